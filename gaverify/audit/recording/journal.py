"""Writes the events of a run: each with the number of its update and the script's line."""

from __future__ import annotations

from gaverify.audit.recording.storage import Storage
from gaverify.records.events import Event
from gaverify.tracebacks import Place, user_place


class Journal:
    """The events of one run, in order.

    Args:
        storage: Where they are written.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.update = 1
        """Number of the update that is being worked on."""

    def stamp(self, place: Place | tuple[None, None] | None = None) -> tuple[int, str | None, int | None]:
        """Returns the first three fields of an event that happens now: update, file and line.

        Args:
            place: The script's line; None for the one that is running, two None for a line that is not known.
        """
        file, line = place or user_place() or (None, None)  # a pair of None is true: it stays unknown
        return self.update, file, line

    def add(self, event: Event) -> None:
        """Writes an event."""
        self._storage.event(event)
