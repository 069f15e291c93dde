"""What a forward or a script changes between micro-batches: GAV401 to GAV403."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gaverify.records.audit import Record
from gaverify.records.events import Event
from gaverify.records.experiment import ControlKind
from gaverify.records.facts import Facts, State, StateChange
from gaverify.records.findings import Evidence, Finding
from gaverify.rules.controls import left_by
from gaverify.rules.rule import controlled, measured, rule
from gaverify.rules.scale import factor_in_loop, weights_of
from gaverify.rules.telling import told
from gaverify.rules.wording import count, listed, located, quoted, tested
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
    named = listed([f"{_PLACES.get(change.place, change.place)} `{change.name}`" for change in blamed])
    kind = "changed" if not primed(state) else "set-and-moved" if _moves_on(state) else "set"
    evidence = _evidence(facts, state, blamed)
    yield told(f"GAV401.{kind}", *evidence, changed=named, **_settled(facts, state, blamed))


def _settled(facts: Facts, state: State, blamed: list[StateChange]) -> dict[str, Any]:
    """Place, proof and repair; proven where the difference falls without the changes, or without all that is named."""
    return {
        "location": blamed[0].writer.location if blamed[0].writer is not None else None,
        "together": [change.writer.location for change in blamed if change.writer is not None],
        "proven": state.control is not None and (state.control.rounding or facts.cleared),
        "remedy": _remedy(state),
    }


def _writing(change: StateChange) -> str:
    """What wrote a value, and where; empty where nothing is known."""
    writer = change.writer
    if writer is None or not (writer.name or writer.file):
        return ""
    if not writer.name:
        return f"`{change.name}` changes at {writer.file}:{writer.line}"
    return f"`{change.name}` is written by {writer}"


def _evidence(facts: Facts, state: State, blamed: list[StateChange]) -> tuple[Evidence, ...]:
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
        text = left_by(state.control, article)
        if state.alone > 0:
            text += f"; alone, with the other causes neutralised, it makes {state.alone:.0e}: proven"
        if state.beside > 0:
            text += f"; restored alone, it moves the accumulated gradient by {state.beside:.0e}: proven"
        found.append(controlled("state", text, left=state.control.left))
    return tuple(found)


def primed(state: State) -> bool:
    """Whether what the forward changes is set once, from the first batch, so that one forward before repairs it."""
    run = state.control
    return run is not None and run.kind in _PRIMED and run.rounding


def _moves_on(state: State) -> bool:
    """Whether what the first forward sets is moved by later ones as well, so that it has to be held still, too."""
    return state.control is not None and state.control.kind is ControlKind.STATE_PRIMED_AND_HELD


def _remedy(state: State) -> str:
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
        named = quoted(change.name for change in blamed if change.place != "unnamed") or "state"
        evidence = _evidence(facts, state, blamed)
        yield told("GAV403.changed", *evidence, changed=named, **_settled(facts, state, blamed))
    elif twice is not None and twice.forward > facts.repeats:
        yield told("GAV403.unrepeatable", proven=False, **vars(twice))


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
        yield told(
            "GAV402.buffers",
            measured("state", differs, **dict(drift)),
            severity="note",
            proven=True,
            drift=drift,
            are=are,
            often=facts.steps,
            end=end,
            after=f" after update {facts.buffers.update}" if facts.buffers.update is not None else "",
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
    yield told(
        "GAV402.average",
        severity="fault" if suspected else "note",
        location=located([*inside, *(event for each in loop.windows for event in each.of("average"))]),
        proven=not suspected,
        all=len(window.of("average")) if window is not None else len(inside),
        number=number,
        inside=len(inside),
        by=f"; if the loss uses what the average gives, update {suspected} differs by that" if suspected else "",
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
