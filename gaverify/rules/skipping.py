"""Micro-batches that a loop skips: they get no backward pass, or are not even fed to the model."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.events import Event, Forward
from gaverify.records.findings import Location
from gaverify.records.windows import Window
from gaverify.rules.wording import first_place, join_texts


@dataclass(frozen=True)
class Skipped:
    """The micro-batches that a window leaves out although the full batch leaves out nothing.

    Args:
        window: The window.
        number: How many.
        count: How many micro-batches the window should have, with those.
        positions: Which, where the model was fed them.
        samples: How many samples they hold, where the model was not fed them.
    """

    window: Window
    number: int
    count: int
    positions: tuple[int, ...] = ()
    samples: int = 0

    @property
    def location(self) -> Location | None:
        """The forwards that no backward pass follows; else those that were made."""
        forwards = self.window.of(Forward)
        return first_place([forwards[at] for at in self.positions] or forwards)

    @property
    def subject(self) -> str:
        """The beginning of a sentence, with its verb."""
        number = self.window.number
        if not self.positions:
            return f"{self.samples} samples of update {number} have"
        which = f"{join_texts([str(at + 1) for at in self.positions], 6)} of update {number}"
        return f"micro-batches {which} have" if len(self.positions) > 1 else f"micro-batch {which} has"


def find_skipped(loop: Record, update: UpdateComparison) -> Skipped | None:
    """Returns the micro-batches that an update leaves out; None where it leaves out none, or the full batch does."""
    windows = (loop.full_windows, loop.windows)
    full_window, window = (next((w for w in each if w.number == update.number), None) for each in windows)
    # forwards without a backward in the full batch as well are part of the training (validation, a teacher)
    if full_window is None or window is None or full_window.dropped_positions:
        return None
    forwards = window.of(Forward)
    # a window without any backward pass is no accumulation at all
    if 0 < len(window.dropped_positions) < len(forwards):
        return Skipped(window, len(window.dropped_positions), len(forwards), window.dropped_positions)
    count = loop.expected_passes(window)
    missing = update.data.missing if update.data.adds_nothing else update.never_fed
    if not missing or count is None or not len(forwards) < count:
        return None
    return Skipped(window, count - len(forwards), count, samples=missing)


def explains_skipped(loop: Record, update: UpdateComparison) -> bool:
    """Whether the micro-batches that an update leaves out are all that is wrong with its weights.

    Those that are left out have nothing to give, and the others are divided by the number of all.
    """
    skipped = find_skipped(loop, update)
    if skipped is None or update.window.fit is None or update.window.fit.residual > loop.tolerance:
        return False
    if math.isclose(update.norm_ratio, skipped.window.backwards / skipped.count, rel_tol=loop.tolerance):
        return True
    # Weights of 1 / count become shares of targets, which add up to 1: the factors that repair them add up to count.
    factors = sum(update.window.fit.multipliers)
    return update.window.fit.determined and math.isclose(factors, skipped.count, rel_tol=loop.tolerance)


@dataclass(frozen=True)
class MissedBoundary:
    """A window that goes on behind its K micro-batches, because the loop skips the last of them and the step with it.

    `last` is the forward of that one; None where the model was not fed it.
    """

    window: Window
    steps: int
    last: Event | None


def missed_boundaries(loop: Record) -> list[MissedBoundary]:
    """Returns the windows that go on behind a last micro-batch that is skipped."""
    if any(window.dropped_positions for window in loop.full_windows):
        return []
    boundaries = []
    for window in loop.complete:
        forwards, update, steps = window.of(Forward), loop.update_of(window.number), _micro_batches_of(loop, window)
        if steps is None or not 1 < steps < len(forwards):
            continue
        last = forwards[steps - 1] if steps - 1 in window.dropped_positions else None
        if update is None:  # calls alone: a validation that may be differentiated stands at another line
            places = {event.place for event in window.reached_forwards()}
            if last is not None and last.place in places:
                boundaries.append(MissedBoundary(window, steps, last))
        elif update.fed is not None and update.fed.accumulated > update.fed.full:
            # all of the full batch's samples and some of its next, or all but those that no update is fed
            if last is not None and update.fed.missing == 0:
                boundaries.append(MissedBoundary(window, steps, last))
            elif 0 < update.fed.missing == update.never_fed < update.fed.full:
                boundaries.append(MissedBoundary(window, steps, None))
    return boundaries


def _micro_batches_of(loop: Record, window: Window) -> int | None:
    """K: as the user says, as the full batch's rows tell, or as most windows have; None where nothing shows it."""
    counts = Counter(len(each.of(Forward)) for each in loop.complete if each.optimizers == window.optimizers)
    if loop.steps is not None:
        return loop.steps
    full_window = next((full for full in loop.full_windows if full.number == window.number), None)
    if full_window is None:
        # of equally frequent numbers the smallest: windows that were joined are longer
        steps = max(counts, key=lambda count: (counts[count], -count))
        return steps if counts[steps] > 1 else None
    rows = list(accumulate(forward.rows or 0 for forward in window.of(Forward)))
    steps = rows.index(full_window.rows) + 1 if full_window.rows in rows else 0
    # else the arguments may ask for another batch size, and nothing is wrong with the loop
    return steps if steps in loop.numbers or steps in counts else None


def is_skipping(loop: Record, update: UpdateComparison) -> bool:
    """Whether a micro-batch that is skipped is why an update holds other samples than the full batch's."""
    joined = any(each.window.number == update.number for each in missed_boundaries(loop))
    return joined or find_skipped(loop, update) is not None
