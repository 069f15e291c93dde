"""The calls around which a recording is built, and what the listeners of one process share.

A call carries what its patch knows, and what listeners find out for those that subscribe behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from gaverify.audit.recording.bus import Call, FunctionCall, Guard
from gaverify.audit.recording.graph import Terms
from gaverify.audit.recording.storage import Journal, Storage
from gaverify.audit.recording.unannounced import UnannouncedChanges
from gaverify.audit.recording.values import Names, Roundoff
from gaverify.audit.recording.watching import Look, Watch, WatchedOptimizer
from gaverify.audit.same_data import ForwardInputs
from gaverify.records.events import LossOrigin
from gaverify.records.ranks import Traffic
from gaverify.tracebacks import Place

# Objects that the listeners of one process share: its run, the script's optimizers and models, the journal of events.


class Assignment(Protocol):
    """The part of a run's job that a recorder reads; everything else that the run asks for installs itself."""

    # Properties, because a protocol's attributes could be assigned to, and those of a frozen job cannot.
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
    def is_launched(self) -> bool:
        """Whether its backward passes may reduce gradients, also in a group of one."""

    @property
    def meeting(self) -> Path | None:
        """A folder that all ranks of the run see; None where it is alone."""


@dataclass
class Phase:
    """Where the script is: in a forward, in a backward pass, or between."""

    in_forward: bool = False
    in_backward: bool = False

    @property
    def outside_forwards(self) -> Literal["backward", "between"]:
        """Where a call is made that no forward makes."""
        return "backward" if self.in_backward else "between"


@dataclass
class Recording:
    """The state that listeners share; everything else belongs to one of them."""

    job: Assignment
    """The part that the process plays."""
    storage: Storage
    """The folder of the run."""
    guard: Guard
    """Decides what is recorded."""
    journal: Journal
    """Where events are written."""
    watch: Watch = field(default_factory=Watch)
    """The script's optimizers, and their gradients and weights at the last look."""
    names: Names = field(default_factory=Names)
    """The script's models."""
    roundoff: Roundoff = field(default_factory=Roundoff)
    """The arithmetic behind gradients."""
    phase: Phase = field(default_factory=Phase)
    """Where the script is."""

    def __post_init__(self) -> None:
        # Shared, because every call ends what happened without a call before it.
        self.unannounced = UnannouncedChanges(self.watch, self.journal)
        """Turns into events what no call announced."""

    @property
    def is_last_update(self) -> bool:
        """Whether the update that is worked on is the last one that is recorded."""
        return self.journal.update == self.job.updates


# The calls around which a recording is built: forwards, backward passes, optimizer steps, and the end of an update.


@dataclass(kw_only=True)
class ForwardCall(FunctionCall):
    """The forward of an outermost module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_graded: bool
    """Whether its operations are differentiated."""
    trains: bool = False
    """Whether its module has something to train and its operations are differentiated."""
    model: int = 0
    """Number of the module among those that train."""
    number: int = 0
    """Number of the forward among those that train."""
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of its input tensors."""
    inputs: ForwardInputs = field(default_factory=dict)
    """Fingerprints of its input tensors."""


@dataclass(kw_only=True)
class Differentiation(FunctionCall):
    """Something that computes gradients."""

    roots: Any
    """The tensor or tensors that are differentiated."""
    place: Place | None
    """The script's line."""


@dataclass(kw_only=True)
class BackwardCall(Differentiation):
    """A call of `backward`."""

    # No default: a listener that reads the terms too early fails, and does not go on with an empty loss.
    terms: Terms = field(init=False)
    """The terms of the loss, as soon as a listener has looked at its graph."""
    origin: LossOrigin = field(default_factory=LossOrigin)
    """Where the loss comes from, as far as a control asks for it."""
    reached: list[int] = field(default_factory=list)
    """Numbers of the forwards that it reached."""
    look: Look = field(default_factory=Look)
    """The changes that it made in `.grad`."""
    is_counted: bool = False
    """Whether it reached parameters: else it belongs to no window."""
    touched: list[int] = field(default_factory=list)
    """Optimizers whose gradients it changed."""
    targets: tuple[tuple[int, int], ...] = ()
    """Valid and all targets of the losses before it."""
    weight: float | None = None
    """Factor on the innermost loss."""
    divisor: float | None = None
    """The divisor of the loss, where no targets tell it."""
    scales: list[float] = field(default_factory=list)
    """Factors on each number on the way to the innermost loss."""
    loss: float = float("nan")
    """The number that was differentiated."""
    traffic: Traffic = field(default_factory=Traffic)
    """Its collectives."""
    reduced: int = 0
    """Bytes of whole gradients that its collectives reduced."""
    gathers: list[Place | None] = field(default_factory=list)
    """Lines that gathered trained tensors before it."""


@dataclass(kw_only=True)
class GradCall(Differentiation):
    """A call of `autograd.grad` for parameters; its result are their gradients."""

    inputs: Sequence[Any]
    """The tensors whose gradients are asked for."""


@dataclass
class StepCall(Call):
    """A step of an optimizer of torch's."""

    entry: WatchedOptimizer
    """The optimizer, with its window."""
    # The two halves of a step are two calls: torch's hooks have nothing in common but the optimizer.
    place: Place | None = None
    """The script's line; None after the step."""
    can_lead: bool = False
    """Whether its gradients may be replaced: a closure would compute them again."""
    was_led: bool = False
    """Whether it used the full-batch run's gradients."""


@dataclass
class UpdateEnd(Call):
    """Something new begins after the steps of an update."""

    number: int
