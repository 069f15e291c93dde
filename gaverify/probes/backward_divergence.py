"""Where does the backward start to depend on the batch, although all forwards agree?

Gradients are compared at every module's outputs and inputs, sample by sample: with the right micro-batch weights the
gradient of sample i is the same number in the full batch and in its micro-batch.

Shapes: B samples, micro-batches of samples `start` to `stop - 1`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gaverify.gradients import PassProbe, accumulated_gradients, full_batch_gradients
from gaverify.measurements import ControlRun, Operation
from gaverify.probes.controls import Bench
from gaverify.probes.holding import ControlFailed, OutputHeld, rows_for
from gaverify.tracebacks import shown

_AGREE = 1e-6
Key = tuple[int, str, int]  # the module call, "outputs" or "inputs", the position of the tensor


@dataclass(frozen=True)
class BackwardCulprit:
    """The module inside which gradients that agreed stop to agree; `hooks` where hooks on parameters do it instead."""

    operation: Operation
    control: ControlRun | None
    hooks: bool = False


def backward_culprit(bench: Bench) -> BackwardCulprit | None:
    """Returns where the backward diverges, with a control run; None where no single place was found."""
    hooked = [name for name, parameter in bench.task.parameters.items() if _hooked(parameter)]
    if hooked:
        without = bench.run("gradient hooks on parameters removed", _WithoutHooks(bench))
        if without.rounding:
            owner = hooked[0].rpartition(".")[0]
            return BackwardCulprit(Operation("gradient hook", owner, _kinds(bench).get(owner, "")), without, hooks=True)
    listener = _listened(bench)
    path = _diverging_module(listener)
    if path is None:
        return BackwardCulprit(_loss_function(bench), None) if _starts_in_the_loss(listener) else None
    kind = _kinds(bench)[path]
    modules = {name: module for root in bench.task.modules for name, module in root.named_modules()}
    held = OutputHeld(modules[path], list(bench.task.bounds()), bench.task.batch_size)
    try:
        control = bench.run(f"the output of `{path or '(root)'}` held constant", held)
    except ControlFailed:
        control = None
    return BackwardCulprit(Operation("backward", path, kind), control)


def _kinds(bench: Bench) -> dict[str, str]:
    return {path: type(module).__name__ for root in bench.task.modules for path, module in root.named_modules()}


def _listened(bench: Bench) -> _GradientListener:
    """Runs both strategies and compares the gradients at all module boundaries."""
    listener = _GradientListener(bench)
    probe = bench.with_probe(listener)
    full, _ = full_batch_gradients(bench.task, bench.state, bench.record, lift=bench.lift, probe=probe)
    accumulated_gradients(bench.task, bench.state, bench.record, full, lift=bench.lift, probe=probe)
    return listener


def _diverging_module(listener: _GradientListener) -> str | None:
    """The innermost module whose output gradients agree and whose input gradients do not."""
    culprits = [
        call
        for call, sides in listener.by_call().items()
        if sides.get("outputs") and max(sides["outputs"]) <= _AGREE and max(sides.get("inputs", [0.0])) > _AGREE
    ]
    return listener.paths[max(culprits)] if culprits else None  # the innermost call was entered last


def _starts_in_the_loss(listener: _GradientListener) -> bool:
    """Whether the gradients that reach the outermost modules differ already."""
    outermost = [listener.by_call().get(call, {}).get("outputs", []) for call in listener.outermost]
    return any(outputs and max(outputs) > _AGREE for outputs in outermost)


def _loss_function(bench: Bench) -> Operation:
    code = getattr(bench.task.problem.loss, "__code__", None)
    if code is None:
        return Operation("backward of the loss")
    return Operation("backward of the loss", file=shown(code.co_filename), line=code.co_firstlineno)


class _GradientListener(PassProbe):
    """Keeps the gradients at module boundaries of the full batch, and compares the micro-batches' with their rows."""

    def __init__(self, bench: Bench) -> None:
        self._names = {module: path for root in bench.task.modules for path, module in root.named_modules()}
        self._bounds, self._size = list(bench.task.bounds()), bench.task.batch_size
        self._full: dict[Key, torch.Tensor] = {}
        self._worst: dict[Key, float] = {}
        self.paths: dict[int, str] = {}
        self.outermost: set[int] = set()
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
        try:
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


class _WithoutHooks(PassProbe):
    """Takes the gradient hooks off every parameter for the length of a pass."""

    def __init__(self, bench: Bench) -> None:
        self._parameters = list(bench.task.parameters.values())

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Empties the hook registries, and fills them again."""
        registries = [registry for p in self._parameters for registry in _registries(p)]
        kept = [dict(registry) for registry in registries]
        for registry in registries:
            registry.clear()
        try:
            yield
        finally:
            for registry, hooks in zip(registries, kept, strict=True):
                registry.update(hooks)


def _registries(parameter: torch.Tensor) -> list[dict[int, Any]]:
    found = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return [registry for registry in found if registry is not None]


def _hooked(parameter: torch.Tensor) -> bool:
    return any(_registries(parameter))
