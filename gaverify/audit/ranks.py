"""Reads a recorded run of several ranks as one run: rows and increments of all ranks, and the gradients of one replica.

Gradients of sharded parameters are put together from the shards of all ranks.

Shapes: R ranks, K backward passes in each window, S sampled elements of an optimizer's gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from gaverify.audit.measurements import ForwardInputs, StepSample
from gaverify.audit.reading import Place, RecordedRun, Samples
from gaverify.audit.recording.values import Sample
from gaverify.audit.same_data import check_rows
from gaverify.errors import ProblemError
from gaverify.records.events import Backward, Event, Forward, Step, ZeroGrad
from gaverify.records.windows import Round, rounds_of

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

    def gradients(self, round_: Round, *, summed: bool = False) -> dict[Place, torch.Tensor]:
        """Returns rank 0's gradients, those of sharded parameters put together from all ranks."""
        merged = self.ranks[0].gradients(round_, summed=summed)
        sharded = self.sharded_places & merged.keys()  # ranks hold whole replicas of all others
        if not sharded:
            return merged
        parts = [run.gradients(round_, summed=summed) for run in self.ranks]
        for place in sharded:
            gradient = torch.zeros(self.parameters[place][1], dtype=merged[place].dtype, device=merged[place].device)
            for run, gradients in zip(self.ranks, parts, strict=True):
                if place in gradients:
                    part = gradients[place]
                    parameter = run.parameter(place)  # each rank's own: their pieces lie elsewhere
                    shard = gradient[parameter.shard.slices] if parameter.shard is not None else gradient
                    # As many ranks as `addends` says hold the same addend: together they count once.
                    shard.copy_(part if parameter.addends is None else shard + part / parameter.addends)
            merged[place] = gradient
        return merged

    def samples(self, round_: Round) -> Samples:
        """Returns rank 0's samples with the increments of all ranks, those of one backward pass side by side."""
        first_rank = self.ranks[0].samples(round_)
        of_ranks = [run.samples(round_) for run in self.ranks]
        steps: dict[int, StepSample] = {}
        for at, step in first_rank.steps.items():
            if self.is_sharded(at):
                changed = any(side.steps[at].summed is not None for side in of_ranks if at in side.steps)
                steps[at] = self._sample_again(step, at, round_, changed=changed)
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

    def _sample_again(self, step: StepSample, optimizer: int, round_: Round, *, changed: bool) -> StepSample:
        """Returns a step with samples of the whole gradients, at the places where a run of one process samples.

        What each backward pass added, and the weights, are known of the shards only. `changed` says that the gradients
        at the step are not those of the last backward pass.
        """
        shapes = [shape for (index, _), (_, shape) in self.parameters.items() if index == optimizer]
        # Expanded zeros have the shapes of whole parameters without their memory.
        sample = Sample([torch.zeros((), device="cpu").expand(shape) for shape in shapes])
        final, summed = (
            sample.read([gradients.get((optimizer, at)) for at in range(len(shapes))])
            for gradients in (self.gradients(round_, summed=before) for before in (False, True))
        )
        nothing = torch.zeros(0, dtype=torch.float64, device="cpu")
        return replace(
            step,
            final=final,
            summed=summed if changed else None,
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
