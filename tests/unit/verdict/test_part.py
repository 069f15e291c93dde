"""What a part of the batch settles, and what goes to the float64 control of the whole batch all the same."""

from __future__ import annotations

from typing import Any

import problems_small
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import gaverify
from gaverify import Outcome, Problem
from gaverify.records.comparison import Method
from gaverify.verdict import criteria, judging


def noisy(seed: int = 3) -> Problem:
    """Convolutions whose rounding leaves a few parameters open, and which are equivalent."""
    return problems_small.planted("convolutions", "weight", 0.0, seed)[0]


def methods(verdict: gaverify.Verdict) -> set[Method]:
    return {Method(row.method) for row in verdict.parameters}


@pytest.fixture
def open_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets working precision explain half a unit of roundoff only: then every processor leaves parameters open.

    How many units a few layers round by differs between processors; that they round at all does not.
    """
    monkeypatch.setattr(criteria, "FEW_UNITS", 0.5)


def quiet() -> Problem:
    """A small network whose rounding two samples tell, and which is equivalent."""
    return problems_small.planted("mlp", "weight", 0.0)[0]


@pytest.mark.usefixtures("open_rows")
def test_a_few_open_parameters_are_settled_by_a_part() -> None:
    verdict = gaverify.verify(quiet(), steps=4)
    assert verdict.outcome is Outcome.EQUIVALENT
    assert verdict.method == Method.TWO_SAMPLES
    assert Method.TWO_SAMPLES in methods(verdict) <= {Method.WORKING_PRECISION, Method.TWO_SAMPLES}
    assert verdict.resolution <= 1e-5
    assert "control" in verdict.timings


def test_the_bounds_as_they_are_leave_nothing_open_there() -> None:
    assert methods(gaverify.verify(quiet(), steps=4)) == {Method.WORKING_PRECISION}


def test_exact_asks_float64_for_everything() -> None:
    for problem in (noisy(), problems_small.planted("mlp", "weight", 0.0)[0]):
        verdict = gaverify.verify(problem, steps=4, exact=True)
        assert verdict.outcome is Outcome.EQUIVALENT
        assert methods(verdict) == {Method.FLOAT64_CONTROL}


def test_exact_in_a_float64_model_has_nothing_finer_to_ask() -> None:
    problem = problems_small.planted("mlp", "weight", 0.0)[0]
    verdict = gaverify.verify(problem, steps=4, dtype="float64", exact=True)
    assert methods(verdict) == {Method.WORKING_PRECISION}


def test_exact_and_tolerances_contradict_each_other() -> None:
    with pytest.raises(gaverify.ProblemError, match="one or the other"):
        gaverify.verify(noisy(), steps=4, exact=True, rtol=1e-3, atol=0.0)


def refused(monkeypatch: pytest.MonkeyPatch, problem: Problem, **options: Any) -> gaverify.Verdict:
    """Verifies, and checks that a part was asked and settled nothing."""
    answers = []
    real = judging.settled
    monkeypatch.setattr(judging, "settled", lambda *given: answers.append(real(*given)) or answers[-1])
    verdict = gaverify.verify(problem, steps=4, diagnose=False, **options)
    assert answers == [None]
    return verdict


@pytest.mark.usefixtures("open_rows")
def test_weights_that_are_a_little_wrong_are_settled_by_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = refused(monkeypatch, quiet(), weighting=[0.25, 0.25, 0.25, 0.25 + 2e-7])
    assert methods(verdict) == {Method.FLOAT64_CONTROL}


WITHIN = ("convolutions", "early-gain", 1.5e-6, 3)


def test_a_fault_within_their_rounding_is_seen_by_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, options, _ = problems_small.planted(*WITHIN)
    verdict = refused(monkeypatch, problem, weighting=options["weighting"])
    assert verdict.outcome is Outcome.DIVERGENT


def test_without_float64_their_rounding_alone_would_have_hidden_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaverify.verdict.part._agree", lambda *_: True)
    verdict = gaverify.verify(problems_small.planted(*WITHIN)[0], steps=4, diagnose=False)
    assert verdict.outcome is Outcome.EQUIVALENT


class Words(nn.Module):
    """Classifies each word by itself, so that no micro-batch differs from another but in its targets."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.table(words))).flatten(0, -2)


@pytest.mark.parametrize("ignored", [0, 1])
@pytest.mark.usefixtures("open_rows")
def test_a_target_less_in_a_late_micro_batch_is_seen(ignored: int) -> None:
    """One target of 160,000 that the loss ignores: 5e-6 of the gradient, and nothing of it in the first two samples."""
    torch.manual_seed(0)
    words, targets = torch.randint(50, (8, 20_000)), torch.randint(50, (8, 20_000))
    targets[7, :ignored] = -100
    problem = Problem(
        Words(), lambda model, batch: cross_entropy(model(batch[0]), batch[1].flatten()), (words, targets)
    )
    verdict = gaverify.verify(problem, steps=4, diagnose=False)
    assert verdict.outcome is (Outcome.DIVERGENT if ignored else Outcome.EQUIVALENT)


@pytest.mark.usefixtures("open_rows")
def test_checkpointing_that_forms_all_gradients_or_none_is_settled_as_well() -> None:
    problem = quiet()

    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)

    verdict = gaverify.verify(Problem(Checkpointed(problem.model), problem.loss, problem.batch), steps=4)
    assert verdict.outcome is Outcome.EQUIVALENT and verdict.method == Method.TWO_SAMPLES


@pytest.mark.usefixtures("open_rows")
def test_a_sum_over_the_samples_is_settled_as_a_mean_is() -> None:
    problem = quiet()
    summed = Problem(problem.model, lambda model, batch: problem.loss(model, batch) * len(batch[0]), problem.batch)
    verdict = gaverify.verify(summed, steps=4, weighting="none")
    assert verdict.outcome is Outcome.EQUIVALENT and verdict.method == Method.TWO_SAMPLES


@pytest.mark.usefixtures("open_rows")
def test_draws_of_two_samples_are_found_in_another_precision_than_they_were_made_in() -> None:
    problem = quiet()
    model = nn.Sequential(nn.Dropout(0.2), problem.model, nn.Dropout(0.2))
    verdict = gaverify.verify(Problem(model, problem.loss, problem.batch), steps=4)
    assert verdict.outcome is Outcome.EQUIVALENT and verdict.method == Method.TWO_SAMPLES


class Attending(nn.Module):
    """A layer of attention that is run twice, so that nobody knows the terms of its gradients.

    The bias of the keys shifts all logits of a softmax: its gradient is zero but for rounding. `late` lets it act on
    the batch of samples whose last feature is above zero, `own` on each sample by itself.
    """

    def __init__(self, late: float, own: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.late, self.own = late, own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flags = (x[:, :1, -1:] > 0).to(x)
        for _ in range(2):
            key, value = self.key(x), self.value(x)
            x = torch.softmax(self.query(x) @ key.mT, -1) @ value
        return x.mean(1) + self.late * (flags * self.key.bias).mean(0) ** 2 + self.own * self.key.bias


@pytest.mark.usefixtures("open_rows")
@pytest.mark.parametrize(
    ("late", "own", "method", "outcome"),
    [
        (0.0, 0.0, Method.TWO_SAMPLES, Outcome.EQUIVALENT),
        (1e-4, 0.0, Method.FLOAT64_CONTROL, Outcome.DIVERGENT),
        (0.0, 1e-6, Method.FLOAT64_CONTROL, Outcome.EQUIVALENT),
    ],
)
def test_a_gradient_of_zero_is_settled_where_it_differs_by_no_more_than_rounding(
    late: float, own: float, method: Method, outcome: Outcome
) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(16, 5, 8)
    inputs[:, 0, -1] = torch.linspace(-2, 1, 16)
    batch = inputs, torch.randint(8, (16,))
    model = Attending(late, own)
    verdict = gaverify.verify(model, lambda model, b: cross_entropy(model(b[0]), b[1]), batch, diagnose=False)
    assert (verdict.outcome, verdict.method) == (outcome, method), verdict.parameters


def test_no_part_is_run_where_more_differs_than_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("gaverify.verdict.part.rounding_of_two_samples")
    assert refused(monkeypatch, quiet(), weighting="none").outcome is Outcome.DIVERGENT


@pytest.mark.usefixtures("open_rows")
def test_a_model_that_takes_no_single_sample_goes_to_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = quiet()

    class Pairs(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) < 2:
                raise ValueError("two at least")
            return self.inner(x)

    verdict = refused(monkeypatch, Problem(Pairs(problem.model), problem.loss, problem.batch))
    assert verdict.outcome is Outcome.EQUIVALENT and methods(verdict) == {Method.FLOAT64_CONTROL}


@pytest.mark.usefixtures("open_rows")
def test_a_fault_of_gaverifys_own_is_none_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bool:
        raise TypeError("planted")

    monkeypatch.setattr("gaverify.verdict.part.rounding_of_two_samples", broken)
    with pytest.raises(TypeError, match="planted"):
        gaverify.verify(quiet(), steps=4)


def test_everything_is_put_back() -> None:
    problem = noisy()
    before = {name: value.clone() for name, value in problem.model.state_dict().items()}
    state = torch.get_rng_state()
    gaverify.verify(problem, steps=4)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in problem.model.state_dict().items())
    assert all(parameter.grad is None for parameter in problem.model.parameters())
