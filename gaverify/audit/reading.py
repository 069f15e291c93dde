"""Reads what a recorded run left: events at once, tensors when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from gaverify.audit.folders import closing_record_of
from gaverify.audit.job import Role
from gaverify.audit.same_data import ForwardInputs, StepSample, StoredGradients, read_gradients, read_rows, read_step
from gaverify.records.events import ClosingRecord, Event, Forward, TrainedParameter, read_event
from gaverify.records.windows import Round

ParameterPlace = tuple[int, int]
"""An optimizer, and the position of one of its parameters."""


@dataclass(frozen=True)
class RecordedRun:
    """One recorded run on disk."""

    role: Role
    folder: Path
    seconds: float

    @cached_property
    def closing(self) -> ClosingRecord:
        """The closing record."""
        return closing_record_of(self.folder)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Everything that the script did, in order."""
        with (self.folder / "events.jsonl").open(encoding="utf-8") as stream:
            return tuple(map(read_event, stream))

    @property
    def updates(self) -> int:
        """How many updates it made."""
        return self.closing.updates

    @property
    def parameters(self) -> dict[ParameterPlace, tuple[str, tuple[int, ...]]]:
        """The key `model:name` and the shape of every parameter, by its optimizer and its position in that."""
        return {
            (optimizer, at): (parameter.key, parameter.shape)
            for optimizer, group in enumerate(self.closing.groups)
            if not group.is_part
            for at, parameter in enumerate(group.parameters)
        }

    def gradients(self, round_: Round, *, summed: bool = False) -> dict[ParameterPlace, torch.Tensor]:
        """Returns the gradients of some steps: values of small parameters, sketches of others, which add as these do.

        Args:
            round_: The steps.
            summed: As the window's last backward pass left them, where something changed them before the step.
        """
        stored = self._read_stored(round_, summed=summed)
        return {
            (optimizer, at): numbers
            for optimizer, each in stored.items()
            for at, numbers in (*each.values.items(), *each.sketches.items())
        }

    def norms(self, round_: Round, *, summed: bool = False) -> dict[ParameterPlace, float]:
        """Returns the norms of the gradients that `gradients` returns sketches of; without those that are not known."""
        stored = self._read_stored(round_, summed=summed)
        return {(optimizer, at): norm for optimizer, each in stored.items() for at, norm in each.norms.items()}

    def _read_stored(self, round_: Round, *, summed: bool) -> dict[int, StoredGradients]:
        stored: dict[int, StoredGradients] = {}
        for optimizer, step in round_:
            paths = [self.folder / f"{kind}-{optimizer}-{step}.pt" for kind in ("summed", "gradients")]
            # The sum was stored only where the optimizer used something else.
            path = paths[0] if summed and paths[0].exists() else paths[1]
            if path.exists():
                stored[optimizer] = read_gradients(path)
        return stored

    def samples(self, round_: Round) -> Samples:
        """Returns what was sampled at some steps; steps that the run did not make are left out."""
        paths = {optimizer: self.folder / f"step-{optimizer}-{step}.pt" for optimizer, step in round_}
        return Samples({at: read_step(path) for at, path in paths.items() if path.exists()})

    def beside(self, full: RecordedRun) -> RecordedRun:
        """Returns this run as it is compared with a full-batch run."""
        return self

    def each(self, round_: Round) -> list[Samples]:
        """Returns the samples of every process that stepped in this run; here of the one."""
        return [self.samples(round_)]

    def rows(self, update: int) -> Sequence[ForwardInputs]:
        """Returns the fingerprints of the rows of an update's forwards, in order."""
        path = self.folder / f"rows-{update}.pt"
        return read_rows(path) if path.exists() else []

    def rows_of(self, samples: Samples, *, reached: bool) -> Sequence[ForwardInputs]:
        """Returns the fingerprints of the rows behind some steps.

        Args:
            samples: The steps.
            reached: Read only the forwards that a backward pass reached; else all forwards of their updates.
        """
        if not reached:  # forwards whose result hides its graph count, too
            return [row for update in sorted(samples.updates) for row in self.rows(update)]
        return [self.rows(update)[position] for update, position in samples.forwards]

    def rows_behind(self, forwards: Sequence[Forward]) -> Sequence[ForwardInputs]:
        """Returns the fingerprints of the rows of some forwards."""
        counts: dict[int, int] = {}
        places: dict[int | None, tuple[int, int]] = {}
        for event in self.events:
            if isinstance(event, Forward):
                counts[event.update] = counts.get(event.update, 0) + 1
                places[event.number] = event.update, counts[event.update] - 1
        positions = [places[event.number] for event in forwards]
        # an update that the run did not end has no stored rows
        return [rows[position] for update, position in positions if position < len(rows := self.rows(update))]

    def parameter(self, place: ParameterPlace) -> TrainedParameter:
        """Returns what the closing record tells of a parameter."""
        optimizer, at = place
        return self.closing.groups[optimizer].parameters[at]

    @property
    def sharded_places(self) -> frozenset[ParameterPlace]:
        """The parameters of which this process holds pieces."""
        return frozenset(
            (optimizer, at)
            for optimizer, group in enumerate(self.closing.groups)
            for at, parameter in enumerate(group.parameters)
            if parameter.shard is not None
        )

    def is_sharded(self, optimizer: int) -> bool:
        """Whether this process holds pieces of parameters of an optimizer."""
        return any(place[0] == optimizer for place in self.sharded_places)

    @property
    def models_by_optimizer(self) -> dict[int, frozenset[int]]:
        """The models that each optimizer trains, by the numbers that the events of their forwards have."""
        groups = {at: group for at, group in enumerate(self.closing.groups) if group.models and not group.is_part}
        return {optimizer: frozenset(group.models) for optimizer, group in groups.items()}

    @cached_property
    def disk_bytes(self) -> int:
        """Bytes of everything that the run stored."""
        return sum(path.stat().st_size for path in self.folder.glob("*.pt"))


Moment = Literal["final", "summed", "before", "weights"]
"""Gradients that the optimizer used, or as the last backward pass left them; weights before and after the step."""


@dataclass(frozen=True)
class Samples:
    """The sampled elements at the steps of one round, by optimizer.

    Shapes: S sampled elements of an optimizer's gradients or weights.
    """

    steps: Mapping[int, StepSample]

    def of(self, moment: Moment) -> dict[int, torch.Tensor]:
        """Returns the gradients or weights of every optimizer at a moment, shape (S,)."""
        values = {at: getattr(step, moment) for at, step in self.steps.items()}
        # The weights of sharded parameters are known of the shards alone, and have no elements here.
        sizes = {at: len(step.stretches) for at, step in self.steps.items()}
        return {at: each for at, each in values.items() if each is not None and len(each) == sizes[at]}

    @property
    def stretches(self) -> dict[int, torch.Tensor]:
        """How many elements each sampled one stands for, by optimizer, shape (S,)."""
        return {at: step.stretches for at, step in self.steps.items()}

    def norm(self, of: Mapping[int, torch.Tensor]) -> float:
        """Returns the norm of sampled elements of some optimizers, each of which stands for a stretch of its tensor."""
        # A sampled element stands for a stretch of elements: its square counts as often as the stretch is long.
        return math.hypot(*(float((value * self.steps[at].stretches.sqrt()).norm()) for at, value in of.items()))

    @property
    def summed_gradients(self) -> dict[int, torch.Tensor]:
        """The gradients as the last backward pass left them, shape (S,)."""
        # The sum was sampled only where the optimizer used something else; the right side of `|` wins.
        return self.of("final") | self.of("summed")

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers, `model:name`, after the update."""
        return {name: value for step in self.steps.values() for name, value in step.buffers.items()}

    @property
    def increments(self) -> list[dict[int, torch.Tensor]]:
        """The gradients that each backward pass added, in order."""
        by_backward: dict[int, dict[int, torch.Tensor]] = {}
        for at, step in self.steps.items():
            for backward, change in step.increments:
                # A pass may reach the parameters of one optimizer only: the passes of all are brought together.
                by_backward.setdefault(backward, {})[at] = change
        return [by_backward[backward] for backward in sorted(by_backward)]

    @property
    def forwards(self) -> list[tuple[int, int]]:
        """The forwards that were reached: the number of their update, and their position in it."""
        return sorted({(update, position) for step in self.steps.values() for update, position in step.forwards})

    @property
    def updates(self) -> set[int]:
        """The updates in which the steps were made."""
        return {step.update for step in self.steps.values()}


def labels(full: RecordedRun, accumulated: RecordedRun) -> dict[ParameterPlace, str]:
    """Names of all parameters for people, as the full-batch run calls them.

    The model's number stands before them only where there are several. A parameter that a run met outside any module
    has the other run's name, if that has one.
    """
    keys = {}
    accumulated_parameters = accumulated.parameters
    for place, (key, _) in full.parameters.items():
        other_key = accumulated_parameters.get(place, (key, ()))[0]
        keys[place] = other_key if key.startswith("-") and not other_key.startswith("-") else key
    keys = {place: key for place, (key, _) in accumulated_parameters.items()} | keys
    models = {key.partition(":")[0] for key in keys.values() if not key.startswith("-")}
    named = {}
    for place, key in keys.items():
        model, _, name = key.partition(":")
        named[place] = name if len(models) < 2 or model == "-" else f"{model}.{name}"
    return named
