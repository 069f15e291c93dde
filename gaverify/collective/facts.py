"""What a window showed of the ranks, whoever started them: are they apart, what did each one's gradient count?

Shapes: R ranks; S = 4096 numbers of a sketch, which stands for all gradients of one rank.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gaverify.collective.engines import Scaled, loss_factor, of_every_rank
from gaverify.collective.membership import gathers_with_gradient
from gaverify.collective.window import Moved, Trained, always_reducing, bare
from gaverify.passes.gradients import Gradients
from gaverify.passes.layouts import digest_of
from gaverify.passes.precision import buffers_apart
from gaverify.passes.sketches import SINGULAR_FLOAT32, fit_weights, sketch
from gaverify.passes.wrappers import THIS_RANK, RankSum, is_sharded, local, shard_number
from gaverify.records.comparison import Outcome, ParameterComparison, relative_total
from gaverify.records.experiment import ControlKind, ControlRun, WeightFit
from gaverify.records.ranks import (
    Engine,
    RankFacts,
    RankShares,
    RankTraffic,
    Reduction,
    Replicas,
    Shares,
    Traffic,
    rounding_of,
)
from gaverify.records.windows import SCRIPT, AccumulationWindow
from gaverify.thresholds import COMPUTED_FLOAT32
from gaverify.verdict.comparison import left_between
from gaverify.verdict.decision import Decision
from gaverify.verdict.measurement import Measurement

_NO_REDUCTION = Reduction()


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
    reduction: Reduction = _NO_REDUCTION,
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
        reduction: What the backward passes reduced.
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
        reduction=reduction,
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
        used: What the ranks ended up with.
        ranks: What makes sketches those of all ranks; None: this process holds all of these gradients.

    Returns:
        The fit; None where a side lacks a gradient that the other one has, or one is not finite.
    """
    if any((gradient is None) != (used[name] is None) for name, gradient in target.items()):
        return None
    shards = any(gradient is not None and is_sharded(gradient) for gradient in target.values())
    # What one process computed is whole on every rank: added up, it would count as often as there are ranks.
    wanted = sketch(target.values(), ranks if shards else THIS_RANK)
    sides = [torch.stack(list(rank_sketches), dim=1), wanted.cpu(), sketch(used.values(), ranks).cpu()]
    if not all(bool(numbers.isfinite().all()) for numbers in sides) or not bool(sides[1].any()):
        return None
    return fit_weights(sides[0], sides[1], used=sides[2], singular=SINGULAR_FLOAT32)


def with_shares(facts: RankFacts, difference_left: Callable[[Shares], float]) -> RankFacts:
    """Returns the facts with the control of each rank's share: the first that leaves rounding, or the last tried.

    Args:
        facts: What was measured.
        difference_left: What such a window differs by from the right one, relative.
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
    moved: Moved,
    one: Measurement | None = None,
    unclipped: float = math.nan,
) -> RankFacts:
    """Returns what the window showed.

    Args:
        trained: How the ranks train.
        measurement: Of their window.
        decision: What was decided about it.
        moved: What that moved.
        one: The same micro-batches, all of them on every rank; None where nothing diverges.
        unclipped: What such a window leaves whose losses are too small to be clipped; NaN where nothing is.
    """
    member, engine = trained.member, trained.engine
    window = measurement.accumulated
    meter = moved.meter
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
        reduction=_describe_reduction(trained, measurement, moved),
        clip_control=unclipped,
    )
    if one is None:
        return facts
    if facts.is_rounding(unclipped):
        return replace(facts, from_one_process=0.0)
    together = trained.place(one.accumulated.gradients)
    facts = replace(facts, from_one_process=left_between(window.gradients, together, measurement.experiment.ranks))
    if trained.strategy is not None:
        together = measurement.full.gradients  # the loop counts its losses itself, and better than one process may
        own_of_each, counted = _rank_sketches_of_strategy(trained, measurement)
        weights = fit_rank_weights(own_of_each, together, window.gradients, measurement.experiment.ranks)
        facts = _of_strategy(trained, measurement, replace(facts, shares=RankShares(weights), counted=counted))
    else:
        weights = _fit_ranks(trained, measurement, one)
        facts = replace(facts, shares=RankShares(weights))

    def difference_left(shares: Shares) -> float:
        repaired_training = replace(trained, shares=shares[member.rank])
        repaired, _ = repaired_training.window(measurement.experiment, measurement.full)
        return left_between(repaired.gradients, together, measurement.experiment.ranks)

    if facts.at_fault and facts.gathers:
        with gathers_with_gradient():
            facts = replace(facts, gather_control=difference_left(((1.0,),) * member.count))
    return with_shares(facts, difference_left) if facts.at_fault and not facts.replicas_differ else facts


def _of_strategy(trained: Trained, measurement: Measurement, facts: RankFacts) -> RankFacts:
    """What a control of the user's own loop shows, every backward pass reducing, and the weights that it counts with.

    Where one factor that is not the number of ranks is all that is wrong, or weights of micro-batches and none of
    ranks, the fault is one of the loop and not of the ranks. A factor that is both K and R cannot be told apart.
    """
    full = measurement.full.gradients
    if facts.reduction.stepped_without or facts.ends_unreduced or facts.replicas_differ:
        with always_reducing():
            reduced, _ = trained.window(measurement.experiment, measurement.full)
        facts = replace(facts, sync_control=left_between(reduced.gradients, full, measurement.experiment.ranks))
        if facts.replicas.difference > 0.0:
            accumulated, right = (
                sketch(gradients.values(), measurement.experiment.ranks)
                for gradients in (measurement.accumulated.gradients, full)
            )
            mean_left = torch.linalg.vector_norm(accumulated - right) / torch.linalg.vector_norm(right)
            facts = replace(facts, shares=replace(facts.shares, mean_left=float(mean_left)))
        return facts
    factor, residual = facts.one_factor
    of_ranks = any(math.isclose(factor, value, rel_tol=COMPUTED_FLOAT32) for value in (facts.ranks, 1.0 / facts.ranks))
    if residual <= facts.rounding and not of_ranks:
        return replace(facts, from_one_process=0.0)
    among_ranks = facts.shares.fit is not None and facts.is_rounding(facts.shares.fit.residual)
    of_loop = facts.counted is not None and facts.is_rounding(facts.counted.residual) and not among_ranks
    return replace(facts, from_one_process=0.0) if of_loop else facts


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


def _describe_reduction(trained: Trained, measurement: Measurement, moved: Moved) -> Reduction:
    """What each backward pass reduced; nothing where gaverify decides when that happens."""
    if trained.plain is not None:
        return _NO_REDUCTION
    no_gradient = all(gradient is None for gradient in measurement.accumulated.gradients.values())
    element_bytes = min((dtype.itemsize for dtype in moved.meter.reduced_in if dtype.is_floating_point), default=0)
    elements = sum(parameter.numel() for parameter in measurement.experiment.parameters.values())
    return Reduction(tuple(moved.reduced), element_bytes * elements, trained.engine is Engine.FSDP2 and no_gradient)


def _fit_ranks(trained: Trained, measurement: Measurement, one: Measurement) -> WeightFit | None:
    """What each rank's gradient counts, by sketches from before they are reduced."""
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


def _rank_sketches_of_strategy(
    trained: Trained, measurement: Measurement
) -> tuple[list[torch.Tensor], WeightFit | None]:
    """The sketch of what each rank's micro-batches give, counted as the user's loop does, by rank; and that count.

    What each of them counts is fitted; where no weights make the loop's gradient, or several do, they count as given.
    """
    each = [range(k, k + 1) for k in range(measurement.experiment.steps)]
    columns = _sketch_groups(trained, measurement, each)
    weight_fit = fit_rank_weights(
        columns, measurement.full.gradients, measurement.accumulated.gradients, measurement.experiment.ranks
    )
    unit = measurement.unit
    if weight_fit is None or not weight_fit.determined or weight_fit.used_residual > rounding_of(unit):
        weight_fit, counted = None, [1.0] * measurement.experiment.steps
    else:
        counted = [trained.member.count * used for used in weight_fit.used]
    pairs = list(zip(columns, counted, strict=True))
    rank_ranges = (trained.own(measurement.experiment, rank) for rank in range(trained.member.count))
    return [
        sum((pairs[k][0] * pairs[k][1] for k in mine), torch.zeros((), device="cpu")) for mine in rank_ranges
    ], weight_fit


def weights_of_strategy(
    trained: Trained, measurement: Measurement, single: AccumulationWindow, fit: WeightFit
) -> AccumulationWindow:
    """Returns what the micro-batches of the user's own loop count, tried in it: with the right weights.

    Where some never reach its gradient, the loop ends with the same one without their losses.

    Args:
        trained: How the ranks train.
        measurement: Of their window.
        single: What one process that trains the same micro-batches counts, and what is wrong with that; returned where
            the loop counts alike, or no weights are what is wrong with it.
        fit: The weights that make the loop's gradient.
    """
    count, rounding = trained.member.count, rounding_of(measurement.unit)
    each = [count**2 * weight for weight in single.used]  # of one process's, in the loop of a rank
    used, right = (tuple(map(operator.mul, each, weights)) for weights in (fit.used, fit.weights))
    weights = replace(single, used=used, weighting=SCRIPT, counts=(), place=None)
    as_one = all(math.isclose(count * weight, 1.0, rel_tol=max(rounding, COMPUTED_FLOAT32)) for weight in fit.used)
    if as_one or (fit.residual > rounding and not weights.lost_micro_batches):
        return single
    fit = replace(fit, used=used, weights=right)
    what, kind, wanted = "these weights in the loop", ControlKind.WEIGHTS, measurement.full.gradients
    factors = fit.multipliers
    if weights.lost_micro_batches:
        what, kind, wanted = "their losses taken as zero", ControlKind.LOST_LOSSES, measurement.accumulated.gradients
        factors = tuple(float(k not in weights.lost_micro_batches) for k in range(measurement.experiment.steps))
    reweighted = replace(trained, shares=tuple(factors[k] for k in trained.own(measurement.experiment)))
    repaired, _ = reweighted.window(measurement.experiment, measurement.full)
    difference_left = left_between(repaired.gradients, wanted, measurement.experiment.ranks)
    return replace(
        weights, fit=fit, remedy=ControlRun(what, difference_left, difference_left <= rounding, fit=fit, kind=kind)
    )
