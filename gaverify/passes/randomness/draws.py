"""The draws of a full-batch pass, and what came of dealing them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gaverify.passes.randomness.foreign import ForeignDraw
from gaverify.tracebacks import calling_frame, shown

_HIDDEN = "it draws inside its kernel, and no kernel that shows its draws took its place"
MicroBatch = tuple[int, int]
"""The first sample of a micro-batch, and the first behind it."""


@dataclass
class Draw:
    """One random operation of the full batch: its result, and what is needed to tell how the samples lie in it."""

    operation: str
    value: torch.Tensor
    arguments: tuple[Any, ...]
    input_shape: tuple[int, ...] | None
    # Fingerprints of the rows that it was drawn for, how exact these are, and the place in the code that drew.
    prints: torch.Tensor | None = None
    least: float = 0.0
    site: int = 0
    # Where the rows of the micro-batch that starts at a sample begin, and how many are handed out so far: rows that a
    # graph's nodes or a selection drew do not lie at a fixed multiple of the sample's number.
    offsets: dict[int, int] = field(default_factory=dict)
    dealt: int = 0
    taken: list[torch.Tensor] = field(default_factory=list)  # rows that were handed out in the second reading


@dataclass
class DrawRecord:
    """Every draw of a full-batch pass, in order, and what came of dealing them out."""

    draws: list[Draw] = field(default_factory=list)
    fused: set[str] = field(default_factory=set)
    unaligned: dict[str, str] = field(default_factory=dict)  # operations that could not be dealt out, and why
    places: dict[str, tuple[str, int]] = field(default_factory=dict)  # file and line of what could not be dealt out
    # Draws that have no row per sample, so that every micro-batch was given the full batch's, with their file and line.
    shared: dict[str, tuple[str, int] | None] = field(default_factory=dict)
    sliced: int = 0
    ambiguous: bool = False  # the first reading is open to doubt
    inner: bool = False  # the second reading: by place and contents, the batch as inner index of folded dimensions
    constant: bool = False  # every draw gives one typical value instead (a control run)
    foreign: list[ForeignDraw] = field(default_factory=list)
    foreign_end: dict[str, Any] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)  # draws that some micro-batch was dealt rows of
    # How many draws each micro-batch made at each place in the first reading.
    made: dict[MicroBatch, Counter[int]] = field(default_factory=dict)
    # Which draws were made at a place; of the generators that the dispatcher does not see, at the place's complement.
    _sites: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)

    def at(self, site: int, *, foreign: bool = False) -> list[int]:
        """Returns the indices of the draws that were made at a place, in order."""
        if not self._sites:
            for index, draw in enumerate(self.draws):
                self._sites.setdefault(draw.site, []).append(index)
            for index, drawn in enumerate(self.foreign):
                self._sites.setdefault(~drawn.site, []).append(index)
        return self._sites.get(~site if foreign else site, [])

    @property
    def count(self) -> int:
        """How many draws the full batch made."""
        return len(self.draws) + len(self.foreign)

    def share(self, name: str) -> None:
        """Notes a draw without a row per sample, and the line of the user's code that is running."""
        if name not in self.shared:
            frame = calling_frame()
            self.shared[name] = (shown(frame[0]), frame[1]) if frame is not None else None

    def rewind(self) -> None:
        """Starts dealing anew, for another pass over the micro-batches."""
        self.sliced = 0
        self.used.clear()
        self.unaligned.clear()
        self.unaligned.update(dict.fromkeys(self.fused, _HIDDEN))
        self.shared.clear()
        for draw in self.draws:
            draw.dealt = 0
            draw.offsets.clear()
            draw.taken.clear()


def placed(
    indices: Sequence[int], site: int, at: int, micro_batch: MicroBatch, made: Mapping[MicroBatch, Counter[int]]
) -> int | None:
    """Returns which of the full batch's draws of one place a micro-batch's draw number `at` of that place is.

        as many draws as the full batch made, or none    once per forward (or per expert that is used)
        together as many as the full batch made          a loop over samples; the samples before ours drew before us

    Args:
        indices: The full batch's draws of that place, in order.
        site: The place.
        at: How many draws the micro-batch made there before.
        micro_batch: Which micro-batch.
        made: How many draws each micro-batch makes there.

    Returns:
        The draw's index; None where neither holds.
    """
    counts = {micro: numbers[site] for micro, numbers in made.items()}
    if all(count in (0, len(indices)) for count in counts.values()):
        return indices[at] if at < len(indices) else None
    if sum(counts.values()) == len(indices):
        before = sum(count for micro, count in counts.items() if micro < micro_batch)
        return indices[before + at] if before + at < len(indices) else None
    return None
