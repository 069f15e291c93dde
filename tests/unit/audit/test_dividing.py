"""What a script divides its loss by, the terms of the loss, and how many micro-batches a batch has."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from gaverify.audit.flow import micro_batches_per_batch
from gaverify.audit.reading import Samples
from gaverify.audit.recording import graph
from gaverify.audit.recording.graph import MOST, Terms, Weight
from gaverify.audit.same_data import StepSample
from gaverify.audit.stages import _feels_samples, add_up, fit_gradients
from gaverify.records.audit import Calls, Record
from gaverify.records.events import Backward, Event, Forward, Step
from gaverify.records.windows import Window

STEPS, VALID, ROWS, KINDS = 4, 5, 8, 3


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.tensor([0, 2, -100, 1, -100, 2, 0, -100], device="cpu")
    return torch.randn(ROWS, KINDS, device="cpu", requires_grad=True), labels


def gathered(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mask = labels != -100
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return -(chosen * mask).sum() / mask.sum()


def selected(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mask = labels != -100
    return -logits.log_softmax(-1)[mask].gather(-1, labels[mask][:, None]).mean()


def in_parts(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0] * (labels != -100)
    return -sum(part.sum() for part in chosen.chunk(2)) / (labels != -100).sum()


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mask = labels != -100
    chosen = logits.log_softmax(-1)
    uniform = -(chosen.mean(-1) * mask).sum() / mask.sum()
    return gathered(logits, labels) + 0.1 * uniform


def each(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, labels, reduction="none").sum() / (labels != -100).sum()


@pytest.mark.parametrize("loss", [gathered, selected, in_parts, smoothed, each])
def test_a_mean_over_valid_targets_tells_how_many_they_are(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """The factor K is in all micro-batches alike."""
    weight = Weight()
    root = loss(*logits_and_labels()) / STEPS
    weight.begin(root)
    root.backward()
    weight.end()
    assert weight.divisor == pytest.approx(STEPS * VALID)


@pytest.mark.parametrize("loss, divided", [(each, True), (gathered, True), (functional.cross_entropy, False)])
def test_a_sum_that_the_script_divides_is_told_from_a_mean(loss: Callable[..., torch.Tensor], divided: bool) -> None:
    weight = Weight()
    root = loss(*logits_and_labels()) / STEPS
    weight.begin(root)
    root.backward()
    weight.end()
    assert weight.of_a_sum is divided


def test_a_sum_counts_one() -> None:
    weight = Weight()
    root = logits_and_labels()[0].log_softmax(-1)[:, 0].sum()
    weight.begin(root)
    root.backward()
    assert weight.end() == 1.0
    assert weight.divisor == pytest.approx(1.0)


def test_nothing_is_told_of_several_roots() -> None:
    weight = Weight()
    weight.begin([torch.zeros((), device="cpu")])
    weight.end()
    assert weight.divisor is None


def weight() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, 2.0, 3.0], device="cpu"))


def alone(loss: torch.Tensor, parameter: nn.Parameter) -> list[list[float]]:
    """The gradients of each term."""
    terms, found = Terms(loss), []
    for number in range(1, len(terms) + 1):
        parameter.grad = None
        with terms.only(number):
            loss.backward(retain_graph=True)
        assert parameter.grad is not None
        found.append(parameter.grad.tolist())
    return found


@pytest.mark.skipif(
    not hasattr(torch.ones(1, requires_grad=True, device="cpu").sum().grad_fn, "_input_metadata"),
    reason="torch 2.4 does not tell the shapes of a node's operands: a loss has no terms there",
)
class TestTerms:
    def test_a_sum_below_a_scale_is_taken_apart_in_its_order(self) -> None:
        w = weight()
        loss = (2 * w.sum() + w.square().sum() - w.sum() * 3) / 2
        assert alone(loss, w) == [[1.0, 1.0, 1.0], [1.0, 2.0, 3.0], [-1.5, -1.5, -1.5]]

    def test_a_term_that_is_also_part_of_another_is_cut_from_the_sum_alone(self) -> None:
        w = weight()
        first = w.sum()
        assert alone(first + first * 2, w) == [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]

    def test_a_loss_of_one_element_has_terms_as_a_number_has(self) -> None:
        w = weight()
        loss = (2 * w.sum(0, keepdim=True) + w.square().sum(0, keepdim=True)) / 2
        assert loss.shape == (1,) and alone(loss, w) == [[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]]

    def test_sums_over_many_parameters_are_one_term(self) -> None:
        w = weight()
        loss = w.sum() + 0.5 * sum(part.square() for part in w.unbind())
        assert alone(loss, w) == [[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]]

    def test_the_rest_of_a_long_sum_is_one_term(self) -> None:
        w = weight()
        found = alone(sum((w.sum() for _ in range(9)), start=w.sum()), w)
        assert found == [[1.0] * 3] * (MOST - 1) + [[11.0 - MOST] * 3]

    def test_a_loss_that_is_no_sum_of_numbers_has_no_terms(self) -> None:
        w = weight()
        assert not len(Terms((w + w.square()).sum())) and not len(Terms(w.sum() * w.prod())) and not len(Terms(w + w))

    def test_after_it_every_term_counts_again(self) -> None:
        w = weight()
        loss = w.sum() + w.square().sum()
        alone(loss, w)
        w.grad = None
        loss.backward()
        assert w.grad is not None and w.grad.tolist() == [3.0, 5.0, 7.0]


class TestAddUp:
    def samples(self, *values: float) -> Samples:
        final = torch.tensor(values, dtype=torch.float64, device="cpu")
        return Samples({0: StepSample(final, before=final, stretches=torch.ones_like(final))})

    def test_terms_that_are_the_whole(self) -> None:
        assert add_up(self.samples(3.0, 1.0), [self.samples(1.0, 2.0), self.samples(2.0, -1.0)], 1e-9)

    def test_terms_that_leave_something_over(self) -> None:
        assert not add_up(self.samples(3.0, 1.0), [self.samples(1.0, 2.0), self.samples(2.0, 0.0)], 1e-9)

    def test_a_run_that_did_not_step(self) -> None:
        assert not add_up(self.samples(3.0), [self.samples(3.0), Samples({})], 1e-9)


def test_what_a_backward_pass_gave_before_the_optimizer_took_more_parameters_counts_nothing() -> None:
    gradient = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, device="cpu")
    whole = {0: gradient}
    fit = fit_gradients(whole, {0: torch.ones_like(gradient)}, whole, [{0: gradient[:2]}, {0: gradient}, {}])
    assert fit is not None and (len(fit.weights), fit.residual) == (3, pytest.approx(0, abs=1e-12))


@pytest.mark.parametrize(
    ("target", "used"),
    [
        ([1.0, 2.0], [1.0, 2.0, 3.0]),
        ([1.0, 2.0, math.nan], [1.0, 2.0, 3.0]),
        ([1.0, 2.0, 3.0], [1.0, math.inf, 3.0]),
        ([0.0, 0.0, 0.0], [1.0, 2.0, 3.0]),
    ],
    ids=["other parameters", "not a number", "infinite", "no gradient"],
)
def test_nothing_is_fitted_to_what_is_no_gradient_of_the_same_parameters(
    target: list[float], used: list[float]
) -> None:
    whole, reached = ({0: torch.tensor(values, dtype=torch.float64, device="cpu")} for values in (target, used))
    assert fit_gradients(whole, {0: torch.ones_like(whole[0])}, reached, [reached]) is None


@pytest.mark.parametrize(("second", "feels"), [([1.0, 2.0 + 1e-9], False), ([1.0, 2.1], True)])
def test_a_term_feels_the_samples_where_its_micro_batches_have_other_gradients(
    second: list[float], feels: bool
) -> None:
    gradients = [{0: torch.tensor(values, dtype=torch.float64, device="cpu")} for values in ([1.0, 2.0], second)]
    assert _feels_samples(SimpleNamespace(increments=gradients), 1e-6) is feels  # type: ignore[arg-type]


CRITIC, GENERATOR = 0, 1


def window(passes: list[list[int]], rows: int) -> Window:
    """A window that ends with the critic's step; every pass touches some optimizers and follows a forward."""
    events: list[Event] = []
    for touched in passes:
        events.append(Forward(1, "train.py", 1, rows=rows, model=0))
        events.append(Backward(1, "train.py", 2, optimizers=tuple(touched)))
    events.append(Step(1, "train.py", 3, optimizer=CRITIC))
    return Window(1, tuple(events))


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        ([[CRITIC]], [[CRITIC]] * 4),
        ([[CRITIC], [CRITIC]], [*[[CRITIC], [CRITIC], [CRITIC, GENERATOR]] * 3, [CRITIC], [CRITIC]]),
    ],
    ids=["one network", "a generator's passes through its critic"],
)
def test_parts(whole: list[list[int]], part: list[list[int]]) -> None:
    record = Record(Calls((window(part, 4),), full_windows=(window(whole, 16),)))
    assert micro_batches_per_batch(record) == 4


def test_rows_that_do_not_divide_tell_nothing() -> None:
    record = Record(Calls((window([[CRITIC, GENERATOR]], 5),), full_windows=(window([[CRITIC]], 16),)))
    assert micro_batches_per_batch(record) == 0


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([("/train.py", 5), ("/torch/module.py", 1), ("/lib/trainer.py", 7), ("/train.py", 9)], ("/train.py", 9)),
        ([("/train.py", 5), ("/torch/module.py", 1), ("/train.py", 9)], None),
        ([("/train.py", 4), ("/lib/trainer.py", 7), ("/train.py", 9)], None),
        ([("/train.py", 5)], None),
    ],
    ids=["by a framework that was called there", "by the script's own function", "called before", "there itself"],
)
def test_a_loss_is_told_where_a_framework_called_it(
    monkeypatch: pytest.MonkeyPatch, lines: list[tuple[str, int]], told: tuple[str, int] | None
) -> None:
    owners = {"train.py": graph.Owner.USER, "trainer.py": graph.Owner.LIBRARY, "module.py": graph.Owner.MACHINERY}
    monkeypatch.setattr(graph, "_lines_of", lambda _: lines)
    monkeypatch.setattr(graph, "owner_of", lambda file: owners[file.rpartition("/")[2]])
    assert Terms(torch.ones(1, requires_grad=True).sum()).made_within(("/train.py", 5)) == told
