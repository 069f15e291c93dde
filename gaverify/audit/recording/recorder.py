"""The recorder of one process: its listeners, the order in which they are told of each call, and its closing record.

The script's own code runs between the two halves of each call; nothing of it is changed: generators, gradients,
weights (but in the runs that move or replace them on purpose) and exceptions pass through.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing.process
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gaverify.audit.memory import peak_memory
from gaverify.audit.recording.bus import Bus, Guard, Nesting, announce_calls, replace_function
from gaverify.audit.recording.calls import (
    Assignment,
    BackwardCall,
    ForwardCall,
    GradCall,
    Recording,
    StepCall,
    UpdateEnd,
)
from gaverify.audit.recording.draws import DealtDraws, ForwardDraws, KeptDraws
from gaverify.audit.recording.listeners.forwards import (
    DataListener,
    DrawListener,
    ForwardListener,
    LossListener,
    ModuleListener,
)
from gaverify.audit.recording.listeners.gradients import GradientListener, TrafficListener
from gaverify.audit.recording.listeners.other_calls import (
    AverageListener,
    ClippingListener,
    LoadListener,
    ScalerListener,
    SchedulerListener,
    TargetListener,
    ZeroGradListener,
)
from gaverify.audit.recording.listeners.steps import ControlListener, StepHooks
from gaverify.audit.recording.listeners.updates import ChangeListener, UpdateListener, WindowListener
from gaverify.audit.recording.script_calls import ScriptCalls
from gaverify.audit.recording.storage import Journal, Storage, leave, leave_together
from gaverify.audit.recording.values import on_meta, shard_of
from gaverify.passes.wrappers import engine_of, is_flattened, tensor_parallel
from gaverify.records.events import (
    ClosingRecord,
    DrawSummary,
    End,
    Ending,
    ModelSummary,
    TrainedGroup,
    TrainedParameter,
    UnseenCalls,
)
from gaverify.torch_internals import compiled_frames
from gaverify.tracebacks import user_place


class Recorder:
    """Records what a training script does, call by call.

    Args:
        job: The part that the process plays.
        storage: Where the record goes.
    """

    def __init__(self, job: Assignment, storage: Storage) -> None:
        self.job, self.storage = job, storage
        guard = Guard(storage)
        self.recording = Recording(job, storage, guard, Journal(storage))
        self.bus = Bus(guard)
        self.data = DataListener()
        self.draws = DrawListener(self.recording, self._choose_draws())
        self.modules = ModuleListener(self.recording)
        self.targets = TargetListener()
        self.losses = LossListener(self.recording, self.targets)
        self.traffic = TrafficListener(self.recording)
        self.gradients = GradientListener(self.recording, self.targets)
        self.updates = UpdateListener(self.recording, self.bus, lambda: self.finish(Ending.UPDATES, 0))
        self.windows = WindowListener(self.recording, self.updates)
        self.forwards = ForwardListener(self.recording, self.updates)
        self.controls = ControlListener(self.recording, self.gradients)
        self.changes = ChangeListener(
            self.recording, self.gradients, self.updates, self.windows, self.controls.restore_weights, self.finish
        )
        self.steps = StepHooks(self.recording, self.bus, self.data, self.controls)
        self._subscribe()

    def _subscribe(self) -> None:
        """Subscribes the listeners to the calls around which a recording is built: this order is what happens."""
        bus = self.bus
        bus.outside(ForwardCall, self.data.pause)
        bus.before(
            ForwardCall,
            self.data.begin_forward,
            self.forwards.identify,
            self.changes.begin_forward,
            self.changes.note_settings,  # they belong to the update that ends here
            self.updates.begin_pass,
            self.changes.note_changes,  # they belong to the update that begins
            self.forwards.note_arithmetic,
            self.controls.begin_forward,
            self.forwards.record,
            self.draws.begin_forward,
        )
        bus.around(
            ForwardCall,
            self.forwards.run,
            self.controls.restore_state,
            self.draws.run_forward,
            self.controls.run_forward,
            self.modules.pin,
            self.modules.record,  # what the script is given, pinned or not
        )
        bus.after(ForwardCall, self.forwards.note_result, self.gradients.note_result, self.controls.end_forward)

        for kind in (BackwardCall, GradCall):
            bus.outside(kind, self.data.pause)
            bus.before(
                kind,
                self.changes.begin_differentiation,
                self.controls.begin_differentiation,
                self.gradients.begin_differentiation,
            )
            bus.around(kind, self.gradients.run_differentiation, self.draws.run_differentiation)
        bus.before(
            BackwardCall,
            self.changes.note_settings,
            self.updates.begin_pass,
            self.changes.note_changes,
            self.draws.begin_backward,
            self.gradients.begin_pass,
            self.controls.begin_backward,
            self.losses.begin,
            self.gradients.listen_to_parameters,
            self.traffic.begin,
            self.controls.describe_loss,  # finds the terms, which the modules look at
            self.modules.trace_loss,
        )
        bus.around(BackwardCall, self.controls.run_backward, self.traffic.count, self.controls.find_setter)
        bus.after(
            BackwardCall,
            self.losses.end,  # takes its hooks off, whether the pass counts or not
            self.gradients.collect,  # decides whether the pass counts
            self.losses.describe,
            self.traffic.describe,
            self.gradients.write,
        )
        bus.around(GradCall, self.controls.run_grad)
        bus.after(GradCall, self.gradients.keep_waiting)
        for kind in (BackwardCall, GradCall):
            bus.after(kind, self.changes.hunt, self.data.end_differentiation, self.controls.end_differentiation)

        bus.before(
            StepCall,
            self.gradients.begin_step,
            self.updates.begin_step,
            self.windows.record,  # the script's own gradients, before they are replaced
            self.controls.begin_step,
        )
        bus.after(
            StepCall,
            self.controls.restore_step,  # tells whether the step was led
            self.windows.note_result,
            self.controls.end_window,
            self.updates.end_if_complete,
        )
        bus.after(UpdateEnd, self.modules.end_update, self.draws.end_update)

    def follow_script(self, calls: ScriptCalls) -> None:
        """Subscribes what listens to the calls of the script's own code."""
        bus = self.bus
        bus.around(ForwardCall, calls.run_forward)
        for kind in (BackwardCall, GradCall):
            bus.before(kind, calls.note_loss)
            bus.around(kind, calls.differentiate)
        bus.after(StepCall, calls.end_step)

    def listen(self) -> None:
        """Lets the listeners to other calls patch torch and subscribe: each owns its calls, in any order."""
        listeners = (
            self.targets,
            ZeroGradListener(self.recording, self.changes.settle),
            ClippingListener(self.recording, self.changes.hunt),
            ScalerListener(self.recording, lambda: self.windows.steps),
            SchedulerListener(self.recording),
            AverageListener(self.recording),
            LoadListener(self.recording, self.storage.folder),
        )
        for listener in listeners:
            listener.listen(self.bus)

    def finish(self, reason: Ending, status: int, code: str = "") -> None:
        """Writes everything and ends the process; one that failed waits for no other rank.

        Args:
            reason: Why it ends.
            status: Its exit status.
            code: The argument that the script gave `sys.exit`, as Python writes it.
        """
        with self.recording.guard.lock:  # no other thread may write behind the end
            self.close(reason, code)
            if self.job.meeting is not None and not status:
                leave_together(self.job.meeting, self.windows.rank, self.windows.ranks)
            leave(status)

    def close(self, reason: Ending, code: str = "") -> None:
        """Writes everything, once; nothing is recorded any more."""
        guard, journal = self.recording.guard, self.recording.journal
        with guard.work():
            self.data.loop.close()
            if guard.closed:  # the last update's timer and the end of the script may meet here
                return
            self.changes.settle()  # the script's last step has no call behind it
            guard.closed = True
            self.recording.unannounced.end_hunt()
            self.updates.close()
            journal.add(End(*journal.stamp(), reason=reason))
            self.storage.finish(summarise(self, reason, code))

    def _choose_draws(self) -> ForwardDraws:
        arithmetic = self.recording.roundoff.arithmetic
        if self.job.is_reference:
            return KeptDraws(arithmetic, self.storage.folder)
        if self.job.role == "accumulated" and self.job.sources:
            return DealtDraws(arithmetic, [Path(source) for source in self.job.sources])
        return ForwardDraws(arithmetic)


# The closing record of a run, from what its listeners own when it ends.


_BY_THE_SCRIPT = "weights changed by the script itself"


def summarise(recorder: Recorder, ending: Ending, exit_code: str) -> ClosingRecord:
    """Returns the closing record.

    Args:
        recorder: The listeners.
        ending: How the run ended.
        exit_code: The argument that the script gave `sys.exit`.
    """
    recording, windows, loop = recorder.recording, recorder.windows, recorder.data.loop
    draws, models, watch = recorder.draws.draws.summarise(), recording.names.models, recording.watch
    optimizers = tuple(type(entry.optimizer).__name__ for entry in watch)
    return ClosingRecord(
        ending,
        exit_code,
        # The journal's number is that of the update that is being worked on.
        recording.journal.update - 1,
        windows.rank,
        windows.ranks,
        groups=tuple(_summarise_group(recorder, index) for index in range(len(watch))),
        # Each model whose weights the script moves has an entry that stands for an optimizer; people are told once.
        optimizers=(_BY_THE_SCRIPT,) if watch.has_stand_ins else optimizers,
        models=ModelSummary(
            tuple(type(model).__name__ for model in models),
            engine_of(models),
            is_flattened(models),
            tensor_parallel(models, watch.all_parameters()),
        ),
        arithmetic=recording.roundoff.describe(),
        draws=DrawSummary(
            # A loop's draws are kept in one run and dealt in the others: one count serves for both.
            draws.count + loop.count,
            draws.dealt + loop.count,
            {**draws.unaligned, **loop.unaligned},
            draws.fused,
            loop.moved,
        ),
        loaders=recorder.data.loaders.count,
        epochs=recorder.data.loaders.ended,
        steps_itself=watch.has_stand_ins,
        keeps_no_gradients=recorder.changes.keeps_no_gradients,
        had_gradients=windows.had_gradients,
        copies=windows.copies,
        unseen=UnseenCalls(
            recording.guard.left_out,
            recorder.gradients.elsewhere,
            started_processes(),
            compiled_frames() > 0,  # steps inside a compiled graph are not seen
        ),
        control=recorder.controls.summarise(),
        memory=peak_memory(),
        torch=torch.__version__,
    )


def _summarise_group(recorder: Recorder, index: int) -> TrainedGroup:
    """Returns what an optimizer trains."""
    names, parameters = recorder.recording.names, recorder.recording.watch.parameters(index)
    addends, is_part = recorder.windows.addends.get(index, {}), index in recorder.steps.parts
    trained = tuple(
        TrainedParameter(
            # Models are numbered by the order in which their parameters are named, which parts must not change.
            "" if is_part else names.key(parameter, index, at),
            () if is_lazy(parameter) else tuple(parameter.shape),  # a lazy one has none before its first forward
            shard_of(parameter),
            addends.get(at),
        )
        for at, parameter in enumerate(parameters)
    )
    return TrainedGroup(trained, tuple(names.models_of(parameters)), is_part)


def started_processes() -> int:
    """Returns how many processes the script has started by `multiprocessing` so far; workers of loaders are some."""
    counter = getattr(multiprocessing.process, "_process_counter", None)  # private: newer Pythons may lack it
    return 0 if counter is None else next(copy.copy(counter)) - 1  # a copy: `next` counts on


# Announces the calls around which a recording is built: hooks where torch has them, wrappers where it has none.


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
        from gaverify.collective.membership import watch_gathers

        watch_gathers(recorder.traffic.note_gather, with_gradient=recorder.traffic.differentiates_gathers)


def _announce_steps(recorder: Recorder) -> None:
    def init_optimizer(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not recorder.recording.guard.off:
            recorder.steps.note_optimizer(self)

    def begin_last(optimizer: Any, args: Any, kwargs: Any) -> None:
        # The optimizer's own hooks run after those of all optimizers, and may change what the step uses.
        if optimizer in last:
            last.pop(optimizer).remove()
        last[optimizer] = optimizer.register_step_pre_hook(functools.partial(_begin_step, recorder))

    last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    replace_function(Optimizer, "__init__", init_optimizer)
    register_optimizer_step_pre_hook(begin_last)
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
