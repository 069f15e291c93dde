"""Compares the gradients at the boundaries of modules and custom functions sample by sample.

Shapes: B samples, micro-batches of samples `start` to `stop - 1`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from gaverify.passes.calls import Call, listening
from gaverify.passes.gradients import PassProbe
from gaverify.search.bench import Bench
from gaverify.search.rows import ControlFailed, take_rows
from gaverify.search.trace.traces import Frame
from gaverify.tracebacks import calling_frame, hands_over

Key = tuple[int, str, int]  # the call, "outputs" or "inputs", the position of the tensor


class BoundaryGradients(PassProbe):
    """Keeps the gradients at module boundaries of the full batch, and compares the micro-batches' with their rows."""

    def __init__(self, bench: Bench) -> None:
        self._names = {module: path for path, module in bench.experiment.named_modules()}
        self._bounds, self._size = list(bench.experiment.bounds()), bench.experiment.batch_size
        self._full: dict[Key, torch.Tensor] = {}
        self.worst: dict[int, dict[str, float]] = {}  # the largest relative difference, by call and side
        self.paths: dict[int, str] = {}
        self.outermost: set[int] = set()
        self.functions: dict[int, tuple[int, str, Frame]] = {}  # position among applications, class, line
        self._k: int | None = None
        self._calls = -1
        self._running: list[Call] = []

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Registers tensor hooks while the forward runs; they fire in its backward."""
        self._k, self._calls = k, -1
        with listening(self._names, self._enter, self._leave) as self._running, intercept_applications(self._apply):
            yield

    def _enter(self, call: Call, inputs: Any, _: Any) -> None:
        self._calls += 1
        if not call.parents:
            self.outermost.add(self._calls)
        if call.module in self._names:
            call.kept["at"] = self._calls
            self.paths[self._calls] = call.path
            self._listen(inputs, self._calls, "inputs")

    def _leave(self, call: Call, output: Any) -> None:
        if "at" in call.kept:
            self._listen(output, call.kept["at"], "outputs")

    @hands_over
    def _apply(self, position: int, kind: type, args: Any, call: Callable[[], Any]) -> Any:
        """Hooks the inputs and outputs of a custom function."""
        self._calls += 1
        number = self._calls
        self.functions[number] = (position, kind.__name__, calling_frame())
        inside = [running.path for running in self._running if running.module in self._names]
        if inside:
            self.paths[number] = inside[-1]
        self._listen(args, number, "inputs")
        result = call()
        self._listen(result, number, "outputs")
        return result

    def _listen(self, value: Any, call: int, side: str) -> None:
        # Modules' own backward hooks would put a node at each boundary, and refuse outputs that are changed in place;
        # hooks on tensors leave the graph as it is.
        tensors = value if isinstance(value, tuple | list) else (value,)
        for position, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda g, key=(call, side, position), k=self._k: self._compare_gradient(key, k, g))

    def _compare_gradient(self, key: Key, k: int | None, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            if k is None:
                self._full[key] = gradient.detach().clone()
                return
            full = self._full.get(key)
            if full is None or full.shape == gradient.shape:
                return  # without a row per sample it is a share of the full batch's gradient, and not the same number
            try:
                rows = take_rows(full, gradient, *self._bounds[k], self._size)
            except ControlFailed:
                return
            scale = float(rows.norm()) or 1.0
            difference, sides = float((gradient.detach() - rows).norm()) / scale, self.worst.setdefault(key[0], {})
            sides[key[1]] = max(sides.get(key[1], 0.0), difference)


@contextmanager
def intercept_applications(changed: Callable[[int, type, Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Replaces every application of a custom autograd function by `changed(position, class, arguments, call)`."""
    original, positions = torch.autograd.Function.__dict__["apply"], count()

    def apply(kind: type, *args: Any, **kwargs: Any) -> Any:
        @hands_over
        def call() -> Any:
            # a classmethod, and from torch 2.14 on a descriptor in C: both are bound by `__get__`
            return original.__get__(None, kind)(*args, **kwargs)

        return changed(next(positions), kind, args, call)

    try:
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
