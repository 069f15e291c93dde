"""Where a traced operation is, for people: the modules around it, its line, and who called it."""

from __future__ import annotations

from collections.abc import Sequence

from gaverify.causes.trace.traces import ModuleCall, Trace, TracedOperation, source_line
from gaverify.records.operations import Operation
from gaverify.tracebacks import shown


def named_call(trace: Trace, step: TracedOperation) -> ModuleCall | None:
    """The innermost call of a module of the task."""
    return next((call for call in trace.around(step.call) if call.path is not None), None)


def operation_of(trace: Trace, step: TracedOperation) -> Operation:
    """Where a step is, for people."""
    chain, known = trace.around(step.call), named_call(trace, step)
    library = bool(chain) and chain[0].library
    # Inside a library's module the user's line is the call of it: worth naming in a module's forward only.
    named = step.frame is not None and (not library or any(not call.library for call in chain))
    return Operation(
        step.name,
        known.path if known else None,
        known.kind if known else "",
        library,
        shown(step.frame[0]) if named and step.frame else None,
        step.frame[1] if named and step.frame else None,
        source_line(step.frame) if named else "",
        _caller(chain, step),
    )


def _caller(chain: Sequence[ModuleCall], step: TracedOperation) -> str:
    """The loss object around a step and the nearest line of the user's own code; empty where the step is on that."""
    if step.caller is None:
        return ""
    outermost = chain[-1] if chain and chain[-1].path is None and not chain[-1].library else None
    place = f"{shown(step.caller[0])}:{step.caller[1]}"
    return f"in `{outermost.kind}`, called at {place}" if outermost is not None else f"called at {place}"
