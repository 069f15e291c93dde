"""Does a module scale its channels, as a normalisation by statistics of the batch does?"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gaverify.causes.bench import Bench
from gaverify.causes.trace.operations import intercept_calls
from gaverify.passes.calls import Call, listening, per_channel_affine
from gaverify.passes.gradients import PassProbe
from gaverify.passes.isolation import generator_states
from gaverify.passes.nesting import leaves
from gaverify.records.experiment import FunctionKey
from gaverify.thresholds import SMALL_PART
from gaverify.torch_internals import without_torch_function

_VARIANCES = ("var", "var_mean", "std", "std_mean")


def is_normalisation(bench: Bench, path: str, reduction: str, functions: Collection[FunctionKey] = ()) -> bool:
    """Returns whether the outputs of the module at `path` are a·input + b with one (a, b) per channel.

    Or whether it takes a variance over the batch and hands out what has its input's shape: so do normalisations that
    are no scaling of channels, because they divide by the larger of two deviations. A module with modules inside is a
    block of a network, and one that appends a deviation as a feature changes the shape. Or whether a mean that it takes
    (by one of `functions`) and what else it does undo each other.
    """
    module = dict(bench.experiment.named_modules())[path]
    listener = _Listener(module)
    bench.experiment.forward(None, listener)
    if listener.affine or _normalises_later(bench, module, listener.first):
        return True
    if listener.same_shape and reduction in _VARIANCES and not any(True for _ in module.children()):
        return True
    return _undoes_scaling(bench, module, listener, functions)


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
        bench.experiment.state.restore()
        restore()
    input_tensor, output_tensor = _first_tensor(inputs), _first_tensor(output)
    return input_tensor is not None and output_tensor is not None and per_channel_affine(input_tensor, output_tensor)


def _undoes_scaling(bench: Bench, module: nn.Module, before: _Listener, functions: Collection[FunctionKey]) -> bool:
    """Whether the outputs of a module stay when what is reduced over the batch becomes 2 · it + 1.

    So they do where a mean is subtracted and a deviation divided by, wherever that is written. An epsilon beside the
    variance moves them a little. What hardly hears of the reduction, as a solver of its error norm, undoes nothing.

    Args:
        bench: Where to run.
        module: Whose outputs.
        before: What listened to it in the forward as it is.
        functions: The torch calls that reduce: the first of them is given another input.
    """
    listener = _Listener(module, functions)
    if functions:
        bench.experiment.forward(None, listener)
    if not listener.scaled or not listener.outputs:
        return False
    of_results = _Listener(module, functions, of_results=True)
    bench.experiment.forward(None, of_results)
    distance = min(_size(before), _distance(before, of_results))
    return _distance(before, listener) <= SMALL_PART * distance


def _size(listener: _Listener) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(output)) for output in listener.outputs))


def _distance(a: _Listener, b: _Listener) -> float:
    pairs = zip(a.outputs, b.outputs, strict=False)
    return math.hypot(*(float(torch.linalg.vector_norm(x - y)) for x, y in pairs))


def _first_tensor(inputs: Any) -> torch.Tensor | None:
    return next((leaf for _, leaf in leaves(inputs) if isinstance(leaf, torch.Tensor)), None)


class _Listener(PassProbe):
    """Looks at the input and outputs of one module, and scales in place what the first of some torch calls is given.

    Or, where `of_results`, what that call returns.
    """

    def __init__(self, module: nn.Module, functions: Collection[FunctionKey] = (), *, of_results: bool = False) -> None:
        self._module, self._functions, self._of_results = module, functions, of_results
        self.affine = False
        self.same_shape = False
        self.first: tuple[Any, ...] = ()
        self.outputs: list[torch.Tensor] = []
        self.scaled = False

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Listens for the length of a forward."""

        def handle_call(key: FunctionKey, func: Any, args: Any, kwargs: Any) -> Any:
            scaled = args[0] if args else None
            first = key in self._functions and not self.scaled and isinstance(scaled, torch.Tensor)
            if first and self._of_results:
                scaled = result = func(*args, **kwargs)
            if first:
                with without_torch_function(), torch.no_grad():
                    for tensor in scaled if isinstance(scaled, tuple) else (scaled,):
                        tensor.data.mul_(2).add_(1)  # `detach` would note the write, and a hooked input forbids it
                self.scaled = True
            return result if first and self._of_results else func(*args, **kwargs)

        with listening({self._module: ""}, ends=self._note_output, outside=""), intercept_calls(handle_call):
            yield

    def _note_output(self, call: Call, output: Any) -> None:
        self.first = self.first or call.args
        input_tensor, output_tensor = (
            _first_tensor(call.args),
            _first_tensor(output),
        )  # a flow hands out a determinant beside it
        with without_torch_function():
            if input_tensor is not None and output_tensor is not None:
                self.same_shape = self.same_shape or input_tensor.shape == output_tensor.shape
                self.affine = self.affine or per_channel_affine(input_tensor, output_tensor)
            tensors = [leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
            self.outputs += [tensor.detach().clone() for tensor in tensors if tensor.is_floating_point()]
