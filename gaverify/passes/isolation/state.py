"""`ModelState`: the values that a forward may change, taken once and restorable any number of times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gaverify.errors import InternalError
from gaverify.passes.isolation.flags import ARITHMETIC, check_initialised, flag_states
from gaverify.passes.isolation.origins import packages_of
from gaverify.passes.isolation.tensors import Tensors
from gaverify.passes.isolation.walk import Walk


class ModelState:
    """The values that a forward may change, taken once and restorable any number of times.

    Buffers, attributes and what the loss function can reach are copied; parameters and other large tensors only when
    something is about to write to them (`before_write`, called from the dispatcher).

    Args:
        modules: The model, and the loss where it is a module.
        others: What else the forward runs: the loss function.
        part_of: The modules that `modules` are a part of, for the state of a part: its arguments are not copied before
            something writes to them, and the gradients of all the parameters belong to the pass that is running.

    Raises:
        ProblemError: A lazy module has no parameters yet.
    """

    def __init__(
        self, modules: list[nn.Module], others: tuple[Any, ...] = (), *, part_of: Sequence[nn.Module] = ()
    ) -> None:
        registered = [tensor for root in modules for tensor in (*root.parameters(), *root.buffers())]
        check_initialised(registered)
        self._flags = flag_states(ARITHMETIC)  # not those of kernels, which a pass sets for itself
        self._tensors = Tensors(0) if part_of else Tensors()
        running = frozenset(map(id, registered)) | {id(p) for root in part_of for p in root.parameters()}
        self._walk = Walk(self._tensors, running, packages_of(others))
        with torch.no_grad(), torch._C.DisableTorchFunction():
            self._walk.follow([*modules, *others])

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """The parameters, and the large tensors, that some pass has written to."""
        return self._tensors.written

    def before_write(self, tensor: torch.Tensor) -> None:
        """Keeps the values of parameters that share storage with `tensor`, if there are any, before they change."""
        self._tensors.before_write(tensor)

    def forget(self) -> None:
        """Lets go of every value: nothing is put back any more, and what the values are of can be freed."""
        self._tensors = Tensors(0)
        self._walk = Walk(self._tensors, frozenset(), frozenset())

    def restore(self) -> None:
        """Puts every value back, in place, so that ties and outside references survive.

        Raises:
            InternalError: Something could not be put back; everything else has been all the same.
        """
        failure: Exception | None = None
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for restore in (self._flags, *self._walk.restorers, *self._tensors.restorers):
                try:
                    restore()
                except Exception as error:
                    failure = failure or error
        if failure is not None:
            raise InternalError(f"state could not be put back: {type(failure).__name__}: {failure}") from failure
