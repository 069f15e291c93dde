"""The calls of modules inside a pass, nested as they run: a problem's, or those of a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gaverify.passes.modes import in_transform

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

    def began(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        path, under = paths.get(module, ""), running[-1].path if running else outside or ""
        counts[path] += 1
        running.append(Call(module, path, counts[path], next(positions), tuple(running), under, args))
        return begins(running[-1], args, kwargs or {})

    def ended(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not any(call.module is module for call in running):
            return None  # it began before
        while running[-1].module is not module:  # a call that raised has no end
            running.pop()
        running[-1].args = args
        call = running.pop()
        return None if in_transform() else ends(call, output)

    with ExitStack() as hooks:
        if outside is None:
            hooks.callback(register_module_forward_pre_hook(began).remove)
            hooks.callback(register_module_forward_hook(ended, always_call=True).remove)
        for module in paths if outside is not None else ():
            hooks.callback(module.register_forward_pre_hook(began, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(ended).remove)
        yield running
