"""Puts the recorder between a script and torch: hooks where torch has them, wrappers where it has none."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import AveragedModel

from gaverify.audit.recording.recorder import Recorder
from gaverify.audit.recording.values import on_meta
from gaverify.passes.walks import walk_from

Around = Callable[..., AbstractContextManager[Callable[[Any], None] | None] | None]


def install(recorder: Recorder) -> None:
    """Puts the recorder into this process, before the script imports anything; it stays until the process ends."""
    recorder.loaders.install()
    _gathers(recorder)
    _optimizers(recorder)
    _forwards(recorder)
    _backwards(recorder)

    def note_average(*_: Any, **__: Any) -> Any:
        return nullcontext(lambda _: recorder.note_average())

    owner: Any
    for owner in (Optimizer, nn.Module):
        _surround(owner, "zero_grad", lambda *_, **__: recorder.zero_grad(), recorder, [False])
    _clipping(recorder)
    _schedulers(recorder)
    _scalers(recorder)
    _losses(recorder)
    _surround(AveragedModel, "update_parameters", note_average, recorder, [False])
    _loads(recorder)


def _replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replaces a function by `call`, which is given that function and the arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(owner, name, wrapper)


def _surround(owner: Any, name: str, around: Around, recorder: Recorder, running: list[bool]) -> None:
    """Replaces a function by one that runs it inside `around`, which is given the same arguments.

    What that gives, if anything, is called with the result. A call while one is `running` runs as it is, and so does
    one that `around` has nothing for.
    """

    def run_around(original: Any, *args: Any, **kwargs: Any) -> Any:
        aside = torch.compiler.is_compiling() or running[0] or recorder.off
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

    _replace(owner, name, run_around)


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
    _replace(torch.autograd, "grad", grad_of_list)  # a generator of parameters can be read once


def _gathers(recorder: Recorder) -> None:
    if recorder.job.has_ranks and torch.distributed.is_available():
        from gaverify.collective.traffic import watch_gathers

        watch_gathers(recorder.note_gather, with_gradient=recorder.differentiates_gathers)


def _optimizers(recorder: Recorder) -> None:
    def init_optimizer(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not recorder.off:
            recorder.optimizer_made(self)

    _replace(Optimizer, "__init__", init_optimizer)
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
        if torch.compiler.is_compiling() or recorder.off or recorder.inside_forward():
            return original(self, *args, **kwargs)
        with recorder.forward(self, args, kwargs) as listen:
            output = original(self, *args, **kwargs)
            listen(output)
            return output

    nn.Module.__call__ = call  # type: ignore[method-assign]


def _clipping(recorder: Recorder) -> None:
    from torch.nn.utils import clip_grad

    def note_clipping(call: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(call).bind_partial(*args, **kwargs).arguments
        limit = arguments.get("max_norm", arguments.get("clip_value"))
        known_limit = float(limit) if isinstance(limit, (int, float)) else None
        return recorder.clip(call.__name__, known_limit, arguments.get("total_norm"))

    running = [False]  # `clip_grad_norm_` calls `clip_grads_with_norm_`
    for name in ("clip_grads_with_norm_", "clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"):
        if hasattr(clip_grad, name):
            around = functools.partial(note_clipping, getattr(clip_grad, name))
            _surround(clip_grad, name, around, recorder, running)
            setattr(torch.nn.utils, name, getattr(clip_grad, name))


def _schedulers(recorder: Recorder) -> None:
    """Surrounds `step` of every scheduler class, those of the script as they are defined."""
    running = [False]  # one that is made of others calls their steps, and each steps once while it is made
    base: Any = lr_scheduler.LRScheduler

    def note_step(scheduler: Any, *_: Any, **__: Any) -> Any:
        return nullcontext(lambda _: recorder.note_scheduler(scheduler))

    def wrap(kind: Any) -> None:
        if "step" in vars(kind):
            _surround(kind, "step", note_step, recorder, running)

    def init_subclass(kind: Any, **kwargs: Any) -> None:
        super(base, kind).__init_subclass__(**kwargs)
        wrap(kind)

    for scheduler_class in walk_from([base], type.__subclasses__):
        wrap(scheduler_class)
    _surround(base, "_initial_step", lambda *_: nullcontext(), recorder, running)
    base.__init_subclass__ = classmethod(init_subclass)  # type: ignore[arg-type]


def _scalers(recorder: Recorder) -> None:
    running = [False]  # `step` calls `unscale_` itself

    def unscale(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_enabled() and not recorder.off:
            recorder.keep_unscaled()

    def around(name: str, self: Any, *_: Any, **__: Any) -> Any:
        return recorder.scaler(name) if self.is_enabled() else None

    _replace(GradScaler, "unscale_", unscale)
    for name in ("unscale_", "step", "update"):
        _surround(GradScaler, name, functools.partial(around, name), recorder, running)


def _losses(recorder: Recorder) -> None:
    """Counts the valid targets of cross entropies: the weights that an average over tokens should have."""

    def count(input: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        ignored = kwargs.get("ignore_index", args[2] if len(args) > 2 else -100)
        if isinstance(target, torch.Tensor) and not target.is_floating_point():
            recorder.targets((target.detach() != ignored).sum(), target.numel())

    for name in ("cross_entropy", "nll_loss"):
        _surround(functional, name, count, recorder, [False])


def _loads(recorder: Recorder) -> None:
    """Notes the files that `torch.load` reads: who starts from other weights may have resumed."""
    audits = os.path.join(os.path.dirname(os.path.abspath(recorder.storage.folder)), "")

    def note(f: Any, *_: Any, **__: Any) -> None:
        path = os.path.abspath(os.fspath(f)) if isinstance(f, str | os.PathLike) else audits
        if not path.startswith(audits):  # what the audit's other runs left is no checkpoint of the script
            recorder.note_load(path)

    _surround(torch, "load", note, recorder, [False])
