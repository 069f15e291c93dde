"""Changes that no call announced: gradients cleared and weights moved by hand, and the line that did it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gaverify.audit.recording.places import LineHunt
from gaverify.audit.recording.watching import Seen, Watch
from gaverify.tracebacks import Place


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
        self._settings: dict[int, list[dict[str, float]]] = {}
        self._setter: Place | None = None

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

    def note_settings(self) -> None:
        """Records that settings of optimizers were changed by hand; the line is known from the second time on."""
        changed = self._watch.changed_settings(self._settings)
        if changed:
            self._event("settings", self._setter or (None, None), optimizers=changed)
            self._hunting = True
        self.know_settings()

    def know_settings(self) -> None:
        """Takes the settings as they are: a scheduler, or a step, has changed them."""
        self._settings = self._watch.settings()

    def settings_differ(self) -> bool:
        """Whether settings were changed since they were last known; remembers nothing."""
        return bool(self._watch.changed_settings(self._settings))

    def hunt(self, changed: Callable[[], bool]) -> None:
        """Starts to watch lines where a change without a known line was seen before."""
        if self._hunting and self._found is None:
            self._hunt.start(changed)

    def settle(self) -> None:
        """Ends the watch and takes what it found."""
        if self._hunt.active:
            self._hunt.stop()
            if self._hunt.found is not None and self.settings_differ():
                self._setter, self._hunt.found = self._hunt.found, None
            self._found = self._hunt.found
