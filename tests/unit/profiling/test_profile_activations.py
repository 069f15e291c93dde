"""Saved activation bytes against a count made by hand, and how they scale with K for each strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gaverify.passes.batching import Problem
from gaverify.profiling.workload import ActivationMeter, activation_bytes, workload
from gaverify.records.profile import Plan, Strategy
from gaverify.spec import Spec

FLOAT, INTEGER = 4, 8  # bytes
B = 8


def mean_squared(model: nn.Module, batch: Any) -> torch.Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def relu_network(batch: int = B) -> Problem:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return Problem(model, mean_squared, (torch.randn(batch, 16), torch.randn(batch, 4)))


def classifier(batch: int = B) -> Problem:
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 5))
    return Problem(model, cross_entropy, (torch.randn(batch, 12), torch.randint(5, (batch,))))


def convolution(batch: int = B) -> Problem:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(3 * 36, 4))
    return Problem(model, mean_squared, (torch.randn(batch, 2, 8, 8), torch.randn(batch, 4)))


# what each network saves per sample, and whatever the batch; views and tensors saved twice count once
BY_HAND = [
    # the input and relu's output for the weights of both layers (relu's backward shares the latter), the error squared
    pytest.param(relu_network, FLOAT * (16 + 32 + 4), 0, id="linear-relu-linear-mse"),
    # input, tanh's output, log-softmax's output; the targets as integers, and the number of them as one float
    pytest.param(classifier, FLOAT * (12 + 20 + 5) + INTEGER, FLOAT, id="linear-tanh-linear-cross-entropy"),
    # input, sigmoid's output (its flattened view is the same storage), the error squared
    pytest.param(convolution, FLOAT * (2 * 8 * 8 + 3 * 6 * 6 + 4), 0, id="conv-sigmoid-linear-mse"),
]


def measured(make: Callable[[int], Problem], strategy: Strategy = "full-batch", steps: int = 1) -> int:
    with workload(make(B), Spec(model="m"), Plan(strategy, steps)) as work:
        return activation_bytes(work)


@pytest.mark.parametrize(("make", "per_sample", "constant"), BY_HAND)
@pytest.mark.parametrize("steps", [2, 4, 8])
def test_saved_bytes_are_what_a_hand_counts(
    make: Callable[[int], Problem], per_sample: int, constant: int, steps: int
) -> None:
    assert measured(make) == B * per_sample + constant
    assert measured(make, "accumulate", steps) == B // steps * per_sample + constant, "one micro-batch at a time"
    assert measured(make, "summed-loss", steps) == B * per_sample + steps * constant, "every graph is held"


def test_a_ragged_tail_counts_the_largest_micro_batch() -> None:
    assert measured(relu_network, "accumulate", 3) == 3 * FLOAT * (16 + 32 + 4)


def test_nothing_is_left_after_the_backward() -> None:
    problem = relu_network()
    meter = ActivationMeter(problem.model.parameters())
    with meter.counting():
        loss = mean_squared(problem.model, problem.batch)
        assert meter.current == B * FLOAT * (16 + 32 + 4)
        loss.backward()
        assert meter.current == 0
    assert meter.peak == B * FLOAT * (16 + 32 + 4)


def test_a_graph_that_is_dropped_is_no_longer_counted() -> None:
    weight = torch.randn(4, requires_grad=True)
    meter = ActivationMeter([weight])
    with meter.counting():
        value = (weight * weight).exp()
        assert meter.current == 4 * FLOAT  # exp saves its own output
        del value
        assert meter.current == 0


def test_views_of_one_storage_count_once_and_whole() -> None:
    base, weight = torch.randn(10, 10), torch.randn(10, requires_grad=True)
    meter = ActivationMeter([weight])
    with meter.counting():
        loss = (weight * base[0]).sum() + (weight * base[1]).sum()
        assert meter.current == 100 * FLOAT
    loss.backward()


def test_parameters_and_buffers_are_left_out() -> None:
    model = nn.BatchNorm1d(4).eval()
    x = torch.randn(6, 4)
    meter = ActivationMeter([*model.parameters(), *model.buffers()])
    with meter.counting():
        model(x).sum().backward()
    assert meter.peak == 6 * 4 * FLOAT  # the input alone; running statistics and weight are saved, too


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_count(reentrant: bool) -> None:
    inner = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    x = torch.randn(B, 16, requires_grad=True)
    meter = ActivationMeter(inner.parameters())
    with meter.counting():
        output = checkpoint(inner, x, use_reentrant=reentrant)
        assert meter.current == B * 16 * FLOAT  # only the input of the checkpoint
        output.sum().backward()
    assert meter.peak == B * (16 + 64) * FLOAT  # and relu's output, once it is computed again


def test_the_model_is_left_as_it_was() -> None:
    problem = Problem(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), mean_squared, (torch.randn(B, 3), torch.randn(B, 4))
    )
    before = {name: value.clone() for name, value in problem.model.state_dict().items()}
    state = torch.get_rng_state()
    with workload(problem, Spec(model="m", mode="train"), Plan("accumulate", 2), "adam") as work:
        work.start_optimizer()
        work.update(work.micro_batches())
    assert all(torch.equal(value, before[name]) for name, value in problem.model.state_dict().items())
    assert all(parameter.grad is None for parameter in problem.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_forward_may_take_its_batch_apart() -> None:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch.pop("labels")
        return ((model(batch["x"].mul_(2)) - labels) ** 2).mean()

    problem = Problem(nn.Linear(3, 1), loss, {"x": torch.randn(B, 3), "labels": torch.randn(B, 1)})
    with workload(problem, Spec(model="m"), Plan("accumulate", 2)) as work:
        gradients = []
        for _ in range(2):
            work.update(work.micro_batches())
            gradients.append([parameter.grad.clone() for parameter in problem.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
