"""Changes that no call announces: gradients, weights and settings that a script changes by hand, and the lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from gaverify.audit.recording.storage import Journal
from gaverify.audit.recording.watching import Look, Watch
from gaverify.records.events import ClearedByHand, GradientsEdited, SettingsChanged, WeightsMoved
from gaverify.thresholds import ONE_FACTOR
from gaverify.tracebacks import LineHunt, Owner, Place

What = Literal["moved", "edited", "settings"]
"""A change by hand: of weights (or gradients that are cleared), of gradients, or of an optimizer's settings."""


class UnannouncedChanges:
    """Writes events for the changes that a look finds.

    Args:
        watch: The optimizers.
        journal: Where the events are written.
    """

    def __init__(self, watch: Watch, journal: Journal) -> None:
        self._watch, self._journal = watch, journal
        self._hunt: LineHunt | None = None
        self._hunting = set[What]()
        self._what: What | None = None  # that was done by the line that the hunt has found
        self._places: dict[What, Place] = {}
        self._settings: dict[int, list[dict[str, float]]] = {}
        self.moving_line: Place | None = None
        """The first line of the script's own steps; None until it is known."""

    def note(self, look: Look, where: Literal["between", "forward", "backward"]) -> None:
        """Records cleared gradients, and changed weights of optimizers whose window is open.

        Args:
            look: The changes since the last look.
            where: Between which calls, for the event.
        """
        self.end_hunt()
        moved = [index for index in look.moved if self._watch.of(index).pending]
        lost = [index for index in look.cleared if self._watch.of(index).pending]
        place = self._place_of("moved")
        if moved:
            self._journal.add(WeightsMoved(*self._journal.stamp(place), tuple(moved), where))
        if look.cleared:  # also gradients that a step has used: the next window starts without them
            self._watch.forget(look.cleared)
            stamp = self._journal.stamp(place if lost else (None, None))
            self._journal.add(ClearedByHand(*stamp, optimizers=tuple(look.cleared)))
        if (moved or lost) and where == "between":
            self._hunting.add("moved")  # the line is found in the next window

    def note_edits(self, look: Look) -> None:
        """Records gradients that were changed by hand between a backward pass and the next call."""
        changed = [index for index in look.changed if index not in look.cleared and self._watch.of(index).pending]
        if changed:
            factors = tuple(_factor(self._watch.of(index).gradients, look.changed[index]) for index in changed)
            self._journal.add(GradientsEdited(*self._journal.stamp(self._place_of("edited")), tuple(changed), factors))
            self._hunting.add("edited")

    def note_settings(self) -> None:
        """Records that settings of optimizers were changed by hand; the line is known from the second change on."""
        changed = self._watch.changed_settings(self._settings)
        if changed:
            stamp = self._journal.stamp(self._place_of("settings"))
            self._journal.add(SettingsChanged(*stamp, optimizers=tuple(changed)))
            self._hunting.add("settings")
        self.accept_settings()

    def accept_settings(self) -> None:
        """Remembers the settings as they are: a scheduler, or a step, has changed them."""
        self._settings = self._watch.settings()

    def has_changes(self) -> bool:
        """Whether a change that is hunted for has happened since the last look; remembers only which."""
        self._what = None
        if self._watch.changed_settings(self._settings):
            self._what = "settings"
        elif self._watch.differs():
            self._what = "moved"
        elif "edited" in self._hunting and self._watch.has_edits():
            self._what = "edited"
        return self._what is not None

    def hunt(self, changed: Callable[[Place], bool]) -> None:
        """Starts to look after every line if the line of an earlier change is not known.

        Args:
            changed: Calls `has_changes`.
        """
        # The script's own steps are hunted although their line is known: the hunt keeps the gradients that each uses.
        wanted = self._watch.has_stand_ins or self._hunting - set(self._places)
        if wanted and sys.gettrace() is None:  # a debugger keeps its own trace function
            self._hunt = LineHunt(changed, Owner.USER)
            self._hunt.start(running=True)

    def end_hunt(self) -> None:
        """Stops to look after every line, and remembers the line that was found."""
        if self._hunt is not None:
            self._hunt.stop()
            if self._hunt.found is not None and self._what is not None:
                self._places.setdefault(self._what, self._hunt.found)
            self._hunt = None

    def _place_of(self, what: What) -> Place | tuple[None, None]:
        return self._places.get(what, (None, None))


def _factor(now: torch.Tensor, change: torch.Tensor) -> float | None:
    """Returns the factor that changed gradients; None if no one factor does. Shape (S,)."""
    before = now - change
    size = float(before @ before)
    factor = float(now @ before) / size if size else 0.0
    residual = float(torch.linalg.vector_norm(now - factor * before))
    return factor if residual <= ONE_FACTOR * float(torch.linalg.vector_norm(now)) else None


@dataclass(frozen=True)
class Waiting:
    """A call of `autograd.grad` for parameters, which is a backward pass if a step uses its gradients."""

    place: Place | None
    """The user's line."""
    reached: list[int]
    """Numbers of the forwards that it reached."""
    targets: tuple[tuple[int, int], ...]
    """The targets of each loss: those that count, and all."""
    changes: dict[int, torch.Tensor]
    """Gradients at the sampled elements, by optimizer."""
