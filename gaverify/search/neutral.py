"""Neutralises a suspect in both runs, and runs them again."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gaverify.passes.batching import fresh
from gaverify.passes.calls import FunctionMode, OperationMode, RunningCall, listening, operation_name
from gaverify.passes.dispatch import PassMode
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import Gradients, PassProbe, PassResult
from gaverify.passes.isolation import RewindableIterator, generator_states, keep_places
from gaverify.passes.isolation.objects import entries_of, is_users_class
from gaverify.passes.layouts import SampleLayout, changed_dimensions, map_leaves, real_numbers
from gaverify.passes.modes import mode_set
from gaverify.passes.precision import widest
from gaverify.passes.randomness import DrawRecorder
from gaverify.passes.user_code import loss_of
from gaverify.records.experiment import ControlKind, FunctionKey
from gaverify.remedies.batch_norm import group_norm_for
from gaverify.search.bench import ControlFailed, Intervention, take_rows, take_rows_of_all
from gaverify.search.trace.first_divergence import intercept_applications
from gaverify.search.trace.operations import address, divert_writes, intercept_calls
from gaverify.search.trace.state import find_state, watch_assignments
from gaverify.search.trace.traces import DECISIONS, Frame, squash_values
from gaverify.thresholds import AGREE_FLOAT32, AGREE_FLOAT64, COMPUTED_FLOAT32, TINY
from gaverify.torch_internals import (
    backward_hooks_of,
    gradient_hooks_of,
    is_in_functorch_transform,
    no_dispatch_modes,
    submodules_of,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    without_torch_function,
)
from gaverify.tracebacks import calling_frame, hands_over

# Neutralises state: restores it, drops what a forward writes to it, or sets it by one forward of the full batch.
#
# Shapes: B samples in the batch.


class RestoredState(PassProbe):
    """Starts every micro-batch from the state that the full batch started from, or from these parts of it.

    Args:
        experiment: The state of this experiment is restored.
        names: The values that are restored; None: everything, also what has no name.
    """

    def __init__(self, experiment: Experiment, names: Sequence[str] | None = None) -> None:
        self._restore = experiment.state.restore if names is None else _keep(experiment, names)

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Restores before the forward."""
        with no_dispatch_modes(), without_torch_function():
            self._restore()
        yield


class LeftState(PassProbe):
    """Keeps some values as the last forward and backward of a pass leave them.

    Args:
        experiment: The values belong to the state of this experiment.
        names: The names of the values.
    """

    def __init__(self, experiment: Experiment, names: Sequence[str]) -> None:
        self._experiment, self._names = experiment, names
        self.put: Callable[[], None] = lambda: None
        self.shapes: list[torch.Size] = []

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Keeps the values after the forward and the backward."""
        yield
        with no_dispatch_modes(), without_torch_function():
            self.put = _keep(self._experiment, self._names)
            named = find_state(self._experiment)
            places = [named[name] for name in self._names if name in named and named[name].kind != "parameter"]
            self.shapes = _shapes_in([place.get() for place in places])


def _shapes_in(values: list[Any]) -> list[torch.Size]:
    """Returns the shapes of all tensors in some values, in containers as well, which may hold themselves."""
    shapes, visited, pending = list[torch.Size](), set[int](), list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            shapes.append(value.shape)
        elif isinstance(value, dict | list | tuple | deque) and id(value) not in visited:
            visited.add(id(value))
            pending += entries_of(value, sys.maxsize, values=True)
    return shapes


def _keep(experiment: Experiment, names: Sequence[str]) -> Callable[[], None]:
    """Returns what puts some values of the state back as they are now."""
    return keep_places([place for name, place in find_state(experiment).items() if name in names])


class PinnedState(PassProbe):
    """Keeps named state as it is in both runs: assignments and writes to it have no effect."""

    def __init__(self, experiment: Experiment, names: Sequence[str]) -> None:
        self._places = [place for name, place in find_state(experiment).items() if name in names]
        self._attributes = {place.attribute for place in self._places}

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Intercepts assignments to modules and writes to tensors."""
        # The addresses are looked up anew in each pass, because a restored buffer may be another tensor.
        values = [place.get() for place in self._places]
        addresses = {address(value) for value in values if issubclass(type(value), torch.Tensor)}
        positions = [(value, value.position) for value in values if isinstance(value, RewindableIterator)]
        with watch_assignments(lambda *_: None, self._is_pinned), divert_writes(addresses):
            yield
        # An iterator moves without a write that could be dropped, so that it is rewound after the pass.
        for iterator, position in positions:
            iterator.rewind(position)

    def _is_pinned(self, module: nn.Module, name: str) -> bool:
        return (id(module), name) in self._attributes


class PrimedState(PassProbe):
    """Runs the full batch forward before the full batch's pass and before the first micro-batch.

    Its changes of the state stay for the pass, and are restored with the rest of the state afterwards.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Runs the forward where a strategy starts."""
        if k in (None, 0):
            # Its random draws are not those of the pass: a recorder of its own, and generators put back afterwards.
            restore = generator_states()
            mode = PassMode(self._experiment.state, DrawRecorder(), lift=self._experiment.lift)
            with no_dispatch_modes(), mode:
                loss_of(self._experiment, fresh(self._experiment.problem.batch), "the full batch")
            restore()
        yield


class RestoredGradients(PassProbe):
    """Adds every backward to the gradients that existed before its forward, which may have cleared them."""

    def __init__(self, experiment: Experiment) -> None:
        self._parameters = list(experiment.parameters.values())
        self._before: list[torch.Tensor | None] = []

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Copies the gradients before the forward."""
        self._before = [p.grad.clone() if p.grad is not None else None for p in self._parameters]
        yield

    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Puts them back, then runs the backward."""
        for parameter, gradient in zip(self._parameters, self._before, strict=True):
            parameter.grad = gradient
        super().backward(k, loss, weight)


# The control of a coupled loss: the loss once over all outputs of the full batch, the model backward per micro-
# batch.
#
# A loss may cache gradients itself: it runs the model without a graph and computes its gradient with respect to the
# outputs. A hook of the backward sends that through the model in small parts, and nothing of it can be cut from
# outside. But samples interact in the loss and nowhere else if two things hold: the model never gets more samples than
# a micro-batch has, and the result is the full batch's gradient.
#
# Shapes: B samples, micro-batches of samples `start` to `stop - 1`.


class _Cut(PassProbe):
    """Cuts the forward at the outputs of module calls: leaves in the full batch, cotangents in the micro-batches."""

    def __init__(self, experiment: Experiment, inside: frozenset[int]) -> None:
        self._experiment, self._inside = experiment, inside
        self._bounds = list(experiment.bounds())
        self._k: int | None = None
        self.leaves: list[torch.Tensor] = []
        self._closed = False  # a recomputation during the backward calls modules again
        self._outputs: list[torch.Tensor] = []
        self._given: dict[int, int] = {}  # rows of each leaf that earlier micro-batches took

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Watches the module calls of one forward."""
        self._k, self._outputs, self._closed = k, [], False
        with listening({}, ends=self._leave):
            yield

    @hands_over
    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Runs the loss's backward in the full batch, and that of the full batch's cotangents in a micro-batch."""
        self._closed = True
        if k is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        if len(self._outputs) != len(self.leaves):
            raise ControlFailed("the micro-batches call other modules than the full batch")
        pairs = [
            (output, cotangent)
            for place, (output, leaf) in enumerate(zip(self._outputs, self.leaves, strict=True))
            if leaf.grad is not None and (cotangent := self._take_cotangent(k, place, leaf, output)) is not None
        ]
        if pairs:
            # Numbers whose gradients at the outputs are the cotangents: given cotangents, `backward` makes torch import
            # sympy, which takes half a second.
            products = [torch.vdot(cotangent.reshape(-1), output.reshape(-1)).real for output, cotangent in pairs]
            torch.autograd.backward(products)

    def _take_cotangent(self, k: int, place: int, leaf: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
        """The gradient's rows for a micro-batch; None where they have been used."""
        assert leaf.grad is not None
        # An output without rows (a temperature) is one value of the window: its gradient counts once.
        if leaf.shape == output.shape and len(self._bounds) > 1:
            return leaf.grad if k == 0 else None
        layout = SampleLayout.find(leaf.shape, output.shape)
        if layout is not None and len(layout.dimensions) == 1:  # samples may have different numbers of rows there
            following = self._take_next_rows(k, place, layout.first.at, leaf, output)
            if following is not None:
                return following
        start, stop = self._bounds[k]
        return take_rows(leaf, output, start, stop, self._experiment.batch_size, leaf.grad)

    def _take_next_rows(
        self, k: int, place: int, dim: int, leaf: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor | None:
        """The rows behind those of earlier micro-batches, for samples with different numbers of rows: nodes, tokens.

        None where the values there differ from the micro-batch's, so that they are other rows.
        """
        assert leaf.grad is not None
        count = output.shape[dim]
        start = self._given.get(place, 0) if k else 0
        self._given[place] = start + count
        if start + count > leaf.shape[dim]:
            return None
        with torch.no_grad():
            difference = torch.linalg.vector_norm(leaf.narrow(dim, start, count) - output)
            is_same = bool(difference <= COMPUTED_FLOAT32 * torch.linalg.vector_norm(output))
        return leaf.grad.narrow(dim, start, count) if is_same else None

    def _leave(self, call: RunningCall, output: Any) -> Any:
        around = [parent.position for parent in call.parents]
        # only the outermost calls are cut: what lies inside one of them is behind the cut already
        if self._closed or call.position in self._inside or not self._inside.issuperset(around):
            return None
        try:
            return map_leaves(output, self._cut)
        except TypeError as error:
            raise ControlFailed(f"a module returns a {type(output).__name__}, which cannot be made anew") from error

    def _cut(self, _: str, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.requires_grad):
            return value
        cut_outputs = self._outputs
        if self._k is None:
            cut_outputs, value = self.leaves, value.detach().requires_grad_()
        cut_outputs.append(value)
        return value


_LOSS_ONCE = "the loss computed once over the full batch's outputs"


def cached_gradients(inside: frozenset[int]) -> Intervention:
    """The two-pass cached gradient: the loss once on all outputs, the model backward per micro-batch.

        1. forward of the full batch, cut at module outputs y; v = ∂ loss / ∂ y; the loss's own parameters directly
        2. per micro-batch: forward, backward of y_k with cotangent v_k

    Args:
        inside: The module calls that are not cut, because their outputs have no row per sample or depend on the batch
            already. They contain the loss or a part of it.

    Source: L. Gao, Y. Zhang, J. Han, J. Callan, Scaling Deep Contrastive Learning Batch Size under Memory Limited
    Setup, 2021, section 3.
    """
    accumulate = partial(_cache_gradients, inside)
    return Intervention(_LOSS_ONCE, ControlKind.CACHED_GRADIENTS, accumulate=accumulate, in_reference=False)


def _cache_gradients(inside: frozenset[int], experiment: Experiment) -> Callable[[PassResult], Gradients]:
    """Runs the loss on all outputs; returns what runs the model per micro-batch.

    Raises:
        ControlFailed: No output of a module takes part in the loss.
    """
    # One backward over the summed losses would have no place for the cotangents of each micro-batch.
    experiment = experiment.with_backwards_apart()
    cut = _Cut(experiment, inside)
    direct = experiment.full_batch(cut).gradients
    if not cut.leaves:
        raise ControlFailed("no module output takes part in the loss")

    def accumulate(full: PassResult) -> Gradients:
        total: dict[str, torch.Tensor | None] = {}
        for name, gradient in experiment.micro_batches(full, cut).gradients.items():
            parts = [part for part in (direct[name], gradient) if part is not None]
            total[name] = sum(parts[1:], parts[0]) if parts else None
        return total

    return accumulate


# Replaces values of a micro-batch by the full batch's, so that both runs go on with the same constants.
#
# A value is a result of a torch call, of a custom autograd function or of a module, or a number that Python code
# reads. Gradient hooks (of parameters, modules and tensors) are removed in both runs instead.
#
# Shapes: B samples, micro-batches of samples `start` to `stop - 1`; a result may hold m rows per sample.


Pin = Callable[[Hashable, Any], Any]
"""`pin(name, value)` returns the constant with which the code goes on; the name is the same in every pass."""


class PinnedValues(PassProbe):
    """Keeps the full batch's values without a graph, and gives each micro-batch its rows of them.

    Args:
        experiment: Its micro-batches are given the values.
        order: How samples lie in results with several rows of each, as in `take_rows`.
    """

    missing: str | None = None
    """The error if the full batch had no value of this name; None: the micro-batch keeps its own value."""

    def __init__(self, experiment: Experiment, order: int | None = None) -> None:
        self._bounds, self._size, self._order = list(experiment.bounds()), experiment.batch_size, order
        self._agree = AGREE_FLOAT64 if experiment.is_float64 else AGREE_FLOAT32
        self._kept: dict[Hashable, Any] = {}

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Replaces values for the length of a pass."""
        if k is None:
            self._kept, self.values_differed = {}, None
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
                self.values_differed = bool(self.values_differed)
                return tree_map_only(torch.Tensor, torch.clone, self._kept[name])
            if name in self._kept:
                constant = self.rows(k, self._kept[name], value)
                self.values_differed = self.values_differed or not _are_same(constant, value, self._agree)
                return constant
        if self.missing is not None:
            raise ControlFailed(f"the micro-batches {self.missing} than the full batch")
        return value


def _are_same(constants: Any, values: Any, allowed: float) -> bool:
    """Whether values are the same up to rounding, relative to the largest of each tensor."""
    for constant, value in zip(tree_leaves(constants), tree_leaves(values), strict=True):
        if not (isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())):
            is_same = torch.equal(constant, value) if isinstance(value, torch.Tensor) else constant == value
            if not is_same:
                return False
        elif value.numel():
            # squashed: a mask of −∞ would make all other values rounding
            wide = (real_numbers(tensor.detach()).to(widest(tensor.device)) for tensor in (constant, value))
            expected, actual = (squash_values(tensor).nan_to_num() for tensor in wide)
            if float((expected - actual).abs().max()) > allowed * max(float(expected.abs().max()), TINY):
                return False
    return True


class _KeptGradients:
    """The full batch's gradients of calls' inputs, which micro-batches get in place of their own.

    A value that is pinned alone cuts off all that was computed before it: whatever is wrong there would disappear with
    the difference. With these gradients the parameters before it stay connected, and a hook there still shows.

    Args:
        experiment: Its micro-batches are given the gradients.
        order: How samples lie in tensors with several rows of each, as in `take_rows`.
    """

    def __init__(self, experiment: Experiment, order: int | None = None) -> None:
        self._bounds, self._size, self._order = list(experiment.bounds()), experiment.batch_size, order
        self._kept: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}  # input → its value and its gradient

    def clear(self) -> None:
        """Forgets an earlier pass of the full batch."""
        self._kept = {}

    def listen_to_inputs(self, name: Hashable, inputs: Any) -> Any:
        """Returns the inputs of a call of the full batch as views, whose gradients come from that call only."""
        positions = count()

        def make_view(tensor: torch.Tensor) -> torch.Tensor:
            if not _has_gradient(tensor):
                return tensor
            key = name, next(positions)
            view = tensor.view_as(tensor)
            view.register_hook(partial(self.keep, key, tensor.detach()))
            return view

        with no_dispatch_modes(), without_torch_function():
            return tree_map_only(torch.Tensor, make_view, inputs)

    def listen_to_parameter(self, key: Hashable, parameter: torch.Tensor) -> Callable[[], None]:
        """Keeps the full batch's gradient of a parameter as the user's hooks get it; returns what ends that."""
        handle: RemovableHandle = parameter.register_hook(partial(self.keep, key, parameter.detach()))
        # the user's hooks run in the micro-batches as well: they must not have changed what is kept
        gradient_hooks_of(parameter)[0].move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
        return handle.remove

    def keep(self, key: Hashable, value: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds to the gradients of one input, which has this value."""
        before = self._kept.get(key)
        gradient = gradient.detach()
        self._kept[key] = value, gradient.clone() if before is None else before[1] + gradient

    def attach(self, k: int, name: Hashable, constants: Any, inputs: Any, parameters: Sequence[torch.Tensor]) -> Any:
        """Returns constants that send the full batch's gradients back to the inputs of a micro-batch's call."""
        sources = [
            tensor for tensor in tree_leaves(inputs) if isinstance(tensor, torch.Tensor) and _has_gradient(tensor)
        ]
        keys: list[Hashable] = [(name, position) for position in range(len(sources))]
        keys += [("parameter", position) for position in range(len(parameters))]
        results, form = tree_flatten(constants)
        floats = [at for at, leaf in enumerate(results) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        sources += parameters
        if not floats or not sources or not torch.is_grad_enabled():
            return constants

        def give_back() -> list[torch.Tensor | None]:
            return [self.take(k, key, source) for key, source in zip(keys, sources, strict=True)]

        with no_dispatch_modes(), without_torch_function():
            attached = _attach(give_back, len(floats), *(results[at] for at in floats), *(s for s in sources))
        for at, tensor in zip(floats, attached, strict=True):
            results[at] = tensor
        return tree_unflatten(results, form)

    def take(self, k: int, key: Hashable, source: torch.Tensor) -> torch.Tensor | None:
        """Returns the gradient of a micro-batch's input; None where nothing came back in the full batch either."""
        if key not in self._kept:
            return None
        (value, gradient), (start, stop) = self._kept[key], self._bounds[k]
        # A weight has no rows of samples: each micro-batch gets its share of the gradient, and the shares add up to it.
        if value.shape == source.shape:
            return gradient * ((stop - start) / self._size)
        value, gradient = self._trim_padding(value, gradient, source.shape, stop - start)
        return take_rows(value, source.detach(), start, stop, self._size, gradient, self._order)

    def _trim_padding(
        self, value: torch.Tensor, gradient: torch.Tensor, shape: Sequence[int], count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leaves out padding that a micro-batch of `count` samples lacks, where no gradient came back to it."""
        changed = changed_dimensions(value.shape, shape) if value.dim() == len(shape) else []
        samples = next((at for at in changed if value.shape[at] * count == shape[at] * self._size), None)
        for at in changed if samples is not None else ():
            size, more = shape[at], value.shape[at] - shape[at]
            if at != samples and (more < 0 or bool(gradient.narrow(at, size, more).any())):
                raise ControlFailed("samples that are padded to another length send other gradients back")
            if at != samples:
                value, gradient = value.narrow(at, 0, size), gradient.narrow(at, 0, size)
        return value, gradient


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_floating_point() and torch.is_grad_enabled()


class _Attached(torch.autograd.Function):
    """Copies of constants with a graph: whatever gradient they get, their sources get what `give_back` returns."""

    @staticmethod
    def forward(ctx: Any, give_back: Callable[[], list[Any]], constants: int, *tensors: torch.Tensor) -> Any:
        """Copies the constants, which come before the sources."""
        ctx.give_back, ctx.constants = give_back, constants
        return tuple(tensor.clone() for tensor in tensors[:constants])

    @staticmethod
    @hands_over
    def backward(ctx: Any, *_: Any) -> Any:
        """Returns the gradients of the sources."""
        return None, None, *(None for _ in range(ctx.constants)), *ctx.give_back()


# Bound here: what listens to the user's functions replaces `apply` for the length of a pass, and must not see this one.
_attach = _Attached.apply


_HOOK = "register_hook"  # of tensors


class PinnedCode(PinnedValues):
    """Pins what code returns; `with_gradients` also what it sends back to its inputs.

    Args:
        experiment: Its micro-batches are given the values.
        order: How samples lie in results with several rows of each, as in `take_rows`.
        parameters: The parameters that the code reads without an input.
        with_gradients: Whether its gradients are pinned too, so that nothing before it is cut off.
    """

    def __init__(
        self,
        experiment: Experiment,
        order: int | None = None,
        parameters: Sequence[torch.Tensor] = (),
        *,
        with_gradients: bool = False,
    ) -> None:
        super().__init__(experiment, order)
        self._parameters = parameters
        hooks = [gradient_hooks_of(parameter) for parameter in experiment.parameters.values()]
        hooks += [backward_hooks_of(module) for _, module in experiment.named_modules()]
        self.may_hide_backward = any(any(registries) for registries in hooks)
        """Whether the user's code changes gradients somewhere, by a hook or a function with a backward of its own."""
        self._sent_back = _KeptGradients(experiment, order) if with_gradients else None
        self.needs_weights = with_gradients
        self._has_shared = False  # whether the parameters got their share in this pass

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Replaces values for the length of a pass, and listens to the gradients of the full batch's."""
        self._has_shared = False
        with ExitStack() as stack:
            if k is None and self._sent_back is not None:
                self._sent_back.clear()
                for position, parameter in enumerate(self._parameters):
                    stack.callback(self._sent_back.listen_to_parameter(("parameter", position), parameter))
            if k is None:
                stack.enter_context(intercept_applications(self._note_application))
            stack.enter_context(super().around(k))
            yield

    def _note_application(self, _: int, __: type, ___: Any, call: Callable[[], Any]) -> Any:
        self.may_hide_backward = True
        return call()

    @property
    def pins_gradients(self) -> bool:
        """Whether the gradients are pinned too."""
        return self._sent_back is not None

    def _listen(self, k: int | None, name: Hashable, inputs: Any) -> Any:
        """Returns the inputs of a call, which the full batch listens to."""
        return inputs if self._sent_back is None or k is not None else self._sent_back.listen_to_inputs(name, inputs)

    def _replace(self, k: int | None, pin: Pin, name: Hashable, inputs: Any, result: Any) -> Any:
        """Returns what replaces the result of a call; the name of another call has other gradients."""
        constants = pin(name, result)
        if self._sent_back is None:
            return constants
        if k is None:  # the values of the full batch with their graph, in new memory as in the micro-batches
            with no_dispatch_modes(), without_torch_function():
                return tree_map_only(torch.Tensor, torch.clone, result)
        # the kept gradient of a parameter is that of all calls together
        parameters, self._has_shared = () if self._has_shared else self._parameters, True
        return self._sent_back.attach(k, name, constants, inputs, parameters)


class PinnedResults(PinnedCode):
    """Pins the results of some outermost torch calls of the forward, by name, line and occurrence."""

    missing = "call other torch functions"

    def __init__(
        self,
        experiment: Experiment,
        functions: Collection[FunctionKey],
        order: int | None = None,
        *,
        with_gradients: bool = False,
    ) -> None:
        super().__init__(experiment, order, with_gradients=with_gradients)
        self._functions = frozenset(functions)

    def places(self, k: int | None, pin: Pin) -> AbstractContextManager[Any]:
        """Intercepts every torch call."""

        def handle_call(key: FunctionKey, func: Any, args: Any, kwargs: Any) -> Any:
            if key not in self._functions:
                self.may_hide_backward = self.may_hide_backward or key[0] == _HOOK
                return func(*args, **kwargs)
            args, kwargs = self._listen(k, key, (args, kwargs))
            result, name = func(*args, **kwargs), key[0]
            if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
                raise ControlFailed(f"the result of `{name}` cannot be kept constant")
            # one underscore at the end is torch's mark of a write in place; `__getitem__` ends in two
            if not name.endswith("_") or name.endswith("__"):
                return self._replace(k, pin, key, (args, kwargs), result)
            if self._sent_back is not None:
                raise ControlFailed("the gradients of a call that writes in place cannot be kept constant")
            return _write_in_place(result, pin(key, result))

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


class PinnedOutputs(PinnedCode):
    """Pins the output tensors of one module at `positions`, or all of them if there are no positions.

    With its gradients all of them are pinned.
    """

    missing = "call the module more often"

    def __init__(
        self, experiment: Experiment, path: str, positions: Sequence[int] = (), *, with_gradients: bool = False
    ) -> None:
        module = dict(experiment.named_modules())[path]
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        super().__init__(experiment, None, parameters, with_gradients=with_gradients)
        self._module = module
        self._positions = frozenset() if with_gradients else frozenset(positions)

    @contextmanager
    def places(self, k: int | None, pin: Pin) -> Iterator[None]:
        """Intercepts the module's inputs and outputs."""

        def begins(call: RunningCall, args: Any, kwargs: Any) -> Any:
            call.kept["inputs"] = self._listen(k, call.number, (args, kwargs))
            return call.kept["inputs"]

        def ends(call: RunningCall, output: Any) -> Any:
            constants = self._replace(k, pin, call.number, call.kept["inputs"], output)
            return self._choose_pinned(constants, output)

        def note_hook(func: Any, args: Any, kwargs: Any) -> Any:
            self.may_hide_backward = self.may_hide_backward or getattr(func, "__name__", "") == _HOOK
            return func(*args, **kwargs)

        hooks = FunctionMode(note_hook) if k is None else nullcontext()
        with hooks, listening({self._module: ""}, begins, ends, outside=""):
            yield

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
        experiment: Its micro-batches are given the values.
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
    """Changes what one application of a custom autograd function sends back, by its position in the forward."""

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
        raise NotImplementedError


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

    def __init__(self, experiment: Experiment, position: int) -> None:
        super().__init__(experiment, position)
        self._sent_back = _KeptGradients(experiment)

    def replace_result(self, k: int | None, pin: Pin, args: Any, call: Callable[[], Any]) -> Any:
        """Registers hooks on the arguments, which run in the backward."""
        if k is None:
            self._sent_back.clear()
        for place, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and arg.requires_grad:
                arg.register_hook(partial(self._replace_gradient, k, place, arg.detach().clone()))
        return call()

    def _replace_gradient(self, k: int | None, place: int, value: torch.Tensor, gradient: torch.Tensor) -> Any:
        if k is None:
            self._sent_back.keep(place, value, gradient)
            return None
        rows = self._sent_back.take(k, place, value)
        # gradients are what this control changes; those of a weight are no rows of samples, and always differ
        if rows is not None and rows.shape[:1] == gradient.shape[:1]:
            self.values_differed = bool(self.values_differed) or not _are_same(rows, gradient, self._agree)
        return rows


def find_layers_of_class(experiment: Experiment, path: str) -> list[nn.Module]:
    """A module and every other one of its class: they are repaired together."""
    modules = dict(experiment.named_modules())
    kind = type(modules[path])
    return [module for module in modules.values() if type(module) is kind]


class EvaluationMode(PassProbe):
    """Runs a module and others of its class in `eval` mode, so that both runs use the stored statistics."""

    def __init__(self, experiment: Experiment, path: str) -> None:
        self.modules = find_layers_of_class(experiment, path)

    def around(self, k: int | None) -> AbstractContextManager[None]:
        """Switches the modules for the length of a pass."""
        return mode_set(self.modules, "eval")


class GroupNorms(PassProbe):
    """Puts GroupNorm with the same scale and shift in the place of a BatchNorm layer and others of its class.

    Raises:
        ControlFailed: The layer is the model itself.
        ValueError: Its channels cannot be grouped.
    """

    def __init__(self, experiment: Experiment, path: str) -> None:
        layers = find_layers_of_class(experiment, path)
        self._places: list[tuple[nn.Module, str, nn.Module, nn.GroupNorm]] = []
        for _, parent in experiment.named_modules():
            for name, child in submodules_of(parent).items():
                if isinstance(child, nn.modules.batchnorm._BatchNorm) and any(child is layer for layer in layers):
                    self._places.append((parent, name, child, group_norm_for(child)))
        names = {f"GroupNorm({norm.num_groups}, {norm.num_channels})" for *_, norm in self._places}
        if not names:
            raise ControlFailed("the layer is the model itself")
        self.name = names.pop() if len(names) == 1 else "GroupNorm"

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Replaces them for the length of a pass."""
        # Not by assignment to the attribute: the user's `__setattr__` may do more than that.
        for parent, name, _, norm in self._places:
            submodules_of(parent)[name] = norm
        try:
            yield
        finally:
            for parent, name, layer, _ in self._places:
                submodules_of(parent)[name] = layer


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

    def __init__(self, _: Experiment) -> None:
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
        if getattr(func, "__name__", "") != _HOOK:
            return func(*args, **kwargs)
        self.frames.append(calling_frame())
        return _Handle()


class _Handle:
    """Stands in for the handle of a hook that was not registered."""

    def remove(self) -> None:
        """Removes nothing."""
