"""A recorded run of several ranks, read as one: rows and increments of all, gradients of a replica or put together.

Shapes: R ranks, K backward passes in each window, S sampled elements of an optimizer's gradients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from gaverify.audit.fitting import fit_gradients
from gaverify.audit.reading import Place, Run, Samples
from gaverify.audit.recording.sampling import positions
from gaverify.errors import ProblemError
from gaverify.records.comparison import Outcome
from gaverify.records.events import Event
from gaverify.records.ranks import Collective, Engine, RankFacts, Share, Traffic
from gaverify.records.rounds import Round, rounds_of
from gaverify.records.totals import relative_total
from gaverify.verdict.comparison import measure

_BUFFER_NOISE = 1e-4  # buffers that differ by less differ by rounding
_SMALLEST = 1  # bytes of an element in the coarsest type that gradients are reduced in
_COUNTED = ("forward", "backward", "step", "zero_grad")


@dataclass(frozen=True)
class RankedRun(Run):
    """The runs of all ranks; what is not overridden here is rank 0's."""

    ranks: tuple[Run, ...] = ()

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Rank 0's events; its forwards count the rows of all ranks, its backward passes their targets.

        Raises:
            ProblemError: The ranks made different calls.
        """
        streams = [[event for event in run.events if event.kind in _COUNTED] for run in self.ranks]
        self._check_alike(streams)
        together = {id(everyone[0]): everyone for everyone in zip(*streams, strict=True)}
        return tuple(_merged(event, together.get(id(event), (event,))) for event in self.ranks[0].events)

    def _check_alike(self, streams: Sequence[Sequence[Event]]) -> None:
        for rank, stream in enumerate(streams):
            if [event.kind for event in stream] != [event.kind for event in streams[0]]:
                counts = [
                    ", ".join(f"{sum(event.kind == kind for event in events)} {kind}" for kind in _COUNTED)
                    for events in (streams[0], stream)
                ]
                raise ProblemError(
                    f"the ranks of the accumulated run made different calls: {counts[0]} in rank 0 and {counts[1]} in "
                    f"rank {rank}; each rank must have as many batches as the others"
                )

    def gradients(self, round_: Round, *, summed: bool = False) -> dict[Place, torch.Tensor]:
        """Returns rank 0's gradients, those of sharded parameters put together from all ranks."""
        found = self.ranks[0].gradients(round_, summed=summed)
        sharded = {(at, int(place)) for at, shards in enumerate(self.meta["shards"]) for place in shards}
        if not sharded & set(found):
            return found
        parts = [run.gradients(round_, summed=summed) for run in self.ranks]
        for place in sharded & set(found):
            whole = torch.zeros(self.parameters[place][1], dtype=found[place].dtype, device=found[place].device)
            for run, gradients in zip(self.ranks, parts, strict=True):
                if place in gradients:
                    part = gradients[place]
                    offset = run.meta["shards"][place[0]][str(place[1])]
                    whole[tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))] = part
            found[place] = whole
        return found

    def samples(self, round_: Round) -> Samples:
        """Returns rank 0's samples with the increments of all ranks, those of one backward pass side by side."""
        whole = self.ranks[0].samples(round_)
        others = [run.samples(round_) for run in self.ranks]
        steps: dict[int, Any] = {}
        for at, step in whole.steps.items():
            if self.meta["shards"][at]:
                steps[at] = {**step, **self._sampled_again(at, round_)}
                continue
            increments = [
                (number * len(self.ranks) + rank, change)
                for rank, samples in enumerate(others)
                if at in samples.steps
                for number, change in samples.steps[at]["increments"]
            ]
            steps[at] = {**step, "increments": increments}
        return Samples(steps)

    def _sampled_again(self, optimizer: int, round_: Round) -> dict[str, Any]:
        """Samples of the gradients that were put together, at the places where a run of one process samples.

        What each backward pass added, and the weights, are known of the shards only.
        """
        members = {at: shape for (index, at), (_, shape) in self.parameters.items() if index == optimizer}
        counts = [math.prod(members[at]) for at in sorted(members)]
        places = [positions(at, count, sum(counts)) for at, count in enumerate(counts)]
        final, summed = (self.gradients(round_, summed=before) for before in (False, True))
        nothing = torch.zeros(0, dtype=torch.float64, device="cpu")
        return {
            "final": _at(final, optimizer, places),
            "summed": _at(summed, optimizer, places),
            "sizes": [len(place) for place in places],
            "stretches": torch.cat(
                [
                    torch.full((len(place),), count / max(len(place), 1), dtype=torch.float64, device="cpu")
                    for place, count in zip(places, counts, strict=True)
                ]
            ),
            "increments": [],
            "before": nothing,
            "weights": nothing,
            "buffers": {},
        }

    def rows_of(self, samples: Samples, *, reached: bool) -> list[dict[str, Any]]:
        """Returns the rows that all ranks were fed."""
        return [row for run in self.ranks for row in run.rows_of(samples, reached=reached)]

    @cached_property
    def disk_bytes(self) -> int:
        """Bytes that all ranks stored."""
        return sum(run.disk_bytes for run in self.ranks)


def _at(gradients: dict[Place, torch.Tensor], optimizer: int, places: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of an optimizer's gradients at these places, shape (S,)."""
    parts = []
    for at, place in enumerate(places):
        gradient = gradients.get((optimizer, at))
        zero = torch.zeros(len(place), dtype=torch.float64, device="cpu")
        parts.append(zero if gradient is None else gradient.reshape(-1)[place].to(torch.float64))
    return torch.cat(parts)


def _merged(event: Event, everyone: Sequence[Event]) -> Event:
    values = dict(event.values)
    if event.kind == "forward":
        rows = [other.values.get("rows") for other in everyone]
        values["rows"] = None if None in rows else sum(rows)  # type: ignore[arg-type]
    if event.kind == "backward" and values.get("targets"):
        lists = [other.values.get("targets", []) for other in everyone]
        if len({len(targets) for targets in lists}) == 1:
            values["targets"] = [
                (sum(count for count, _ in same), sum(total for _, total in same)) for same in zip(*lists, strict=True)
            ]
    return replace(event, values=values)


def rank_facts(full: Run, accumulated: RankedRun, outcome: Outcome, difference: float, unit: float) -> RankFacts:
    """Returns what the ranks did in the first update.

    Args:
        full: The run at world size 1.
        accumulated: The ranks.
        outcome: What the comparison of that update came to.
        difference: ‖accumulated − full‖ / ‖full‖ of that update.
        unit: Unit roundoff of the coarsest arithmetic.
    """
    first = rounds_of(accumulated.events)[0]
    whole = full.samples(first)
    ranks = [run.samples(first) for run in accumulated.ranks]
    sharded = any(accumulated.meta["shards"])
    own = [{at: _total(samples, at) for at in samples.steps} for samples in ranks]
    fit = None if sharded else fit_gradients(whole.summed, whole.of("stretches"), ranks[0].summed, own)
    window = [event for event in accumulated.ranks[0].events if event.update == 1 and event.kind == "backward"]
    return RankFacts(
        ranks=len(ranks),
        engine=Engine.FSDP2 if sharded else None,
        apart=math.nan if sharded else _apart([samples.summed for samples in ranks]),
        window=_traffic(window),
        own=Traffic(),
        weights=fit,
        difference=difference,
        unit=unit,
        divergent=outcome is Outcome.DIVERGENT,
        from_one_process=difference,
        buffers_apart=_buffers_apart(ranks),
        mean_left=math.nan if sharded else _mean_left(whole, own),
        reduced=tuple(event.values.get("reduced", 0) for event in window),
        stepped_without=sharded and not any(run.gradients(first) for run in accumulated.ranks),
        shards=_shares(full, accumulated, first) if sharded else (),
        update_bytes=_SMALLEST * sum(math.prod(shape) for _, shape in accumulated.parameters.values()),
    )


def _traffic(backwards: Sequence[Event]) -> Traffic:
    """The collectives of some backward passes together."""
    counts: Counter[Collective] = Counter()
    for event in backwards:
        counts.update({Collective(kind): count for kind, count in event.values.get("collectives", {}).items()})
    return Traffic(dict(counts), sum(event.values.get("sent", 0) for event in backwards))


def _mean_left(whole: Samples, own: Sequence[Mapping[int, torch.Tensor]]) -> float:
    """How far the mean of the ranks' own gradients is from the full batch's, relative."""
    stretches = whole.of("stretches")
    target = {at: gradient for at, gradient in whole.summed.items() if all(at in part for part in own)}
    if not target:
        return math.nan
    apart = size = 0.0
    for at, gradient in target.items():
        mean = sum((part[at] for part in own[1:]), own[0][at]) / len(own)
        apart += float((stretches[at] * (mean - gradient).square()).sum())
        size += float((stretches[at] * gradient.square()).sum())
    return math.sqrt(apart / size) if size else math.nan


def _shares(full: Run, accumulated: RankedRun, round_: Round) -> tuple[Share, ...]:
    """What each rank made of its shard, where the sums of both runs are known."""
    used, sums = full.gradients(round_), accumulated.gradients(round_, summed=True)
    norm = math.hypot(*(float(torch.linalg.vector_norm(gradient.double())) for gradient in sums.values()))
    found = []
    for run in accumulated.ranks:
        parts, own = run.gradients(round_), run.gradients(round_, summed=True)
        pairs = [(parts[place], _cut(run, place, used[place])) for place in parts if place in used]
        inner = sum(float((a.double() * b.double()).sum()) for a, b in pairs)
        size = sum(float(b.double().square().sum()) for _, b in pairs)
        alone = math.hypot(*(float(torch.linalg.vector_norm(gradient.double())) for gradient in own.values()))
        if not size or not alone:
            return ()
        factor = inner / size
        left = sum(float((a.double() - factor * b.double()).square().sum()) for a, b in pairs)
        found.append(Share(factor, math.sqrt(left / size), norm / alone))
    return tuple(found)


def _cut(run: Run, place: Place, whole: torch.Tensor) -> torch.Tensor:
    """The shard of a whole gradient that a rank holds."""
    offset = run.meta["shards"][place[0]].get(str(place[1]))
    if offset is None:
        return whole
    sizes = run.meta["local"][place[0]][str(place[1])]
    return whole[tuple(slice(at, at + size) for at, size in zip(offset, sizes, strict=True))]


def _buffers_apart(ranks: Sequence[Samples]) -> tuple[str, ...]:
    """Buffers, `model:name`, that differ between the ranks after the update."""
    sides = [
        {name: value for step in samples.steps.values() for name, value in step.get("buffers", {}).items()}
        for samples in ranks
    ]
    return tuple(
        name
        for name, value in sides[0].items()
        if any(name in other and not _alike(other[name], value) for other in sides[1:])
    )


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    scale = float(torch.linalg.vector_norm(b)) or 1.0
    return a.shape == b.shape and float(torch.linalg.vector_norm(a - b)) <= _BUFFER_NOISE * scale


def left_by(full: Run, accumulated: Run, left_out: Collection[Place] = ()) -> float:
    """Returns ‖accumulated − full‖ / ‖full‖ of the first update's summed gradients; NaN where there are none.

    Args:
        full: The full-batch run.
        accumulated: The accumulated run.
        left_out: Parameters that are not compared.
    """
    round_ = rounds_of(accumulated.events)[0]
    sides = [run.gradients(round_, summed=True) for run in (full, accumulated)]
    keys = [{str(place): gradient for place, gradient in side.items() if place not in left_out} for side in sides]
    rows = measure({name: keys[1].get(name) for name in keys[0]}, keys[0])
    return relative_total((row.difference, row.reference) for row in rows) if rows else math.nan


def _total(samples: Samples, at: int) -> torch.Tensor:
    """The sum of a rank's own gradients over its window, shape (S,)."""
    step = samples.steps[at]
    return sum((change for _, change in step["increments"]), torch.zeros_like(step["final"]))


def _apart(gradients: Sequence[dict[int, torch.Tensor]]) -> float:
    """How far the ranks' gradients are apart, relative to rank 0's."""
    first = torch.cat(list(gradients[0].values()))
    norm = float(torch.linalg.vector_norm(first))
    apart = [float(torch.linalg.vector_norm(torch.cat(list(other.values())) - first)) for other in gradients[1:]]
    return max(apart, default=0.0) / norm if norm else math.inf if any(apart) else 0.0
