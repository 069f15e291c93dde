"""What is held in a control, and where the rows of micro-batches first part from themselves in the full batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gaverify.audit.coupling_controls import (
    Pair,
    agree,
    depends_on_other_rows,
    first_module,
    levels,
    loss_difference,
    writers_of,
)
from gaverify.audit.job import Blamed
from gaverify.audit.recording.graph import keep_lines, meetings
from gaverify.audit.recording.outputs import SCRIPT, Outputs, PinnedCalls, PinnedModules, PinnedRows, rows_at
from gaverify.records.audit import ControlResults, Record
from gaverify.records.comparison import comparison_of
from gaverify.records.experiment import Cause, ControlKind, ControlRun
from gaverify.rules import batch_coupled_loss, batch_statistics, cross_sample_operation
from gaverify.tracebacks import set_home

SAMPLES = torch.arange(16 * 6, dtype=torch.float64, device="cpu").square().sin().reshape(16, 6)
EVERY: PinnedRows = [[(0, range(4 * at, 4 * at + 4)) for at in range(4)]]
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


def run(
    model: nn.Module, held: Sequence[str], loss: Loss, source: Path | None
) -> tuple[dict[str, float], PinnedModules]:
    """The gradients of a full batch, or of four micro-batches that are given what its run kept, as norms and sums."""
    model.zero_grad()
    holding = PinnedModules(nullcontext, held, source, EVERY)
    pieces = [SAMPLES] if source is None else SAMPLES.split(4)
    for piece in pieces:
        with holding.listening(model, (piece,), {}):
            result = loss(_Once(model), piece)
        holding.note_differentiation(result)
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
) -> tuple[set[str], set[str], PinnedCalls]:
    """The parameters whose gradient differs, those that the held code reads itself, and what the pins changed."""
    torch.manual_seed(0)
    model = make()
    whole, kept = run(model, held, loss, None)
    torch.save(kept.forwards, folder / "pinned.pt")
    part, holding = run(model, held, loss, folder)
    names = [name for name, _ in model.named_parameters()]
    pinned_calls = holding.describe([list(model.parameters())])
    own = {names[at] for at in pinned_calls["own"][0]}
    apart = {n for n in whole if not torch.allclose(whole[n], part[n], rtol=1e-9, atol=1e-12)}
    return apart, own, pinned_calls


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
    apart, read, pinned_calls = differing(make, held, loss, tmp_path)
    assert read == own and apart <= own
    # a loss has no output to pin: what it sends back differed
    kind: Blamed = "values" if make is Centred else "gradients"
    assert list(held) == pinned_calls[kind]


def test_code_that_does_not_couple_explains_nothing_when_it_is_held(tmp_path: Path) -> None:
    """The script is held, the model couples: its layer before the mean differs still."""
    apart, own, _ = differing(Centred, (SCRIPT,), each, tmp_path)
    assert "first.weight" in apart and not own


class Reporting(nn.Module):
    """Returns the mean of the batch, which nobody reads, beside a result of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, device="cpu", dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.scale, x.mean(0).expand_as(x)


@pytest.mark.parametrize(("at", "differ"), [(0, False), (1, True)])
def test_only_a_value_that_the_loss_depends_on_had_differed(tmp_path: Path, at: int, differ: bool) -> None:
    def make() -> nn.Module:
        return nn.Sequential(layer(), Reporting())

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)[at].square().mean()  # type: ignore[no-any-return]

    _, _, pinned_calls = differing(make, ("1",), loss, tmp_path)
    assert pinned_calls["values"] == ["1"] * differ


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

    @staticmethod
    def _rows(count: int) -> torch.Tensor:
        return SAMPLES[:count].clone().requires_grad_().exp()

    @staticmethod
    def _line_of(text: str) -> int:
        return Path(__file__).read_text(encoding="utf-8").splitlines().index(f"        {text}") + 1

    def test_a_mean_over_the_batch_and_a_matrix_of_rows(self) -> None:
        x = self._rows(5)
        mean = x.mean(0)
        away = x - mean
        matrix = away @ away.T
        found = meetings([matrix.logsumexp(1).sum().grad_fn], {x.grad_fn}, {5})
        assert [line for _, line in found] == [
            self._line_of("mean = x.mean(0)"),
            self._line_of("matrix = away @ away.T"),
        ]

    def test_as_many_rows_as_features_may_meet(self) -> None:
        """Only the lines of a larger batch tell: these are wanted to be among them."""
        x = self._rows(6)
        matrix = x @ x.T
        roots = [matrix.logsumexp(1).sum().grad_fn]
        assert not meetings(roots, {x.grad_fn}, {6})
        assert self._line_of("matrix = x @ x.T") in {
            line for _, line in meetings(roots, {x.grad_fn}, {6}, may_meet=True)
        }

    def test_a_number_that_is_given_back_to_the_rows(self) -> None:
        x = self._rows(5)
        assert len(meetings([(x - x.mean()).square().sum().grad_fn], {x.grad_fn}, {5})) == 1

    def test_rows_that_stay_apart_do_not_meet(self) -> None:
        x = self._rows(5)
        loss = F.cross_entropy(x @ x[0].detach().diag(), torch.arange(5, device="cpu"), reduction="none").mean()
        assert not meetings([loss.grad_fn], {x.grad_fn}, {5})


UNIT = 2.0**-24
SINGLE = SAMPLES.float()
CoupledLoss = Callable[[torch.Tensor], torch.Tensor]


class Pooling(nn.Module):
    """Every sample is given the mean of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.tanh().mean(0)


class Counting(nn.Module):
    """Does something else in each call, whatever it is given."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


def each_of(found: torch.Tensor) -> torch.Tensor:
    return found.tanh().square().sum()


def listened(
    model: nn.Module, pieces: tuple[torch.Tensor, ...], loss: CoupledLoss, moved: tuple[str, ...] = ()
) -> list[Any]:
    outputs = Outputs(nullcontext, moved)
    for piece in pieces:
        with outputs.listening(model, (piece,), {}):
            result = model(piece)
        loss(result).backward()
    return outputs.forwards


def pairs(middle: nn.Module, loss: CoupledLoss = each_of, rest: CoupledLoss | None = None) -> list[Pair]:
    """The pairs of a full batch of 16 and 4 micro-batches; `rest` is the micro-batches' loss where that is another."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), middle, nn.ReLU(inplace=True), nn.Linear(8, 4))
    (whole,) = listened(model, (SINGLE,), loss)
    if isinstance(middle, Counting):
        middle.calls = 0
    parts = listened(model, SINGLE.split(4), rest or loss)
    return [(whole, part, range(4 * at, 4 * at + 4)) for at, part in enumerate(parts)]


def test_a_model_that_is_given_what_another_made_is_another_model() -> None:
    """Modules of the same path, of which the first model's agree for every micro-batch."""
    models = nn.Sequential(nn.Linear(6, 8)), nn.Sequential(Pooling())
    outputs = Outputs(nullcontext)
    for piece in (SINGLE, *SINGLE.split(4)):
        for model in models:
            with outputs.listening(model, (piece,), {}):
                piece = model(piece)
    whole, parts = outputs.forwards[:2], outputs.forwards[2:]
    found = first_module(
        [(whole[at % 2], part, range(4 * (at // 2), 4 * (at // 2) + 4)) for at, part in enumerate(parts)], UNIT
    )
    assert found is not None and (found.operation.name, found.samples) == ("Pooling", 16)


class Leaving(nn.Module):
    """Leaves a number behind that depends on all rows of what a layer of its own gives."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.inner(x)
        self.left = found.tanh().mean(0).square().sum()
        return found


@pytest.mark.parametrize(("taken", "inside"), [(True, ["1"]), (False, [])])
def test_a_loss_takes_what_a_module_leaves_behind_from_its_code(taken: bool, inside: list[str]) -> None:
    model = nn.Sequential(nn.Linear(6, 8), Leaving(), nn.Linear(8, 4))
    outputs = Outputs(nullcontext)
    with outputs.listening(model, (SINGLE,), {}):
        result = model(SINGLE)
    found = outputs.inside(result.square().sum() + (model[1].left if taken else 0.0))
    assert found == inside
    assert list(levels(outputs.forwards, found)) == [(SCRIPT,), *([("1",)] if taken else [])]


@pytest.mark.parametrize("middle", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False)])
def test_statistics_of_the_batch_are_found_in_their_module(middle: nn.Module) -> None:
    found = pairs(middle)
    suspect = first_module(found, UNIT)
    assert suspect is not None and suspect.operation.module == "1"
    assert (suspect.statistics, suspect.in_model, suspect.samples) == (True, True, 16)
    assert ("1" in writers_of(found)) == middle.track_running_stats
    assert not agree(found, UNIT)


@pytest.mark.parametrize("middle", [nn.GroupNorm(2, 8), nn.LayerNorm(8), nn.BatchNorm1d(8).eval()])
def test_modules_that_look_at_one_sample_agree(middle: nn.Module) -> None:
    found = pairs(middle)
    assert first_module(found, UNIT) is None
    assert agree(found, UNIT) and loss_difference(found, UNIT) == 0.0


def test_a_module_that_counts_its_calls_does_not_couple() -> None:
    """Its first call is the full batch's; the others differ by what was before them."""
    found = pairs(Counting())
    assert first_module(found, UNIT) is None and not agree(found, UNIT)
    for _, part, _ in found[2:]:
        part["rank"] = 1
    assert first_module(found, UNIT) is not None, "before another rank's first micro-batch there was none"


def test_a_loss_that_compares_samples_gives_back_something_else() -> None:
    norm = nn.GroupNorm(2, 8)
    assert loss_difference(pairs(norm, each_of, lambda result: each_of(result) / 7), UNIT) == 0.0, "a factor is none"
    found = pairs(norm, contrastive)
    assert first_module(found, UNIT) is None and agree(found, UNIT)
    assert loss_difference(found, UNIT) > 0.01


@pytest.mark.parametrize(("loss", "feels"), [(each_of, False), (contrastive, True)])
def test_only_a_coupled_loss_depends_on_other_rows_of_the_batch(loss: CoupledLoss, feels: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    plain, moved = (listened(model, (SINGLE,), loss, rest) for rest in ((), (SCRIPT,)))
    assert depends_on_other_rows(plain, moved, UNIT) == feels


def test_a_term_that_is_not_divided_parts_and_feels_nothing() -> None:
    """Two terms of different scale are no factor, and yet no sample acts on another."""

    def other(found: torch.Tensor) -> torch.Tensor:
        return each_of(found) + 3 * found.exp().sum()

    assert loss_difference(pairs(nn.GroupNorm(2, 8), each_of, other), UNIT) > 0.01
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    plain, moved = (listened(model, (SINGLE,), other, rest) for rest in ((), (SCRIPT,)))
    assert not depends_on_other_rows(plain, moved, UNIT)


@pytest.mark.parametrize("left", [1e-7, 0.2])
def test_a_cause_in_a_loop_is_proven_by_its_control_alone(left: float) -> None:
    suspect = first_module(pairs(nn.BatchNorm1d(8)), UNIT)
    assert suspect is not None
    control = ControlRun("`1` in evaluation mode", left, left < 1e-6, kind=ControlKind.EVALUATION_MODE)
    facts = comparison_of(Record(controls=ControlResults(coupling=(Cause(suspect, control),))))
    (found,) = batch_statistics.judge(facts)
    assert (found.code, found.proven, "keep it in evaluation mode" in found.remedy) == ("GAV101", left < 1e-6, True)
    assert not [*cross_sample_operation.judge(facts), *batch_coupled_loss.judge(facts)]


def test_what_no_control_held_is_suspected() -> None:
    suspect = first_module(pairs(Pooling()), UNIT)
    assert suspect is not None and (suspect.operation.module, suspect.statistics) == ("1", False)
    loss = replace(suspect, in_model=False)
    controls = ControlResults(coupling=(Cause(suspect, None), Cause(loss, None)))
    facts = comparison_of(Record(controls=controls))
    found = [*cross_sample_operation.judge(facts), *batch_coupled_loss.judge(facts)]
    assert [(finding.code, finding.proven) for finding in found] == [("GAV102", False), ("GAV103", False)]
    assert not [*batch_statistics.judge(facts)]
