"""Facts about the ranks of a window, whoever started them: are they apart, what did each one's gradient count?

Shapes: R ranks; S = 4096 numbers of a sketch, which stands for all gradients of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gaverify.collective.engines import Scaled, loss_factor, of_every_rank
from gaverify.collective.membership import TrafficMeter, gathers_with_gradient
from gaverify.collective.window import Trained, bare
from gaverify.passes.gradients import Gradients
from gaverify.passes.layouts import digest_of
from gaverify.passes.precision import buffers_apart
from gaverify.passes.sketches import SINGULAR_FLOAT32, fit_weights, sketch
from gaverify.passes.wrappers import THIS_RANK, RankSum, is_sharded, local, shard_number
from gaverify.records.experiment import WeightFit
from gaverify.records.outcomes import Outcome, ParameterComparison, relative_total
from gaverify.records.ranks import (
    Engine,
    RankFacts,
    RankShares,
    RankTraffic,
    Replicas,
    Shares,
    Traffic,
)
from gaverify.verdict.comparison import left_between
from gaverify.verdict.decision import Decision
from gaverify.verdict.measurement import Measurement


def make_rank_facts(
    ranks: int,
    engine: Engine | None,
    unit: float,
    decided: tuple[float, bool],
    *,
    buffers: Sequence[Mapping[str, torch.Tensor]],
    window: Iterable[Traffic],
    own: Iterable[Traffic] = (),
    replicas: Replicas,
    **measured: Any,
) -> RankFacts:
    """Returns the facts of ranks, whether local ranks, a launcher's or those of an audit report them.

    Args:
        ranks: R, their number.
        engine: How they hold the model; None where that was not recognised.
        unit: Unit roundoff of the arithmetic that they trained in.
        decided: The relative difference of their gradient from the full batch's, and whether it is more than rounding.
        buffers: Of each rank, when the window ends.
        window: All collectives of the window, of each rank that reports them.
        own: Those that the model and the loss ran themselves.
        replicas: How far ranks are from each other; the buffers are added.
        measured: Further fields.
    """
    difference, divergent = decided
    traffic = (max(counts, key=Traffic.count, default=Traffic()) for counts in (window, own))
    return RankFacts(
        ranks,
        engine,
        difference,
        divergent,
        unit,
        replicas=replace(replicas, buffers=buffers_apart(buffers, unit)),
        traffic=RankTraffic(*traffic),
        **measured,
    )


def _summarize_rows(rows: Iterable[ParameterComparison]) -> tuple[float, bool]:
    """Returns the relative difference of all parameters together, and whether one of them diverges."""
    decided = list(rows)
    difference = relative_total((row.difference_norm, row.reference_norm) for row in decided)
    return difference, any(row.outcome is Outcome.DIVERGENT for row in decided)


def apart_by(sketches: Sequence[torch.Tensor]) -> float:
    """Returns the largest difference of the ranks' gradients from the first one's, relative to its norm."""
    first, *other_sketches = sketches
    norm = float(torch.linalg.vector_norm(first))
    far = max(float(torch.linalg.vector_norm(other_sketch - first)) for other_sketch in other_sketches)
    return far / norm if norm else math.inf if far else 0.0


def fit_rank_weights(
    rank_sketches: Sequence[torch.Tensor], target: Gradients, used: Gradients, ranks: RankSum | None = None
) -> WeightFit | None:
    """Fits the ranks' own gradients to the one of one process, and to the one that they ended up with.

    Args:
        rank_sketches: The sketch of each rank's own, before a reduction.
        target: Of one process that ran the same micro-batches.
        used: The gradients that the ranks ended up with.
        ranks: Makes sketches those of all ranks; None: this process holds all of these gradients.

    Returns:
        The fit; None where a side lacks a gradient that the other one has, or one is not finite.
    """
    if any((gradient is None) != (used[name] is None) for name, gradient in target.items()):
        return None
    shards = any(gradient is not None and is_sharded(gradient) for gradient in target.values())
    # One process computed whole gradients, on every rank: added up, they would count as often as there are ranks.
    wanted = sketch(target.values(), ranks if shards else THIS_RANK)
    sides = [torch.stack(list(rank_sketches), dim=1), wanted.cpu(), sketch(used.values(), ranks).cpu()]
    if not all(bool(numbers.isfinite().all()) for numbers in sides) or not bool(sides[1].any()):
        return None
    return fit_weights(sides[0], sides[1], used=sides[2], singular=SINGULAR_FLOAT32)


def with_shares(facts: RankFacts, difference_left: Callable[[Shares], float]) -> RankFacts:
    """Returns the facts with the control of each rank's share: the first that leaves rounding, or the last tried.

    Args:
        facts: The facts without the control.
        difference_left: Returns the relative difference of such a window from the right one.
    """
    for shares in facts.shares_to_try:
        facts = replace(facts, weights_control=difference_left(shares), shares_tried=shares)
        if facts.is_rounding(facts.weights_control):
            break
    return facts


def facts_of_ranks(
    trained: Trained,
    measurement: Measurement,
    decision: Decision,
    meter: TrafficMeter,
    one: Measurement | None = None,
) -> RankFacts:
    """Returns what the window showed.

    Args:
        trained: How the ranks train.
        measurement: Of their window.
        decision: The verdict about it.
        meter: Counted its collectives.
        one: The same micro-batches, all of them on every rank; None where nothing diverges.
    """
    member, engine = trained.member, trained.engine
    window = measurement.accumulated
    buffers = of_every_rank({name: b.cpu() for name, b in window.buffers.items()}, member.count, member.device)
    facts = make_rank_facts(
        member.count,
        engine,
        measurement.unit,
        _summarize_rows(decision.rows),
        buffers=buffers,
        window=[meter.traffic],
        own=() if trained.without_engine is None else (trained.without_engine.calls,),
        replicas=Replicas(_replica_difference(trained, window.gradients)),
    )
    if one is None:
        return facts
    together = trained.place(one.accumulated.gradients)
    facts = replace(facts, from_one_process=left_between(window.gradients, together, measurement.experiment.ranks))
    facts = replace(facts, shares=RankShares(_fit_ranks(trained, measurement, one)))

    def difference_left(shares: Shares) -> float:
        repaired_training = replace(trained, shares=shares[member.rank])
        repaired, _ = repaired_training.window(measurement.experiment, measurement.full)
        return left_between(repaired.gradients, together, measurement.experiment.ranks)

    if facts.at_fault and facts.gathers:
        with gathers_with_gradient():
            facts = replace(facts, gather_control=difference_left(((1.0,),) * member.count))
    return with_shares(facts, difference_left) if facts.at_fault and not facts.replicas_differ else facts


def _replica_difference(trained: Trained, gradients: Gradients) -> float:
    """How far ranks that hold the same parts are apart, relative; 0 where all bits agree, NaN where there are none."""
    member, local_gradients = trained.member, {name: None if g is None else local(g) for name, g in gradients.items()}
    parts = tuple(shard_number(gradient) for gradient in gradients.values())
    said = member.everyones("replicas", (parts, digest_of(local_gradients)))
    alike = [
        [at for at, (held_by, _) in enumerate(said) if held_by == shard_numbers]
        for shard_numbers in dict.fromkeys(s[0] for s in said)
    ]
    copies = [ranks for ranks in alike if len(ranks) > 1]
    if not copies or all(gradient is None for gradient in gradients.values()):
        return math.nan
    if all(len({said[rank][1] for rank in ranks}) == 1 for ranks in copies):
        return 0.0
    sketches = of_every_rank(sketch(local_gradients.values(), THIS_RANK), member.count, member.device)
    return max(apart_by([sketches[rank] for rank in ranks]) for ranks in copies)


def _fit_ranks(trained: Trained, measurement: Measurement, one: Measurement) -> WeightFit | None:
    """Returns the weights of each rank's gradient, by sketches from before they are reduced."""
    used, ranks = measurement.accumulated.gradients, measurement.experiment.ranks
    if trained.without_engine is not None:
        # A shard has other random signs than its place in the whole tensor: all sketches are of whole tensors.
        return fit_rank_weights(trained.without_engine.sketches, one.accumulated.gradients, trained.gather(used))
    each = [trained.own(measurement.experiment, rank) for rank in range(trained.member.count)]
    return fit_rank_weights(_sketch_groups(trained, measurement, each), one.accumulated.gradients, used, ranks)


def _sketch_groups(trained: Trained, measurement: Measurement, each: Sequence[range]) -> list[torch.Tensor]:
    """The sketches of what some groups of micro-batches give, R times: as many of them on each rank, in its order."""
    member, sharded = trained.member, trained.engine is Engine.FSDP2
    rank_experiment = measurement.experiment if sharded else bare(measurement.experiment)
    factor = loss_factor(measurement.experiment, member.count)

    def gradients(group: range) -> Gradients:
        return rank_experiment.micro_batches(measurement.full, Scaled(factor), own=group).gradients

    if sharded:  # a shard of it needs all ranks: every one runs each one's micro-batches
        return [sketch(gradients(group).values(), rank_experiment.ranks) for group in each]
    count = len(each) // member.count
    mine = [
        sketch(gradients(group).values(), THIS_RANK) for group in each[member.rank * count : (member.rank + 1) * count]
    ]
    return [gradient_sketch for rank in of_every_rank(mine, member.count, member.device) for gradient_sketch in rank]
