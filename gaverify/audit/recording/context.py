"""What the listeners of one process share: its run, the script's optimizers and models, the journal of events."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from gaverify.audit.recording.guard import Guard
from gaverify.audit.recording.journal import Journal
from gaverify.audit.recording.storage import Storage
from gaverify.audit.recording.unannounced import UnannouncedChanges
from gaverify.audit.recording.values import Names, Roundoff
from gaverify.audit.recording.watching import Watch


class Assignment(Protocol):
    """What a recorder knows of its run; everything else that the run asks for installs itself."""

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
