"""The calls of modules inside a forward, nested as they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gaverify.audit.job import SCRIPT
from gaverify.audit.recording.names import plain_name

Begins = Callable[["Call", tuple[Any, ...], dict[str, Any]], "tuple[tuple[Any, ...], dict[str, Any]] | None"]
"""Told of a call before it runs; may return other arguments for it."""
Ends = Callable[["Call", Any], Any]
"""Told of a call and its output; may return another output."""


@dataclass
class Call:
    """One call of a module.

    Args:
        module: What was called.
        path: Its path in the outermost module.
        number: The how-manieth call of this path in the forward, from 1.
        under: The path of the module whose forward called it; `SCRIPT` for the outermost one.
        kept: What a listener keeps from the beginning of the call to its end.
    """

    module: nn.Module
    path: str
    number: int
    under: str
    kept: dict[str, Any] = field(default_factory=dict)


@contextmanager
def listening(model: nn.Module, begins: Begins, ends: Ends) -> Iterator[None]:
    """Tells of every call of a module inside the forward of an outermost one, that one's own call among them."""
    running: list[Call] = []
    counts: Counter[str] = Counter()

    def pre_hook(path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            counts[path] += 1
            call = Call(module, path, counts[path], running[-1].path if running else SCRIPT)
            running.append(call)
            return begins(call, args, kwargs)

        return hook

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        while running[-1].module is not module:  # a call that raised has no end
            running.pop()
        return ends(running.pop(), output)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            hooks.callback(module.register_forward_pre_hook(pre_hook(plain_name(name)), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(hook).remove)
        yield
