"""Does a module scale its channels, as a normalisation by statistics of the batch does?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gaverify.causes.bench import Bench
from gaverify.passes.calls import Call, listening
from gaverify.passes.channels import per_channel_affine
from gaverify.passes.gradients import PassProbe
from gaverify.passes.isolation import generator_states
from gaverify.passes.nesting import leaves

_VARIANCES = ("var", "var_mean", "std", "std_mean")


def normalises(bench: Bench, path: str, reduction: str) -> bool:
    """Returns whether the outputs of the module at `path` are a·input + b with one (a, b) per channel.

    Or whether it takes a variance over the batch and hands out what has its input's shape: so do normalisations that
    are no scaling of channels, because they divide by the larger of two deviations. A module with modules inside is a
    block of a network, and one that appends a deviation as a feature changes the shape.
    """
    module = dict(bench.task.named_modules())[path]
    listener = _Listener(module)
    bench.forward(listener)
    if listener.affine or _normalises_later(bench, module, listener.first):
        return True
    return listener.same_shape and reduction in _VARIANCES and not any(True for _ in module.children())


def _normalises_later(bench: Bench, module: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Whether a module scales its channels once its state has moved: fresh statistics may undo the batch's exactly."""
    restore = generator_states()
    try:
        with torch.no_grad():
            module(*inputs)
            output = module(*inputs)
    except Exception:  # it needs more than what it was given by position; then only the pass tells
        return False
    finally:
        bench.state.restore()
        restore()
    first, given = _first_tensor(inputs), _first_tensor(output)
    return first is not None and given is not None and per_channel_affine(first, given)


def _first_tensor(inputs: Any) -> torch.Tensor | None:
    return next((leaf for _, leaf in leaves(inputs) if isinstance(leaf, torch.Tensor)), None)


class _Listener(PassProbe):
    """Looks at the input and output of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.affine = False
        self.same_shape = False
        self.first: tuple[Any, ...] = ()

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Listens for the length of a forward."""
        with listening({self._module: ""}, ends=self._hear, outside=""):
            yield

    def _hear(self, call: Call, output: Any) -> None:
        self.first = self.first or call.args
        first, given = _first_tensor(call.args), _first_tensor(output)  # a flow hands out a determinant beside it
        if first is not None and given is not None:
            self.same_shape = self.same_shape or first.shape == given.shape
            with torch._C.DisableTorchFunction():
                self.affine = self.affine or per_channel_affine(first, given)
