"""Which samples of the full batch a micro-batch holds: found by content, as order alone may not tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gaverify.audit.same_data import Row, alike, rows_of

Fingerprints = dict[str, Any]
Spot = tuple[int, int]
"""The number of a forward of the full-batch run, and the first of its rows."""


class ScatteredRows(Exception):
    """The rows of a micro-batch do not lie one behind the other in the full batch."""


class Matcher:
    """Finds the rows of micro-batches in the forwards of one update of the full-batch run, each spot once.

    Args:
        forwards: The fingerprints of each forward's inputs.
    """

    def __init__(self, forwards: Sequence[Fingerprints]) -> None:
        self._forwards = forwards
        self._read: dict[tuple[int, str], list[Row]] = {}
        self._taken: set[Spot] = set()

    def find(self, among: Sequence[int], micro_batch: Fingerprints) -> Spot | None:
        """Returns where a micro-batch lies in one of the forwards `among`; None where content does not tell.

        The input with the fewest possible places decides: a mask is the same for many samples.

        Raises:
            ScatteredRows: All rows are there, but not one behind the other (two views of each sample in one batch).
        """
        best: list[Spot] = []
        for path, prints in micro_batch.items():
            rows = rows_of([prints], 0)
            spots = self._spots(among, path, rows)
            if not spots and self._holds(among, path, rows):
                raise ScatteredRows
            if spots and (not best or len(spots) < len(best)):
                best = spots
        if not best:
            return None
        spot = next((spot for spot in best if spot not in self._taken), best[0])
        self._taken.add(spot)
        return spot

    def _spots(self, among: Sequence[int], path: str, rows: list[Row]) -> list[Spot]:
        found = []
        for forward in among:
            whole = self._rows(forward, path)
            for start in range(len(whole) - len(rows) + 1):
                if all(alike(row, whole[start + at]) for at, row in enumerate(rows)):
                    found.append((forward, start))
        return found

    def _holds(self, among: Sequence[int], path: str, rows: list[Row]) -> bool:
        wholes = [self._rows(forward, path) for forward in among]
        return any(all(any(alike(row, other) for other in whole) for row in rows) for whole in wholes)

    def _rows(self, forward: int, path: str) -> list[Row]:
        if (forward, path) not in self._read:
            prints = self._forwards[forward].get(path)
            self._read[forward, path] = rows_of([prints], 0) if prints is not None else []
        return self._read[forward, path]
