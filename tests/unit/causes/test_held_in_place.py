"""A call that writes in place is held constant in the tensor that it wrote to, since other code may hold that tensor.

Shapes: B = 4 samples of two features, in two micro-batches.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gaverify.causes.neutral.holding import OutputHeld, ResultsHeld
from gaverify.causes.rows import ControlFailed
from gaverify.passes.task import Task

_HALVES = SimpleNamespace(bounds=lambda: [(0, 2), (2, 4)], batch_size=4)


def held(run: Any, *names: str) -> list[torch.Tensor]:
    """What `run(samples)` returns for the full batch and for both micro-batches, with these calls held."""
    samples = torch.arange(8.0, device="cpu").reshape(4, 2).requires_grad_()
    first = run.__code__.co_firstlineno
    places = [(name, (__file__, line), 0) for name in names for line in range(first, first + 6)]
    probe = ResultsHeld(cast(Task, _HALVES), places)
    found = []
    for k, part in ((None, samples), (0, samples[:2]), (1, samples[2:])):
        with probe.around(k):
            found.append(run(part))
    return found


def test_a_sum_that_is_written_in_place_is_the_full_batch_everywhere() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(2)
        total.index_add_(0, torch.zeros(len(x), dtype=torch.long, device="cpu"), x.sum(1))
        return total

    for total in held(run, "index_add_"):
        assert total.tolist() == [28.0, 0.0] and not total.requires_grad


def test_nothing_trained_is_overwritten() -> None:
    weight = torch.nn.Parameter(torch.ones(2, device="cpu"))

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight.mul_(2.0)
        return x * weight

    with pytest.raises(ControlFailed, match="trained or shared memory"):
        held(run, "mul_")
    assert weight.requires_grad


class _Centred(torch.nn.Module):
    """Hands out samples without their mean, and their own sums beside them."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x - x.mean(0), x.sum(1)


def test_outputs_that_are_held_are_rows_of_the_full_batch_and_others_live() -> None:
    samples = torch.arange(8.0, device="cpu").reshape(4, 2).requires_grad_()
    module = _Centred()
    probe = OutputHeld(cast(Task, _HALVES), module, positions=(0,))
    whole = (samples - samples.mean(0)).detach()
    for k, part in ((None, slice(0, 4)), (0, slice(0, 2)), (1, slice(2, 4))):
        with probe.around(k):
            held, live = module(samples[part])
        assert torch.equal(held, whole[part]) and not held.requires_grad
        assert torch.equal(live, samples[part].sum(1)) and live.requires_grad
    with probe.around(1), pytest.raises(ControlFailed, match="more often than the full batch"):
        module(samples[:2])
        module(samples[:2])
