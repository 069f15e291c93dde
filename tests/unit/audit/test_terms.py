"""The terms of a loss: taken apart at the top of its graph, and held against the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gaverify.audit.fitting import add_up, fit_gradients
from gaverify.audit.reading import Samples
from gaverify.audit.recording.losses import MOST, Terms


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
        return Samples({0: {"final": torch.tensor(values, dtype=torch.float64, device="cpu")}})

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
