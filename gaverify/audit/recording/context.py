"""What all listeners of one process share: the script's optimizers and models, and where events are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gaverify.audit.recording.guard import Guard
from gaverify.audit.recording.journal import Journal
from gaverify.audit.recording.unannounced import UnannouncedChanges
from gaverify.audit.recording.values import Names, Roundoff
from gaverify.audit.recording.watching import Watch


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
    """The state that listeners share."""

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
        self.unannounced = UnannouncedChanges(self.watch, self.journal)
        """Turns what no call announced into events."""
