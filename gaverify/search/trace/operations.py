"""Traces one forward operation by operation: what ran, where in the user's code, and a fingerprint of every result.

Shapes: B samples, n of a micro-batch; a result with B·m rows along one dimension is kept as B fingerprints.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gaverify.passes.calls import FunctionMode, OperationMode, RunningCall, listening, operation_name
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import PassProbe
from gaverify.passes.isolation import written_arguments, written_tensors
from gaverify.passes.layouts import LAYOUT_KINDS, LayoutKind, SampleLayout
from gaverify.passes.randomness.operations import draws_unseen, generator_key
from gaverify.records.experiment import FunctionKey
from gaverify.search.trace.traces import (
    INPUT,
    Frame,
    GroupedFingerprints,
    ModuleCall,
    OperationTrace,
    Result,
    TracedOperation,
    find_result,
)
from gaverify.torch_internals import buffers_of, no_dispatch_modes, parameters_of, tree_map_only, without_torch_function
from gaverify.tracebacks import Owner, calling_frame, hands_over, owner_of

# Watches and diverts the writes to some tensors.


def watch_writes(
    addresses: Mapping[int, str],
    notice: Callable[[str, str, Frame], None],
    kept: Mapping[int, str],
    read: Callable[[str], None],
) -> OperationMode:
    """Returns a mode that calls `notice` before every write to a tensor of the state.

    Args:
        addresses: The names of the state's tensors by `address`.
        notice: Takes the tensor's name, the operation and its line.
        kept: Those of them that are no parameters.
        read: Takes the name of one of these that an operation reads and does not write.
    """

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = written_tensors(func, args, kwargs)
        # In training (a True among its arguments) it writes the running statistics, which its schema does not declare.
        if "batch_norm" in func.__name__ and any(arg is True for arg in args):
            written = [*written, *(arg for arg in args[3:5] if isinstance(arg, torch.Tensor))]
        for target in written:
            name = addresses.get(address(target))
            if name is not None:
                notice(name, operation_name(func), calling_frame())
        # reading every argument of every operation is slow, and worth it only where some state is no parameter
        for tensor in _tensor_arguments(args, kwargs) if kept else ():
            name = kept.get(address(tensor))
            if name is not None and not any(tensor is target for target in written):
                read(name)
        return func(*args, **kwargs)

    return OperationMode(handle)


def divert_writes(addresses: Set[int]) -> OperationMode:
    """Returns a mode in which writes to the tensors at some addresses go to a copy that is thrown away."""

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(address(tensor) in addresses for tensor in written_tensors(func, args, kwargs)):
            return func(*args, **kwargs)
        originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def copy_target(tensor: torch.Tensor) -> torch.Tensor:
            if address(tensor) not in addresses:
                return tensor
            copy = tensor.clone()
            originals[id(copy)] = (tensor, copy)  # with the copy, so that nothing else gets its identity meanwhile
            return copy

        written = written_arguments(func)
        positions, names = {position for position, _ in written}, {name for _, name in written}
        changed = [
            tree_map_only(torch.Tensor, copy_target, arg) if i in positions else arg for i, arg in enumerate(args)
        ]
        kwargs = {key: tree_map_only(torch.Tensor, copy_target, v) if key in names else v for key, v in kwargs.items()}
        result = func(*changed, **kwargs)
        # An in-place operation returns its target: the code has to go on with the tensor itself and not with the copy.
        return tree_map_only(torch.Tensor, lambda tensor: originals.get(id(tensor), (tensor,))[0], result)

    return OperationMode(handle)


def _tensor_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operation at the dispatcher, which has lists of them and nothing deeper."""
    for value in (*args, *kwargs.values()):
        for entry in value if isinstance(value, list | tuple) else (value,):
            if isinstance(entry, torch.Tensor):
                yield entry


def address(tensor: Any) -> int:
    """Identifies the memory that a tensor lies in; 0 where it has none, or is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        return 0
    try:
        with without_torch_function():
            return int(tensor.untyped_storage()._cdata)  # of the storage: views and `.data` share it with their base
    except (NotImplementedError, RuntimeError):
        return 0


# Traces one forward operation by operation: what ran, where in the user's code, and a fingerprint of every result.


_UNSEEN_FACTORIES = ("from_numpy", "frombuffer", "from_dlpack")  # of `torch`, which no mode of functions is told of
_FACTORIES = ("tensor", "as_tensor", "asarray", "new_tensor", *_UNSEEN_FACTORIES)  # bring numbers in from outside torch
_UNWRITTEN = ("empty", "new_empty")  # factories whose results are uninitialised memory; all their variants begin so


@cache
def _read_traits(func: Any) -> tuple[str, bool, bool]:
    """Name, whether the result is a view of an argument, whether the operation may draw random numbers."""
    returns = func._schema.returns
    view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return operation_name(func), view, torch.Tag.nondeterministic_seeded in func.tags


class OperationTracer(PassProbe):
    """Records the forward of a pass.

    Args:
        names: The modules of the experiment and their paths.
        batch_size: B.
        count: n of the micro-batch that `template` was taken of.
        template: An earlier trace of a micro-batch without fingerprints, whose shapes show where the samples are; None
            records only shapes.
        plan: The layouts found by the trace of the full batch; the micro-batches follow them.
        described: Fingerprints of results with these layouts are kept; reading every row costs more than the forward.
    """

    def __init__(
        self,
        names: dict[nn.Module, str],
        batch_size: int,
        count: int,
        template: OperationTrace | None = None,
        plan: OperationTrace | None = None,
        described: Collection[LayoutKind] = LAYOUT_KINDS,
    ) -> None:
        self.trace = OperationTrace()
        self._described = described
        self._fingerprints = GroupedFingerprints()
        self._names, self._size, self._count = names, batch_size, count
        self._template, self._plan = template, plan
        self._running: list[RunningCall] = []
        self._writers: dict[int, int] = {}
        self._storages: dict[int, StorageWeakRef] = {}  # no other storage gets an address while these exist
        self._state = {
            _address(value)
            for module in names
            for value in (*parameters_of(module).values(), *buffers_of(module).values())
            if value is not None
        }
        self._function: FunctionKey | None = None

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Listens to modules, functions and operations for the length of a forward."""
        modules = listening(self._names, self._enter, self._leave)
        with modules as self._running, intercept_calls(self._call), OperationMode(self._operate):
            yield

    def finish(self, loss: torch.Tensor) -> OperationTrace:
        """Ends the recording with the loss that the forward returned, and returns the trace."""
        self.trace.loss = self._writers.get(_address(loss))
        self._fingerprints.read()
        self._writers.clear()
        self._storages.clear()
        return self.trace

    def _call(self, key: FunctionKey, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a torch function; the operations inside are recorded as parts of it."""
        before, self._function = self._function, key
        try:
            result = func(*args, **kwargs)
            if getattr(func, "__name__", "") in _FACTORIES:
                with without_torch_function():
                    self._note_inputs(list(_tensors_of(result)))
            return result
        finally:
            self._function = before

    def _operate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation, by gaverify's mode around the pass, and records it."""
        name, view, may_draw = _read_traits(func)
        before = generator_key(args, kwargs) if may_draw else None
        result = func(*args, **kwargs)
        if name.startswith(_UNWRITTEN) and isinstance(result, torch.Tensor):
            # Padding may copy such memory before it is written. Its values lie there by chance and are no difference.
            with no_dispatch_modes(), torch.no_grad():
                result.zero_()
        for work in result if isinstance(result, tuple) else ():
            if hasattr(work, "_has_method") and work._has_method("wait"):
                work.wait()  # a collective runs in the background: its result is read here
        if not view:  # a view has the memory of its base, which is found under the same address
            # attention without dropout could draw and does not: then its generator stays where it was
            drew = may_draw and (generator_key(args, kwargs) != before or draws_unseen(func, args, kwargs))
            self._record(name, drew, args, kwargs, result)
        return result

    def _record(self, name: str, random: bool, args: Any, kwargs: Any, result: Any) -> None:
        """Notes one operation of the forward, gradients that the forward asks for included."""
        tensors = list(_tensors_of((args, kwargs)))
        addresses = self._note_inputs(tensors)
        writers = tuple(dict.fromkeys(self._writers[place] for place in addresses if place in self._writers))
        self._add(name, writers, any(t.requires_grad for t in tensors), random, len(tensors), list(_tensors_of(result)))

    def _add(
        self,
        name: str,
        writers: tuple[int, ...],
        differentiable: bool,
        random: bool,
        inputs: int,
        written: list[torch.Tensor],
    ) -> None:
        call, frame = self._running[-1].position if self._running else None, calling_frame()
        path = next((c.path for c in self.trace.around(call) if c.path is not None), None)
        step = TracedOperation(
            name, call, self._function, frame, writers, differentiable, random, inputs, (name, frame, path)
        )
        if frame is not None and owner_of(frame[0]) is Owner.LIBRARY:
            step.caller = calling_frame(Owner.USER)
        index = self.trace.add(step)
        for position, tensor in enumerate(written):
            step.results.append(self._describe_result(step, position, tensor))
            self._note_writer(tensor, index)

    def _note_writer(self, tensor: torch.Tensor, index: int) -> None:
        address = _address(tensor)
        if address not in self._storages:
            with contextlib.suppress(NotImplementedError, RuntimeError):
                self._storages[address] = StorageWeakRef(tensor.untyped_storage())
        self._writers[address] = index

    def _note_inputs(self, tensors: list[torch.Tensor]) -> list[int]:
        """Adds a step for every tensor that no operation wrote: the batch, and what comes from outside torch.

        Returns their addresses.
        """
        addresses = list(map(_address, tensors))
        for tensor, place in zip(tensors, addresses, strict=True):
            if place not in self._writers and place not in self._state:
                self._add(INPUT, (), False, False, 0, [tensor])
        return addresses

    def _describe_result(self, step: TracedOperation, position: int, tensor: torch.Tensor) -> Result:
        shape, name = tuple(tensor.shape), step.name
        result = Result(shape, tensor.is_floating_point() or tensor.is_complex())
        if self._plan is not None:
            planned = find_result(self._plan, step, position)
            result.layout = planned.layout if planned is not None else None
        elif self._template is not None and (shaped := find_result(self._template, step, position)) is not None:
            result.layout = SampleLayout.find(shape, shaped.shape, self._size, self._count)
        layout, is_written = result.layout, not name.startswith(_UNWRITTEN)
        if is_written and layout is not None and layout.kind in self._described and tensor.layout is torch.strided:
            with no_dispatch_modes():
                # computed integers (indices) may differ in a right loss as well; inputs and masks must agree
                integers = name == INPUT or tensor.dtype is torch.bool
                result.summed = name != INPUT
                self._fingerprints.add(result, tensor, layout, integers=integers)
        return result

    def _enter(self, call: RunningCall, *_: Any) -> None:
        kind, parents = type(call.module), tuple(parent.position for parent in call.parents)
        library = kind.__module__.split(".")[0] == "torch"
        has_weights = any(weight.numel() > 1 for weight in call.module.parameters(recurse=False))
        self.trace.calls.append(ModuleCall(self._names.get(call.module), kind.__name__, library, parents, has_weights))

    def _leave(self, call: RunningCall, output: Any) -> None:
        outputs = tuple(self._writers.get(_address(tensor)) for tensor in _tensors_of(output))
        self.trace.calls[call.position].outputs = outputs


def make_tracer(
    experiment: Experiment,
    template: OperationTrace | None = None,
    plan: OperationTrace | None = None,
    layouts: Collection[LayoutKind] = LAYOUT_KINDS,
) -> OperationTracer:
    """Makes what traces one forward of an experiment."""
    names = {module: name for name, module in experiment.named_modules()}
    return OperationTracer(names, experiment.batch_size, experiment.sizes[0], template, plan, layouts)


@contextmanager
def intercept_calls(handle_call: Callable[[FunctionKey, Any, Any, Any], Any]) -> Iterator[None]:
    """Lets `handle_call(key, func, args, kwargs)` stand in for the outermost torch calls.

    By its key (name, line and occurrence) another run of the same forward finds the same call again.
    """
    occurrences: Counter[tuple[str, Frame]] = Counter()
    hands_over(handle_call)

    def handle(func: Any, args: Any, kwargs: Any) -> Any:
        place = str(getattr(func, "__name__", func)), calling_frame()
        occurrences[place] += 1
        return handle_call((*place, occurrences[place] - 1), func, args, kwargs)

    def stand_in(func: Any) -> Any:
        return hands_over(wraps(func)(lambda *args, **kwargs: handle(func, args, kwargs)))

    originals = {name: getattr(torch, name) for name in _UNSEEN_FACTORIES}
    try:
        for name, func in originals.items():
            setattr(torch, name, stand_in(func))
        with FunctionMode(handle):
            yield
    finally:
        for name, func in originals.items():
            setattr(torch, name, func)


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors_of(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors_of(entry)
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        for entry in vars(value).values():
            if isinstance(entry, torch.Tensor):
                yield entry


def _address(tensor: torch.Tensor) -> int:
    return address(tensor) or id(tensor)
