"""The records of a traced forward: operations, module calls, where they are for people, and how two traces correspond.

Traces of two batches part at a branch, or at a loop that runs more often for one of them.

Shapes: B samples; a result with B·m rows along one dimension is kept as B fingerprints.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from gaverify.causes.trace.fingerprints import Layout
from gaverify.passes.walks import reached
from gaverify.records.operations import FunctionKey, Operation
from gaverify.tracebacks import shown

_NEAR = 6  # operations before the traces part among which a decision is looked for
Shape = tuple[int, ...]
Frame = tuple[str, int] | None
Signature = tuple[str, Frame, str | None]  # name, line of the user's code, path of the innermost module
DECISIONS = ("_local_scalar_dense", "equal", "is_nonzero")
"""Operations that hand a number to Python code."""
INPUT = "input"
"""The name of a step that stands for a tensor which no operation wrote."""


@dataclass
class Result:
    """One tensor that an operation returned: how the samples lie in it, its fingerprint, and its moments."""

    shape: Shape
    floating: bool
    layout: Layout | None = None
    prints: torch.Tensor | None = None
    moments: torch.Tensor | None = None


@dataclass
class TracedOperation:
    """One operation of the trace. `inputs` are the steps that wrote its tensor inputs.

    `caller` is the nearest line of the user's own code, where `frame` is a library's.
    """

    name: str
    call: int | None
    function: FunctionKey | None
    frame: Frame
    inputs: tuple[int, ...]
    differentiable: bool
    random: bool
    tensor_inputs: int
    signature: Signature
    occurrence: int = 0
    caller: Frame = None
    results: list[Result] = field(default_factory=list)


@dataclass
class ModuleCall:
    """One call of a module: the calls around it, innermost last, and the steps that wrote its tensor outputs.

    None stands for an output that no operation wrote: a parameter.
    """

    path: str | None
    kind: str
    library: bool
    parents: tuple[int, ...]
    outputs: tuple[int | None, ...] = ()


@dataclass
class Trace:
    """The operations of one forward, in order, and where those of one signature stand.

    Traces of other batches may hold more or fewer operations (a loop over the samples, a branch), so the same operation
    is found by its signature and how often that has occurred, never by its position.
    """

    steps: list[TracedOperation] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    places: dict[Signature, list[int]] = field(default_factory=dict)
    loss: int | None = None  # the step that wrote the loss

    def live(self) -> set[int]:
        """The steps that the loss depends on, through tensors or through numbers that Python code read out of them."""
        ends = [index for index, step in enumerate(self.steps) if step.name in DECISIONS]
        ends += [self.loss] if self.loss is not None else [len(self.steps) - 1]
        return set(reached(ends, lambda index: self.steps[index].inputs))

    def around(self, call: int | None) -> list[ModuleCall]:
        """The module calls around an operation in one of them, innermost first."""
        return [] if call is None else [self.calls[at] for at in (call, *reversed(self.calls[call].parents))]

    def add(self, step: TracedOperation) -> int:
        """Appends a step and returns its index."""
        places = self.places.setdefault(step.signature, [])
        step.occurrence = len(places)
        places.append(len(self.steps))
        self.steps.append(step)
        return len(self.steps) - 1

    def counterpart(self, step: TracedOperation) -> int | None:
        """The index of the step that corresponds to one of another trace; None where there is none."""
        places = self.places.get(step.signature, [])
        return places[step.occurrence] if step.occurrence < len(places) else None


def same_result(trace: Trace, step: TracedOperation, position: int) -> Result | None:
    """The result of the same operation in another trace; None where that has none."""
    index = trace.counterpart(step)
    results = trace.steps[index].results if index is not None else []
    return results[position] if position < len(results) else None


def source_line(frame: Frame) -> str:
    """Returns the text of a source line, stripped; empty where there is none."""
    return linecache.getline(*frame).strip() if frame is not None else ""


def named_call(trace: Trace, step: TracedOperation) -> ModuleCall | None:
    """The innermost call of a module of the task."""
    return next((call for call in trace.around(step.call) if call.path is not None), None)


def operation_of(trace: Trace, step: TracedOperation) -> Operation:
    """Where a step is, for people."""
    chain, known = trace.around(step.call), named_call(trace, step)
    library = bool(chain) and chain[0].library
    # Inside a library's module the user's line is the call of it: worth naming in a module's forward only.
    named = step.frame is not None and (not library or any(not call.library for call in chain))
    path, kind = (known.path, known.kind) if known else (None, "")
    found = located(step.name, step.frame if named else None, path, kind)
    return replace(found, library=library, caller=_caller(chain, step))


def located(name: str, frame: Frame, module: str | None = None, kind: str = "") -> Operation:
    """An operation on a line of the user's code, in a module of a class."""
    file, line = (shown(frame[0]), frame[1]) if frame is not None else (None, None)
    return Operation(name, module, kind, file=file, line=line, source=source_line(frame))


def _caller(chain: Sequence[ModuleCall], step: TracedOperation) -> str:
    """The loss object around a step and the nearest line of the user's own code; empty where the step is on that."""
    if step.caller is None:
        return ""
    outermost = chain[-1] if chain and chain[-1].path is None and not chain[-1].library else None
    place = f"{shown(step.caller[0])}:{step.caller[1]}"
    return f"in `{outermost.kind}`, called at {place}" if outermost is not None else f"called at {place}"


def decisions_before(trace: Trace, start: int) -> list[int]:
    """The numbers that Python code read out of tensors shortly before a step."""
    near = range(max(start - _NEAR, 0), min(start + 1, len(trace.steps)))
    return [i for i in near if trace.steps[i].name in DECISIONS]


def parted(full: Trace, part: Trace) -> int | None:
    """Where two traces stop to hold the same operations one after the other; None where they do not."""
    pairs = enumerate(zip(full.steps, part.steps, strict=False))
    first = next((i for i, (step, other) in pairs if step.signature != other.signature), None)
    if first is None and len(full.steps) != len(part.steps):
        return min(len(full.steps), len(part.steps)) - 1
    return first


def goes_another_way(one: Trace, other: Trace) -> bool:
    """Whether Python code read numbers, and the losses then depend on operations that only one of two traces ran.

    A loop that runs more often over more samples runs the same lines.
    """
    read = any(step.name in DECISIONS for step in (*one.steps, *other.steps))
    ran = [{trace.steps[index].signature for index in trace.live()} for trace in (one, other)]
    return read and ran[0] != ran[1]


def strays_behind(trace: Trace, index: int | None, stray: Callable[[int], bool]) -> set[int]:
    """The strays from which a step computes, back to the first steps that all traces have."""
    if index is None:
        return set()
    steps = reached([index], lambda step: trace.steps[step].inputs if step == index or stray(step) else ())
    return set(filter(stray, steps))
