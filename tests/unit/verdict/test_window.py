"""What a window's sketches and a few of its samples decide below float32, and what they leave to the float64 control.

Shapes: B = 64 samples of 128 features in K = 4 micro-batches; 70,000 parameters, so that a part is worth it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gaverify
from gaverify import Outcome, Problem
from gaverify.records.comparison import Method

Mix = Callable[[torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers, and between them what a test puts there."""

    def __init__(self, mix: Mix | None = None, width: int = 384) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(128, width), nn.Linear(width, 64), mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.last(self.mix(h) if self.mix is not None else h)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def problem(mix: Mix | None = None, *, width: int = 384, alike: bool = False) -> Problem:
    torch.manual_seed(0)
    x, y = torch.randn(64, 128), torch.randint(64, (64,))
    if alike:
        x[:8], y[:8] = x[0], y[0]
    return Problem(Net(mix, width), loss, (x, y))


def verify(problem: Problem, **options: Any) -> gaverify.Verdict:
    return gaverify.verify(problem, **{"steps": 4, "dtype": "bfloat16", "diagnose": False, **options})


@pytest.mark.parametrize("precision", [{"dtype": "bfloat16"}, {"autocast": "bfloat16", "dtype": None}])
def test_an_equivalent_window_is_told_by_its_weights_and_a_few_samples(precision: dict[str, Any]) -> None:
    verdict = verify(problem(), **precision)
    assert verdict.outcome is Outcome.EQUIVALENT
    assert {row.method for row in verdict.parameters} == {Method.FEW_SAMPLES}
    few = verdict.few_samples
    assert few is not None and few.samples == 4 and few.structure < 1e-13
    assert few.rest < few.allowed == verdict.resolution < 0.1
    assert few.weights < 0.02


def test_a_small_batch_is_asked_in_float64_as_a_whole() -> None:
    verdict = verify(problem(width=64))
    assert verdict.outcome is Outcome.EQUIVALENT and verdict.method == Method.FLOAT64_CONTROL


def test_exact_asks_float64_of_the_whole_batch() -> None:
    assert verify(problem(), exact=True).method == Method.FLOAT64_CONTROL


def divergent(verdict: gaverify.Verdict) -> bool:
    """Whether the float64 control found a divergence that the window left open; what adding up loses it has told."""
    lost = [finding for finding in verdict.findings if finding.code == "GAV501"]
    assert all("4 samples" in str(finding.evidence) for finding in lost)
    return verdict.outcome is Outcome.DIVERGENT and verdict.few_samples is None


@pytest.mark.parametrize("weight", [0.2575, 0.2525])
def test_one_weight_of_four_that_is_a_little_off(weight: float) -> None:
    assert divergent(verify(problem(), weighting=[weight, 0.25, 0.25, 0.25]))


def test_a_divergence_is_looked_into_and_confirmed_without_float64_of_the_whole_batch() -> None:
    """The rounding that a few samples showed is what a control may leave of the whole batch."""
    told: list[str] = []
    coupled = verify(problem(lambda h: torch.softmax(h, 0)), diagnose=True, progress=lambda what, *_: told.append(what))
    assert [what for what in told if "float64" in what] == ["float64: 4 samples", "float64 control: the full batch"]
    assert told.index("float64 control: the full batch") > told.index("a part of the batch: 8 samples")
    assert coupled.method == Method.FLOAT64_PART
    assert [(finding.code, finding.proven) for finding in coupled.findings[:1]] == [("GAV102", True)]
    made = problem()
    made.batch[1][[0, 1, 2, 4, 8, 9, 10, 11, 12]] = -100
    tokens = verify(made, diagnose=True)
    assert tokens.method == Method.FLOAT64_PART
    finding = tokens.findings[0]
    assert finding.code == "GAV202" and finding.proven
    assert "7 of 55, 16 of 55, 16 of 55, 16 of 55" in str(finding.evidence)
    assert "weighting tokens" in finding.remedy


def test_a_part_whose_counts_differ_is_no_fault_of_a_batch_whose_counts_do_not() -> None:
    """One of the first four samples counts, so that no grouping rounds their gradient otherwise."""
    made = problem()
    made.batch[1][:] = -100
    made.batch[1][[3, 4, 5, 6, 8, 9, 10, 11, *range(16, 24), *range(32, 40), *range(48, 56)]] = 1
    assert verify(made).outcome is Outcome.EQUIVALENT


def test_a_scale_is_told_exactly() -> None:
    """A fit in bfloat16 knows it to a tenth of a percent; the part in float64 to all digits."""
    made = problem()
    made.loss = lambda model, batch: loss(model, batch) * len(batch[0])
    verdict = verify(made, diagnose=True)
    assert verdict.method == Method.FLOAT64_PART
    assert verdict.findings[0].code == "GAV201" and verdict.findings[0].proven
    told = "loss by 4 (weights 1, 1, 1, 1): tested, equivalent"
    assert verdict.findings[0].remedy.endswith(told)


def test_a_mean_of_means_over_15_and_16_valid_targets() -> None:
    made = problem()
    made.batch[1][0] = -100
    assert divergent(verify(made))
    assert verify(made, weighting="tokens").few_samples is not None


@pytest.mark.parametrize("share", [0.3, 3e-3, 3e-6])
def test_samples_that_act_on_each_other_show_below_the_rounding(share: float) -> None:
    found = verify(problem(lambda h: h + share * h.mean(0)))
    assert found.few_samples is None
    # what is clearly more than rounding, a part of the batch tells in float64; the rest all of it
    assert found.method == (Method.FLOAT64_PART if share > 0.1 else Method.FLOAT64_CONTROL)


def test_samples_that_are_alike_say_nothing_about_structure() -> None:
    """Their mean is each of them: what acts on others is seen in the whole batch only."""
    assert divergent(verify(problem(lambda h: h + 3e-3 * h.mean(0), alike=True)))
    assert verify(problem(alike=True)).method == Method.FLOAT64_CONTROL


def test_what_shows_in_large_batches_only_is_more_than_rounding() -> None:
    """A few samples do not pass the branch; the rest is 10 times what they differ by."""
    found = verify(problem(lambda h: h * 1.03 + 0.06 * h.mean(0) if len(h) > 20 else h))
    assert divergent(found)


def test_gradients_that_do_not_add_up() -> None:
    """A forward that shrinks what has accumulated: each micro-batch's own gradient is right."""
    made = problem()

    def shrinking(model: nn.Module, batch: Any) -> torch.Tensor:
        gradient = model.last.weight.grad
        if gradient is not None:
            gradient.mul_(0.95)
        return loss(model, batch)

    made.loss = shrinking
    assert verify(made).few_samples is None


def test_a_rounding_above_a_tenth_of_the_gradient_says_nothing() -> None:
    """Samples that nearly cancel: the sum of their gradients is far smaller than what each is rounded by."""
    made = problem()
    inputs, _ = made.batch
    made.batch = (1 + 0.03 * inputs, torch.tensor([1.0, -1.0]).repeat(32))
    made.loss = lambda model, batch: (model(batch[0]).sum(1) * batch[1]).mean()
    assert verify(made).few_samples is None


def test_samples_without_a_gradient_say_nothing() -> None:
    made = problem()
    made.batch[1][:4] = -100
    made.loss = lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="sum") / 64
    assert verify(made, weighting="none").method == Method.FLOAT64_CONTROL


def test_a_gradient_of_zeros_is_no_window() -> None:
    made = problem()
    made.loss = lambda model, batch: loss(model, batch) * 0.0
    assert verify(made).outcome is Outcome.INCONCLUSIVE


def test_a_micro_batch_that_counts_for_nothing() -> None:
    assert divergent(verify(problem(), weighting=[0.5, 0.5, 0.0, 0.0]))


def test_a_gradient_on_one_side_only_is_no_question_of_numbers() -> None:
    class Branching(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(128, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + (0.0 * self.extra(x) if len(x) > 20 else 0.0)

    made = problem()
    made.model = Branching()
    assert divergent(verify(made))


def test_what_adding_up_loses_is_told() -> None:
    verdict = verify(problem(), steps=64)
    assert verdict.few_samples is not None and verdict.few_samples.lost > verdict.few_samples.error
    assert [finding.code for finding in verdict.findings] == ["GAV501"]
    assert "4 samples" in str(verdict.findings[0].evidence)


def test_a_weight_that_no_operation_can_lift_is_copied() -> None:
    """A model that reads its weights' memory itself: the few samples run in a copy of it."""
    made = problem()

    class Reading(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(super().forward(x @ self.first.weight.data.mT @ self.first.weight.data))

    torch.manual_seed(0)
    made.model = Reading()
    verdict = verify(made)
    assert verdict.few_samples is not None and verdict.few_samples.structure < 1e-13
