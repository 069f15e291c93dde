"""A model that lies on the host and on the device, and what lies on the host beside one on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

import gaverify
from gaverify import Outcome, Problem, ProblemError, Verdict


class Spread(nn.Module):
    """Its first layers on the host, its last on the device, as parallelism by hand does it."""

    def __init__(self, middle: nn.Module, share: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 16, device="cpu"), middle, nn.Tanh())
        self.last = nn.Linear(16, 4, device="cuda")
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hands the rows over from one device to the other."""
        return self.last(dropout(self.first(x).to("cuda"), self.share))


def hooked() -> nn.Module:
    """The rows are moved by a hook, as a device map does it."""
    model = nn.Sequential(nn.Linear(6, 16, device="cpu"), nn.Tanh(), nn.Linear(16, 4, device="cuda"))
    model[2].register_forward_pre_hook(lambda module, given: (given[0].to("cuda"),))
    return model


MODELS = {
    "by hand": lambda: Spread(nn.Identity()),
    "with dropout": lambda: Spread(nn.Identity(), share=0.3),
    "hooked": hooked,
}


def problem(model: nn.Module, reduction: str = "mean") -> Problem:
    batch = torch.randn(16, 6, device="cpu"), torch.randint(0, 4, (16,), device="cuda")
    return Problem(model, lambda m, rows: cross_entropy(m(rows[0]), rows[1], reduction=reduction), batch)


def faults(verdict: Verdict) -> dict[str, bool]:
    return {finding.code: finding.proven for finding in verdict.findings if finding.severity == "fault"}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    "options", [{}, {"exact": True}, {"autocast": "bfloat16"}, {"dtype": "bfloat16"}, {"trace": True}], ids=str
)
def test_a_spread_model_is_equivalent_where_it_lies(build, options) -> None:
    torch.manual_seed(0)
    given = problem(build())
    verdict = gaverify.verify(given, **options)
    assert verdict.outcome is Outcome.EQUIVALENT
    assert not verdict.control_failure
    assert verdict.run.device == "cpu and cuda:0"
    assert {parameter.device.type for parameter in given.model.parameters()} == {"cpu", "cuda"}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_a_forgotten_division_is_proven_across_devices(build) -> None:
    torch.manual_seed(0)
    verdict = gaverify.verify(problem(build(), "sum"))
    assert faults(verdict) == {"GAV201": True}
    assert verdict.method == "float64-control"


def test_batch_norm_is_proven_across_devices() -> None:
    torch.manual_seed(0)
    assert faults(gaverify.verify(problem(Spread(nn.BatchNorm1d(16))))) == {"GAV101": True}


def test_one_device_for_a_spread_model_is_told_in_a_sentence() -> None:
    given = problem(hooked())
    given.model[0].register_forward_pre_hook(lambda module, rows: (rows[0].to("cpu"),))
    with pytest.raises(ProblemError) as raised:
        gaverify.verify(given, device="cuda")
    assert "the model was on cpu and cuda:0 and `device` moved it to cuda:0: leave `device` out" in str(raised.value)


def test_a_hand_over_that_was_forgotten_is_told_in_a_sentence() -> None:
    given = problem(nn.Sequential(nn.Linear(6, 16, device="cpu"), nn.Tanh(), nn.Linear(16, 4, device="cuda")))
    with pytest.raises(ProblemError) as raised:
        gaverify.verify(given)
    assert "gaverify does not move a model on cpu and cuda:0" in str(raised.value)


def test_the_micro_batches_of_a_users_split_are_moved() -> None:
    rows = torch.randn(8, 3, device="cpu")
    problem = Problem(
        nn.Linear(3, 2),
        lambda model, batch: model(batch).square().mean(),
        rows,
        split=lambda batch, start, stop: rows[start:stop],  # of the host's own rows, whatever it is given
    )
    for dtype in (None, "bfloat16"):
        assert gaverify.verify(problem, steps=4, device="cuda", dtype=dtype).outcome is Outcome.EQUIVALENT


def closure() -> Problem:
    table = torch.ones(2, device="cpu")
    return Problem(nn.Linear(3, 2), lambda model, batch: (model(batch) * table).sum(), torch.randn(8, 3, device="cpu"))


def attribute() -> Problem:
    model = nn.Linear(3, 2)
    model.table = torch.ones(2, device="cpu")  # neither parameter nor buffer
    return Problem(model, lambda model, batch: (model(batch) * model.table).sum(), torch.randn(8, 3, device="cpu"))


@pytest.mark.parametrize("build", [closure, attribute])
def test_a_tensor_that_nobody_moved_is_named(build) -> None:
    with pytest.raises(ProblemError) as raised:
        gaverify.verify(build(), device="cuda")
    assert "gaverify moves model and batch to cuda:0; move the rest yourself: `table`" in str(raised.value)


def test_on_the_host_nothing_is_left_behind() -> None:
    assert gaverify.verify(closure(), device="cpu").outcome is not None


def test_another_error_gets_no_such_hint() -> None:
    problem = Problem(nn.Linear(3, 2), lambda model, batch: model(batch[:, :1]).sum(), torch.randn(8, 3, device="cpu"))
    with pytest.raises(ProblemError) as raised:
        gaverify.verify(problem, device="cuda")
    assert "move the rest" not in str(raised.value)
