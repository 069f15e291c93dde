"""Higher precision without a copy of the model: a weight is lifted for each operation, and again in the backward.

    forward    each operation gets the weight in float64, or float32; what it saves of that is the weight itself
    backward   what was saved is lifted again; the gradient is handed to who listens, and freed

So there is never more in that precision than the weights of one operation, and no gradient is held.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import get_default_nowrap_functions

from gaverify.errors import ProblemError
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import PassProbe
from gaverify.torch_internals import gradient_hooks_of, tree_map_only, without_subclass_function
from gaverify.tracebacks import hands_over

Listener = Callable[[int, torch.Tensor], None]
"""Is given the place of a parameter among the experiment's, and a gradient of it in the higher precision."""
_AS_THEY_ARE = frozenset(("__get__", "__set__", "backward", "register_hook", "type"))  # of the weight, not its values


class LiftedWeights(PassProbe):
    """Lifts the trainable weights of an experiment for the operations that take them.

    Args:
        experiment: Whose weights are lifted to its `lift`; those that are so precise already, or complex, stay.
        listen: Is given every gradient.

    Raises:
        ProblemError: A weight is no plain parameter, or has hooks, which belong to a gradient that is not formed.
    """

    def __init__(self, experiment: Experiment, listen: Listener) -> None:
        places = {id(weight): place for place, weight in enumerate(experiment.parameters.values())}
        weights = {id(weight): weight for root in experiment.modules for weight in root.parameters()}
        self._to = experiment.lift or torch.float64
        self._weights = [
            (weight, places.get(key))
            for key, weight in weights.items()
            if weight.dtype.is_floating_point and weight.dtype.itemsize < self._to.itemsize
        ]
        for weight, _ in self._weights:
            if type(weight) is not nn.Parameter or has_hooks(weight):
                raise ProblemError("a weight is not a plain parameter, or has hooks")
        self._listen = listen
        # By the address of a lifted copy: what autograd saves may be a view of it, such as its transpose.
        self._live: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    @property
    def places(self) -> frozenset[int]:
        """The places of the parameters whose gradients are handed over."""
        return frozenset(place for _, place in self._weights if place is not None)

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Lifts during the forward and the backward, also where a part of the forward runs again in that."""
        try:
            for weight, place in self._weights:
                # The class is exchanged, not the object: closures and ties hold the very same parameter.
                weight.__class__ = _Lifted
                cast(_Lifted, weight).lift, cast(_Lifted, weight).precision = partial(self._lift, place), self._to
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            for weight, _ in self._weights:
                weight.__class__ = nn.Parameter
                del weight.__dict__["lift"], weight.__dict__["precision"]

    @hands_over  # a device without float64 refuses
    def _lift(self, place: int | None, weight: torch.Tensor) -> torch.Tensor:
        if place is None:
            return weight.detach().to(self._to)
        lifted: torch.Tensor = _Lift.apply(weight, self._to, place, self._listen)  # type: ignore[no-untyped-call]
        # An address is another tensor's once this one is gone: the reference tells.
        self._live[lifted.untyped_storage().data_ptr()] = weakref.ref(lifted), weight
        return lifted

    def _pack(self, saved: torch.Tensor) -> Any:
        lifted, weight = self._live.get(saved.untyped_storage().data_ptr(), (None, None))
        if lifted is None or lifted() is None:
            return saved
        # The weight in place of its copy: the copy is made again in the backward, and none lives in between.
        return weight, saved.size(), saved.stride(), saved.storage_offset()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        weight, *view = packed
        with without_subclass_function():
            return cast(torch.Tensor, weight.detach().to(self._to).as_strided(*view))


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether something waits for the gradient of a parameter."""
    return any(gradient_hooks_of(parameter))


class _Lift(torch.autograd.Function):
    """A weight in higher precision, whose gradient is handed over and goes no further."""

    @staticmethod
    @hands_over
    def forward(ctx: Any, weight: torch.Tensor, to: torch.dtype, place: int, listen: Listener) -> torch.Tensor:
        """Copies the weight."""
        ctx.place, ctx.listen = place, listen
        return weight.detach().to(to)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Hands the gradient over."""
        # Nothing is returned: a higher gradient of all weights is the memory that lifting saves.
        ctx.listen(ctx.place, gradients[0])
        return None, None, None, None


class _Lifted(nn.Parameter):
    """A weight while it is lifted: it says that it has the higher precision, and each operation gets it so."""

    lift: Callable[[torch.Tensor], torch.Tensor]
    precision: torch.dtype
    dtype = property(lambda self: self.precision)  # type: ignore[assignment]

    @classmethod
    @hands_over
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_subclass_function():
            if func in get_default_nowrap_functions() or getattr(func, "__name__", "") in _AS_THEY_ARE:
                return func(*args, **(kwargs or {}))
            args, kwargs = tree_map_only(_Lifted, lambda weight: weight.lift(weight), (args, kwargs or {}))
            return func(*args, **kwargs)
