"""What the optimizer sees of losses that count otherwise: which gradients each micro-batch transforms on its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gaverify.audit.code_controls import compare_responses
from gaverify.records.audit import Record, RowCheck, UpdateComparison
from gaverify.records.outcomes import Outcome, ParameterComparison

GRADIENTS = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
COUNTS = ((1.0, 1.0), (-0.5, 1.0), (1.0, -0.5), (-0.5, -0.5))


def row(outcome: Outcome) -> ParameterComparison:
    return ParameterComparison("weight", (6, 5), outcome, "noise-floor", 1.0, 1.2, 0.4, 1e-5, 0.4, None)  # type: ignore[arg-type]


def clip(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / gradient.norm().clamp_min(0.1)


def clip_with_room(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / gradient.norm().clamp_min(100.0)


def rectify(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp_min(0.0)


@pytest.mark.parametrize(
    ("transform", "of_sum", "outcome", "is_named"),
    [
        (clip, False, Outcome.DIVERGENT, True),
        (torch.sign, False, Outcome.DIVERGENT, True),
        (rectify, False, Outcome.DIVERGENT, True),
        # of the sum, linear, or where nothing differs
        (clip, True, Outcome.DIVERGENT, False),
        (clip_with_room, False, Outcome.DIVERGENT, False),
        (torch.Tensor.flipud, False, Outcome.DIVERGENT, False),
        (clip, False, Outcome.EQUIVALENT, False),
    ],
)
def test_a_gradient_that_each_micro_batch_transforms_is_named(
    transform: Callable[[torch.Tensor], torch.Tensor], of_sum: bool, outcome: Outcome, is_named: bool
) -> None:
    def seen(first: float, second: float) -> dict[tuple[int, int], torch.Tensor]:
        counted = [times * each for times, each in zip((first, first, second, second), GRADIENTS, strict=True)]
        return {(0, 0): transform(sum(counted)) if of_sum else sum(map(transform, counted))}  # type: ignore[arg-type,dict-item]

    update = UpdateComparison(1, Outcome.DIVERGENT, True, (row(outcome),), RowCheck(8, 8))
    record = Record(updates=(update,))
    found = compare_responses(record, update, {(0, 0): "weight"}, *(seen(*counts) for counts in COUNTS))
    assert (found is not None) is is_named
    if found is not None:
        assert found.parameters == ("weight",) and found.all_of_it
        assert found.responses == pytest.approx([found.responses[0]]) and found.halves_difference < 1e-12
