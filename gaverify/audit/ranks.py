"""Reads a recorded run of several ranks as one run, and measures its ranks in its updates.

Gradients of sharded parameters are put together from the shards of all ranks.

Shapes: R ranks, K backward passes in each window, S sampled elements of an optimizer's gradients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import torch

from gaverify.audit.reading import Moment, ParameterPlace, RecordedRun, Samples
from gaverify.audit.recording.values import Sample, places_in_shard, positions
from gaverify.audit.same_data import ForwardInputs, StepSample, check_rows
from gaverify.audit.stages import clips_of, fit_gradients
from gaverify.collective.facts import make_rank_facts
from gaverify.errors import ProblemError
from gaverify.records.audit import Stage, UpdateComparison
from gaverify.records.events import Backward, Event, Forward, Step, ZeroGrad
from gaverify.records.experiment import WeightFit, is_constant
from gaverify.records.outcomes import Outcome, relative_total
from gaverify.records.ranks import Collective, Engine, RankFacts, RankShares, Reduction, Replicas, Share, Traffic
from gaverify.records.windows import Round, rounds_of, windows_of
from gaverify.thresholds import FIT_UNITS, KEPT_ELEMENTS

# The calls that all ranks have to make alike; rank 0 alone may read files, say, without changing a gradient.
_COUNTED = (Forward, Backward, Step, ZeroGrad)


@dataclass(frozen=True)
class RankedRun(RecordedRun):
    """The runs of all ranks; what is not overridden here is rank 0's.

    Args:
        ranks: All of them.
        feeding: Those whose rows make the batch; empty: all. Ranks of tensor parallelism share theirs.
    """

    ranks: tuple[RecordedRun, ...] = ()
    feeding: tuple[RecordedRun, ...] = ()

    def beside(self, full: RecordedRun) -> RankedRun:
        """Returns this run with the rows of one rank for each set of ranks that share theirs, where they are `full`'s.

        Only ranks of tensor parallelism share them on purpose. Rows that data happens to hold more than once are no
        such sharing: they are in the full batch as often.
        """
        first, sharing = rounds_of(self.events)[:1], self._sharing()
        if not first or len(sharing) == len(self.ranks) or not self.closing.models.is_tensor_parallel:
            return self
        rows = full.rows_of(full.samples(first[0]), reached=False)
        alone, every = (
            check_rows(rows, [row for run in runs for row in run.rows_of(run.samples(first[0]), reached=False)])
            for runs in (sharing, self.ranks)
        )
        return replace(self, feeding=sharing) if alone.checked and alone.same and not every.same else self

    def _sharing(self) -> tuple[RecordedRun, ...]:
        """The first rank of each set that was fed the same rows in the same order; all where sets differ in size."""
        sets: dict[Any, list[RecordedRun]] = {}
        for run in self.ranks:
            fed = [(path, *rows.hash[:, -1].tolist()) for forward in run.rows(1) for path, rows in forward.items()]
            sets.setdefault(tuple(fed), []).append(run)
        # Ranks that were fed no tensor cannot be told apart by their rows.
        if () in sets or len({len(members) for members in sets.values()}) != 1:
            return self.ranks
        return tuple(members[0] for members in sets.values())

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Rank 0's events; its forwards count the rows of all ranks, its backward passes their targets.

        Raises:
            ProblemError: The ranks made different calls.
        """
        streams = [[event for event in run.events if isinstance(event, _COUNTED)] for run in self.ranks]
        self._check_alike(streams)
        feeding = [at for at, run in enumerate(self.ranks) if run in (self.feeding or self.ranks)]
        together = {
            id(counterparts[0]): [counterparts[at] for at in feeding] for counterparts in zip(*streams, strict=True)
        }
        return tuple(_merge_event(event, together.get(id(event), [event])) for event in self.ranks[0].events)

    def _check_alike(self, streams: Sequence[Sequence[Event]]) -> None:
        for rank, stream in enumerate(streams):
            if [event.kind for event in stream] != [event.kind for event in streams[0]]:
                counts = [
                    ", ".join(f"{sum(isinstance(event, kind) for event in events)} {kind.kind}" for kind in _COUNTED)
                    for events in (streams[0], stream)
                ]
                common = min(run.updates for run in self.ranks)
                fewer = 0 < common < max(run.updates for run in self.ranks)
                advice = f", or write `--updates {common}` to compare those that all ranks make" if fewer else ""
                raise ProblemError(
                    f"the ranks of the accumulated run made different calls: {counts[0]} in rank 0, "
                    f"{counts[1]} in rank {rank}; give every rank the same number of batches{advice}"
                )

    def gradients(self, round_: Round, *, summed: bool = False) -> dict[ParameterPlace, torch.Tensor]:
        """Returns rank 0's gradients, those of sharded parameters put together from all ranks."""
        merged = self.ranks[0].gradients(round_, summed=summed)
        sharded = self.sharded_places & merged.keys()  # ranks hold whole replicas of all others
        if not sharded:
            return merged
        parts = [run.gradients(round_, summed=summed) for run in self.ranks]
        for place in sharded:
            first, shape = merged[place], self.parameters[place][1]
            # Sketches of shards are sketches of whole parameters with zeros elsewhere: they add up as they are.
            is_sketch = math.prod(shape) > KEPT_ELEMENTS
            gradient = first.new_zeros(first.shape if is_sketch else shape)
            for run, gradients, share in zip(self.ranks, parts, self._shares_of_sum(place), strict=True):
                if place in gradients and share:
                    shard = run.parameter(place).shard  # each rank's own: their pieces lie elsewhere
                    piece = gradient if is_sketch or shard is None else gradient[shard.slices]
                    piece += gradients[place] * share
            merged[place] = gradient
        return merged

    def norms(self, round_: Round, *, summed: bool = False) -> dict[ParameterPlace, float]:
        """Returns the norms of whole gradients; not of those whose addends the ranks hold."""
        norms = self.ranks[0].norms(round_, summed=summed)
        sharded = self.sharded_places & norms.keys()
        parts = [run.norms(round_, summed=summed) for run in self.ranks] if sharded else []
        for place in sharded:
            if self.parameter(place).addends is not None:
                del norms[place]
                continue
            pairs = zip(parts, self._shares_of_sum(place), strict=True)
            norms[place] = math.hypot(*(part.get(place, 0.0) * share for part, share in pairs))
        return norms

    def _shares_of_sum(self, place: ParameterPlace) -> list[float]:
        """Returns the share with which what each rank holds of a sharded gradient enters the whole one."""
        shares, counted = [], set[Any]()
        for run in self.ranks:
            parameter = run.parameter(place)
            # As many ranks as `addends` says hold the same addend, and all with one shard the same values.
            shares.append(1.0 / parameter.addends if parameter.addends else float(parameter.shard not in counted))
            counted.add(parameter.shard)
        return shares

    def samples(self, round_: Round) -> Samples:
        """Returns rank 0's samples with the increments of all ranks, those of one backward pass side by side."""
        first_rank = self.ranks[0].samples(round_)
        of_ranks = [run.samples(round_) for run in self.ranks]
        steps: dict[int, StepSample] = {}
        for at, step in first_rank.steps.items():
            if self.is_sharded(at):
                steps[at] = self._join_shards(at, step, [side.steps.get(at) for side in of_ranks])
                continue
            increments = tuple(
                # A column of the fit for each rank's pass: with one for all ranks no rank's weight could be read.
                (number * len(self.ranks) + rank, change)
                for rank, samples in enumerate(of_ranks)
                if at in samples.steps
                for number, change in samples.steps[at].increments
            )
            steps[at] = replace(step, increments=increments)
        return Samples(steps)

    def _join_shards(self, optimizer: int, first: StepSample, steps: Sequence[StepSample | None]) -> StepSample:
        """Returns a step with samples of the whole gradients, at the places where a run of one process samples.

        The gradients that each backward pass added, and the weights, are known of the shards only.
        """
        shapes = [shape for (index, _), (_, shape) in self.parameters.items() if index == optimizer]
        # Expanded zeros have the shapes of whole parameters without their memory.
        sample = Sample([torch.zeros((), device="cpu").expand(shape) for shape in shapes])
        shares = zip(*(self._shares_of_sum((optimizer, at)) for at in range(len(shapes))), strict=True)
        final, summed = torch.zeros(2, sum(sample.sizes), dtype=torch.float64, device="cpu")
        for step, share in zip(steps, shares, strict=True):
            if step is not None and step.from_whole:
                weights = torch.tensor(share, dtype=torch.float64, device="cpu").repeat_interleave(
                    torch.tensor(sample.sizes, device="cpu")
                )
                final += step.from_whole[0] * weights
                summed += step.from_whole[1] * weights
        nothing = torch.zeros(0, dtype=torch.float64, device="cpu")
        return replace(
            first,
            final=final,
            # `summed` says that the gradients at the step are not those of the last backward pass.
            summed=summed if any(step and step.summed is not None for step in steps) else None,
            from_whole=(),
            sizes=tuple(sample.sizes),
            stretches=sample.stretches(),
            increments=(),
            before=nothing,
            weights=nothing,
            buffers={},
        )

    def each(self, round_: Round) -> list[Samples]:
        """Returns the samples of every rank, of the optimizers whose parameters each of them holds whole."""
        unsharded = {at for at in range(len(self.closing.groups)) if not self.is_sharded(at)}
        steps_by_rank = [run.samples(round_).steps for run in self.ranks]
        return [Samples({at: step for at, step in steps.items() if at in unsharded}) for steps in steps_by_rank]

    def rows_of(self, samples: Samples, *, reached: bool) -> Sequence[ForwardInputs]:
        """Returns the rows that all ranks were fed, those of ranks that share them once."""
        return [row for run in self.feeding or self.ranks for row in run.rows_of(samples, reached=reached)]

    @cached_property
    def disk_bytes(self) -> int:
        """Bytes that all ranks stored."""
        return sum(run.disk_bytes for run in self.ranks)


def _merge_event(event: Event, everyone: Sequence[Event]) -> Event:
    if isinstance(event, Forward):
        rows = [counterpart.rows for counterpart in everyone if isinstance(counterpart, Forward)]
        return replace(event, rows=sum(count for count in rows if count is not None) if None not in rows else None)
    if isinstance(event, Backward) and event.targets:
        targets = [counterpart.targets for counterpart in everyone if isinstance(counterpart, Backward)]
        if len({len(counts) for counts in targets}) == 1:
            return replace(event, targets=tuple(map(_add_targets, zip(*targets, strict=True))))
    return event


def _add_targets(counts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the valid and all targets of the same loss on all ranks."""
    return sum(valid for valid, _ in counts), sum(total for _, total in counts)


# Measures the ranks of a recorded run in its updates: reductions, gradients, weights, buffers.
#
# Shapes: R ranks, K backward passes in each window, S sampled elements of an optimizer's gradients.


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
        # Tensor parallelism alone reduces activations, not gradients.
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
    used, norm = full.samples(round_), _norm(accumulated, round_)
    shares = []
    for run in accumulated.ranks:
        alone = _norm(run, round_)
        pairs = [
            (step.from_whole[0][is_held] * scale, used.of("final")[at][is_held] * scale)
            for at, step in run.samples(round_).steps.items()
            if step.from_whole and len(used.of("final").get(at, ())) == len(step.from_whole[0])
            for is_held in [_find_held_elements(run, at)]
            for scale in [used.stretches[at][is_held].sqrt()]
        ]
        of_rank, of_all = (
            (torch.cat(side) for side in zip(*pairs, strict=True)) if pairs else torch.zeros(2, 0, device="cpu")
        )
        size = float(of_all.square().sum())
        # A control scales the losses of all ranks: one rank without a known share makes the other shares useless.
        if not size or not alone:
            return ()
        factor = float(of_rank @ of_all) / size
        shares.append(Share(factor, float((of_rank - factor * of_all).norm()) / math.sqrt(size), norm / alone))
    return tuple(shares)


def _find_held_elements(run: RecordedRun, optimizer: int) -> torch.Tensor:
    """Returns which elements that a process with whole parameters samples this one holds, shape (S,)."""
    shapes = [shape for (index, _), (_, shape) in run.parameters.items() if index == optimizer]
    counts = [math.prod(shape) for shape in shapes]
    chosen = [positions(at, count, sum(counts)) for at, count in enumerate(counts)]
    return torch.cat(
        [
            places_in_shard(part, shape, run.parameter((optimizer, at)).shard)[0]
            for at, (part, shape) in enumerate(zip(chosen, shapes, strict=True))
        ]
    )


def _norm(run: RecordedRun, round_: Round) -> float:
    """The norm of all gradients as the last backward pass left them."""
    known_norms = run.norms(round_, summed=True)
    gradients = run.gradients(round_, summed=True)
    return math.hypot(
        *(known_norms.get(place, float(torch.linalg.vector_norm(each.double()))) for place, each in gradients.items())
    )


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


def _copies(accumulated: RankedRun, round_: Round, what: Moment) -> Iterator[tuple[int, ParameterPlace, float, float]]:
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
