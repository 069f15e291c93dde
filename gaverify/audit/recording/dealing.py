"""Which part of what the full-batch run drew at a place belongs to a draw of the accumulated run.

A loop draws at a place once per batch, or m times (two crops of every image): m is the fewest that the full-batch run
drew there between two backward passes, and every m-th draw of a place makes a row of its own. In such a row a draw is

    by rows       of a shape that follows the batch (noise, time steps, indices of samples): the micro-batches take the
                  rows of the full batch's one behind the other, also where the loop draws for its next batch ahead
    whole         of a shape that does not (the share of a mixup): all micro-batches of a window are given the same.
                  Windows are told apart by the optimizer's steps, which are as many in both runs
    one by one    a single number for each sample, in a loop over the samples: the next one

Several ranks share the rows that follow: each takes the next ones, block by block, or they take turns, row by row.

No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class LoopDraw:
    """A draw of the full-batch run.

    Args:
        place: Where it was made.
        steps: Optimizer steps before it.
        interval: Backward passes before it.
        operation: What drew.
        shape: Of what was drawn; empty for a single number.
        value: What was drawn.
    """

    place: Hashable
    steps: int
    interval: int
    operation: str
    shape: tuple[int, ...]
    value: Any


class Part(NamedTuple):
    """The part of a draw that belongs to a micro-batch, every `step`-th row; a dimension of −1 means all of it."""

    draw: LoopDraw
    dim: int = -1
    start: int = 0
    size: int = 0
    step: int = 1

    @property
    def rows(self) -> range:
        """Which rows of the draw."""
        return range(self.start, self.start + self.size * self.step, self.step)


class Share(NamedTuple):
    """Which of the ranks draws, of how many, and whether they take turns row by row."""

    rank: int = 0
    ranks: int = 1
    turns: bool = False


_ALONE = Share()


class Unalignable(Exception):
    """The draw has no counterpart; the message says why."""


class _Row:
    """Every m-th draw of a place."""

    def __init__(self, draws: Sequence[LoopDraw]) -> None:
        self._draws = draws
        self._at = self._taken = 0
        self._visits: Counter[int] = Counter()

    def whole(self, steps: int, parts: int) -> Part:
        here = [draw for draw in self._draws if draw.steps == steps]
        self._visits[steps] += 1
        if not here:
            raise Unalignable("the full-batch run drew nothing at this place in this window")
        if len(here) > 1 and not parts:
            raise Unalignable("the full-batch run drew several times at this place in this window")
        return Part(here[min((self._visits[steps] - 1) // max(parts, 1), len(here) - 1)])

    def rows(self, shape: tuple[int, ...], share: Share) -> Part:
        while self._at < len(self._draws):
            draw = self._draws[self._at]
            if len(draw.shape) != len(shape):
                break
            changed = [dim for dim, (ours, whole) in enumerate(zip(shape, draw.shape, strict=True)) if ours != whole]
            if len(changed) != 1:
                raise Unalignable("its shape follows the batch in more than one dimension")
            dim = changed[0]
            size, start = shape[dim], self._taken
            if start + size * share.ranks <= draw.shape[dim]:
                self._taken += size * share.ranks
                if share.turns:
                    return Part(draw, dim, start + share.rank, size, share.ranks)
                return Part(draw, dim, start + share.rank * size, size)
            self._at, self._taken = self._at + 1, 0
        raise Unalignable("the full-batch run drew fewer rows at this place")


class _Place:
    def __init__(self, draws: Sequence[LoopDraw], rows: Mapping[int, int]) -> None:
        self._draws, self._visits = draws, 0
        counts = Counter(draw.interval for draw in draws)
        self._rows = [_Row(draws[at :: min(counts.values())]) for at in range(min(counts.values()))]
        # As many single numbers as the forward has samples: one for each.
        self._single = len({draw.shape for draw in draws}) == 1 and all(
            rows.get(interval, 0) > 1 and count % rows[interval] == 0 for interval, count in counts.items()
        )

    def find(self, steps: int, operation: str, shape: tuple[int, ...], parts: int, share: Share) -> Part:
        first = self._draws[0]
        visit, self._visits = self._visits, self._visits + 1
        if first.operation != operation or len(first.shape) != len(shape):
            raise Unalignable("the full-batch run drew something else at this place")
        if self._single and first.shape == shape:
            if share.ranks > 1:
                raise Unalignable("a number for each sample is not dealt to several ranks")
            if visit >= len(self._draws):
                raise Unalignable("the full-batch run drew less often at this place")
            return Part(self._draws[visit])
        row = self._rows[visit % len(self._rows)]
        return row.whole(steps, parts) if any(draw.shape == shape for draw in self._draws) else row.rows(shape, share)


class Counterparts:
    """Finds for each draw of the accumulated run the part of the full-batch run's that is its own.

    Args:
        draws: Of the full-batch run, in order.
        rows: The rows of its forwards, by backward passes before them.
        parts: Micro-batches per batch of the full-batch run; 0 where that is not known.
    """

    def __init__(self, draws: Sequence[LoopDraw], rows: Mapping[int, int], parts: int) -> None:
        self._parts = parts
        self.steps = max((draw.steps for draw in draws), default=-1) + 1
        by_place: dict[Hashable, list[LoopDraw]] = {}
        for draw in draws:
            by_place.setdefault(draw.place, []).append(draw)
        self._places = {place: _Place(members, rows) for place, members in by_place.items()}

    def find(self, place: Hashable, steps: int, operation: str, shape: tuple[int, ...], share: Share = _ALONE) -> Part:
        """Returns the part of the full-batch run's draw.

        Args:
            place: Where the accumulated run draws.
            steps: Optimizer steps before it.
            operation: What draws.
            shape: Of what was drawn.
            share: Which rank draws.

        Raises:
            Unalignable: There is none.
        """
        if place not in self._places:
            raise Unalignable("the full-batch run drew nothing at this place")
        return self._places[place].find(steps, operation, shape, self._parts, share)
