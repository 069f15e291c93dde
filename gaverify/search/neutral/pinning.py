"""Replaces values of a micro-batch by the full batch's, so that both runs go on with the same constants.

A value is a result of a torch call or of a custom autograd function, an output of a module, or a number that Python
code reads. Gradient hooks (of parameters, modules and tensors) are removed in both runs instead.

Shapes: B samples, micro-batches of samples `start` to `stop - 1`; a result may hold m rows per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from gaverify.passes.calls import Call, FunctionMode, OperationMode, listening, operation_name
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import PassProbe
from gaverify.passes.isolation import mode_set
from gaverify.passes.isolation.origins import is_users_class
from gaverify.records.experiment import FunctionKey
from gaverify.search.rows import ControlFailed, take_rows, take_rows_of_all
from gaverify.search.trace.backward_listening import intercept_applications
from gaverify.search.trace.operations import intercept_calls
from gaverify.search.trace.traces import DECISIONS, Frame
from gaverify.torch_internals import (
    is_in_functorch_transform,
    no_dispatch_modes,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    without_torch_function,
)
from gaverify.tracebacks import calling_frame, hands_over

Pin = Callable[[Hashable, Any], Any]
"""`pin(name, value)` returns the constant with which the code goes on; the name is the same in every pass."""


class PinnedValues(PassProbe):
    """Keeps the full batch's values without a graph, and gives each micro-batch its rows of them.

    Args:
        experiment: Whose micro-batches.
        order: How samples lie in results with several rows of each, as in `take_rows`.
    """

    missing: str | None = None
    """The error if the full batch had no value of this name; None: the micro-batch keeps its own value."""

    def __init__(self, experiment: Experiment, order: int | None = None) -> None:
        self._bounds, self._size, self._order = list(experiment.bounds()), experiment.batch_size, order
        self._kept: dict[Hashable, Any] = {}

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Replaces values for the length of a pass."""
        if k is None:
            self._kept = {}
        with self.places(k, partial(self._pin, k)):
            yield

    def places(self, k: int | None, pin: Pin) -> AbstractContextManager[Any]:
        """Opens what calls `pin` with each value in one pass."""
        raise NotImplementedError

    def rows(self, k: int, kept: Any, computed: Any) -> Any:
        """Returns what replaces the value that a micro-batch computed."""
        return take_rows_of_all(kept, computed, *self._bounds[k], self._size, self._order)

    def _pin(self, k: int | None, name: Hashable, value: Any) -> Any:
        if is_in_functorch_transform():
            raise ControlFailed("what is computed inside a transform of torch.func cannot be kept constant")
        with no_dispatch_modes(), without_torch_function():  # the copies are no operations of the user's
            # Both runs get a copy without a graph. With the graph in one run only, that run alone would have a gradient
            # through the value, and the difference would stay.
            if k is None:
                # with another copy than the one that is kept, because the code may write into it
                self._kept[name] = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), value)
                return tree_map_only(torch.Tensor, torch.clone, self._kept[name])
            if name in self._kept:
                return self.rows(k, self._kept[name], value)
        if self.missing is not None:
            raise ControlFailed(f"the micro-batches {self.missing} than the full batch")
        return value


class PinnedResults(PinnedValues):
    """Pins the results of some outermost torch calls of the forward, by name, line and occurrence."""

    missing = "call other torch functions"

    def __init__(self, experiment: Experiment, functions: Collection[FunctionKey], order: int | None = None) -> None:
        super().__init__(experiment, order)
        self._functions = frozenset(functions)

    def places(self, k: int | None, pin: Pin) -> AbstractContextManager[Any]:
        """Intercepts every torch call."""

        def handle_call(key: FunctionKey, func: Any, args: Any, kwargs: Any) -> Any:
            result = func(*args, **kwargs)
            if key not in self._functions:
                return result
            name = key[0]
            if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
                raise ControlFailed(f"the result of `{name}` cannot be kept constant")
            # one underscore at the end is torch's mark of a write in place; `__getitem__` ends in two
            constant, in_place = pin(key, result), name.endswith("_") and not name.endswith("__")
            return _write_in_place(result, constant) if in_place else constant

        return intercept_calls(handle_call)


def _write_in_place(target: Any, value: Any) -> torch.Tensor:
    """Writes a constant into the tensor that a call wrote in place, because other code may refer to that tensor.

    Raises:
        ControlFailed: It is trained, or shares its memory with others.
    """
    if not isinstance(target, torch.Tensor) or target._is_view() or (target.is_leaf and target.requires_grad):
        raise ControlFailed("what a call writes into trained or shared memory cannot be kept constant")
    with no_dispatch_modes(), torch.no_grad():
        if target.grad_fn is not None:
            target.detach_()  # a constant: without this, gradients would go back through the call that wrote it
        return target.copy_(value)


class PinnedOutputs(PinnedValues):
    """Pins the output tensors of one module at `positions`, or all of them if there are no positions."""

    missing = "call the module more often"

    def __init__(self, experiment: Experiment, module: nn.Module, positions: Sequence[int] = ()) -> None:
        super().__init__(experiment)
        self._module, self._positions = module, frozenset(positions)

    def places(self, k: int | None, pin: Pin) -> AbstractContextManager[Any]:
        """Intercepts the module's outputs."""

        def ends(call: Call, output: Any) -> Any:
            return self._choose_pinned(pin(call.number, output), output)

        return listening({self._module: ""}, ends=ends, outside="")

    def _choose_pinned(self, constants: Any, output: Any) -> Any:
        """The pinned outputs, and the live ones at all other positions."""
        if not self._positions:
            return constants
        (pinned_leaves, form), output_leaves, tensor = tree_flatten(constants), tree_leaves(output), -1
        for place, leaf in enumerate(pinned_leaves):
            tensor += isinstance(leaf, torch.Tensor)  # positions count tensors, and leaves hold numbers as well
            if isinstance(leaf, torch.Tensor) and tensor not in self._positions:
                pinned_leaves[place] = output_leaves[place]
        return tree_unflatten(pinned_leaves, form)


class PinnedDecisions(PinnedValues):
    """Pins the numbers that Python code reads out of tensors on one line, so that all runs take the same branch."""

    missing = "decide more often"

    def __init__(self, experiment: Experiment, frame: Frame) -> None:
        super().__init__(experiment)
        self._frame = frame

    def places(self, k: int | None, pin: Pin) -> AbstractContextManager[Any]:
        """Intercepts the reads."""
        return _numbers(pin, lambda frame: frame == self._frame)

    def rows(self, k: int, kept: Any, computed: Any) -> Any:
        """The full batch's number."""
        return kept


def _numbers(pin: Pin, is_wanted: Callable[[Frame], bool]) -> OperationMode:
    """Pins the numbers that Python code reads out of tensors on the wanted lines."""
    numbers = count()

    def read(func: Any, args: Any, kwargs: Any) -> Any:
        result, name = func(*args, **kwargs), operation_name(func)
        if name not in DECISIONS or not is_wanted(frame := calling_frame()):
            return result
        return pin((name, frame, next(numbers)), result)

    return OperationMode(read)


class PinnedConstants(PinnedValues):
    """Pins what the forward cuts out of the graph (`detach`, `item`, `no_grad`), unless it has a row per sample.

    Such results are constants to the backward. If they were computed from the batch, the backward depends on the batch
    although every forward may agree.

    Args:
        experiment: Whose micro-batches.
        only: Lines of the user's code; None: all of them.
    """

    def __init__(self, experiment: Experiment, only: Collection[Frame] | None = None) -> None:
        super().__init__(experiment)
        self._only = only
        self.frames: list[Frame] = []

    @contextmanager
    def places(self, k: int | None, pin: Pin) -> Iterator[None]:
        """Intercepts every torch call, and every number that is read."""
        if k is None:  # the lines of the full batch's pass are the candidates that are released one by one later
            self.frames = []

        def is_wanted(frame: Frame) -> bool:
            if self._only is not None and frame not in self._only:
                return False
            if k is None and frame is not None and frame not in self.frames:
                self.frames.append(frame)
            return True

        def handle_call(key: FunctionKey, func: Any, args: Any, kwargs: Any) -> Any:
            result = func(*args, **kwargs)
            # Cut out of the graph: an argument has a gradient and the result has none.
            cut = isinstance(result, torch.Tensor) and result.is_floating_point() and not result.requires_grad
            with without_torch_function():  # reading `requires_grad` is a call that a mode would see
                argument_leaves = tree_leaves((args, kwargs))
                inside = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in argument_leaves)
            return pin(key, result) if cut and inside and is_wanted(key[1]) else result

        with intercept_calls(handle_call), _numbers(pin, is_wanted):
            yield

    @hands_over
    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Runs the backward of a forward that cuts something."""
        if not self.frames:
            raise ControlFailed("the forward cuts nothing out of the graph")
        super().backward(k, loss, weight)

    def rows(self, k: int, kept: Any, computed: Any) -> Any:
        """The full batch's number, or its tensor where that has the same shape."""
        if not isinstance(kept, torch.Tensor):
            return kept
        return kept.clone() if kept.shape == computed.shape else computed


class PinnedApplication(PinnedValues):
    """Pins the result of one application of a custom autograd function, by its position in the forward."""

    def __init__(self, experiment: Experiment, position: int) -> None:
        super().__init__(experiment)
        self._position = position

    def places(self, k: int | None, pin: Pin) -> AbstractContextManager[Any]:
        """Intercepts the applications of custom functions."""

        def handle_application(position: int, _: type, args: Any, call: Callable[[], Any]) -> Any:
            return call() if position != self._position else self.replace_result(k, pin, args, call)

        return intercept_applications(handle_application)

    def replace_result(self, k: int | None, pin: Pin, args: Any, call: Callable[[], Any]) -> Any:
        """Returns what replaces the function's result."""
        result = call()
        if not isinstance(result, torch.Tensor):
            raise ControlFailed("the custom function returns no single tensor")
        return pin(self._position, result)


class StraightThrough(PinnedApplication):
    """Keeps the values of a custom function, and lets gradients pass through it unchanged."""

    def replace_result(self, k: int | None, pin: Pin, args: Any, call: Callable[[], Any]) -> Any:
        """The function's input, moved to what it returns."""
        result = call()
        source = next((arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad), None)
        if source is None or not isinstance(result, torch.Tensor) or source.shape != result.shape:
            raise ControlFailed("the custom function changes the shape of its input")
        return source + (result - source).detach()  # the function's value, with the gradient of the identity


class PinnedGradients(PinnedApplication):
    """Replaces the gradients of a custom function's inputs by the full batch's, sample by sample."""

    def replace_result(self, k: int | None, pin: Pin, args: Any, call: Callable[[], Any]) -> Any:
        """Registers hooks on the arguments, which run in the backward."""
        for place, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and arg.requires_grad:
                arg.register_hook(partial(self._replace_gradient, k, place, arg.detach().clone()))
        return call()

    def _replace_gradient(self, k: int | None, place: int, value: torch.Tensor, gradient: torch.Tensor) -> Any:
        if k is None:
            self._kept[place] = value, gradient.detach().clone()
            return None
        full_value, full_gradient = self._kept.get(place, (value, gradient))
        start, stop = self._bounds[k]
        # A weight has no rows of samples: each micro-batch gets its share of the gradient, and the shares add up to it.
        if full_value.shape == value.shape:
            return full_gradient * ((stop - start) / self._size)
        return take_rows(full_value, value, start, stop, self._size, full_gradient)


class EvaluationMode(PassProbe):
    """Runs modules in `eval` mode, so that both runs use the stored statistics."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules

    def around(self, k: int | None) -> AbstractContextManager[None]:
        """Switches the modules for the length of a pass."""
        return mode_set(self.modules, "eval")


def find_live_statistics(experiment: Experiment) -> list[nn.Module]:
    """Returns the BatchNorm layers of libraries that use statistics of the batch in the runs of an experiment."""
    probes = [probe for probe in experiment.probes if isinstance(probe, EvaluationMode)]
    switched = {id(layer) for probe in probes for layer in probe.modules}
    layers = [layer for _, layer in experiment.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    # without running statistics, a layer takes those of the batch in evaluation mode as well
    live = [layer for layer in layers if layer.running_mean is None or (layer.training and id(layer) not in switched)]
    return [layer for layer in live if not is_users_class(type(layer), frozenset())]


Registry = MutableMapping[int, Any]


class WithoutHooks(PassProbe):
    """Empties registries of hooks for the length of a pass."""

    def __init__(self, registries: Sequence[Registry]) -> None:
        self._registries = registries

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Empties the registries, and fills them again."""
        saved = [dict(registry) for registry in self._registries]
        for registry in self._registries:
            registry.clear()
        try:
            yield
        finally:
            for registry, hooks in zip(self._registries, saved, strict=True):
                registry.update(hooks)


class WithoutTensorHooks(PassProbe):
    """Gives `Tensor.register_hook` no effect in a forward; `frames` are the lines that called it."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def around(self, k: int | None) -> AbstractContextManager[Any]:
        """Intercepts the registrations of one pass."""
        return FunctionMode(self._handle_call)

    @hands_over
    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Runs the backward of a forward that has registered hooks."""
        if not self.frames:
            raise ControlFailed("no hook is registered on a tensor")
        super().backward(k, loss, weight)

    def _handle_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(func, "__name__", "") != "register_hook":
            return func(*args, **kwargs)
        self.frames.append(calling_frame())
        return _Handle()


class _Handle:
    """Stands in for the handle of a hook that was not registered."""

    def remove(self) -> None:
        """Removes nothing."""
