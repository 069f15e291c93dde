"""The full batch's draws are kept: which, how often, and with what they were drawn for."""

import random

import pytest
import torch
from drawing import recorded
from torch import nn


@pytest.mark.parametrize(
    ("draw", "operation", "shape"),
    [
        (lambda: torch.rand(4, 3), "rand", (4, 3)),
        (lambda: torch.randn(4, 3), "randn", (4, 3)),
        (lambda: torch.randint(0, 9, (4,)), "randint", (4,)),
        (lambda: torch.randperm(4), "randperm", (4,)),
        (lambda: torch.empty(4, 2).normal_(), "normal", (4, 2)),
        (lambda: torch.empty(4, 2).exponential_(), "exponential", (4, 2)),
        (lambda: torch.bernoulli(torch.full((4, 2), 0.5)), "bernoulli", (4, 2)),
        (lambda: torch.multinomial(torch.ones(4, 5), 2), "multinomial", (4, 2)),
    ],
)
def test_a_draw_is_kept_with_its_result(draw, operation, shape) -> None:
    results = []
    torch.manual_seed(0)
    record = recorded(lambda: results.append(draw()))
    (kept,) = record.draws
    assert kept.operation == operation
    assert tuple(kept.value.shape) == shape
    assert torch.equal(kept.value.to(results[0].dtype), results[0])


def test_a_kept_draw_does_not_change_with_the_tensor_it_was_drawn_into() -> None:
    noise = torch.empty(4)
    record = recorded(lambda: noise.normal_().mul_(0))
    assert not noise.any()
    assert record.draws[0].value.any()


def test_what_draws_nothing_is_not_kept() -> None:
    assert recorded(lambda: torch.ones(4, 3).exp()).draws == []
    assert recorded(lambda: nn.Dropout(0.0)(torch.ones(4, 3))).draws == []
    assert recorded(lambda: nn.Dropout(0.5).eval()(torch.ones(4, 3))).draws == []


def test_a_draw_that_a_recomputation_repeats_is_one_draw() -> None:
    def twice() -> None:
        state = torch.get_rng_state()
        torch.rand(4)
        torch.set_rng_state(state)
        torch.rand(4)

    assert len(recorded(twice).draws) == 1
    assert len(recorded(lambda: [torch.rand(4), torch.rand(4)]).draws) == 2


def test_a_dropout_is_kept_with_the_rows_it_was_drawn_for() -> None:
    inputs = torch.randn(4, 6, requires_grad=True)
    (kept,) = recorded(lambda: nn.Dropout(0.5)(inputs)).draws
    assert kept.value.dtype is torch.bool
    assert kept.prints is None or kept.prints.shape == (4,)


def test_draws_of_python_are_kept_with_their_state() -> None:
    random.seed(3)
    record = recorded(lambda: [random.random(), random.gauss(0, 1)])
    assert [draw.call.name for draw in record.foreign] == ["random", "gauss"]
    assert set(record.foreign_end) >= {"random"}
    assert recorded(lambda: None).foreign == []
    assert random.random.__name__ == "random" and random.random.__self__ is random._inst  # put back
