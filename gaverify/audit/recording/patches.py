"""Announces the calls around which a recording is built: hooks where torch has them, wrappers where it has none."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gaverify.audit.recording.bus import Nesting, announce_calls, replace_function
from gaverify.audit.recording.calls import BackwardCall, ForwardCall, GradCall
from gaverify.audit.recording.recorder import Recorder
from gaverify.audit.recording.values import on_meta
from gaverify.tracebacks import user_place


def install(recorder: Recorder) -> None:
    """Puts the recorder into this process, before the script imports anything; it stays until the process ends."""
    recorder.data.loaders.install()
    _announce_gathers(recorder)
    _announce_steps(recorder)
    _announce_forwards(recorder)
    _announce_backwards(recorder)
    recorder.listen()


def _announce_backwards(recorder: Recorder) -> None:
    """Announces backward passes, but not those that only count operations: they belong to no update.

    `autograd.grad` counts where it is asked for the gradients of parameters.
    """
    nesting = Nesting()  # `Tensor.backward` calls `autograd.backward`, and checkpointing that from inside: one pass
    owner: Any

    def describe_backward(tensors: Any, *_: Any, **__: Any) -> BackwardCall | None:
        return None if on_meta(tensors) else BackwardCall(roots=tensors, place=user_place())

    def describe_grad(outputs: Any, inputs: list[Any], *_: Any, **__: Any) -> GradCall | None:
        wanted = any(isinstance(tensor, nn.Parameter) for tensor in inputs)
        return GradCall(roots=outputs, place=user_place(), inputs=inputs) if wanted else None

    def grad_of_list(original: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return original(outputs, [inputs] if isinstance(inputs, torch.Tensor) else list(inputs), *args, **kwargs)

    for owner in (torch.Tensor, torch.autograd):
        announce_calls(recorder.bus, owner, "backward", describe_backward, nesting)
    announce_calls(recorder.bus, torch.autograd, "grad", describe_grad, nesting)
    replace_function(torch.autograd, "grad", grad_of_list)  # a generator of parameters can be read once


def _announce_gathers(recorder: Recorder) -> None:
    if recorder.job.has_ranks and torch.distributed.is_available():
        from gaverify.collective.traffic import watch_gathers

        watch_gathers(recorder.traffic.note_gather, with_gradient=recorder.traffic.differentiates_gathers)


def _announce_steps(recorder: Recorder) -> None:
    def init_optimizer(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not recorder.recording.guard.off:
            recorder.steps.note_optimizer(self)

    replace_function(Optimizer, "__init__", init_optimizer)
    register_optimizer_step_pre_hook(functools.partial(_begin_step, recorder))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: recorder.steps.end(optimizer))


def _begin_step(recorder: Recorder, optimizer: Any, args: Any, kwargs: Any) -> Any:
    """Torch's pre-hook; gives the optimizer a closure that is recorded, where the script gave it one."""
    # Torch gives its hook all arguments of `step`, of which the first is the optimizer.
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    recorded = recorder.steps.begin(optimizer, closure if callable(closure) else None)
    if recorded is None:
        return None
    if "closure" in kwargs:
        return args, {**kwargs, "closure": recorded}
    return (args[0], recorded, *args[2:]), kwargs


def _announce_forwards(recorder: Recorder) -> None:
    original: Any = nn.Module.__call__
    guard, forwards, bus = recorder.recording.guard, recorder.forwards, recorder.bus

    @functools.wraps(original)
    def call_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Asked for every module: an inner one returns here, after a few attributes.
        if torch.compiler.is_compiling() or guard.off or forwards.is_inside():
            return original(self, *args, **kwargs)
        call = ForwardCall(module=self, args=args, kwargs=kwargs, is_graded=torch.is_grad_enabled())
        with bus.announce(call):
            call.result = original(self, *args, **kwargs)
        return call.result

    nn.Module.__call__ = call_module  # type: ignore[method-assign]
