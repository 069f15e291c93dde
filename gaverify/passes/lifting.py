"""Higher precision without a copy of the model: a weight is lifted for each operation, and again in the backward.

    forward    each operation gets the weight in float64, or float32; what it saves of that is the weight itself
    backward   what was saved is lifted again; the gradient is handed to who listens, and freed

So there is never more in that precision than the weights of one operation, and no gradient that nobody holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import get_default_nowrap_functions

from gaverify.errors import ProblemError
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import Gradients, GradientStore, PassProbe
from gaverify.passes.precision import return_freed
from gaverify.torch_internals import (
    gradient_hooks_of,
    no_dispatch_modes,
    tree_map_only,
    version_of,
    without_subclass_function,
    without_torch_function,
)
from gaverify.tracebacks import hands_over

Listener = Callable[[int, torch.Tensor], None]
"""Is given the place of a parameter among the experiment's, and a gradient of it in the higher precision."""
_GRADIENT = torch.Tensor.grad
_FREED = 1 << 27
"""Bytes of copies after which freed memory goes back to the system: results that stay lie between, and fill no gap."""
# Calls that are about the weight, and not its values.
_SHAPES = ("__len__", "dim", "is_complex", "is_contiguous", "is_floating_point", "numel", "size", "stride")
_MEMORY = ("__get__", "__set__", "data_ptr", "untyped_storage")
_AS_THEY_ARE = frozenset((*_SHAPES, *_MEMORY, "backward", "register_hook", "type"))


class LiftedWeights(PassProbe):
    """Lifts the trainable weights of an experiment for the operations that take them.

    Args:
        experiment: Its weights are lifted to its `lift`; those that are so precise already, or complex, stay.
        listen: Is given every gradient.

    Raises:
        ProblemError: A weight is no plain parameter, or has hooks, which belong to a gradient that is not formed; or,
            in a pass, the forward writes to a weight or looks at its gradient, which are not those that it would see.
    """

    def __init__(self, experiment: Experiment, listen: Listener) -> None:
        places = {id(weight): place for place, weight in enumerate(experiment.parameters.values())}
        weights = {id(weight): weight for root in experiment.modules for weight in root.parameters()}
        self.precision = experiment.lift or torch.float64
        self._weights = [
            (weight, places.get(key))
            for key, weight in weights.items()
            if weight.dtype.is_floating_point and weight.dtype.itemsize < self.precision.itemsize
        ]
        for weight, _ in self._weights:
            if type(weight) is not nn.Parameter or has_hooks(weight):
                raise ProblemError("a weight is not a plain parameter, or has hooks")
        self._listen = listen
        self._state = experiment.state
        self._copied = 0  # bytes on the CPU since memory was returned
        self._refused = False  # in this pass
        self._detached: list[torch.Tensor] = []  # what shares the memory of a copy, and may be written to later
        # By the address of a lifted copy: what autograd saves may be a view of it, such as its transpose.
        self._live: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    @property
    def places(self) -> frozenset[int]:
        """The places of the parameters whose gradients are handed over."""
        return frozenset(place for _, place in self._weights if place is not None)

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Lifts during the forward and the backward, also where a part of the forward runs again in that."""
        self._refused, self._detached = False, []
        try:
            for weight, place in self._weights:
                # The class is exchanged, not the object: closures and ties hold the very same parameter.
                weight.__class__ = _Lifted
                # Not an attribute of the weight, which a restored state would take away.
                _LIFTS[id(weight)] = self, place
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            for weight, _ in self._weights:
                weight.__class__ = nn.Parameter
                _LIFTS.pop(id(weight), None)
        written = set(map(id, self._state.written_tensors))
        # Code in C++ takes a weight as it is, whose gradient is then formed in its own precision.
        trained = [weight for weight, place in self._weights if place is not None]
        is_other = any(weight.grad is not None or id(weight) in written for weight in trained)
        if is_other or self._refused or any(map(version_of, self._detached)):
            raise ProblemError("the forward writes to a weight, looks at its gradient, or takes it in another way")

    def refuse(self) -> None:
        """Lets the pass fail at its end; the user's code may catch what is raised inside it."""
        self._refused = True

    def watch(self, detached: torch.Tensor) -> None:
        """Lets the pass fail at its end if something has written to a part of a copy by then."""
        self._detached.append(detached)

    @hands_over  # a device without float64 refuses
    def lift(self, place: int | None, weight: torch.Tensor) -> torch.Tensor:
        """Returns a weight in the higher precision, and listens to its gradient."""
        self._count(weight)
        if place is None:
            return _copy(weight, self.precision)
        lifted: torch.Tensor = _copy_with_graph(weight, self.precision, place, self._listen)  # type: ignore[no-untyped-call]
        # An address is another tensor's once this one is gone: the reference tells.
        self._live[lifted.untyped_storage().data_ptr()] = weakref.ref(lifted), weight
        return lifted

    def _count(self, weight: torch.Tensor) -> None:
        self._copied += weight.numel() * self.precision.itemsize if weight.is_cpu else 0
        if self._copied > _FREED:
            return_freed()
            self._copied = 0

    def _pack(self, saved: torch.Tensor) -> Any:
        lifted, weight = self._live.get(saved.untyped_storage().data_ptr(), (None, None))
        if lifted is None or lifted() is None:
            # detached: a node that saves its own output would otherwise keep itself alive where no backward follows
            with no_dispatch_modes(), without_torch_function():
                return saved.detach()
        # The weight in place of its copy: the copy is made again in the backward, and none lives in between.
        return weight, saved.size(), saved.stride(), saved.storage_offset()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        weight, *view = packed
        self._count(weight)
        with without_subclass_function():
            return _copy(weight, self.precision).as_strided(*view)


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether something waits for the gradient of a parameter."""
    return any(gradient_hooks_of(parameter))


def _copy(weight: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    # a trace that saw the copy would look for the line of the user's that made it
    with no_dispatch_modes(), without_torch_function():
        return weight.detach().to(to)


class _Lift(torch.autograd.Function):
    """A weight in higher precision, whose gradient is handed over and goes no further."""

    @staticmethod
    @hands_over
    def forward(ctx: Any, weight: torch.Tensor, to: torch.dtype, place: int, listen: Listener) -> torch.Tensor:
        """Copies the weight."""
        ctx.place, ctx.listen = place, listen
        ctx.set_materialize_grads(False)  # a gradient that is missing is no zero
        return _copy(weight, to)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Hands the gradient over."""
        # Nothing is returned: a higher gradient of all weights is the memory that lifting saves.
        if gradients[0] is not None:
            ctx.listen(ctx.place, gradients[0])
        return None, None, None, None


# Bound here: what listens to the user's functions replaces `apply` for the length of a pass, and must not see this one.
_copy_with_graph = _Lift.apply


_LIFTS: dict[int, tuple[LiftedWeights, int | None]] = {}
"""The identity of a weight while it is lifted → by whom, and its place."""


class _Lifted(nn.Parameter):
    """A weight while it is lifted: it says that it has the higher precision, and each operation gets it so."""

    dtype = property(lambda self: _LIFTS[id(self)][0].precision)  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        # nobody lifts the copy, which may also outlive the pass
        _LIFTS[id(self)][0].refuse()
        with without_subclass_function():
            memo[id(self)] = copied = nn.Parameter(self.data.clone(), self.requires_grad)
        return copied

    @classmethod
    @hands_over
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_subclass_function():
            if func in get_default_nowrap_functions() or getattr(func, "__name__", "") in _AS_THEY_ARE:
                if getattr(func, "__self__", None) is _GRADIENT:
                    _LIFTS[id(args[0])][0].refuse()
                return func(*args, **(kwargs or {}))
            copies: list[torch.Tensor] = []
            lifts: list[LiftedWeights] = []

            def lift(weight: _Lifted) -> torch.Tensor:
                lifted, place = _LIFTS[id(weight)]
                lifts.append(lifted)
                copies.append(lifted.lift(place, weight))
                return copies[-1]

            args, kwargs = tree_map_only(_Lifted, lift, (args, kwargs or {}))
            if func is torch.autograd.grad:  # these copies are not the ones that were used
                lifts[0].refuse()
            result = func(*args, **kwargs)
            if any(map(version_of, copies)):  # the copies took a write, and the weights did not
                lifts[0].refuse()
            if getattr(func, "__name__", "") == "detach":
                lifts[0].watch(result)
            return result


class CollectedGradients(LiftedWeights, GradientStore):
    """Lifts the weights of an experiment, and adds up their gradients: one set in that precision, and no weights."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment, self._add)
        self._parameters = dict(experiment.parameters)
        self._collected = self.places
        self._gradients: dict[int, torch.Tensor] = {}

    def _add(self, place: int, gradient: torch.Tensor) -> None:
        before = self._gradients.get(place)
        # in new memory: autograd may give others the same tensor
        self._gradients[place] = gradient if before is None else before + gradient

    def clear(self) -> None:
        """Lets go of them."""
        self._gradients = {}

    def take(self) -> Gradients:
        """Returns what has accumulated so far, by parameter name."""
        return {
            name: self._gradients.get(place) if place in self._collected else parameter.grad
            for place, (name, parameter) in enumerate(self._parameters.items())
        }


@contextmanager
def lift_weights(experiment: Experiment, precision: torch.dtype) -> Iterator[Experiment]:
    """Gives the experiment in a higher precision, as `in_precision` does, with weights that are lifted in every use.

    Args:
        experiment: The experiment to run.
        precision: `torch.float64` or `torch.float32`.

    Raises:
        ProblemError: That does not go with its weights, its engine or its strategy.
    """
    weights = experiment.parameters.values()
    if experiment.ranks is not None or experiment.strategy != "accumulate" or any(map(torch.is_complex, weights)):
        raise ProblemError("its gradients are not formed one by one, or are complex")
    with experiment.in_precision(precision, weights=False) as exact:
        yield replace(exact, store=CollectedGradients(exact))
