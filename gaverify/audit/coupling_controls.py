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


@dataclass(frozen=True)
class _Tried:
    """Both runs with something held, and their forwards that hold the same rows."""

    held: _Held
    full: Run
    accumulated: Run
    pairs: list[Pair | None]


class _Bench:
    """Runs the script again up to the update that differs, with what the search asks for."""

    def __init__(self, trial: Trial, record: Record, update: UpdateComparison) -> None:
        self._trial, self.record, self.update = trial, record, update

    def tried(self, held: _Held, first: Sequence[Pair | None] = ()) -> _Tried:
        """Makes both runs; the pairs of those in which nothing is held tell whose rows are given to which forward."""
        change = {"frozen": held.frozen, "held": held.code}
        spots = tuple(None if pair is None else (pair[0]["number"], tuple(pair[2])) for pair in first)
        full = self._again("full", **change)
        accumulated = self._again("accumulated", source=full, spots=spots, **change)
        return _Tried(held, full, accumulated, pairs_of(full, accumulated, self.update.number))

    def feels(self, tried: _Tried, level: tuple[str, ...]) -> bool:
        """Whether a loss gives other gradients to half of the rows where the other half has other values."""
        moved = self._again("full", frozen=tried.held.frozen, moved=level)
        return feels_the_rest(outputs_of(tried.full), outputs_of(moved), self.record.unit, level)

    def control(self, tried: _Tried, what: str, kind: ControlKind) -> ControlRun:
        """Returns what a control leaves, apart from parameters that the held code reads without a call of a module.

        It leaves rounding where it is no more than two runs of equal gradients are apart; else weights may explain it.
        """
        path, number, unit = tried.accumulated.folder / "held.pt", self.update.number, self.record.unit
        own = torch.load(path, weights_only=True) if path.exists() else {}
        left_out = {(at, position) for at, positions in own.items() for position in positions}
        if left_out:
            names = labels(tried.full, tried.accumulated)
            what += f" (but for its own {listed([f'`{names[place]}`' for place in sorted(left_out)], 1)})"
        left = left_by(tried.full, tried.accumulated, left_out, update=number)
        if left <= max(MANY_UNITS * unit, floors_allowed(unit) * self.update.noise):
            return ControlRun(what, left, True, kind=kind)
        round_ = rounds_of(tried.accumulated.events)[number - 1]
        fit = fit_of(tried.full.samples(round_), tried.accumulated.samples(round_))
        explains = fit is not None and not fit.vacuous and fit.residual <= self.record.tolerance
        return ControlRun(what, left, False, fit if explains else None, kind)

    def _again(self, role: Role, **changed: Any) -> Run:
        number = self.update.number
        changed |= {"eager": True, "outputs": True, "at": number, "updates": number, "shown_as": "coupling"}
        return self._trial.again(role, **changed)


def _causes(bench: _Bench) -> Iterator[Cause]:
    """Yields what parts first, then with that held what parts next, until nothing but rounding is left."""
    tried, unit, whole = bench.tried(_Held()), bench.record.unit, bench.update.relative_difference
    first = tried.pairs
    if not first:
        return
    for _ in range(_MOST):
        before, suspect = tried, first_module(tried.pairs, unit)
        if suspect is None:
            yield from _loss_causes(bench, tried, first)
            return
        held, what, kind = _holding(suspect, before, writers_of(before.pairs))
        tried = bench.tried(held, first)
        following = first_module(tried.pairs, unit)
        if following is not None and following.operation == suspect.operation and kind is ControlKind.FROZEN:
            # It does the same in evaluation mode: its buffers are not what couples.
            held, what, kind = _holding(suspect, before, {})
            tried = bench.tried(held, first)
        control = bench.control(tried, what, kind)
        statistics = suspect.statistics or kind is ControlKind.FROZEN
        control = replace(control, modules=_owners(held.frozen) if kind is ControlKind.FROZEN else ())
        yield Cause(replace(suspect, statistics=statistics), control, explained=_explained(control, whole))
        if control.rounding or control.fit is not None:
            return


def _explained(control: ControlRun, whole: float) -> float:
    """The share of a difference that went with what is held; what weights explain beside it may be larger than that."""
    share = 1 - control.left / whole
    return 1 - control.fit.residual / whole if control.fit is not None and share <= SMALL_PART else share


def _loss_causes(bench: _Bench, tried: _Tried, first: Sequence[Pair | None]) -> Iterator[Cause]:
    """Yields the loss, where it gives back to samples what depends on the others, or on what the loop computes of them.

    The second is only known by the control, and where no scale of a term can be behind it.
    """
    pairs, held, record = tried.pairs, tried.held, bench.record
    terms = [event.values.get("terms", 0) for window in record.windows for event in window.of("backward")]
    weights_excluded = max(terms, default=0) < 2 or bool(record.terms)
    for level in levels(outputs_of(tried.full)):
        apart = loss_apart(pairs, record.unit, level) if agree(pairs, record.unit, level) else 0.0
        feels = apart > 0 and bench.feels(tried, level)
        if not feels and not (apart and weights_excluded):
            continue
        more = replace(held, code=tuple(dict.fromkeys((*held.code, *level))))
        what, kind = "the loss computed once over all outputs", ControlKind.CACHED_GRADIENTS
        control = bench.control(bench.tried(more, first), what, kind)
        if feels or control.rounding:
            loss = _loss(bench.update.number, tried, level)
            suspect = Suspect("rows" if feels else "non-additive", loss, None, apart, 0, False, False)
            yield Cause(suspect, control, explained=_explained(control, bench.update.relative_difference))
            return


def _holding(suspect: Suspect, tried: _Tried, writers: dict[str, list[str]]) -> tuple[_Held, str, ControlKind]:
    """What holds a module as well: evaluation mode where it keeps statistics, else what it does for the full batch."""
    path, held = suspect.operation.module or "", tried.held
    if path in writers:  # in their forwards modules write the buffers with these names
        names = {f"{path}.{name}" if path else name for path, members in writers.items() for name in members}
        steps = tried.full.samples(rounds_of(tried.full.events)[0]).steps.values()
        frozen = tuple(key for step in steps for key in step.get("buffers", {}) if key.partition(":")[2] in names)
        if frozen:
            return replace(held, frozen=frozen), _named(frozen), ControlKind.FROZEN
    what = f"what `{path or '(root)'}` gives and gives back held at the full batch's"
    return replace(held, code=(*held.code, path)), what, ControlKind.FULL_BATCH


def _owners(frozen: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key.partition(":")[2].rpartition(".")[0] for key in frozen))


def _named(frozen: tuple[str, ...]) -> str:
    owners = _owners(frozen)
    if len(owners) > 3:
        return f"`{owners[0]}` and {len(owners) - 1} other modules with statistics in evaluation mode"
    return ", ".join(f"`{owner or '(root)'}`" for owner in owners) + " in evaluation mode"


def _loss(update: int, tried: _Tried, level: tuple[str, ...]) -> Operation:
    """The loss, at the line in which rows first meet; else where it is made, or differentiated."""
    lines: list[list[Any]] = []
    for run in (tried.full, tried.accumulated):
        event = next(event for event in run.events if event.kind == "backward" and event.update == update)
        calls = [call for forward in outputs_of(run) for call in forward["calls"] if call["path"] in level]
        inside = [place for call in calls for place in call["meetings"]]
        lines.append([*inside, *event.values.get("met", ()), event.place])
    file, line = first_meeting(*lines) or (None, None)
    return Operation("gradient of the loss", file=file, line=line)
