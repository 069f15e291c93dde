"""The records of a traced forward: operations, module calls, where they are for people, and how two traces correspond.

Traces of two batches differ after a branch, or after a loop that runs more often for one of them. Tensors are too large
to keep: short vectors, called fingerprints, represent them.

Shapes: B samples; a result with B·m rows along one dimension is kept as B fingerprints, B numbers per direction.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from gaverify.passes.calls import walk_from
from gaverify.passes.layouts import LayoutKind, SampleLayout, real_numbers, summaries
from gaverify.passes.precision import widest
from gaverify.records.experiment import FunctionKey, Operation
from gaverify.tracebacks import display_path

_LARGE = 1e3  # from which on values count by their order of magnitude
_HUGE = 1e30  # stands for infinity
_PIECE = 1 << 15
# Elements of a tensor that is copied and described with others, and of all these copies. On a host only dispatch is
# saved by it, on a device most of the cost.
_SMALL_ON_HOST = 1 << 12
_SMALL = 1 << 20
_MOST_WAITING = 1 << 23


class GroupedFingerprints:
    """Fingerprints and moments of the tensors of one forward, which are described in groups and read once.

    A result has no fingerprints until `read` was called. Small tensors of one shape and layout make one group: on a
    device it takes as many launches as one tensor alone. They are copied, because a later operation may write to them.
    """

    def __init__(self) -> None:
        self._waiting: dict[_TensorGroup, list[tuple[Result, torch.Tensor]]] = {}
        self._elements = 0
        self._described: list[tuple[list[Result], torch.Tensor, torch.Tensor | None]] = []

    def add(self, result: Result, tensor: torch.Tensor, layout: SampleLayout, *, integers: bool = False) -> None:
        """Describes a tensor, now or with others of its shape; nothing where the layout does not fit.

        Args:
            result: Gets the tensor's fingerprints, and its moments where it wants them.
            tensor: The tensor.
            layout: Where its samples are.
            integers: Whether integers count.
        """
        numeric = tensor.is_floating_point() or tensor.is_complex()
        if not _has_layout(tensor, layout) or not (numeric or integers or layout.kind == "global"):
            return
        values, widest_dtype = real_numbers(tensor), widest(tensor.device)
        at, fold = layout.first.at, layout.first.fold
        is_small = values.numel() <= (_SMALL_ON_HOST if tensor.device.type == "cpu" else _SMALL)
        copy = values.to(widest_dtype, copy=is_small)
        kind: LayoutKind = layout.kind
        group = _TensorGroup(tuple(copy.shape), copy.device, kind, at, fold, moments=result.summed and numeric)
        if not is_small:
            self._describe_group(group, [(result, copy)])
            return
        self._waiting.setdefault(group, []).append((result, copy))
        self._elements += copy.numel()
        if self._elements > _MOST_WAITING:
            self._describe_waiting()

    def read(self) -> None:
        """Gives every result its fingerprints on the CPU, after one transfer per device."""
        self._describe_waiting()
        devices: dict[torch.device, list[tuple[list[Result], str, torch.Tensor]]] = {}
        for results, prints, moments in self._described:
            entries = devices.setdefault(prints.device, [])
            entries.append((results, "prints", prints))
            if moments is not None:
                entries.append((results, "of_folded", moments))
        self._described.clear()
        for entries in devices.values():
            joined = torch.cat([numbers.reshape(-1) for _, _, numbers in entries]).to("cpu", torch.float64)
            pieces = joined.split([numbers.numel() for _, _, numbers in entries])
            for (results, name, numbers), piece in zip(entries, pieces, strict=True):
                for result, of_result in zip(results, piece.view(numbers.shape), strict=True):
                    setattr(result, name, of_result)

    def _describe_waiting(self) -> None:
        for group, members in self._waiting.items():
            self._describe_group(group, members)
        self._waiting.clear()
        self._elements = 0

    def _describe_group(self, group: _TensorGroup, members: list[tuple[Result, torch.Tensor]]) -> None:
        tensors = [tensor.reshape(-1) if tensor.dim() == 0 else tensor for _, tensor in members]
        joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        prints, moments = describe_tensors(joined.reshape(len(tensors), *group.shape), group)
        self._described.append(([result for result, _ in members], prints, moments))


class _TensorGroup(NamedTuple):
    """Tensors that are described together."""

    shape: tuple[int, ...]
    device: torch.device
    kind: LayoutKind
    at: int
    fold: int
    moments: bool


def describe_tensors(values: torch.Tensor, group: _TensorGroup) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns fingerprints of several tensors of one shape and layout and, where wanted, moments of folded rows.

    The fingerprints of each, of shape (variants, rows, 3), are two projections and the norm of each row, in float64.
    Folded rows (`fold` > 1) may hold the batch as their outer or as their inner index: both variants are kept.

    The moments, of shape (10,), are sums over all rows that do not depend on their order: eight moments and two scales.
    Every row counts by its two projections and its norm, in products of two and of three of these. The moments of the
    full batch are the sums of the micro-batches' exactly where all hold the same rows, in whatever order: tokens that
    are sorted by their expert. The last two entries bound the products of two and of three in magnitude.
    """
    count, fold = len(values), group.fold
    if group.kind == "global":
        return summaries(values.reshape(count, 1, 1, -1)), None
    rows = squash_values(values).movedim(group.at + 1, 1)
    length = rows.shape[1]
    if group.kind == "selected" or fold == 1:
        return summaries(rows.reshape(count, 1, length, -1)), None
    folded = rows.reshape(count, length // fold, -1)
    inner = rows.reshape(count, fold, length // fold, -1).transpose(1, 2)
    prints = torch.stack([summaries(folded), summaries(inner.reshape(count, length // fold, -1))], dim=1)
    return prints, _moments(summaries(rows.reshape(count, length, -1))) if group.moments else None


def _moments(rows: torch.Tensor) -> torch.Tensor:
    """The moments, of the summaries of all rows; of several tensors where the rows have a dimension before."""
    a, b, n = rows.unbind(-1)
    twice = [a * a, a * b, b * b, a * n, n * n]
    thrice = [a * a * a, a * a * b, b * b * n]
    scales = [a.square() + b.square() + n.square(), a.abs() ** 3 + b.abs() ** 3 + n**3]
    return torch.stack([*twice, *thrice, *scales], dim=-2).sum(-1)


def squash_values(values: torch.Tensor) -> torch.Tensor:
    """Returns v, and sign(v) · 1000 (2 − 1000 / |v|) where |v| is above 1000; NaN stays.

    A mask of −∞, or of a type's lowest number, would make all other values rounding.
    """
    host = values.device.type == "cpu"
    # On a CPU the range shows that most tensors need no change. On a GPU, reading it would wait for the device.
    if host and all(abs(float(bound)) <= _LARGE for bound in values.aminmax()):
        return values
    flat = values.reshape(-1)
    result = torch.empty_like(flat)
    # Piece by piece, because a piece stays in the CPU's cache for all of the operations.
    size = _PIECE if host else max(flat.numel(), 1)
    for piece, into in zip(flat.split(size), result.split(size), strict=True):
        torch.clamp(piece, -_HUGE, _HUGE, out=into)
        share = _LARGE / into.abs().clamp_min_(_LARGE)
        into.mul_(share).mul_(2.0 - share)
    return result.view(values.shape)


def _has_layout(tensor: torch.Tensor, layout: SampleLayout) -> bool:
    """Whether a layout that was found in another micro-batch fits this tensor."""
    at, fold = layout.first.at, layout.first.fold
    if tensor.numel() == 0 or layout.kind in ("matrix", "mixed") or at >= max(tensor.dim(), 1):
        return False
    return layout.kind != "rows" or (tensor.dim() > 0 and tensor.shape[at] % fold == 0)


_NEAR = 6  # operations before the first difference of two traces among which a decision is looked for
Shape = tuple[int, ...]
Frame = tuple[str, int] | None
Signature = tuple[str, Frame, str | None]  # name, line of the user's code, path of the innermost module
DECISIONS = ("_local_scalar_dense", "equal", "is_nonzero")
"""Operations that hand a number to Python code."""
INPUT = "input"
"""The name of a step for a tensor that no operation wrote."""


@dataclass
class Result:
    """One tensor that an operation returned."""

    shape: Shape
    """Its shape."""
    floating: bool
    """Whether its numbers are floating-point or complex."""
    layout: SampleLayout | None = None
    """Where its samples are; None if not known."""
    prints: torch.Tensor | None = None
    """Fingerprints, of shape (variants, rows, 3); None if not wanted."""
    of_folded: torch.Tensor | None = None
    """Moments, if a dimension has several rows per sample."""
    summed: bool = True
    """Whether moments are wanted."""

    @property
    def moments(self) -> torch.Tensor | None:
        """The moments of all rows; with one row per sample they are computed from the fingerprints."""
        if self.of_folded is not None or self.prints is None or not (self.summed and self.floating):
            return self.of_folded
        return _moments(self.prints[0])


@dataclass
class TracedOperation:
    """One operation of the trace."""

    name: str
    """Its name at the dispatcher."""
    call: int | None
    """Index of the innermost module call around it; None outside of all."""
    function: FunctionKey | None
    """The outermost torch call that it is part of."""
    frame: Frame
    """The line that ran it: the user's, or a library's."""
    inputs: tuple[int, ...]
    """Steps that wrote its tensor inputs."""
    differentiable: bool
    """Whether an input has a gradient."""
    random: bool
    """Whether it drew random numbers."""
    tensor_inputs: int
    """Number of its tensor inputs."""
    signature: Signature
    """Finds it in other traces."""
    occurrence: int = 0
    """How many steps with this signature came before it."""
    caller: Frame = None
    """The nearest line of the user's own code, if `frame` is a library's."""
    results: list[Result] = field(default_factory=list)
    """The tensors that it returned."""


@dataclass
class ModuleCall:
    """One call of a module."""

    path: str | None
    """Its path in the model; None for a module of the loss or of a library."""
    kind: str
    """Its class."""
    library: bool
    """Whether that is one of torch's."""
    parents: tuple[int, ...]
    """The calls around it, innermost last."""
    has_weights: bool = False
    """Whether it has parameters of several elements itself, and not only in its children."""
    outputs: tuple[int | None, ...] = ()
    """Steps that wrote its tensor outputs; None for an output that no operation wrote: a parameter."""


@dataclass
class OperationTrace:
    """The operations of one forward, in order.

    Traces of other batches may contain more or fewer operations (a loop over the samples, a branch). So an operation
    is found again by its signature and occurrence, and not by its position.
    """

    steps: list[TracedOperation] = field(default_factory=list)
    """The operations."""
    calls: list[ModuleCall] = field(default_factory=list)
    """The module calls, in the order in which they began."""
    places: dict[Signature, list[int]] = field(default_factory=dict)
    """Signature → indices of its steps."""
    loss: int | None = None
    """Index of the step that wrote the loss."""

    def live(self) -> set[int]:
        """The steps that the loss depends on, through tensors or through numbers that Python code read out of them."""
        ends = [index for index, step in enumerate(self.steps) if step.name in DECISIONS]
        ends += [self.loss] if self.loss is not None else [len(self.steps) - 1]
        return set(walk_from(ends, lambda index: self.steps[index].inputs))

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


def find_result(trace: OperationTrace, step: TracedOperation, position: int) -> Result | None:
    """The result of the same operation in another trace; None where that has none."""
    index = trace.counterpart(step)
    results = trace.steps[index].results if index is not None else []
    return results[position] if position < len(results) else None


def find_named_call(trace: OperationTrace, step: TracedOperation) -> ModuleCall | None:
    """The innermost call of a module of the experiment."""
    return next((call for call in trace.around(step.call) if call.path is not None), None)


def describe_step(trace: OperationTrace, step: TracedOperation) -> Operation:
    """Where a step is, for people."""
    chain, module_call = trace.around(step.call), find_named_call(trace, step)
    library = bool(chain) and chain[0].library
    # Inside a library's module the nearest line of the user is the call of that module. It is named only if it is in
    # the forward of the user's own module: otherwise it is the line that calls the model.
    named = step.frame is not None and (not library or any(not call.library for call in chain))
    path, kind = (module_call.path, module_call.kind) if module_call else (None, "")
    # a value from outside torch is known by the call that takes it in
    name = step.function[0] if step.name == INPUT and step.function is not None else step.name
    operation = locate_operation(name, step.frame if named else None, path, kind)
    return replace(operation, caller=_caller(chain, step))


def locate_operation(name: str, frame: Frame, module: str | None = None, kind: str = "") -> Operation:
    """An operation on a line of the user's code, in a module of a class."""
    if frame is None:
        return Operation(name, module, kind)
    source = linecache.getline(*frame).strip()
    return Operation(name, module, kind, file=display_path(frame[0]), line=frame[1], source=source)


def _caller(chain: Sequence[ModuleCall], step: TracedOperation) -> str:
    """The loss object around a step and the nearest line of the user's own code; empty where the step is on that."""
    if step.caller is None:
        return ""
    outermost = chain[-1] if chain and chain[-1].path is None and not chain[-1].library else None
    place = f"{display_path(step.caller[0])}:{step.caller[1]}"
    return f"in `{outermost.kind}`, called at {place}" if outermost is not None else f"called at {place}"


def find_decisions(trace: OperationTrace, start: int) -> list[int]:
    """The numbers that Python code read out of tensors shortly before a step."""
    near = range(max(start - _NEAR, 0), min(start + 1, len(trace.steps)))
    return [i for i in near if trace.steps[i].name in DECISIONS]


def first_difference(full: OperationTrace, part: OperationTrace) -> int | None:
    """Index of the first step at which two traces differ; None if they do not."""
    pairs = enumerate(zip(full.steps, part.steps, strict=False))
    first = next((i for i, (step, other_step) in pairs if step.signature != other_step.signature), None)
    if first is None and len(full.steps) != len(part.steps):
        return min(len(full.steps), len(part.steps)) - 1
    return first


def takes_other_branch(one: OperationTrace, other: OperationTrace) -> bool:
    """Whether Python code read numbers, and the losses depend on operations that only one of two traces ran."""
    # Signatures are compared without their number: a loop that runs more often over more samples runs the same lines.
    read = any(step.name in DECISIONS for step in (*one.steps, *other.steps))
    ran = [{trace.steps[index].signature for index in trace.live()} for trace in (one, other)]
    return read and ran[0] != ran[1]


def find_strays(trace: OperationTrace, index: int | None, stray: Callable[[int], bool]) -> set[int]:
    """The strays from which a step computes, back to the nearest steps that all traces have."""
    if index is None:
        return set()
    steps = walk_from([index], lambda step: trace.steps[step].inputs if step == index or stray(step) else ())
    return set(filter(stray, steps))
