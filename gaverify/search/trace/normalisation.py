"""Does a module scale its channels, as a normalisation by statistics of the batch does?"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gaverify.passes.calls import Call, listening, per_channel_affine
from gaverify.passes.gradients import PassProbe
from gaverify.passes.isolation import generator_states
from gaverify.passes.nesting import leaves
from gaverify.records.experiment import FunctionKey
from gaverify.search.bench import Bench
from gaverify.search.trace.operations import intercept_calls
from gaverify.thresholds import SMALL_PART
from gaverify.torch_internals import without_torch_function

_VARIANCES = ("var", "var_mean", "std", "std_mean")


def is_normalisation(bench: Bench, path: str, reduction: str, functions: Collection[FunctionKey] = ()) -> bool:
    """Returns whether a module normalises over the batch; one of three properties is enough.

    1. Its outputs are a·input + b with one (a, b) per channel.
    2. It computes a variance over the batch, and its output has the shape of its input.
    3. Its outputs stay the same if the input of its reduction over the batch is scaled and shifted.

    Args:
        bench: Where to run.
        path: The module's path.
        reduction: Name of the operation that reduces over the batch.
        functions: The torch calls that reduce.
    """
    module = dict(bench.experiment.named_modules())[path]
    listener = _ModuleProbe(module)
    bench.experiment.forward(None, listener)
    if listener.affine or _normalises_later(bench, module, listener.first):
        return True
    # For normalisations that scale no channel, such as those that divide by the larger of two deviations. A module that
    # contains modules is a block of a network, and one that appends a deviation as a feature changes the shape.
    if listener.same_shape and reduction in _VARIANCES and not any(True for _ in module.children()):
        return True
    return _undoes_scaling(bench, module, listener, functions)


def _normalises_later(bench: Bench, module: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Whether a module scales its channels in a second call: fresh state may cancel the batch's statistics exactly."""
    restore = generator_states()
    try:
        with torch.no_grad():
            module(*inputs)  # fresh statistics may undo those of the batch exactly; after one forward they do not
            output = module(*inputs)
    except Exception:  # it needs keyword arguments, which were not recorded: only the first call counts then
        return False
    finally:
        bench.experiment.state.restore()
        restore()
    input_tensor, output_tensor = _first_tensor(inputs), _first_tensor(output)
    return input_tensor is not None and output_tensor is not None and per_channel_affine(input_tensor, output_tensor)


def _undoes_scaling(bench: Bench, module: nn.Module, before: _ModuleProbe, functions: Collection[FunctionKey]) -> bool:
    """Whether the outputs of a module stay when the input x of its reduction over the batch becomes 2x + 1.

    They do wherever a mean is subtracted and the result divided by a deviation, except for the epsilon beside it.

    Args:
        bench: Where to run.
        module: The module.
        before: The outputs in the forward as it is.
        functions: The torch calls that reduce: the first of them is given another input.
    """
    listener = _ModuleProbe(module, functions)
    if functions:
        bench.experiment.forward(None, listener)
    if not listener.scaled or not listener.outputs:
        return False
    # A module that hardly depends on the reduction (a solver on its error norm) normalises nothing. Scaling the result
    # of the reduction shows how much the outputs depend on it.
    of_results = _ModuleProbe(module, functions, of_results=True)
    bench.experiment.forward(None, of_results)
    distance = min(_size(before), _distance(before, of_results))
    return _distance(before, listener) <= SMALL_PART * distance


def _size(listener: _ModuleProbe) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(output)) for output in listener.outputs))


def _distance(a: _ModuleProbe, b: _ModuleProbe) -> float:
    pairs = zip(a.outputs, b.outputs, strict=False)
    return math.hypot(*(float(torch.linalg.vector_norm(x - y)) for x, y in pairs))


def _first_tensor(inputs: Any) -> torch.Tensor | None:
    return next((leaf for _, leaf in leaves(inputs) if isinstance(leaf, torch.Tensor)), None)


class _ModuleProbe(PassProbe):
    """Compares input and outputs of one module, and scales the input of the first of some torch calls in place.

    With `of_results` it scales what that call returns instead.
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
        # the first of several outputs: a flow returns a determinant beside it
        input_tensor, output_tensor = _first_tensor(call.args), _first_tensor(output)
        with without_torch_function():
            if input_tensor is not None and output_tensor is not None:
                self.same_shape = self.same_shape or input_tensor.shape == output_tensor.shape
                self.affine = self.affine or per_channel_affine(input_tensor, output_tensor)
            tensors = [leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
            self.outputs += [tensor.detach().clone() for tensor in tensors if tensor.is_floating_point()]
