"""Measures the ranks of a recorded run in its updates: reductions, gradients, weights, buffers.

Shapes: R ranks, K backward passes in each window, S sampled elements of an optimizer's gradients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch

from gaverify.audit.ranks import RankedRun
from gaverify.audit.reading import Moment, Place, RecordedRun, Samples
from gaverify.audit.same_data import check_rows
from gaverify.audit.stages import clips_of, fit_gradients
from gaverify.collective.facts import make_rank_facts
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.comparison import Outcome, relative_total
from gaverify.records.events import Backward
from gaverify.records.experiment import ControlRun, WeightFit, is_constant
from gaverify.records.ranks import Collective, Engine, RankFacts, RankShares, Reduction, Replicas, Share, Traffic
from gaverify.records.stages import Stage
from gaverify.records.windows import Round, rounds_of, windows_of
from gaverify.thresholds import FIT_UNITS
from gaverify.verdict.comparison import left_between

_SMALLEST = 1  # bytes of an element in the coarsest type that gradients are reduced in


def rank_facts(full: RecordedRun, accumulated: RankedRun, update: UpdateComparison, unit: float) -> RankFacts:
    """Returns what the ranks did in the first update, and how far they were apart in any.

    Args:
        full: The run at world size 1.
        accumulated: The ranks.
        update: The comparison of the first update.
        unit: Unit roundoff of the coarsest arithmetic.
    """
    rounds = rounds_of(accumulated.events)
    first, difference = rounds[0], update.relative_difference
    full_samples = full.samples(first)
    ranks = [run.samples(first) for run in accumulated.ranks]
    sharded = accumulated.closing.is_sharded
    engine = accumulated.closing.models.engine
    own_gradients = [{at: _total(samples, at) for at in samples.steps} for samples in ranks]
    window = _backwards_of_first_update(accumulated.ranks[0])
    # of trained tensors, which the script makes in its forwards and losses
    gathers = sum(len(backward.gathers) for backward in window)
    fed = [run.rows_of(run.samples(first), reached=False) for run in accumulated.ranks]
    checks = [check_rows(one, another) for one, another in combinations(fed, 2)]
    replicas = Replicas(
        # A rank may fall out of step in a later update only: the largest distance of all updates counts.
        max(distance_between_ranks(accumulated, round_, "final") for round_ in rounds),
        distance_between_ranks(accumulated, first, "summed"),
        distance_between_ranks(accumulated, first, "before"),
        _names_apart(accumulated, first, FIT_UNITS * unit),
        fed_alike=any(check.checked and check.same for check in checks),
    )
    reduction = Reduction(
        # What tensor parallelism reduces alone is activations.
        () if sharded and engine is not Engine.FSDP2 else tuple(backward.reduced for backward in window),
        _SMALLEST * sum(math.prod(shape) for _, shape in accumulated.parameters.values()),
        sharded and not any(run.gradients(first) for run in accumulated.ranks),
        _altered_share(accumulated.samples(first)),
    )
    shares = RankShares(
        mean_left=math.nan if sharded else _mean_difference(full_samples, own_gradients),
        shards=_shares(full, accumulated, first) if sharded else (),
        targets=_targets(accumulated),
    )
    facts = make_rank_facts(
        len(ranks),
        engine,
        unit,
        (difference, update.outcome is Outcome.DIVERGENT),
        buffers=[samples.buffers for samples in ranks],
        window=[_traffic(window)],
        own=[Traffic({Collective.GATHER: gathers} if gathers else {})],  # their bytes are not counted
        replicas=replicas,
        reduction=reduction,
        shares=shares,
        from_one_process=difference,
        tensor_parallel=accumulated.closing.models.is_tensor_parallel,
    )
    # Elements sampled from shards are not those of the full batch's tensors: no weights can be fitted to them.
    if sharded:
        return facts
    # Clipping would hide a wrong weight; without it what the optimizers saw counts, which a script may have reduced.
    clipped = update.decided is Stage.SUMMED and not facts.reduced_late
    stages = [side.summed_gradients if clipped else side.of("final") for side in (full_samples, ranks[0])]
    fit = fit_gradients(stages[0], full_samples.stretches, stages[1], own_gradients)
    alike = facts.reduced_late and fit is not None and is_constant(fit.weights, facts.rounding)
    shards = _parts(full, accumulated, fit) if alike and fit is not None else ()
    return replace(facts, shares=replace(shares, fit=fit, shards=shards))


def _parts(full: RecordedRun, accumulated: RankedRun, fit: WeightFit) -> tuple[Share, ...]:
    """The factor of each rank on its own gradient before a script reduced them by hand, and that of its clipping."""
    residual, full_clipping = max(fit.residual, fit.used_residual), _clipping(full)
    return tuple(
        Share(used / right, residual, _clipping(run) / full_clipping)
        for run, used, right in zip(accumulated.ranks, fit.used, fit.weights, strict=True)
    )


def _clipping(run: RecordedRun) -> float:
    """The factor of the clippings of the first update, by the norms that they measured; NaN where these are unknown."""
    # Ranks that clip before they reduce clip by different factors: their mean is then no mean of what they computed.
    clips = clips_of(windows_of(run.events)[0])
    return math.prod(min(1.0, clip.limit / clip.norm) if clip.norm else math.nan for clip in clips)


def _altered_share(samples: Samples) -> float:
    """The relative part of the gradient that is no sum of the ranks' backward passes; NaN if that is not known.

    Elements for which none computed anything got their gradient in another way, and are left out.
    """
    increments, used = samples.increments, {}
    for at, gradient in samples.summed_gradients.items():
        parts = [part[at] for part in increments if at in part and len(part[at]) == len(gradient)]
        # A gradient that a script puts in place itself is no sum of passes, and still nothing has altered it.
        computed = torch.stack(parts).any(0) if parts else torch.zeros_like(gradient, dtype=torch.bool)
        used[at] = gradient * computed
    fit = fit_gradients(used, samples.stretches, used, increments)
    return math.nan if fit is None else fit.residual


def _traffic(backwards: Sequence[Backward]) -> Traffic:
    """The collectives of some backward passes together."""
    counts: Counter[Collective] = Counter()
    for backward in backwards:
        counts.update(backward.traffic.counts)
    return Traffic(dict(counts), sum(backward.traffic.bytes_moved for backward in backwards))


def _backwards_of_first_update(run: RecordedRun) -> list[Backward]:
    return [event for event in run.events if isinstance(event, Backward) and event.update == 1]


def _targets(accumulated: RankedRun) -> tuple[tuple[int, ...], ...]:
    """The valid targets of each rank in each of the first window's passes; empty where one is unknown or has none."""
    by_rank = []
    for run in accumulated.ranks:
        targets = [backward.targets for backward in _backwards_of_first_update(run)]
        by_rank.append(tuple(max((count for count, _ in counts), default=0) for counts in targets))
    return tuple(by_rank) if all(counts and all(counts) for counts in by_rank) else ()


def _mean_difference(full_samples: Samples, own_gradients: Sequence[Mapping[int, torch.Tensor]]) -> float:
    """How far the mean of the ranks' own gradients is from the full batch's, relative."""
    stretches = full_samples.stretches
    target = {
        at: gradient
        for at, gradient in full_samples.summed_gradients.items()
        if all(at in part for part in own_gradients)
    }
    if not target:
        return math.nan
    difference = size = 0.0
    for at, gradient in target.items():
        mean = sum((part[at] for part in own_gradients[1:]), own_gradients[0][at]) / len(own_gradients)
        difference += float((stretches[at] * (mean - gradient).square()).sum())
        size += float((stretches[at] * gradient.square()).sum())
    return math.sqrt(difference / size) if size else math.nan


def _shares(full: RecordedRun, accumulated: RankedRun, round_: Round) -> tuple[Share, ...]:
    """The factor that each rank applied to its shard of the gradient; empty if one of them is not known."""
    used, sums = full.gradients(round_), accumulated.gradients(round_, summed=True)
    norm = math.hypot(*(float(torch.linalg.vector_norm(gradient.double())) for gradient in sums.values()))
    shares = []
    for run in accumulated.ranks:
        parts, own_sums = run.gradients(round_), run.gradients(round_, summed=True)
        pairs = [(parts[place], _cut(run, place, used[place])) for place in parts if place in used]
        inner = sum(float((a.double() * b.double()).sum()) for a, b in pairs)
        size = sum(float(b.double().square().sum()) for _, b in pairs)
        alone = math.hypot(*(float(torch.linalg.vector_norm(gradient.double())) for gradient in own_sums.values()))
        # A control scales the losses of all ranks: one rank without a known share makes the other shares useless.
        if not size or not alone:
            return ()
        factor = inner / size
        residual = sum(float((a.double() - factor * b.double()).square().sum()) for a, b in pairs)
        shares.append(Share(factor, math.sqrt(residual / size), norm / alone))
    return tuple(shares)


def _cut(run: RecordedRun, place: Place, gradient: torch.Tensor) -> torch.Tensor:
    """The shard of a whole gradient that a rank holds."""
    shard = run.parameter(place).shard
    return gradient if shard is None else gradient[shard.slices]


def compare_weighed_run(full: RecordedRun, control_run: RecordedRun, record: Record) -> ControlRun:
    """Returns the difference that is left in the first differing update if losses have other weights."""
    update = record.divergent
    assert update is not None
    difference_left = gradient_difference(
        full, control_run, summed=update.decided is Stage.SUMMED, update=update.number
    )
    return ControlRun("each loss weighted correctly", difference_left, difference_left <= record.tolerance)


def gradient_difference(
    full: RecordedRun,
    accumulated: RecordedRun,
    left_out: Collection[Place] = (),
    *,
    summed: bool = True,
    update: int = 1,
) -> float:
    """Returns ‖accumulated − full‖ / ‖full‖ of an update's gradients; NaN where there are none.

    Args:
        full: The full-batch run.
        accumulated: The accumulated run.
        left_out: Parameters that are not compared.
        summed: As the last backward pass left them; else as the optimizers saw them.
        update: Its number.
    """
    round_ = rounds_of(accumulated.events)[update - 1]
    sides = [run.gradients(round_, summed=summed) for run in (full, accumulated)]
    keys = [{str(place): gradient for place, gradient in side.items() if place not in left_out} for side in sides]
    return left_between({name: keys[1].get(name) for name in keys[0]}, keys[0]) if keys[0] else math.nan


def _total(samples: Samples, at: int) -> torch.Tensor:
    """The sum of a rank's own gradients over its window, shape (S,)."""
    step = samples.steps[at]
    return sum((change for _, change in step.increments), torch.zeros_like(step.final))


def distance_between_ranks(accumulated: RankedRun, round_: Round, what: Moment) -> float:
    """How far gradients, or weights before the step, are apart between ranks that hold the same piece of a parameter.

    Relative to those of the first such rank, at the sampled elements; NaN where no two ranks hold the same. Ranks whose
    pieces have other shapes sample other elements, and addends of a sum that is still to be made are no copies.
    """
    norms_by_rank: dict[int, list[tuple[float, float]]] = {}
    for rank, _, difference, norm in _copies(accumulated, round_, what):
        norms_by_rank.setdefault(rank, []).append((difference, norm))
    return max(map(relative_total, norms_by_rank.values()), default=math.nan)


def _names_apart(accumulated: RankedRun, round_: Round, allowed: float) -> tuple[str, ...]:
    """The parameters whose gradients are apart at the step, where those of others agree."""
    copies = list(_copies(accumulated, round_, "final"))
    differing = {place for _, place, difference, norm in copies if difference > allowed * norm}
    names = {place: accumulated.parameters[place][0].partition(":")[2] for place in sorted(differing)}
    return tuple(names.values()) if len(differing) < len({place for _, place, *_ in copies}) else ()


def _copies(accumulated: RankedRun, round_: Round, what: Moment) -> Iterator[tuple[int, Place, float, float]]:
    """Yields each rank's pieces that an earlier rank holds too: ‖difference‖ from those, and the norm of those."""
    first: dict[Any, torch.Tensor] = {}
    for rank, run in enumerate(accumulated.ranks):
        samples = run.samples(round_)
        for at, values in (samples.summed_gradients if what == "summed" else samples.of(what)).items():
            sizes, parameters = samples.steps[at].sizes, run.closing.groups[at].parameters
            # Ranks whose pieces have other shapes sample other elements of all parameters of the optimizer.
            layout = (sizes, tuple(each.shard.shape if each.shard else None for each in parameters))
            for place, part in enumerate(values.split(sizes)):
                # Ranks whose parts are still to be added up hold different values by design.
                if parameters[place].addends is not None or not len(part):
                    continue
                reference = first.setdefault((at, place, parameters[place].shard, layout), part)
                if reference is not part:
                    yield rank, (at, place), float((part - reference).norm()), float(reference.norm())
