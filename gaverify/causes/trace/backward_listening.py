"""Listens to gradients at the boundaries of modules and custom functions, and compares the runs sample by sample.

Shapes: B samples, micro-batches of samples `start` to `stop - 1`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gaverify.causes.bench import Bench
from gaverify.causes.rows import ControlFailed, rows_for
from gaverify.causes.trace.traces import Frame
from gaverify.passes.gradients import PassProbe
from gaverify.tracebacks import calling_frame, hands_over

Key = tuple[int, str, int]  # the call, "outputs" or "inputs", the position of the tensor


class GradientListener(PassProbe):
    """Keeps the gradients at module boundaries of the full batch, and compares the micro-batches' with their rows."""

    def __init__(self, bench: Bench) -> None:
        self._names = {module: path for path, module in bench.task.named_modules()}
        self._bounds, self._size = list(bench.task.bounds()), bench.task.batch_size
        self._full: dict[Key, torch.Tensor] = {}
        self._worst: dict[Key, float] = {}
        self.paths: dict[int, str] = {}
        self.outermost: set[int] = set()
        self.functions: dict[int, tuple[int, str, Frame]] = {}  # position among applications, class, line
        self._k: int | None = None
        self._calls = -1
        self._stack: list[int] = []

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Registers tensor hooks while the forward runs; they fire in its backward."""
        self._k, self._calls, self._stack = k, -1, []
        handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave),
        ]
        self._applied = 0
        try:
            with applications(self._apply):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def by_call(self) -> dict[int, dict[str, list[float]]]:
        """The largest relative differences at every boundary that both runs passed, by module call and side."""
        found: dict[int, dict[str, list[float]]] = {}
        for (call, side, _), difference in self._worst.items():
            found.setdefault(call, {}).setdefault(side, []).append(difference)
        return found

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._calls += 1
        if not self._stack:
            self.outermost.add(self._calls)
        self._stack.append(self._calls)
        if module in self._names:
            self.paths[self._calls] = self._names[module]
            self._listen(inputs, self._calls, "inputs")

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._stack:
            call = self._stack.pop()
            if module in self._names:
                self._listen(output, call, "outputs")

    @hands_over
    def _apply(self, kind: type, args: Any, call: Callable[[], Any]) -> Any:
        """Listens at a custom function; what its own arguments were used for besides shows in other calls."""
        self._calls += 1
        number, frame = self._calls, calling_frame()
        self.functions[number] = (self._applied, kind.__name__, frame)
        self._applied += 1
        inside = [self.paths[call] for call in self._stack if call in self.paths]
        if inside:
            self.paths[number] = inside[-1]
        self._listen(args, number, "inputs")
        result = call()
        self._listen(result, number, "outputs")
        return result

    def _listen(self, value: Any, call: int, side: str) -> None:
        tensors = value if isinstance(value, tuple | list) else (value,)
        for position, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda g, key=(call, side, position), k=self._k: self._hear(key, k, g))

    def _hear(self, key: Key, k: int | None, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            if k is None:
                self._full[key] = gradient.detach().clone()
                return
            full = self._full.get(key)
            if full is None or full.shape == gradient.shape:
                return  # no rows of its own
            try:
                rows = rows_for(full, gradient, *self._bounds[k], self._size)
            except ControlFailed:
                return
            scale = float(rows.norm()) or 1.0
            difference = float((gradient.detach() - rows).norm()) / scale
            self._worst[key] = max(self._worst.get(key, 0.0), difference)


@contextmanager
def applications(changed: Callable[[type, Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Lets `changed(function class, arguments, call)` stand in for every application of a custom autograd function."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(kind: type, *args: Any, **kwargs: Any) -> Any:
        @hands_over
        def call() -> Any:
            return original.__func__(kind, *args, **kwargs)

        return changed(kind, args, call)

    try:
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
