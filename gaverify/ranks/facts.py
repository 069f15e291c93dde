"""What any window of ranks is asked, whoever started them: are their gradients apart, what did each one's count?

Shapes: R ranks; S = 4096 numbers of a sketch, which stands for all gradients of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from gaverify.passes.gradients import Gradients
from gaverify.passes.sketches import SINGULAR_FLOAT32, fit_weights, sketch
from gaverify.passes.wrappers import is_sharded, summed_over
from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.records.ranks import RankFacts, Shares
from gaverify.records.totals import relative_total
from gaverify.records.weights import WeightFit


def facts_of(rows: Iterable[ParameterComparison], **measured: Any) -> RankFacts:
    """Returns the facts of ranks: what was `measured` on them, and what was decided about their gradient."""
    decided = list(rows)
    return RankFacts(
        difference=relative_total((row.difference_norm, row.reference_norm) for row in decided),
        divergent=any(row.outcome is Outcome.DIVERGENT for row in decided),
        **measured,
    )


def own_sketch(gradients: Gradients) -> torch.Tensor:
    """Returns the sketch of what this process holds, whatever other ranks do."""
    with summed_over(1, lambda numbers: numbers):
        return sketch(list(gradients.values()))


def apart_by(sketches: Sequence[torch.Tensor]) -> float:
    """Returns the largest difference of the ranks' gradients from the first one's, relative to its norm."""
    first, *others = sketches
    norm = float(torch.linalg.vector_norm(first))
    far = max(float(torch.linalg.vector_norm(other - first)) for other in others)
    return far / norm if norm else math.inf if far else 0.0


def fitted(own: Sequence[torch.Tensor], target: Gradients, used: Gradients) -> WeightFit | None:
    """Fits the ranks' own gradients to the one of one process, and to the one that they ended up with.

    Args:
        own: The sketch of each rank's own, before a reduction.
        target: Of one process that ran the same micro-batches.
        used: What the ranks ended up with.

    Returns:
        The fit; None where a side lacks a gradient that the other one has, or one is not finite.
    """
    if any((gradient is None) != (used[name] is None) for name, gradient in target.items()):
        return None
    shards = any(gradient is not None and is_sharded(gradient) for gradient in target.values())
    wanted = sketch(list(target.values())) if shards else own_sketch(target)
    sides = [torch.stack(list(own), dim=1), wanted.cpu(), sketch(list(used.values())).cpu()]
    if not all(bool(numbers.isfinite().all()) for numbers in sides) or not bool(sides[1].any()):
        return None
    return fit_weights(sides[0], sides[1], used=sides[2], singular=SINGULAR_FLOAT32)


def with_shares(facts: RankFacts, left: Callable[[Shares], float]) -> RankFacts:
    """Returns the facts with the control of each rank's share: the first that leaves rounding, or the last tried.

    Args:
        facts: What was measured.
        left: What such a window differs by from the right one, relative.
    """
    for shares in facts.shares_to_try:
        facts = replace(facts, weights_control=left(shares), shares_tried=shares)
        if facts.is_rounding(facts.weights_control):
            break
    return facts
