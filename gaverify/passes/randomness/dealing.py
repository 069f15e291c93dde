"""Deals the full batch's draws out to one micro-batch, and makes again those of Python's and NumPy's generators.

Activation checkpointing runs parts of earlier forwards once more: what a backward draws again is dealt out again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from gaverify.passes.randomness import foreign
from gaverify.passes.randomness.draws import (
    LOOSE,
    Draw,
    DrawRecord,
    MicroBatch,
    Recorder,
    fingerprint,
    place_draw,
    tolerance,
)
from gaverify.passes.randomness.foreign import call_site
from gaverify.passes.randomness.operations import Drawing, alike, generator_key, same_arguments
from gaverify.passes.randomness.selection import (
    Rows,
    Selection,
    by_contents,
    by_position,
    doubtful,
    hand_out,
    taken_from,
    withdraw,
)
from gaverify.tracebacks import calling_frame, display_path, hands_over

_NAMES = {"numpy": "numpy.random"}


class ForeignDealer:
    """Counts the draws in the first reading; the second makes each from the state that its sample's was made from.

    Args:
        record: The full batch's draws.
        micro_batch: The samples.
        batch_size: B.
        made: How many draws were made at each place so far.
    """

    def __init__(self, record: DrawRecord, micro_batch: MicroBatch, batch_size: int, made: Counter[int]) -> None:
        self._record, self._micro_batch, self._size, self._made = record, micro_batch, batch_size, made
        self._at: int | None = None
        self._lost = False
        self._whole = micro_batch == (0, batch_size)
        self._once: dict[int, str] = {}  # places of the draws that gave no row per sample, and what was called there

    @property
    def _active(self) -> bool:
        return 0 < len(self._record.foreign) < foreign.MOST and not self._record.constant

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sees the draws."""
        if not self._active:
            yield
            return
        with foreign.watch_generators(self._draw):
            yield

    def finish(self) -> None:
        """Leaves the generators where the full batch leaves them, if every draw was found and drew as much."""
        if not self._active or self._whole:
            return
        self._hold_against_full()
        for site, name in self._once.items():  # a loop over samples draws more often in the full batch
            if self._made[site] != len(self._record.at(site, foreign=True)):
                self._record.shared.pop(name, None)
        end = self._record.foreign_end
        if not self._record.inner:
            self._record.ambiguous |= not all(foreign.same_state(module, state) for module, state in end.items())
        elif not self._lost:
            self._record.sliced += 1
            for module, state in end.items():
                foreign.put(module, state)

    @hands_over
    def _draw(self, call: foreign.Call, run: Callable[[], Any]) -> Any:
        self._hold_against_full()
        site = call_site()
        at = self._made[site]
        self._made[site] += 1
        if not self._whole:
            self._note(site, call)
        if not self._record.inner or self._whole:
            return run()
        draws = self._record.foreign
        of_site = self._record.at(site, foreign=True)
        self._at = place_draw(of_site, site, at, self._micro_batch, self._record.draw_counts)
        if self._at is None:  # a draw that follows another one: its generator may be where it has to be
            self._at = next((i for i in of_site if foreign.same_state(call.module, draws[i].state)), None)
        if self._at is None:
            self._lost = True
            return run()
        foreign.put(call.module, draws[self._at].state)
        result = run()
        rows = foreign.own_rows(draws[self._at], call, result, self._micro_batch, self._size)
        if rows is None:
            return result
        self._record.shared.pop(self._once.pop(site, ""), None)
        foreign.put(call.module, foreign.state_after(draws, self._at, self._record.foreign_end))
        return rows

    def _note(self, site: int, call: foreign.Call) -> None:
        """Notes a draw as one for all samples, until it turns out to have rows or to be made once per sample."""
        if site not in self._once:
            self._once[site] = f"{_NAMES.get(call.module, call.module)}.{call.name}"
            self._record.share(self._once[site])

    def _hold_against_full(self) -> None:
        """The draw before this one must have left its generator where the full batch's left it."""
        at, self._at = self._at, None
        if at is not None:
            after = foreign.state_after(self._record.foreign, at, self._record.foreign_end)
            self._lost |= not foreign.same_state(self._record.foreign[at].call.module, after)


_SEARCHED = 64  # draws of one place that are searched for contents
_FEWER = "the micro-batch made fewer draws than the full batch"


class Dealer:
    """Handles the random operations of one micro-batch: replaces each result by the rows of its own samples.

    Args:
        record: The full batch's draws.
        start: The number of its first sample.
        stop: The number behind its last one.
        batch_size: B.
        order: The places of its samples in the full batch, where those are not `start` to `stop - 1`.
    """

    def __init__(
        self, record: DrawRecord, start: int, stop: int, batch_size: int, order: tuple[int, ...] | None = None
    ) -> None:
        self.record = record
        self._micro_batch = (start, stop)
        self._order = order
        self._size = batch_size
        # A repeated draw is dealt the same rows: by the generator's state before it, and the shape that was drawn.
        self.known: dict[Any, tuple[torch.Size, tuple[torch.Tensor, Selection] | None]] = {}
        self._next = 0
        self._made: Counter[int] = Counter()
        self._doubts: list[torch.Tensor] = []
        self._foreign = ForeignDealer(record, self._micro_batch, batch_size, self._made)
        if not record.inner and not self._whole:
            record.draw_counts[self._micro_batch] = self._made

    @property
    def _whole(self) -> bool:
        """Whether this is the full batch again."""
        return self._micro_batch == (0, self._size) and self._order is None

    @hands_over
    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: torch.Tensor | None = None
    ) -> Any:
        """Runs the operation and returns the full batch's draw for these samples."""
        run = Drawing(func, args, kwargs, like)
        drawn = run.drawn
        if drawn is None:
            return run.result
        if self.record.constant:
            return run.replace_numbers(drawn, run.kind.typical(args, drawn))
        if run.before not in self.known or self.known[run.before][0] != drawn.shape or drawn.numel() == 0:
            if not run.has_moved and drawn.numel() > 0:
                return run.result
            rows = self._rows(drawn, run.source)
            self.known[run.before] = drawn.shape, self._deal(self._place(run.operation, rows), run, rows)
        dealt = self.known[run.before][1]
        return run.result if dealt is None else run.replace_numbers(drawn, taken_from(*dealt))

    def watching(self) -> AbstractContextManager[None]:
        """Returns what sees Python's and NumPy's draws."""
        return self._foreign.watching()

    def finish(self) -> None:
        """Notes what was left over, and what is open to doubt."""
        if self._micro_batch[1] == self._size:
            self._finish_last()
        if not self.record.inner:
            self._miss(range(self._next, len(self.record.draws)))
        for device in {doubt.device for doubt in self._doubts}:  # one wait per device, not one per draw
            doubts = torch.stack([doubt for doubt in self._doubts if doubt.device == device])
            self.record.ambiguous = self.record.ambiguous or bool(doubts.any())
        self._foreign.finish()

    def _finish_last(self) -> None:
        for draw in self.record.draws:
            if draw.dealt and draw.dealt not in draw.value.shape:
                self._refuse(draw.operation, "the rows that the micro-batches drew are not the full batch's")
        if self.record.inner:
            self._miss(index for index in range(len(self.record.draws)) if index not in self.record.used)

    def _miss(self, indices: Iterable[int]) -> None:
        """Notes the first of the full batch's draws that were not asked for."""
        index = next(iter(indices), None)
        if index is not None:
            self.record.ambiguous = True
            self.record.unaligned.setdefault(self.record.draws[index].operation, _FEWER)

    def _rows(self, drawn: torch.Tensor, source: torch.Tensor | None) -> Rows:
        is_same_shape = source is not None and source.shape == drawn.shape
        prints = fingerprint(source) if source is not None and is_same_shape else None
        least = tolerance(source) if source is not None else 0.0
        return Rows(self._micro_batch, self._size, drawn.shape, prints, least, self._order)

    def _place(self, operation: str, rows: Rows) -> int:
        """Which of the full batch's draws this is: the next one, or by place and contents."""
        site = call_site()
        index: int | None = self._next
        self._next += 1
        if self.record.inner and not self._whole:
            of_site = self.record.at(site)
            index = place_draw(of_site, site, self._made[site], self._micro_batch, self.record.draw_counts)
            if index is None or not self._fits(index, operation, rows):
                draw_index = self._find_draw(of_site or range(len(self.record.draws)), operation, rows)
                index = draw_index if draw_index is not None else index
            self.record.sliced += index != self._next - 1
        self._made[site] += 1
        if index is None:
            return len(self.record.draws)
        self.record.used.add(index)
        return index

    def _fits(self, index: int, operation: str, rows: Rows) -> bool:
        """Whether a draw may be the one: of the same kind, and for these rows as far as that can be told."""
        draw = self.record.draws[index]
        has_prints = draw.prints is not None and rows.prints is not None
        return alike(operation, draw.operation) and (not has_prints or by_contents(draw, rows) is not None)

    def _find_draw(self, indices: Any, operation: str, rows: Rows) -> int | None:
        """The first draw that was made for these contents."""
        if rows.prints is None:
            return None
        near = sorted(indices, key=lambda index: abs(index - self._next))[:_SEARCHED]
        with_prints = (index for index in near if self.record.draws[index].prints is not None)
        return next((index for index in with_prints if self._fits(index, operation, rows)), None)

    def _deal(self, index: int, run: Drawing, rows: Rows) -> tuple[torch.Tensor, Selection] | None:
        """The full batch's draw and the rows of it that are ours; None where there are none."""
        draw = self.record.draws[index] if index < len(self.record.draws) else None
        why = _why_not(draw, run, rows.shape)
        selection = self._rows_of(draw, rows) if draw is not None and not why else None
        if draw is None or selection is None:
            self._refuse(run.operation, why or f"shapes {_shapes(draw, rows)} do not correspond")
            return None
        self.record.sliced += bool(selection)
        if not selection and not self._whole:
            self.record.share(run.operation)
        if self.record.inner and not self._whole:
            hand_out(draw, selection)
        return draw.value, selection

    def _rows_of(self, draw: Draw, rows: Rows) -> Selection | None:
        is_comparable = draw.prints is not None and rows.prints is not None and draw.prints.shape == rows.prints.shape
        if self._whole and is_comparable:
            draw.prints, draw.least = rows.prints, rows.least  # in the precision of this run
        rows = replace(rows, least=max(rows.least, draw.least))  # a part may run in another precision than the whole
        selection, guessed = by_position(draw, rows, self.record.inner)
        self.record.ambiguous = self.record.ambiguous or guessed
        return self._check_rows(draw, rows, selection)

    def _check_rows(self, draw: Draw, rows: Rows, selection: Selection | None) -> Selection | None:
        """Holds the rows' contents against those that were drawn for; the second reading looks for them elsewhere."""
        if not self.record.inner:
            doubt = doubtful(draw, rows, selection) if selection is not None else None
            if doubt is not None:
                self._doubts.append(doubt)
            return selection
        for level in (rows, replace(rows, least=max(rows.least, LOOSE))):
            doubt = doubtful(draw, level, selection) if selection is not None else torch.tensor(True, device="cpu")
            if doubt is None or not bool(doubt):
                return selection
            by_content = by_contents(draw, level)
            if by_content is not None:
                withdraw(draw, rows)
                return by_content
        return selection

    def _refuse(self, operation: str, why: str) -> None:
        """Notes why a draw cannot be dealt out, and where it was made; the micro-batch then keeps its own draw."""
        self.record.ambiguous = True
        self.record.unaligned.setdefault(operation, why)
        frame = calling_frame()
        if frame is not None:
            self.record.places.setdefault(operation, (display_path(frame[0]), frame[1]))


def _why_not(draw: Draw | None, run: Drawing, shape: torch.Size) -> str:
    """Why a draw of the full batch has no rows for a micro-batch; empty where it has."""
    if draw is None:
        return "the micro-batch made more draws than the full batch"
    if not alike(run.operation, draw.operation):
        return f"the full batch drew `{draw.operation}` in its place"
    if run.operation == "randperm" and shape != draw.value.shape:
        return "a permutation of the batch has no rows of its own for a micro-batch"
    asked = run.kind.asked(run.args)
    if not same_arguments(asked, draw.arguments, shape, draw.value.shape):
        return f"its arguments depend on the batch: {draw.arguments} and {asked}"
    if run.operation == "multinomial" and draw.input_shape and draw.input_shape[-1] != run.args[0].shape[-1]:
        return "it draws samples of the batch itself"
    return ""


def _shapes(draw: Draw | None, rows: Rows) -> str:
    return f"{list(draw.value.shape) if draw is not None else []} and {list(rows.shape)}"


class Recomputing:
    """Gives each draw of a backward to the forward that made it first; the generator's state before it tells which.

    Args:
        handlers: Those of the window's forwards, in order.
    """

    def __init__(self, handlers: Sequence[Recorder | Dealer]) -> None:
        self._handlers = handlers

    def watching(self) -> AbstractContextManager[None]:
        """Returns a context that does nothing: a backward draws nothing from Python's or NumPy's generators."""
        return nullcontext()

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: torch.Tensor | None = None
    ) -> Any:
        """Runs the operation under the handler that knows it; the last forward's where none does."""
        key = generator_key(args, kwargs)
        first = next((handler for handler in self._handlers if key in handler.known), self._handlers[-1])
        return first(func, args, kwargs, like)
