"""The recorder of one process: its listeners, and the order in which they are told of each call.

The script's own code runs between the two halves of each call; nothing of it is changed: generators, gradients,
weights (but in the runs that move or replace them on purpose) and exceptions pass through.
"""

from __future__ import annotations

from pathlib import Path

from gaverify.audit.recording.bus import Bus
from gaverify.audit.recording.calls import BackwardCall, ForwardCall, GradCall, StepCall, UpdateEnd
from gaverify.audit.recording.context import Assignment, Recording
from gaverify.audit.recording.draws import DealtDraws, Draws, KeptDraws
from gaverify.audit.recording.guard import Guard
from gaverify.audit.recording.journal import Journal
from gaverify.audit.recording.listeners.by_hand import HandListener
from gaverify.audit.recording.listeners.controls import ControlListener
from gaverify.audit.recording.listeners.draws import DataListener, DrawListener
from gaverify.audit.recording.listeners.forwards import ForwardListener
from gaverify.audit.recording.listeners.gradient_calls import ClippingListener, ScalerListener, ZeroGradListener
from gaverify.audit.recording.listeners.gradients import GradientListener
from gaverify.audit.recording.listeners.losses import LossListener
from gaverify.audit.recording.listeners.modules import ModuleListener
from gaverify.audit.recording.listeners.other_calls import (
    AverageListener,
    LoadListener,
    SchedulerListener,
    TargetListener,
)
from gaverify.audit.recording.listeners.steps import StepHooks
from gaverify.audit.recording.listeners.traffic import TrafficListener
from gaverify.audit.recording.listeners.updates import UpdateListener, WindowListener
from gaverify.audit.recording.loop import Loop
from gaverify.audit.recording.samples import Inputs, Loaders
from gaverify.audit.recording.storage import Storage, leave, leave_together
from gaverify.audit.recording.summary import summarise
from gaverify.records.events import End, Ending


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
        self.updates = UpdateListener(self.recording, self.bus, self._stop)
        self.windows = WindowListener(self.recording, self.updates)
        self.forwards = ForwardListener(self.recording, self.updates)
        self.by_hand = HandListener(self.recording, self.gradients, self.updates, self.windows, self.finish)
        self.controls = ControlListener(self.recording, self.gradients, self.by_hand)
        self.steps = StepHooks(self.recording, self.bus, self.data, self.by_hand, self.controls)
        self._subscribe()

    def _subscribe(self) -> None:
        """Subscribes the listeners to the calls around which a recording is built: this order is what happens."""
        bus = self.bus
        bus.outside(ForwardCall, self.data.pause)
        bus.before(
            ForwardCall,
            self.data.begin_forward,
            self.forwards.identify,
            self.by_hand.begin_forward,
            self.by_hand.note_settings,  # they belong to the update that ends here
            self.updates.begin_pass,
            self.by_hand.note_changes,  # they belong to the update that begins
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
        bus.after(ForwardCall, self.forwards.note_result, self.gradients.note_result)

        for kind in (BackwardCall, GradCall):
            bus.outside(kind, self.data.pause)
            bus.before(kind, self.by_hand.begin_differentiation, self.gradients.begin_differentiation)
            bus.around(kind, self.gradients.run_differentiation, self.draws.run_differentiation)
        bus.before(
            BackwardCall,
            self.by_hand.note_settings,
            self.updates.begin_pass,
            self.by_hand.note_changes,
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
            bus.after(kind, self.by_hand.hunt, self.data.end_differentiation, self.controls.end_differentiation)

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

    def listen(self) -> None:
        """Lets the listeners to other calls patch torch and subscribe: each owns its calls, in any order."""
        listeners = (
            self.targets,
            ZeroGradListener(self.recording, self.by_hand.settle),
            ClippingListener(self.recording, self.by_hand.keep_used),
            ScalerListener(self.recording, lambda: self.windows.steps),
            SchedulerListener(self.recording),
            AverageListener(self.recording),
            LoadListener(self.recording, self.storage.folder),
        )
        for listener in listeners:
            listener.listen(self.bus)

    def replay(self, loop: Loop, loaders: Loaders, inputs: Inputs | None) -> None:
        """Keeps what lies outside the models, or takes it from the full-batch run; see `DataListener.replay`."""
        self.data.replay(loop, loaders, inputs)
        self.draws.draws.deals_loop_draws = True

    def expect_steps_by_hand(self) -> None:
        """Counts each change of the weights as a step: the script has no optimizer of torch's."""
        self.by_hand.expect_steps()
        self.data.starts_at_forward = True

    def undo_steps(self) -> None:
        """Undoes every step; all of them belong to the full batch's first update, and so do its draws."""
        self.by_hand.undoes_steps = True
        self.windows.stores_gradients = False
        self.draws.draws.repeats_first_update = True

    def finish(self, reason: Ending, status: int, code: str = "") -> None:
        """Writes everything and ends the process; one that failed waits for no other rank.

        Args:
            reason: Why it ends.
            status: Its exit status.
            code: What the script gave `sys.exit`, as Python writes it.
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
            self.by_hand.settle()  # the script's last step has no call behind it
            guard.closed = True
            self.recording.unannounced.end_hunt()
            self.updates.close()
            journal.add(End(*journal.stamp(), reason=reason))
            self.storage.finish(summarise(self, reason, code))

    def _choose_draws(self) -> Draws:
        arithmetic = self.recording.roundoff.arithmetic
        if self.job.is_reference:
            return KeptDraws(arithmetic, self.storage.folder)
        if self.job.role == "accumulated" and self.job.sources:
            return DealtDraws(arithmetic, [Path(source) for source in self.job.sources])
        return Draws(arithmetic)

    def _stop(self) -> None:
        self.finish(Ending.UPDATES, 0)
