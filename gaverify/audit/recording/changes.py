"""Changes that no call announced: gradients cleared or changed, weights and settings set by hand; and their lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import torch

from gaverify.audit.recording.averages import Followers
from gaverify.audit.recording.watching import Seen, Watch
from gaverify.thresholds import ONE_FACTOR
from gaverify.tracebacks import LineHunt, Owner, Place

What = Literal["moved", "edited", "settings"]
"""What was done by hand: weights moved or gradients cleared, gradients or settings changed."""


class Changes:
    """Turns what a look found into events.

    Args:
        watch: The optimizers.
        event: Writes an event: kind, place, values.
        hunting: Look for the line in every window: no call tells when the weights move.
        averages: The averages of the weights.
    """

    def __init__(self, watch: Watch, event: Callable[..., Any], averages: Followers, hunting: bool = False) -> None:
        self._watch, self._event, self._averages = watch, event, averages
        self._hunt: LineHunt | None = None
        self._always = hunting
        self._hunting = set[What](["moved"] if hunting else [])
        self._what: What | None = None  # that was done by the line that the hunt has found
        self._places: dict[What, Place] = {}
        self._settings: dict[int, list[dict[str, float]]] = {}

    @property
    def found(self) -> Place | None:
        """The line that moves the weights, once it is known."""
        return self._places.get("moved")

    def note(self, seen: Seen, where: str) -> None:
        """Records cleared gradients, and moved weights of optimizers that have a window open."""
        self.settle()
        moved = [index for index in seen.moved if self._watch.of(index).pending]
        lost = [index for index in seen.cleared if self._watch.of(index).pending]
        place = self._place_of("moved")
        if moved:
            self._event("moved", place, where=where, optimizers=moved)
        if seen.cleared:  # also what a step has used: the next window starts without it
            self._watch.forget(seen.cleared)
            self._event("cleared", place if lost else (None, None), cleared=seen.cleared)
        if (moved or lost) and where == "between":
            self._hunting.add("moved")  # the next time round the line is found

    def note_edits(self, seen: Seen) -> None:
        """Records gradients that were changed by hand after a backward pass, and before the window goes on."""
        changed = [index for index in seen.changed if index not in seen.cleared and self._watch.of(index).pending]
        if changed:
            factors = [_factor(self._watch.of(index).gradients, seen.changed[index]) for index in changed]
            self._event("edited", self._place_of("edited"), optimizers=changed, factors=factors)
            self._hunting.add("edited")

    def note_averages(self) -> None:
        """Records updates of averages of the weights that no call announced; their lines are not known."""
        for move in self._averages.look():
            self._event("average", (None, None), **move.values())

    def note_settings(self) -> None:
        """Records that settings of optimizers were changed by hand; the line is known from the second time on."""
        changed = self._watch.changed_settings(self._settings)
        if changed:
            self._event("settings", self._place_of("settings"), optimizers=changed)
            self._hunting.add("settings")
        self.know_settings()

    def know_settings(self) -> None:
        """Takes the settings as they are: a scheduler, or a step, has changed them."""
        self._settings = self._watch.settings()

    def differ(self) -> bool:
        """Whether what is hunted for has happened since the last look; remembers only what it was."""
        self._what = None
        if self._watch.changed_settings(self._settings):
            self._what = "settings"
        elif self._watch.differs():
            self._what = "moved"
        elif "edited" in self._hunting and self._watch.edited():
            self._what = "edited"
        return self._what is not None

    def hunt(self, changed: Callable[[Place], bool]) -> None:
        """Starts to watch lines where a change without a known line was seen before; not while a debugger does.

        Args:
            changed: Calls `differ`.
        """
        if self._always:
            self._hunting = {"moved"}
        wanted = self._hunting if self._always else self._hunting - set(self._places)
        if wanted and sys.gettrace() is None:
            self._hunt = LineHunt(changed, Owner.USER)
            self._hunt.start(running=True)

    def settle(self) -> None:
        """Ends the watch and takes what it found."""
        if self._hunt is not None:
            self._hunt.stop()
            if self._hunt.found is not None and self._what is not None:
                self._places.setdefault(self._what, self._hunt.found)
            self._hunt = None

    def _place_of(self, what: What) -> Place | tuple[None, None]:
        return self._places.get(what, (None, None))


def _factor(now: torch.Tensor, change: torch.Tensor) -> float | None:
    """What gradients were multiplied by; None where no one number makes them what they are now. Shape (S,)."""
    before = now - change
    size = float(before @ before)
    factor = float(now @ before) / size if size else 0.0
    left = float(torch.linalg.vector_norm(now - factor * before))
    return factor if left <= ONE_FACTOR * float(torch.linalg.vector_norm(now)) else None
