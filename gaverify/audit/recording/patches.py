"""Puts the recorder between a script and torch: hooks where torch has them, wrappers where it has none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gaverify.audit.recording.bus import replace_function
from gaverify.audit.recording.recorder import Recorder
from gaverify.audit.recording.values import on_meta

Around = Callable[..., AbstractContextManager[Callable[[Any], None] | None] | None]


def install(recorder: Recorder) -> None:
    """Puts the recorder into this process, before the script imports anything; it stays until the process ends."""
    recorder.loaders.install()
    _gathers(recorder)
    _optimizers(recorder)
    _forwards(recorder)
    _backwards(recorder)
    recorder.subscribe()


def _surround(owner: Any, name: str, around: Around, recorder: Recorder, running: list[bool]) -> None:
    """Replaces a function by one that runs it inside `around`, which is given the same arguments.

    What that gives, if anything, is called with the result. A call while one is `running` runs as it is, and so does
    one that `around` has nothing for.
    """

    def run_around(original: Any, *args: Any, **kwargs: Any) -> Any:
        aside = torch.compiler.is_compiling() or running[0] or recorder.guard.off
        context = None if aside else around(*args, **kwargs)
        if context is None:
            return original(*args, **kwargs)
        running[0] = True
        try:
            with context as ended:
                result = original(*args, **kwargs)
                if ended is not None:
                    ended(result)
                return result
        finally:
            running[0] = False

    replace_function(owner, name, run_around)


def _backwards(recorder: Recorder) -> None:
    """Surrounds backward passes, but not those that only count operations: they belong to no update.

    `autograd.grad` counts where it is asked for the gradients of parameters.
    """
    running = [False]  # `Tensor.backward` calls `autograd.backward`, and checkpointing that from inside: one pass
    owner: Any

    def passes(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return None if on_meta(tensors) else recorder.backward(tensors, *args, **kwargs)

    for owner in (torch.Tensor, torch.autograd):
        _surround(owner, "backward", passes, recorder, running)

    def around(outputs: Any, inputs: list[Any], *_: Any, **__: Any) -> Any:
        wanted = any(isinstance(tensor, nn.Parameter) for tensor in inputs)
        return recorder.differentiation(outputs, inputs) if wanted else None

    def grad_of_list(original: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return original(outputs, [inputs] if isinstance(inputs, torch.Tensor) else list(inputs), *args, **kwargs)

    _surround(torch.autograd, "grad", around, recorder, running)
    replace_function(torch.autograd, "grad", grad_of_list)  # a generator of parameters can be read once


def _gathers(recorder: Recorder) -> None:
    if recorder.job.has_ranks and torch.distributed.is_available():
        from gaverify.collective.traffic import watch_gathers

        watch_gathers(recorder.note_gather, with_gradient=recorder.differentiates_gathers)


def _optimizers(recorder: Recorder) -> None:
    def init_optimizer(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not recorder.guard.off:
            recorder.optimizer_made(self)

    replace_function(Optimizer, "__init__", init_optimizer)
    register_optimizer_step_pre_hook(functools.partial(_before_step, recorder))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: recorder.step_ended(optimizer))


def _before_step(recorder: Recorder, optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Torch's pre-hook; gives the optimizer a closure that is recorded, where the script gave it one."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    recorded = recorder.step_begins(optimizer, closure if callable(closure) else None)
    if recorded is None:
        return None
    if "closure" in kwargs:
        return args, {**kwargs, "closure": recorded}
    return (args[0], recorded, *args[2:]), kwargs


def _forwards(recorder: Recorder) -> None:
    original: Any = nn.Module.__call__

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or recorder.guard.off or recorder.inside_forward():
            return original(self, *args, **kwargs)
        with recorder.forward(self, args, kwargs) as listen:
            output = original(self, *args, **kwargs)
            listen(output)
            return output

    nn.Module.__call__ = call  # type: ignore[method-assign]
