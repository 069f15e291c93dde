"""GAV401 state-changed-by-forward."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.measurements import Measurements, StateChange, StateProbe
from gaverify.results import Evidence, Finding, Location

CODE, NAME = "GAV401", "state-changed-by-forward"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where parameters or buffers that a forward writes decide the difference."""
    state = measured.state
    blamed = [change for change in state.blamed if change.place in ("parameter", "buffer")] if state else []
    if state is None or not blamed:
        return
    names = ", ".join(f"{change.place} `{change.name}`" for change in blamed)
    yield Finding(
        CODE, NAME, "fault", f"the forward changes {names}, which the next micro-batch reads",
        location=location_of(blamed[0]), evidence=evidence_for(measured, state, blamed),
        remedy=remedy_for(state), proven=state.control is not None and state.control.rounding,
    )  # fmt: skip


def location_of(change: StateChange) -> Location | None:
    """Returns where a change was written."""
    return change.writer.location if change.writer is not None else None


def evidence_for(measured: Measurements, state: StateProbe, blamed: list[StateChange]) -> tuple[Evidence, ...]:
    """What was seen to change, and the control run."""
    writers = "; ".join(
        f"`{change.name}` is written by {change.writer}" for change in blamed if change.writer and change.writer.name
    )
    found = [Evidence("state", "measured", f"{measured.largest}" + (f"; {writers}" if writers else ""),
                      {"changed": [change.name for change in state.changes]})]  # fmt: skip
    if state.control is not None:
        text = f"with the {state.control.what} in both runs the difference is {state.control.left:.0e}: proven"
        found.append(Evidence("state", "control", text, {"left": state.control.left}))
    return tuple(found)


def remedy_for(state: StateProbe) -> str:
    """The repair that was run."""
    if state.remedies:
        return "restore the state before each micro-batch: tested, equivalent; or update it once per window"
    return "update the state once per window, after the optimizer step: tested with the state held, equivalent"
