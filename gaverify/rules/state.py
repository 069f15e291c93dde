"""What a forward or a script changes between micro-batches: GAV401 to GAV403."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.audit import Record
from gaverify.records.events import Event
from gaverify.records.experiment import ControlKind
from gaverify.records.facts import Facts, State, StateChange
from gaverify.records.findings import Evidence, Finding, Location
from gaverify.rules.rule import controlled, finding_of, measured, rule
from gaverify.rules.scale import factor_in_loop, weights_of
from gaverify.rules.wording import count, listed, located, tested, times
from gaverify.thresholds import SAME_IN_FLOAT32

_PLACES = {"closure": "variable"}  # what a place is called in a sentence, where it is not its own name
_PRIMED = (ControlKind.STATE_PRIMED, ControlKind.STATE_PRIMED_AND_HELD)
_SHOWN = 3  # changed values that are written out


@rule("GAV401")
def state_changed_by_forward(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where parameters or buffers that a forward writes decide the difference."""
    state = facts.state
    if state is None:
        return
    places = ("parameter", "buffer", "attribute", "closure") if primed(state) else ("parameter", "buffer")
    blamed = [change for change in state.blamed if change.place in places]
    if not blamed:
        return
    names = listed([f"{_PLACES.get(change.place, change.place)} `{change.name}`" for change in blamed])
    summary = f"the forward changes {names}, which the next micro-batch reads"
    if primed(state):
        summary = f"the first forward sets {names} by the batch that it is given"
        summary += ", and every later one moves it on" if _moves_on(state) else ""
    yield finding_of(
        summary,
        *evidence_for(facts, state, blamed),
        location=location_of(blamed[0]),
        remedy=remedy_for(state),
        proven=is_proven(facts, state),
    )


def location_of(change: StateChange) -> Location | None:
    """Returns where a change was written."""
    return change.writer.location if change.writer is not None else None


def _writing(change: StateChange) -> str:
    """What wrote a value, and where; empty where nothing is known."""
    writer = change.writer
    if writer is None or not (writer.name or writer.file):
        return ""
    if not writer.name:
        return f"`{change.name}` changes at {writer.file}:{writer.line}"
    return f"`{change.name}` is written by {writer}"


def evidence_for(facts: Facts, state: State, blamed: list[StateChange]) -> tuple[Evidence, ...]:
    """What was seen to change, and the control run."""
    shown = blamed[:_SHOWN]
    writers = "; ".join(text for change in shown if (text := _writing(change)))
    if len(blamed) > _SHOWN:
        writers += f"; and {len(blamed) - _SHOWN} more"
    found = [
        measured(
            "state",
            f"{facts.compared.largest}" + (f"; {writers}" if writers else ""),
            changed=[change.name for change in state.changes],
        )
    ]
    if state.control is not None:
        article = "" if primed(state) else "the "
        text = f"with {article}{state.control.what} in both runs the difference is {state.control.left:.0e}"
        if state.control.rounding:
            text += ": proven"
        if state.alone > 0:
            text += f"; alone, with the other causes neutralised, it makes {state.alone:.0e}: proven"
        if state.beside > 0:
            text += f"; restored alone, it moves the accumulated gradient by {state.beside:.0e}: proven"
        found.append(controlled("state", text, left=state.control.left))
    return tuple(found)


def is_proven(facts: Facts, state: State) -> bool:
    """Whether the difference falls to rounding with the state held, or with it and the causes named beside it."""
    return state.control is not None and (state.control.rounding or facts.cleared)


def primed(state: State) -> bool:
    """Whether what the forward changes is set once, from the first batch, so that one forward before repairs it."""
    run = state.control
    return run is not None and run.kind in _PRIMED and run.rounding


def _moves_on(state: State) -> bool:
    """Whether what the first forward sets is moved by later ones as well, so that it has to be held still, too."""
    return state.control is not None and state.control.kind is ControlKind.STATE_PRIMED_AND_HELD


def remedy_for(state: State) -> str:
    """The repair that was run."""
    first = "run one full batch through the model first, without a step"
    if primed(state) and _moves_on(state):
        return f"{first}, and update the state once per window, after the optimizer step: tested with the state held"
    if primed(state):
        return f"{first}: tested, equivalent"
    if state.alone > 0 or state.beside > 0:
        return "update the state once per window, after the optimizer step: tested together with the other repairs"
    if state.remedies:
        return f"restore the state before each micro-batch: {tested(state.remedies[0])}"
    held = "update the state once per window, after the optimizer step: tested with the state held, equivalent"
    if not state.elsewhere > SAME_IN_FLOAT32:
        return held
    return (
        f"{held} to the gradient of a full batch that reads the state of before the window, {state.elsewhere:.1e} from "
        "that of one that reads what it has just written"
    )


@rule("GAV403")
def hidden_state(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where state outside parameters and buffers decides the difference."""
    state, twice = facts.state, facts.repeatability
    hidden = ("attribute", "closure", "unnamed")
    blamed = [change for change in state.blamed if change.place in hidden] if state else []
    if state is not None and blamed and not primed(state):  # what the first forward sets once is GAV401
        names = listed([f"`{change.name}`" for change in blamed if change.place != "unnamed"]) or "state"
        summary = f"the forward changes {names}, outside of parameters and buffers, and reads it again"
        yield finding_of(
            summary,
            *evidence_for(facts, state, blamed),
            location=location_of(blamed[0]),
            remedy=remedy_for(state),
            proven=is_proven(facts, state),
        )
    elif twice is not None and twice.forward > facts.repeats:
        yield finding_of(
            "the same batch gives another loss when it is run again with all known state restored",
            measured(
                "repeatability",
                f"the loss differs by {twice.forward:.1e}",
                forward=twice.forward,
                backward=twice.backward,
            ),
            remedy="look for state that lives outside the model (files, global objects, generators of its own, clocks)",
            proven=False,
        )


@rule("GAV402")
def buffer_drift(facts: Facts) -> Iterator[Finding]:
    """Yields a note on buffers that end up different, and one on an average that is updated inside a window."""
    drift = facts.buffers.drift
    if drift:
        are, end = ("are", "end") if len(drift) > 1 else ("is", "ends")
        worst = max(drift, key=lambda name: drift[name])
        differs = f"`{worst}` differs by {drift[worst]:.1e}"
        if math.isnan(drift[worst]):
            differs = f"{count(len(drift), 'buffer')} differ{'' if len(drift) > 1 else 's'} by more than rounding"
        after = f" after update {facts.buffers.update}" if facts.buffers.update is not None else ""
        yield finding_of(
            f"{listed([f'`{name}`' for name in drift])} {are} updated {times(facts.steps)} per window and {end} up "
            f"different{after}",
            measured("state", differs, **dict(drift)),
            severity="note",
            remedy="scale the update rate (BatchNorm: momentum / K), if evaluation depends on these buffers",
            proven=True,
        )
    if facts.loop is not None:
        yield from _average(facts.loop)


def _average(loop: Record) -> Iterator[Finding]:
    inside = loop.inside("average")
    if not inside:
        return
    suspected = _blamed(loop, inside)
    number = suspected or inside[0].update
    window = loop.window_of(number)
    total = len(window.of("average")) if window is not None else len(inside)
    yield finding_of(
        f"the moving average of the weights is updated {times(total)} in the window of update {number}",
        measured(
            "events",
            f"{len(inside)} updates before the last backward pass of their windows"
            + (f"; if the loss uses what the average gives, update {suspected} differs by that" if suspected else ""),
            inside=len(inside),
        ),
        severity="fault" if suspected else "note",
        location=located([*inside, *(event for each in loop.windows for event in each.of("average"))]),
        remedy="update the average once per optimizer step",
        proven=not suspected,
    )


def _blamed(loop: Record, inside: list[Event]) -> int | None:
    """The first update that differs, if an average moved in its window and neither weights nor a factor explain it.

    In the first window an average that begins as the weights stays what it is: its updates there change nothing.
    """
    update = loop.divergent
    if update is None or update.number < 2 or all(event.update != update.number for event in inside):
        return None
    explained = weights_of(loop) is not None or factor_in_loop(loop, update) is not None
    return None if explained else update.number
