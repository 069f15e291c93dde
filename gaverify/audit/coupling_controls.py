"""Controls for a difference that no weights explain: who gives samples values that depend on their neighbours?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gaverify.audit.coupling import agree, feels_the_rest, first_module, loss_apart, outputs_of, pairs_of, writers_of
from gaverify.audit.ranks import left_by
from gaverify.audit.reading import Run
from gaverify.audit.running import Runner
from gaverify.errors import ProblemError
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.events import Event
from gaverify.records.experiment import Cause, ControlKind, ControlRun
from gaverify.records.facts import facts_of_loop
from gaverify.records.operations import Operation, Suspect
from gaverify.records.rounds import rounds_of
from gaverify.rules import findings_for
from gaverify.verdict.criteria import floors_allowed

_NOT_HELD = (
    "a script's loss cannot be held from outside; every output agrees for each sample, and given other outputs for "
    "half of the samples the loss gives the other half other gradients"
)
_AGREE = 64.0  # gradients that agree are some roundings apart


def coupled(runner: Runner, record: Record, options: dict[str, Any]) -> Record:
    """Returns the record with the modules, or the loss, in which samples act on each other.

    Looked for where the first update differs and nothing else explains it: both runs again, with what every module
    gives for each row. Where a module that parts keeps statistics, once more with those modules in evaluation mode.

    Args:
        runner: Makes the runs.
        record: What is known so far.
        options: Fields of `Job` that the compared runs had.
    """
    update = record.divergent
    if update is None or update.number != 1 or record.ranks > 1 or record.unaligned or options.get("by_hand"):
        return record
    if any(finding.severity == "fault" for finding in findings_for(facts_of_loop(record))):
        return record
    try:
        return replace(record, coupling=tuple(_causes(_Bench(runner, options, record, update))))
    except ProblemError:
        return record


class _Bench:
    """Runs the script again, with what the search asks for."""

    def __init__(self, runner: Runner, options: dict[str, Any], record: Record, update: UpdateComparison) -> None:
        self._runner, self.record, self.update = runner, record, update
        self._options = {**options, "eager": True, "outputs": True}
        self._own = {name: value for name, value in self._options.items() if name not in ("source", "parts")}

    def both(self, frozen: tuple[str, ...] = ()) -> tuple[Run, Run]:
        """Returns the full-batch run and the accumulated one, with the owners of some buffers in evaluation mode."""
        full = self._runner.full(**self._own, frozen=frozen)
        (accumulated,) = self._runner.runs(
            self._runner.jobs("accumulated", **{**self._options, "source": full, "frozen": frozen})
        )
        return full, accumulated

    def moved(self, frozen: tuple[str, ...]) -> Run:
        """Returns the full-batch run in which the loss is given other values of the second half of the rows."""
        return self._runner.full(**self._own, frozen=frozen, rest_moved=True)

    def is_rounding(self, left: float) -> bool:
        """Whether a control left no more than two runs of equal gradients are apart."""
        unit = self.record.unit
        return left <= max(_AGREE * unit, floors_allowed(unit) * self.update.noise)


def _causes(bench: _Bench) -> Iterator[Cause]:
    """Yields the first module that parts, and what parts with that one held; else, or behind it, the loss."""
    full, accumulated = bench.both()
    pairs = pairs_of(full, accumulated)
    frozen: tuple[str, ...] = ()
    suspect = first_module(pairs, bench.record.unit)
    if suspect is not None:
        writers = writers_of(pairs)
        frozen = _statistics(full, writers) if suspect.operation.module in writers else ()
        if not frozen:
            yield Cause(suspect, None)
            return
        full, accumulated = bench.both(frozen)
        pairs, left = pairs_of(full, accumulated), left_by(full, accumulated)
        following = first_module(pairs, bench.record.unit)
        if following is not None and following.operation == suspect.operation:
            yield Cause(suspect, None)  # it does the same in evaluation mode: its buffers are not what couples
            return
        control = ControlRun(_named(frozen), left, bench.is_rounding(left), kind=ControlKind.FROZEN)
        yield Cause(replace(suspect, statistics=True), control)
        if following is not None:
            yield Cause(following, None)
        if control.rounding or following is not None:
            return
    apart = loss_apart(pairs, bench.record.unit) if agree(pairs, bench.record.unit) else 0.0
    if apart and feels_the_rest(outputs_of(full), outputs_of(bench.moved(frozen)), bench.record.unit):
        yield Cause(_loss(accumulated, apart), None, failure=_NOT_HELD)


def _statistics(run: Run, writers: dict[str, list[str]]) -> tuple[str, ...]:
    """The buffers, `model:name`, that modules write in their forwards."""
    names = {f"{path}.{name}" if path else name for path, members in writers.items() for name in members}
    stored = run.samples(rounds_of(run.events)[0]).steps.values()
    return tuple(key for step in stored for key in step.get("buffers", {}) if key.partition(":")[2] in names)


def _named(frozen: tuple[str, ...]) -> str:
    owners = list(dict.fromkeys(key.partition(":")[2].rpartition(".")[0] for key in frozen))
    if len(owners) > 3:
        return f"`{owners[0]}` and {len(owners) - 1} other modules with statistics in evaluation mode"
    return ", ".join(f"`{owner or '(root)'}`" for owner in owners) + " in evaluation mode"


def _loss(run: Run, apart: float) -> Suspect:
    """The loss, at the line of its first backward pass."""
    event: Event = next(event for event in run.events if event.kind == "backward")
    operation = Operation("gradient of the loss", file=event.file, line=event.line)
    return Suspect("rows", operation, None, apart, 0, False, False)
