"""What listens inside a pass, of a problem or a script: to modules, nested as they run, to operations, to functions.

Whoever listens to torch writes a function and opens one of these; no other mode is defined in gaverify.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from gaverify.torch_internals import TorchDispatchMode, is_in_functorch_transform
from gaverify.tracebacks import hands_over

Begins = Callable[["Call", tuple[Any, ...], dict[str, Any]], "tuple[tuple[Any, ...], dict[str, Any]] | None"]
"""Told of a call before it runs; may return other arguments for it, where only known modules are listened to."""
Ends = Callable[["Call", Any], Any]
"""Told of a call and its output, unless that lives in a transform of `torch.func` alone; may return another output."""


@dataclass
class Call:
    """One call of a module.

    Args:
        module: What was called.
        path: Its path; empty where none is known.
        number: The how-manieth call of this path, from 1.
        position: Among all calls, in the order in which they begin, from 0.
        parents: The calls around it, outermost first.
        under: The path of the module whose forward called it.
        args: What it was given by position.
        kept: What a listener keeps from the beginning of the call to its end.
    """

    module: nn.Module
    path: str
    number: int
    position: int
    parents: tuple[Call, ...]
    under: str
    args: tuple[Any, ...]
    kept: dict[str, Any] = field(default_factory=dict)


@contextmanager
def listening(
    paths: Mapping[nn.Module, str],
    begins: Begins = lambda *_: None,
    ends: Ends = lambda *_: None,
    *,
    outside: str | None = None,
) -> Iterator[list[Call]]:
    """Tells of the calls of modules, and gives those that are running, outermost first.

    Args:
        paths: The modules that are known, by path.
        begins: Told of every call.
        ends: Told of every call that ends.
        outside: What an outermost call is `under`, where these modules alone are listened to; None: every module is, by
            hooks that run before its own and know no arguments by name, and a call that raised ends without an output.
    """
    running: list[Call] = []
    counts: Counter[str] = Counter()
    positions = count()

    def begin_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        path, under = paths.get(module, ""), running[-1].path if running else outside or ""
        counts[path] += 1
        running.append(Call(module, path, counts[path], next(positions), tuple(running), under, args))
        return begins(running[-1], args, kwargs or {})

    def end_call(module: nn.Module, args: tuple[Any, ...], output_value: Any) -> Any:
        if not any(call.module is module for call in running):
            return None  # it began before
        # The user's code may catch what a module raises and go on.
        while running[-1].module is not module:  # a call that raised has no end
            running.pop()
        # What ran: another hook may have exchanged the arguments since the call began.
        running[-1].args = args
        call = running.pop()
        return None if is_in_functorch_transform() else ends(call, output_value)

    with ExitStack() as hooks:
        if outside is None:
            hooks.callback(register_module_forward_pre_hook(begin_call).remove)
            hooks.callback(register_module_forward_hook(end_call, always_call=True).remove)
        for module in paths if outside is not None else ():
            hooks.callback(module.register_forward_pre_hook(begin_call, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(end_call).remove)
        yield running


_UNEXPLAINED = 1e-5  # what a·x + b may leave over of an output before it counts as something else
_ALIKE = 1e-5  # relative spread of the slopes that rounding explains, where the forward ran in float32


def per_channel_affine(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether `after` is a·`before` + b with one (a, b) per channel, the slopes not all alike."""
    if before.shape != after.shape or before.dim() < 2 or not after.is_floating_point():
        return False
    for channel in {1, before.dim() - 1}:
        x = before.detach().movedim(channel, 0).flatten(1).double()
        y = after.detach().movedim(channel, 0).flatten(1).double()
        # Through two points there is always a line.
        if x.shape[1] < 3:
            continue
        # Without the means the offset b falls out, and one slope is left to fit.
        x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
        slope = (x * y).sum(1, keepdim=True) / x.square().sum(1, keepdim=True).clamp_min(1e-300)
        unexplained = (y - slope * x).norm() / y.norm().clamp_min(1e-300)
        spread = slope.std() if len(slope) > 1 else slope.abs().max()
        if float(unexplained) < _UNEXPLAINED and float(spread) > _ALIKE * float(slope.abs().max()):
            return True
    return False


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""`handler(func, args, kwargs)` returns what the caller of the operation gets; it runs `func` itself, or does not."""


class OperationMode(TorchDispatchMode):
    """Gives every operation that reaches the dispatcher to `handler`, in the backward as well."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handler = hands_over(handler)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch wraps a mode in `torch._dynamo.disable` unless it says no here, and that import costs a second."""
        return False

    @hands_over
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handler(func, args, kwargs or {})


class FunctionMode(TorchFunctionMode):
    """Gives every outermost call of a torch function or method to `handler`: what these call in turn is not seen."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = hands_over(handler)

    @hands_over
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handler(func, args, kwargs or {})


def operation_name(func: Any) -> str:
    """Returns `bernoulli_` for `aten::bernoulli_.float`."""
    return str(func._schema.name.split("::")[-1])
