"""The state of a recorded run: who listens to it, its update, its events, and what its closing record holds."""

from __future__ import annotations

import copy
import multiprocessing.process
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy

from gaverify.audit.recording.bus import Bus
from gaverify.audit.recording.context import Recording
from gaverify.audit.recording.control import Buffers, Control, GradientClearing, Lead, Perturbation
from gaverify.audit.recording.draws import DealtDraws, Draws, KeptDraws
from gaverify.audit.recording.graph import Reach, Weight
from gaverify.audit.recording.guard import Guard
from gaverify.audit.recording.journal import Journal
from gaverify.audit.recording.listeners.other_calls import TargetListener
from gaverify.audit.recording.loop import Loop
from gaverify.audit.recording.outputs import Outputs, PinnedModules
from gaverify.audit.recording.samples import Inputs, Loaders
from gaverify.audit.recording.state import RestoredState
from gaverify.audit.recording.storage import Storage, Update
from gaverify.audit.recording.unannounced import ByHand, UnannouncedSteps, Waiting
from gaverify.audit.recording.watching import IncomingGradients
from gaverify.collective.traffic import TrafficMeter
from gaverify.passes.wrappers import engine_of, is_flattened, is_sharded, offset_of_shard, tensor_parallel
from gaverify.records.events import (
    ClosingRecord,
    ControlSummary,
    DrawSummary,
    Ending,
    ModelSummary,
    Shard,
    TrainedGroup,
    TrainedParameter,
    UnseenCalls,
)
from gaverify.torch_internals import compiled_frames
from gaverify.tracebacks import Place

_BY_THE_SCRIPT = "weights moved by the script itself"


class Assignment(Protocol):
    """What a recorder knows of its run; everything else that the run asks for installs itself."""

    @property
    def role(self) -> str:
        """Whether it is the `full` or the `accumulated` run, or one of which only `events` are recorded."""

    @property
    def updates(self) -> int:
        """Optimizer updates after which the script is stopped; 0: it runs to its end."""

    @property
    def is_reference(self) -> bool:
        """Whether other runs follow this one."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Folders of all ranks of the full-batch run that it follows."""

    @property
    def source(self) -> Path | None:
        """That of the rank which this process follows."""

    @property
    def has_ranks(self) -> bool:
        """Whether several processes may train together in the run."""

    @property
    def counts_traffic(self) -> bool:
        """Whether its backward passes may reduce gradients, also in a group of one."""

    @property
    def meeting(self) -> Path | None:
        """A folder that all ranks of the run see; None where it is alone."""


class Session:
    """What a `Recorder` works on.

    Args:
        job: The part that the process plays.
        storage: Where the record goes.
    """

    def __init__(self, job: Assignment, storage: Storage) -> None:
        self.job, self.storage = job, storage
        self.guard, self._journal = Guard(storage), Journal(storage)
        self.bus, self.recording = Bus(self.guard), Recording(self.guard, self._journal)
        self.watch, self.names, self.roundoff = self.recording.watch, self.recording.names, self.recording.roundoff
        self.work, self._phase = self.guard.work, self.recording.phase
        self.steps = 0  # optimizer steps so far, of any optimizer
        self._update = Update(1)
        self._unannounced_changes = self.recording.unannounced
        self.by_hand = False  # the script has no optimizer: moved weights are its steps
        self.undoes_steps = False
        self._complete = False
        self._targets = TargetListener()
        self.perturbation: Perturbation | None = None
        self.source = job.source
        self.lead = Lead(None)
        self._reach = Reach()
        self._forwards: dict[int, tuple[int, int]] = {}  # by number: where their rows are stored
        self._weight = Weight()
        self._numbers = {"forward": 0, "backward": 0}
        self._used: set[int] = set()  # backward passes that a step has used
        self._outer: Any = None  # the optimizer whose step is running
        self._inner: list[Any] = []  # optimizers whose steps are running as a part of that one
        self._parts: set[int] = set()  # optimizers that have stepped so: another one's parameters are theirs
        self.elsewhere = 0  # backward passes that reached no parameter
        self.rank, self.ranks = 0, 1
        self.clearing: GradientClearing | None = None
        self._buffers = Buffers(self.source)
        self.state: RestoredState | None = None
        self._meter = TrafficMeter()
        self._incoming = IncomingGradients(always=job.has_ranks)
        self._addends: dict[int, dict[int, int]] = {}  # of each optimizer, as at its last step
        self._gathers: list[Place | None] = []  # where trained tensors were gathered since the last backward pass
        self._undone: ByHand | None = None  # the step that is undone when it is over
        self.draws = self._make_draws()
        self.outputs: Outputs | None = None
        self.pinned_modules: PinnedModules | None = None
        self.control = Control()
        self.kernels: Any = None  # of attention, where they were chosen
        self.differentiates_gathers = False
        self._unannounced_steps = UnannouncedSteps()
        self._waiting: list[Waiting] = []
        self._had_gradients = False  # whether any step had something to use
        self._by_change = False  # whether the change of the weights stood for the gradient of any
        self._loop = Loop()
        self._inputs: Inputs | None = None
        self.loaders = Loaders(self._loop.ignore_draws)
        self._returns_loss = True  # every forward with something to train

    def _make_draws(self) -> Draws:
        arithmetic = self.roundoff.arithmetic
        if self.job.is_reference:
            return KeptDraws(arithmetic, self.storage.folder)
        if self.job.role == "accumulated" and self.job.sources:
            return DealtDraws(arithmetic, [Path(source) for source in self.job.sources])
        return Draws(arithmetic)

    def replay(self, loop: Loop, loaders: Loaders, inputs: Inputs | None) -> None:
        """Keeps what lies outside the model, or takes it from the full-batch run.

        Args:
            loop: What is done about draws of the loop.
            loaders: What is done about samples.
            inputs: What is done about the inputs of forwards; None: nothing.
        """
        self._loop, self.loaders, self._inputs = loop, loaders, inputs
        self.draws.deals_loop_draws = True

    def expect_steps_by_hand(self) -> None:
        """Takes moved weights for a step: no optimizer will tell of one."""
        self.by_hand = True
        self._unannounced_changes.hunt_always()

    @property
    def _is_last_update(self) -> bool:
        """Whether the modules of this update are listened to, or pinned."""
        return self._update.number == self.job.updates

    def _summarise(self, ending: Ending, exit_code: str) -> ClosingRecord:
        """Returns the closing record."""
        draws, models, clearing = self.draws.summarise(), self.names.models, self.clearing
        optimizers = tuple(type(entry.optimizer).__name__ for entry in self.watch)
        return ClosingRecord(
            ending,
            exit_code,
            self._update.number - 1,
            self.rank,
            self.ranks,
            groups=tuple(map(self._summarise_group, range(len(self.watch)))),
            optimizers=(_BY_THE_SCRIPT,) if self.by_hand else optimizers,
            models=ModelSummary(
                tuple(type(model).__name__ for model in models),
                engine_of(models),
                is_flattened(models),
                tensor_parallel(models, self.watch.all_parameters()),
                self._returns_loss,
            ),
            arithmetic=self.roundoff.describe(),
            draws=DrawSummary(
                draws.count + self._loop.count,
                draws.dealt + self._loop.count,
                {**draws.unaligned, **self._loop.unaligned},
                draws.fused,
                self._loop.moved,
            ),
            loaders=self.loaders.count,
            epochs=self.loaders.ended,
            moves_by_hand=not self.steps and self._unannounced_steps.moves > 0,
            had_gradients=self._had_gradients,
            by_change=self._by_change,
            unseen=UnseenCalls(self.guard.left_out, self.elsewhere, started_processes(), _has_compiled()),
            control=ControlSummary(
                clearing.count if clearing is not None else 0,
                clearing.setter if clearing is not None else None,
                self.state.describe() if self.state is not None else (),
            ),
            torch=torch.__version__,
        )

    def _summarise_group(self, index: int) -> TrainedGroup:
        """Returns what an optimizer trains."""
        parameters, addends, is_part = self.watch.parameters(index), self._addends.get(index, {}), index in self._parts
        trained = tuple(
            TrainedParameter(
                # Models are numbered by the order in which their parameters are named, which parts must not change.
                "" if is_part else self.names.key(parameter, index, at),
                _shape(parameter),
                _shard_of(parameter),
                addends.get(at),
            )
            for at, parameter in enumerate(parameters)
        )
        return TrainedGroup(trained, tuple(self.names.models_of(parameters)), is_part)


def started_processes() -> int:
    """Returns how many processes the script has started by `multiprocessing` so far; workers of loaders are some."""
    counter = getattr(multiprocessing.process, "_process_counter", None)
    return 0 if counter is None else next(copy.copy(counter)) - 1


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns a parameter's shape; a lazy module's has none before its first forward."""
    return () if is_lazy(parameter) else tuple(parameter.shape)


def _shard_of(parameter: torch.Tensor) -> Shard | None:
    """Returns the piece of a parameter that this process holds; None where it holds all of it."""
    data: Any = parameter.data
    return Shard(offset_of_shard(data), tuple(data.to_local().shape)) if is_sharded(data) else None


def _has_compiled() -> bool:
    """Whether the script has compiled anything: steps inside a compiled graph are not seen."""
    return compiled_frames() > 0
