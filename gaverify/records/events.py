"""The protocol between a script's process and the audit: what the script did, call by call, and how its run ended.

The process writes these records, the audit reads them, and rules read nothing else of a script. One pair of functions
writes and reads each kind; the tensors of a run lie in files of their own (`gaverify.audit.steps`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any, ClassVar, Literal

from gaverify.records.ranks import Engine, Traffic

# How a framework scales a script's losses before it differentiates them.


class Framework(str, Enum):
    """Frameworks that accumulate gradients themselves."""

    TRANSFORMERS = "transformers"
    ACCELERATE = "accelerate"
    LIGHTNING = "lightning"


@dataclass(frozen=True)
class FrameworkLoop:
    """How a framework accumulates in the loop that it runs."""

    framework: Framework
    """Which framework."""
    steps: int
    """K, the number of micro-batches that its user set."""
    divides: bool = True
    """Whether it divides each loss by K."""
    counts_items: bool | None = False
    """Whether transformers' Trainer gives the loss the number of targets; None if its version cannot."""


# The protocol between a script's process and the audit: what the script did, call by call, and how its run ended.


Line = tuple[str, int]
"""A file and the number of a line in it."""


class Ending(str, Enum):
    """How a recorded run came to its end; the values are what the events and JSON hold."""

    UPDATES = "updates"
    """Every update that was asked for has been recorded."""

    SCRIPT = "script"
    """The script ran to its end."""

    EXIT = "exit"
    """The script left with `sys.exit`."""

    ERROR = "error"
    """The script raised."""

    UNKEPT = "unkept gradients"
    """The script moves its weights by gradients that no `.grad` holds at that time."""


_EVENTS: dict[str, type[Event]] = {}  # by kind; each class enters itself


@dataclass(frozen=True)
class Event:
    """One call, or one change without a call, that matters to accumulation."""

    kind: ClassVar[str] = ""
    """The event's name in files, timelines and JSON documents; a base of several kinds has none."""

    update: int
    """Number of the update that was being worked on, counted from 1."""
    file: str | None = None
    """File of the script's line that did it; None where that is not known."""
    line: int | None = None
    """Number of that line; None where that is not known."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.kind:
            _EVENTS[cls.kind] = cls

    @property
    def place(self) -> tuple[str | None, int | None]:
        """File and line."""
        return self.file, self.line


@dataclass(frozen=True)
class OptimizerEvent(Event):
    """An event that belongs to some optimizers: it changed their gradients, weights or settings."""

    optimizers: tuple[int, ...] = ()
    """These optimizers, numbered from 0 in the order in which they were made; empty where it changed nothing."""


@dataclass(frozen=True)
class Forward(Event):
    """The forward of an outermost module with something to train."""

    kind = "forward"

    rows: int | None = None
    """Size of the first input tensor's leading dimension; None where no input is a tensor."""
    model: int | None = None
    """Number of the model, in the order in which models were first called."""
    number: int | None = None
    """Number of the forward in the run, counted from 1."""


@dataclass(frozen=True)
class LossOrigin:
    """Lines and modules behind a loss."""

    term: Line | None = None
    """Line of the only term that was differentiated."""
    made: Line | None = None
    """Line that computed the loss, where a framework's loop differentiates it."""
    met: tuple[Line, ...] = ()
    """Lines in which samples interact, then the line of the loss."""
    inside: tuple[str, ...] = ()
    """Modules from whose own code something flows into the loss."""
    custom: tuple[Line, ...] = ()
    """Lines that call custom autograd functions."""


@dataclass(frozen=True)
class Backward(OptimizerEvent):
    """A backward pass that reached parameters."""

    kind = "backward"

    targets: tuple[tuple[int, int], ...] = ()
    """Valid and all targets of each loss that was computed before it."""
    forwards: tuple[int, ...] | None = None
    """Numbers of the forwards that it reached; None where that was not seen."""
    weight: float | None = None
    """Factor on the innermost loss, recorded where only calls are checked; None where it was not seen."""
    counted: float | None = None
    """Divisor of the loss, up to a factor that all micro-batches share, where no targets were seen; None elsewhere."""
    scales: tuple[float, ...] = ()
    """Factors on each number that the loss was computed from, outermost first."""
    loss: float = math.nan
    """The number that was differentiated, times the gradient that was given for it; NaN where it was not read."""
    framework: FrameworkLoop | None = None
    """The framework's loop that ran it; None for a loop of the script's own."""
    terms: int = 0
    """Number of terms of which the loss is a sum; 0 for no sum."""
    origin: LossOrigin = LossOrigin()
    """Where the loss comes from, as far as a control asks for it."""
    traffic: Traffic = field(default_factory=Traffic)
    """Its collectives; none in a run without ranks."""
    reduced: int = 0
    """Bytes of whole gradients that were reduced over the ranks."""
    gathers: tuple[Line | None, ...] = ()
    """Lines that gathered trained tensors from all ranks since the backward pass before it."""


@dataclass(frozen=True)
class GradientsRemoved(OptimizerEvent):
    """Gradients are gone, with or without a call."""


@dataclass(frozen=True)
class ZeroGrad(GradientsRemoved):
    """A call of `zero_grad`, of an optimizer or a module."""

    kind = "zero_grad"


@dataclass(frozen=True)
class ClearedByHand(GradientsRemoved):
    """Gradients were removed without a call: `.grad` was set to None or zero by hand."""

    kind = "cleared"


@dataclass(frozen=True)
class Step(Event):
    """An optimizer's step, or one that the script makes itself."""

    kind = "step"

    optimizer: int = 0
    """The optimizer that stepped."""
    inside: bool = False
    """Whether a backward pass was running."""
    by_hand: bool = False
    """Whether gradients were changed without a known call since the last call, or the script made the step itself."""


@dataclass(frozen=True)
class WeightsMoved(OptimizerEvent):
    """Parameters with gradients changed without a step."""

    kind = "moved"

    where: Literal["between", "forward", "backward"] = "between"
    """Where they changed: between calls, in a forward or in a backward pass."""


@dataclass(frozen=True)
class GradientsEdited(OptimizerEvent):
    """Gradients were changed by hand before a forward or backward pass."""

    kind = "edited"

    factors: tuple[float | None, ...] = ()
    """Factor on each such optimizer's gradients; None where no one number makes them what they are."""


@dataclass(frozen=True)
class Clipping(OptimizerEvent):
    """A call that clips gradients."""

    kind = "clip"

    call: str = ""
    """Name of the function."""
    active: bool = False
    """Whether it changed a gradient."""
    norm: float | None = None
    """The norm that it measured; None for functions that measure none."""
    limit: float | None = None
    """The largest norm, or value, that it lets through; None where that is not a number."""


@dataclass(frozen=True)
class SchedulerStep(Event):
    """A step of a learning-rate scheduler."""

    kind = "scheduler"

    scheduler: int = 0
    """Identity of the scheduler."""
    lr: tuple[float, ...] = ()
    """Learning rates of its optimizer's groups after it."""


@dataclass(frozen=True)
class ScalerCall(Event):
    """A call of an enabled `GradScaler`."""

    kind = "scaler"

    call: str = ""
    """Name of the method: unscale_, step or update."""
    skipped: bool = False
    """Whether it left out a step because of infinities."""


@dataclass(frozen=True)
class AverageUpdate(Event):
    """A call of `AveragedModel.update_parameters`."""

    kind = "average"


@dataclass(frozen=True)
class SettingsChanged(OptimizerEvent):
    """Numbers of optimizers were set by hand: a learning rate, a decay."""

    kind = "settings"


@dataclass(frozen=True)
class FileLoaded(Event):
    """A file that `torch.load` read: a checkpoint, if the weights are other ones afterwards."""

    kind = "loaded"

    path: str = ""
    """Absolute path of the file."""


@dataclass(frozen=True)
class End(Event):
    """The end of the run."""

    kind = "end"

    reason: Ending = Ending.SCRIPT
    """How it came about."""


def write_event(event: Event) -> str:
    """Returns an event as one line of JSON."""
    # `vars` of the dataclasses inside an event; enums are strings already.
    return json.dumps({"kind": event.kind, **vars(event)}, default=vars)


def read_event(line: str) -> Event:
    """Returns the event that `write_event` wrote."""
    values = json.loads(line)
    kind: Any = _EVENTS[values.pop("kind")]
    event: Event = _reader_of(kind).validate_python(values)
    return event


@dataclass(frozen=True)
class Shard:
    """The piece of a sharded parameter that one process holds."""

    offset: tuple[int, ...]
    """Where it begins in the whole parameter, one index per dimension."""
    shape: tuple[int, ...]
    """Its shape."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its place in the whole parameter, as an index."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class TrainedParameter:
    """One parameter of an optimizer."""

    key: str
    """Its name, `model:name`; `-:optimizer0.2` stands for the third one of an optimizer, where no module holds it."""
    shape: tuple[int, ...]
    """Shape of the whole parameter; empty for a lazy module's before its first forward."""
    shard: Shard | None = None
    """The piece of it that this process holds; None where it holds all of it."""
    addends: int | None = None
    """Ranks that hold the same addend of its gradient, a sum still to be made at its last step; None for whole ones."""


@dataclass(frozen=True)
class TrainedGroup:
    """The parameters of one optimizer."""

    parameters: tuple[TrainedParameter, ...] = ()
    """Its parameters in the order of its groups."""
    models: tuple[int, ...] = ()
    """Numbers of the models that hold them, as the events of their forwards have them."""
    is_part: bool = False
    """Whether it steps as a part of another optimizer, which holds the same parameters."""


@dataclass(frozen=True)
class ModelSummary:
    """The models that were seen."""

    classes: tuple[str, ...] = ()
    """Names of their classes, in the order in which they were first called."""
    engine: Engine | None = None
    """The wrapper that reduces their gradients over ranks; None where none of torch's does."""
    is_flattened: bool = False
    """Whether FSDP's first version cuts one of them into flat pieces."""
    is_tensor_parallel: bool = False
    """Whether ranks hold parts of the same layers."""


@dataclass(frozen=True)
class ArithmeticSummary:
    """The data types that a run computed in."""

    unit: float = 0.0
    """Unit roundoff of the coarsest arithmetic behind gradients; 0 where nothing was seen."""
    device: str = "unknown"
    """Type of the device that trained parameters are on."""
    dtype: str = "unknown"
    """Data types of the trained parameters, joined by ", "."""
    autocast: str | None = None
    """Data type of autocast; None where it was off."""


@dataclass(frozen=True)
class DrawSummary:
    """Random draws of a run."""

    count: int = 0
    """Draws that were kept for other runs."""
    dealt: int = 0
    """Draws that were replaced by the full-batch run's."""
    unaligned: Mapping[str, str] = field(default_factory=dict)
    """Draws without a counterpart in the full-batch run, with the reason."""
    fused: tuple[str, ...] = ()
    """Kernels that draw out of sight, among them `COMPILED`."""
    in_loop: bool = False
    """Whether the script draws outside its models' forwards."""


@dataclass(frozen=True)
class UnseenCalls:
    """Calls of a script that could not be recorded."""

    left_out: Mapping[str, int] = field(default_factory=dict)
    """Calls whose tensors had no values, by what hid them."""
    elsewhere: int = 0
    """Backward passes that reached no parameter."""
    processes: int = 0
    """Processes that the script started by `multiprocessing`."""
    has_compiled: bool = False
    """Whether it compiled anything: steps inside a compiled graph are not seen."""


ValuePlace = Literal["parameter", "buffer", "attribute", "closure"]
"""How a module holds a value; "closure" for what no module holds."""


@dataclass(frozen=True)
class ChangedValue:
    """A value of a module that forwards change."""

    name: str
    """Path of the module and name of the value."""
    place: ValuePlace
    """How the module holds it."""
    line: Line | None = None
    """The line that changes it, where one was looked for and found."""


@dataclass(frozen=True)
class CarriedValue:
    """A value of a module that an update finds other than the same update of the full-batch run."""

    update: int
    """The update."""
    name: str
    """Path of the module and name of the value."""
    place: ValuePlace
    """How the module holds it."""
    line: Line | None = None
    """The line of the script's own code that changes it, where one was looked for and found."""


@dataclass(frozen=True)
class ControlSummary:
    """Recordings of control runs, and the facts by which controls are chosen."""

    cleared: int = 0
    """Backward passes before which gradients were cleared."""
    setter: Line | None = None
    """The user's line that writes gradients during a backward pass; None where none was found."""
    changed_values: tuple[ChangedValue, ...] = ()
    """Values of modules that forwards change."""
    carried: tuple[CarriedValue, ...] = ()
    """Values with which an update begins other than the full-batch run's."""
    values_differed: bool | None = None
    """Whether what a control replaced had been different; None: it does not tell."""


@dataclass(frozen=True)
class GradientCopies:
    """The gradients that the full-batch run has copied, so that later runs make the same steps."""

    updates: int
    """Number of updates whose gradients were copied."""
    wanted: int
    """Bytes of the gradients of one update."""
    free: int
    """Bytes that were free on the disk."""


@dataclass(frozen=True)
class PeakMemory:
    """The most memory that a process has had, in bytes; zeros where that is not known."""

    host: int = 0
    """Main memory."""
    device: int = 0
    """Memory of its device that torch had reserved."""
    device_room: int = 0
    """Memory of its device that was free when it ended, or that torch still had."""


@dataclass(frozen=True)
class ClosingRecord:
    """The report of a process about its run when it ends; only a run that has one is complete."""

    ending: Ending = Ending.SCRIPT
    """How the run ended."""
    exit_code: str = ""
    """Argument of the script's `sys.exit`, as Python writes it; empty where it did not call it."""
    updates: int = 0
    """Number of complete updates."""
    rank: int = 0
    """Rank of the process among those that train together."""
    ranks: int = 1
    """Number of processes that train together."""
    groups: tuple[TrainedGroup, ...] = ()
    """The parameters of each optimizer, by its number."""
    optimizers: tuple[str, ...] = ()
    """Class names of the optimizers; for hand-written updates a note instead."""
    models: ModelSummary = ModelSummary()
    """The models that were seen."""
    arithmetic: ArithmeticSummary = ArithmeticSummary()
    """The data types that the run computed in."""
    draws: DrawSummary = field(default_factory=DrawSummary)
    """Its random draws."""
    loaders: int = 0
    """Number of data loaders that were iterated."""
    epochs: int = 0
    """Passes over a loader that came to their end."""
    steps_itself: bool = False
    """Whether the script has no optimizer of torch's and moves its weights itself."""
    keeps_no_gradients: bool = False
    """Whether the script moves weights by gradients that no `.grad` holds at that time."""
    had_gradients: bool = False
    """Whether any step had a gradient to use."""
    copies: GradientCopies | None = None
    """Gradients that it copied for the steps of later runs; None where no run is to follow its steps."""
    unseen: UnseenCalls = field(default_factory=UnseenCalls)
    """Calls that could not be recorded."""
    control: ControlSummary = ControlSummary()
    """Recordings of control runs alone."""
    memory: PeakMemory = PeakMemory()
    """The most memory that it had."""
    torch: str = ""
    """Version of PyTorch."""

    @property
    def is_sharded(self) -> bool:
        """Whether this process holds pieces of parameters."""
        return any(parameter.shard is not None for group in self.groups for parameter in group.parameters)


def write_closing_record(record: ClosingRecord) -> str:
    """Returns a closing record as JSON."""
    return json.dumps(record, default=vars)


def read_closing_record(text: str) -> ClosingRecord:
    """Returns the record that `write_closing_record` wrote."""
    record: ClosingRecord = _reader_of(ClosingRecord).validate_json(text)
    return record


@cache
def _reader_of(record: Any) -> Any:
    # The script's process only writes. It must not import pydantic: the script may bring its own version of it.
    from pydantic import TypeAdapter

    return TypeAdapter(record)


@dataclass(frozen=True)
class LostPasses:
    """Backward passes of one window that no optimizer ever used."""

    window: int
    """Number of the window, counted from 1."""
    backwards: tuple[Backward, ...]
    """These passes."""
    by: Event | None
    """The event that took their gradients away; None where the script ended."""
    survivors: int
    """Number of passes of the window that were used."""


@dataclass(frozen=True)
class Stale:
    """A step that used gradients which an earlier step of the same optimizer had used already."""

    step: Step
    """The step."""
    backwards: int
    """Number of backward passes whose gradients it used again."""


@dataclass(frozen=True)
class Ledger:
    """Whether each backward pass reached a step."""

    lost: tuple[LostPasses, ...]
    """Passes that no optimizer used, by window."""
    stale: tuple[Stale, ...]
    """Steps that used gradients for a second time."""


@dataclass
class _State:
    """The state of each backward pass, by its position in `backwards`, while events are followed."""

    pending: dict[int, list[int]] = field(default_factory=dict)
    """Optimizer → passes whose sum its gradients hold."""
    consumed: dict[int, set[int]] = field(default_factory=dict)
    """Optimizer → passes that its steps used."""
    used: set[int] = field(default_factory=set)
    """Passes that any step used."""
    taken: dict[int, Event | None] = field(default_factory=dict)
    """Pass → the first event that removed its gradients; None for the end of the script."""
    backwards: list[Backward] = field(default_factory=list)
    """The passes so far."""
    stale: list[Stale] = field(default_factory=list)
    """Steps that used gradients again."""


def ledger_of(events: Sequence[Event]) -> Ledger:
    """Follows every backward pass to the steps that used it.

    A backward that is cleared for one optimizer and used by another (a GAN's generator loss also reaches the
    discriminator's gradients) is not lost.
    """
    state = _State()
    for event in events:
        _take(state, event)
    lost = {at: by for at, by in state.taken.items() if at not in state.used}
    return Ledger(_lost_passes(state, lost), tuple(state.stale))


def _take(state: _State, event: Event) -> None:
    if isinstance(event, Backward):
        state.backwards.append(event)
        for optimizer in event.optimizers:
            state.pending.setdefault(optimizer, []).append(len(state.backwards) - 1)
    elif isinstance(event, GradientsRemoved):
        _drop(state, [state.pending.pop(optimizer, []) for optimizer in event.optimizers], event)
    elif isinstance(event, ScalerCall) and event.skipped:
        # The scaler throws these gradients away because of infinities, which is no fault: they count as used.
        state.used |= {at for pending in state.pending.values() for at in pending}
        state.pending.clear()
    elif isinstance(event, Step):
        _step(state, event)
    elif isinstance(event, End) and event.reason is not Ending.UPDATES:
        # A run that is stopped after enough updates may be inside a window, whose passes are not lost.
        _drop(state, state.pending.values(), None)


def _drop(state: _State, groups: Iterable[list[int]], by: Event | None) -> None:
    for pending in groups:
        for at in pending:
            # The first event that removes a gradient is the one to name.
            state.taken.setdefault(at, by)


def _step(state: _State, event: Step) -> None:
    pending = set(state.pending.get(event.optimizer, []))
    consumed = state.consumed.setdefault(event.optimizer, set())
    # A step leaves gradients as they are. Those that nothing cleared before the next step are used again.
    used_twice = pending & consumed
    if used_twice:
        state.stale.append(Stale(event, len(used_twice)))
    consumed |= pending
    state.used |= pending


def _lost_passes(state: _State, lost: dict[int, Event | None]) -> tuple[LostPasses, ...]:
    # By window: all of them have one cause, and are one finding.
    groups: dict[int, list[int]] = {}
    for at in sorted(lost):
        groups.setdefault(state.backwards[at].update, []).append(at)
    result = []
    for window, members in groups.items():
        survivors = sum(event.update == window and at in state.used for at, event in enumerate(state.backwards))
        by = next((lost[at] for at in members if lost[at] is not None), None)
        result.append(LostPasses(window, tuple(state.backwards[at] for at in members), by, survivors))
    return tuple(result)
