"""Changes that no call announced: gradients cleared and weights moved by hand, and the line that did it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gaverify.audit.recording.places import LineHunt, Place
from gaverify.audit.recording.watching import Seen, Watch


class Changes:
    """Turns what a look found into events.

    Args:
        watch: The optimizers.
        event: Writes an event: kind, place, values.
    """

    def __init__(self, watch: Watch, event: Callable[..., Any]) -> None:
        self._watch, self._event = watch, event
        self._hunt, self._hunting = LineHunt(), False
        self._found: Place | None = None

    def note(self, seen: Seen, where: str) -> None:
        """Records cleared gradients, and moved weights of optimizers that have a window open."""
        self.settle()
        moved = [index for index in seen.moved if self._watch.of(index).pending]
        lost = [index for index in seen.cleared if self._watch.of(index).pending]
        place = self._found or (None, None)
        if moved:
            self._event("moved", place, where=where, optimizers=moved)
        if seen.cleared:  # also what a step has used: the next window starts without it
            self._watch.forget(seen.cleared)
            self._event("cleared", place if lost else (None, None), cleared=seen.cleared)
        if (moved or lost) and where == "between":
            self._hunting = True  # the next time round the line is found

    def hunt(self, changed: Callable[[], bool]) -> None:
        """Starts to watch lines where a change without a known line was seen before."""
        if self._hunting and self._found is None:
            self._hunt.start(changed)

    def settle(self) -> None:
        """Ends the watch and takes what it found."""
        if self._hunt.active:
            self._hunt.stop()
            self._found = self._hunt.found
