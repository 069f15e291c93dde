"""Controls for a difference that no weights explain: who gives samples values that depend on their neighbours?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gaverify.audit.coupling import (
    Pair,
    agree,
    feels_the_rest,
    first_meeting,
    first_module,
    levels,
    loss_apart,
    outputs_of,
    pairs_of,
    spots_of,
    writers_of,
)
from gaverify.audit.fitting import fit_of
from gaverify.audit.job import Role
from gaverify.audit.outcome import is_explained
from gaverify.audit.rank_facts import left_by
from gaverify.audit.reading import Run, labels
from gaverify.audit.running import Trial
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.experiment import Cause, ControlKind, ControlRun
from gaverify.records.operations import Operation, Suspect
from gaverify.records.weights import WeightFit
from gaverify.records.windows import rounds_of
from gaverify.rules.wording import listed
from gaverify.thresholds import MANY_UNITS, SMALL_PART
from gaverify.verdict.criteria import floors_allowed

_MOST = 3  # causes that are looked for behind one another


def coupled(trial: Trial, record: Record) -> Record:
    """Returns the record with the modules, or the loss, in which samples act on each other.

    Looked for in the first update that differs, where nothing else explains it: both runs again, with what every module
    gives for each row. Where a module that parts keeps statistics, once more with those modules in evaluation mode.
    """
    update = record.divergent
    if update is None or record.ranks > 1 or record.unaligned or is_explained(record):
        return record
    return replace(record, coupling=tuple(_causes(_Bench(trial, record, update))))


@dataclass(frozen=True)
class _Held:
    """What a pair of runs holds: buffers whose modules run in evaluation mode, and code that is held."""

    frozen: tuple[str, ...] = ()
    code: tuple[str, ...] = ()


class _Bench:
    """Runs the script again up to the update that differs, with what the search asks for."""

    def __init__(self, trial: Trial, record: Record, update: UpdateComparison) -> None:
        self._trial, self.record, self.update = trial, record, update

    def both(self, held: _Held, pairs: Sequence[Pair | None] = ()) -> tuple[Run, Run]:
        """Returns the full-batch run and the accumulated one; `pairs` tell whose rows are given to which forward."""
        change = {"frozen": held.frozen, "held": held.code}
        full = self._again("full", **change)
        return full, self._again("accumulated", source=full, spots=spots_of(pairs), **change)

    def feels(self, full: Run, held: _Held, level: tuple[str, ...]) -> bool:
        """Whether a loss gives other gradients to half of the rows where the other half has other values."""
        moved = self._again("full", frozen=held.frozen, moved=level)
        return feels_the_rest(outputs_of(full), outputs_of(moved), self.record.unit, level)

    def control(self, full: Run, accumulated: Run, what: str, kind: ControlKind) -> ControlRun:
        """Returns what a control leaves, apart from parameters that the held code reads without a call of a module."""
        path = accumulated.folder / "held.pt"
        own = torch.load(path, weights_only=True) if path.exists() else {}
        left_out = {(at, position) for at, positions in own.items() for position in positions}
        if left_out:
            names = labels(full, accumulated)
            what += f" (but for its own {listed([f'`{names[place]}`' for place in sorted(left_out)], 1)})"
        left = left_by(full, accumulated, left_out, update=self.update.number)
        rounding = self._is_rounding(left)
        return ControlRun(what, left, rounding, None if rounding else self._weights(full, accumulated), kind)

    def _weights(self, full: Run, accumulated: Run) -> WeightFit | None:
        """Returns the weights that explain all that a control left; None where none do."""
        round_ = rounds_of(accumulated.events)[self.update.number - 1]
        fit = fit_of(full.samples(round_), accumulated.samples(round_))
        return fit if fit is not None and not fit.vacuous and fit.residual <= self.record.tolerance else None

    def pairs(self, full: Run, accumulated: Run) -> list[Pair | None]:
        """Returns the forwards of both runs that hold the same rows."""
        return pairs_of(full, accumulated, self.update.number)

    @property
    def weights_excluded(self) -> bool:
        """Whether no scale of any term of the loss explains the difference."""
        counts = {event.values.get("terms", 0) for window in self.record.windows for event in window.of("backward")}
        return max(counts, default=0) < 2 or bool(self.record.terms)

    def _again(self, role: Role, **changed: Any) -> Run:
        number = self.update.number
        changed |= {"eager": True, "outputs": True, "at": number, "updates": number, "part": "coupling"}
        return self._trial.again(role, **changed)

    def _is_rounding(self, left: float) -> bool:
        """Whether a control left no more than two runs of equal gradients are apart."""
        unit = self.record.unit
        return left <= max(MANY_UNITS * unit, floors_allowed(unit) * self.update.noise)


def _causes(bench: _Bench) -> Iterator[Cause]:
    """Yields what parts first, then with that held what parts next, until nothing but rounding is left."""
    held, whole = _Held(), bench.update.relative_difference
    full, accumulated = bench.both(held)
    first = pairs = bench.pairs(full, accumulated)
    if not pairs:
        return
    for _ in range(_MOST):
        suspect = first_module(pairs, bench.record.unit)
        if suspect is None:
            yield from _loss_causes(bench, (full, accumulated), held, first)
            return
        held, what, kind = _holding(suspect, held, full, writers_of(pairs))
        full, accumulated = bench.both(held, first)
        control = bench.control(full, accumulated, what, kind)
        pairs = bench.pairs(full, accumulated)
        following = first_module(pairs, bench.record.unit)
        if following is not None and following.operation == suspect.operation and kind is ControlKind.FROZEN:
            # It does the same in evaluation mode: its buffers are not what couples.
            held, what, kind = _holding(suspect, replace(held, frozen=()), full, {})
            full, accumulated = bench.both(held, first)
            control, pairs = bench.control(full, accumulated, what, kind), bench.pairs(full, accumulated)
        statistics = suspect.statistics or kind is ControlKind.FROZEN
        control = replace(control, modules=_owners(held.frozen) if kind is ControlKind.FROZEN else ())
        yield Cause(replace(suspect, statistics=statistics), control, explained=_explained(control, whole))
        if control.rounding or control.fit is not None:
            return


def _explained(control: ControlRun, whole: float) -> float:
    """The share of a difference that went with what is held; what weights explain beside it may be larger than that."""
    share = 1 - control.left / whole
    return 1 - control.fit.residual / whole if control.fit is not None and share <= SMALL_PART else share


def _loss_causes(bench: _Bench, runs: tuple[Run, Run], held: _Held, first: Sequence[Pair | None]) -> Iterator[Cause]:
    """Yields the loss, where it gives back to samples what depends on the others, or on what the loop computes of them.

    The second is only known by the control, and where no scale of a term can be behind it.
    """
    pairs, unit = bench.pairs(*runs), bench.record.unit
    for level in levels(outputs_of(runs[0])):
        apart = loss_apart(pairs, unit, level) if agree(pairs, unit, level) else 0.0
        feels = apart > 0 and bench.feels(runs[0], held, level)
        if not feels and not (apart and bench.weights_excluded):
            continue
        more = replace(held, code=tuple(dict.fromkeys((*held.code, *level))))
        what, kind = "the loss computed once over all outputs", ControlKind.CACHED_GRADIENTS
        control = bench.control(*bench.both(more, first), what, kind)
        if feels or control.rounding:
            suspect = Suspect("rows", _loss(bench.update.number, *runs, level), None, apart, 0, False, False)
            suspect = suspect if feels else replace(suspect, kind="non-additive")
            yield Cause(suspect, control, explained=_explained(control, bench.update.relative_difference))
            return


def _holding(suspect: Suspect, held: _Held, full: Run, writers: dict[str, list[str]]) -> tuple[_Held, str, ControlKind]:
    """What holds a module as well: evaluation mode where it keeps statistics, else what it does for the full batch."""
    path = suspect.operation.module or ""
    frozen = _statistics(full, writers) if path in writers else ()
    if frozen:
        return replace(held, frozen=frozen), _named(frozen), ControlKind.FROZEN
    what = f"what `{path or '(root)'}` gives and gives back held at the full batch's"
    return replace(held, code=(*held.code, path)), what, ControlKind.FULL_BATCH


def _statistics(run: Run, writers: dict[str, list[str]]) -> tuple[str, ...]:
    """The buffers, `model:name`, that modules write in their forwards."""
    names = {f"{path}.{name}" if path else name for path, members in writers.items() for name in members}
    stored = run.samples(rounds_of(run.events)[0]).steps.values()
    return tuple(key for step in stored for key in step.get("buffers", {}) if key.partition(":")[2] in names)


def _owners(frozen: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key.partition(":")[2].rpartition(".")[0] for key in frozen))


def _named(frozen: tuple[str, ...]) -> str:
    owners = _owners(frozen)
    if len(owners) > 3:
        return f"`{owners[0]}` and {len(owners) - 1} other modules with statistics in evaluation mode"
    return ", ".join(f"`{owner or '(root)'}`" for owner in owners) + " in evaluation mode"


def _loss(update: int, full: Run, accumulated: Run, level: tuple[str, ...]) -> Operation:
    """The loss, at the line in which rows first meet; else where it is made, or differentiated."""
    lines: list[list[Any]] = []
    for run in (full, accumulated):
        event = next(event for event in run.events if event.kind == "backward" and event.update == update)
        calls = [call for forward in outputs_of(run) for call in forward["calls"] if call["path"] in level]
        inside = [place for call in calls for place in call["meetings"]]
        lines.append([*inside, *event.values.get("met", ()), event.place])
    file, line = first_meeting(*lines) or (None, None)
    return Operation("gradient of the loss", file=file, line=line)
