"""The records of a traced forward: operations, module calls, and how the operations of two traces correspond.

Shapes: B samples; a result with B·m rows along one dimension is kept as B fingerprints.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from gaverify.causes.trace.fingerprints import Layout
from gaverify.records.operations import FunctionKey

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


def reached(starts: Iterable[int], onwards: Callable[[int], Iterable[int]]) -> Iterator[int]:
    """Yields every step that a walk from some steps comes to, these among them, each once.

    Args:
        starts: Where it begins.
        onwards: The steps that follow one; none where the walk ends.
    """
    queue, seen = list(starts), set[int]()
    while queue:
        current = queue.pop()
        if current not in seen:
            seen.add(current)
            yield current
            queue.extend(onwards(current))


def same_result(trace: Trace, step: TracedOperation, position: int) -> Result | None:
    """The result of the same operation in another trace; None where that has none."""
    index = trace.counterpart(step)
    results = trace.steps[index].results if index is not None else []
    return results[position] if position < len(results) else None


def source_line(frame: Frame) -> str:
    """Returns the text of a source line, stripped; empty where there is none."""
    return linecache.getline(*frame).strip() if frame is not None else ""
