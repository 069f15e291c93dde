"""Code that is held at what it did for the full batch: everything else gives the full batch's gradient, or does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gaverify.audit.job import SCRIPT
from gaverify.audit.recording.graph import keep_lines, meetings
from gaverify.audit.recording.holding import Holding, Spots, rows_at
from gaverify.tracebacks import set_home

SAMPLES = torch.arange(16 * 6, dtype=torch.float64, device="cpu").square().sin().reshape(16, 6)
EVERY: Spots = [(0, range(4 * at, 4 * at + 4)) for at in range(4)]
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Centred(nn.Module):
    """The rows meet in its own code, between its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(6, 6, device="cpu", dtype=torch.float64) for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(6, device="cpu", dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.first(x).tanh()
        return self.second(inner - inner.mean(0) + self.shift)  # type: ignore[no-any-return]


class Scored(nn.Module):
    """Hands out its own loss, in which the rows meet."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, device="cpu", dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones((), device="cpu", dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return contrastive(self.layer(x) * self.scale)


def layer() -> nn.Module:
    return nn.Linear(6, 6, device="cpu", dtype=torch.float64)


def contrastive(found: torch.Tensor) -> torch.Tensor:
    unit = F.normalize(found, dim=1)
    return F.cross_entropy(unit @ unit.roll(1, 1).T, torch.arange(len(unit), device="cpu"))


def each(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).tanh().square().mean()  # type: ignore[no-any-return]


def compared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return contrastive(model(x))


def own_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)  # type: ignore[no-any-return]


def run(model: nn.Module, held: Sequence[str], loss: Loss, source: Path | None) -> tuple[dict[str, float], Holding]:
    """The gradients of a full batch, or of four micro-batches that are given what its run kept, as norms and sums."""
    model.zero_grad()
    holding = Holding(nullcontext, held, source, EVERY)
    pieces = [SAMPLES] if source is None else SAMPLES.split(4)
    for piece in pieces:
        with holding.listening(model, (piece,), {}):
            result = loss(_Once(model), piece)
        holding.differentiated(result)
        (result / len(pieces)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, holding


class _Once(nn.Module):
    """Calls a model without being a module around it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = [model]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[0](x)  # type: ignore[no-any-return]


def differing(
    make: Callable[[], nn.Module], held: Sequence[str], loss: Loss, folder: Path
) -> tuple[set[str], set[str]]:
    """The parameters whose gradient differs, and those that the held code reads itself."""
    torch.manual_seed(0)
    model = make()
    whole, kept = run(model, held, loss, None)
    torch.save(kept.kept(), folder / "held.pt")
    part, holding = run(model, held, loss, folder)
    names = [name for name, _ in model.named_parameters()]
    own = {names[at] for at in holding.own(list(model.parameters()))}
    apart = {n for n in names if not torch.allclose(whole[n], part[n], rtol=1e-9, atol=1e-12)}
    return apart, own


@pytest.mark.parametrize(
    ("make", "held", "loss", "own"),
    [
        (layer, (SCRIPT,), compared, set()),
        (Centred, ("",), each, {"shift"}),
        (Scored, ("",), own_loss, {"scale"}),
    ],
)
def test_what_couples_is_held_and_nothing_else_differs(
    make: Callable[[], nn.Module], held: tuple[str, ...], loss: Loss, own: set[str], tmp_path: Path
) -> None:
    assert differing(make, (), loss, tmp_path)[0], "nothing couples"
    apart, read = differing(make, held, loss, tmp_path)
    assert read == own and apart <= own


def test_code_that_does_not_couple_explains_nothing_when_it_is_held(tmp_path: Path) -> None:
    """The script is held, the model couples: its layer before the mean differs still."""
    apart, own = differing(Centred, (SCRIPT,), each, tmp_path)
    assert "first.weight" in apart and not own


def test_rows_are_found_in_either_dimension_and_folded() -> None:
    whole = torch.arange(24, device="cpu").reshape(8, 3)
    assert rows_at(whole, (2, 3), 8, (5, 1)).tolist() == whole[[5, 1]].tolist()  # type: ignore[union-attr]
    assert rows_at(whole.T, (3, 2), 8, (5, 1)).tolist() == whole.T[:, [5, 1]].tolist()  # type: ignore[union-attr]
    assert rows_at(whole, (4, 3), 4, (3, 0)).tolist() == whole[[6, 7, 0, 1]].tolist()  # type: ignore[union-attr]
    assert rows_at(whole, (2, 2), 8, (5, 1)) is None and rows_at(whole, (2,), 8, (5, 1)) is None


class TestLines:
    """The lines in which rows meet, from the graph."""

    @pytest.fixture(autouse=True)
    def _with_lines(self) -> object:
        set_home(str(Path(__file__).parent))
        keep_lines()
        yield
        torch.autograd.set_detect_anomaly(False)

    def test_a_mean_over_the_batch_and_a_matrix_of_rows(self) -> None:
        x = SAMPLES[:5].clone().requires_grad_().exp()
        mean = x.mean(0)
        away = x - mean
        matrix = away @ away.T
        found = meetings([matrix.logsumexp(1).sum().grad_fn], {x.grad_fn}, {5})
        first = Path(__file__).read_text(encoding="utf-8").splitlines().index("        mean = x.mean(0)") + 1
        assert [line for _, line in found] == [first, first + 2]

    def test_as_many_rows_as_features_may_meet(self) -> None:
        """Only the lines of a larger batch tell: these are wanted to be among them."""
        x = SAMPLES[:6].clone().requires_grad_().exp()
        matrix = x @ x.T
        roots = [matrix.logsumexp(1).sum().grad_fn]
        assert not meetings(roots, {x.grad_fn}, {6})
        first = Path(__file__).read_text(encoding="utf-8").splitlines().index("        matrix = x @ x.T") + 1
        assert first in {line for _, line in meetings(roots, {x.grad_fn}, {6}, may_meet=True)}

    def test_a_number_that_is_given_back_to_the_rows(self) -> None:
        x = SAMPLES[:5].clone().requires_grad_().exp()
        assert len(meetings([(x - x.mean()).square().sum().grad_fn], {x.grad_fn}, {5})) == 1

    def test_rows_that_stay_apart_do_not_meet(self) -> None:
        x = SAMPLES[:5].clone().requires_grad_().exp()
        loss = F.cross_entropy(x @ x[0].detach().diag(), torch.arange(5, device="cpu"), reduction="none").mean()
        assert not meetings([loss.grad_fn], {x.grad_fn}, {5})
