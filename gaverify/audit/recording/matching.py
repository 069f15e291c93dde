"""Which samples of the full batch a micro-batch holds: found by content, as order alone may not tell."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from gaverify.audit.same_data import Row, alike, rows_of

Fingerprints = dict[str, Any]


class Spot(NamedTuple):
    """Where the rows of a micro-batch lie: a forward of the full-batch run, and their places in it."""

    forward: int
    places: tuple[int, ...]

    @property
    def scattered(self) -> bool:
        """Whether they do not lie one behind the other: ranks take turns, or a batch holds two views of each sample."""
        return self.places != tuple(range(self.places[0], self.places[0] + len(self.places)))


class Matcher:
    """Finds the rows of micro-batches in the forwards of one update of the full-batch run, each spot once.

    Args:
        forwards: The fingerprints of each forward's inputs.
    """

    def __init__(self, forwards: Sequence[Fingerprints]) -> None:
        self._forwards = forwards
        self._rows = cache(self._read)
        self._taken: set[Spot] = set()

    def find(self, among: Sequence[int], micro_batch: Fingerprints) -> Spot | None:
        """Returns where a micro-batch lies in one of the forwards `among`; None where content does not tell.

        The input with the fewest possible places decides: a mask is the same for many samples. Where the rows of any
        input are all there, but not one behind the other, they are scattered, whatever such a mask says.
        """
        best: list[Spot] = []
        for path, prints in micro_batch.items():
            rows = rows_of([prints], 0)
            spots = self._spots(among, path, rows)
            if not spots:
                spot = self._scattered(among, path, rows)
                if spot is not None:
                    self._taken.add(spot)
                    return spot
            elif not best or len(spots) < len(best):
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
                    found.append(Spot(forward, tuple(range(start, start + len(rows)))))
        return found

    def _scattered(self, among: Sequence[int], path: str, rows: list[Row]) -> Spot | None:
        """Each row at the first place that holds it and that no other row was given; None where one has no place."""
        for forward in among:
            whole = self._rows(forward, path)
            exact: dict[Any, list[int]] = {}
            for at, row in enumerate(whole):
                exact.setdefault(row.contents, []).append(at)
            given = {place for spot in self._taken if spot.forward == forward for place in spot.places}
            places: dict[int, None] = {}
            for row in rows:
                # Only a row that was padded to another length has to be held against every other one.
                held = exact.get(row.contents) or [at for at, other in enumerate(whole) if alike(row, other)]
                free = [at for at in held if at not in places]
                if not free:
                    break
                places[next((at for at in free if at not in given), free[0])] = None
            else:
                return Spot(forward, tuple(places)) if places else None
        return None

    def _read(self, forward: int, path: str) -> list[Row]:
        prints = self._forwards[forward].get(path)
        return rows_of([prints], 0) if prints is not None else []
