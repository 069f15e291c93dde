"""Deals the full batch's draws to the micro-batches of one pass, and repeats those of Python's and NumPy's generators.

Activation checkpointing runs parts of earlier forwards once more: what a backward draws again is dealt out again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from gaverify.passes.layouts import SampleLayout
from gaverify.passes.randomness import foreign
from gaverify.passes.randomness.draws import (
    LOOSE,
    Draw,
    DrawLedger,
    DrawRecorder,
    GivenRows,
    MicroBatch,
    Rows,
    Selection,
    are_rounded,
    fingerprint,
    have_equal_contents,
    have_other_contents,
    place_draw,
    select_by_contents,
    select_by_position,
    select_packed,
    take_selection,
    tolerance_of,
)
from gaverify.passes.randomness.foreign import call_site
from gaverify.passes.randomness.operations import Drawing, are_interchangeable, generator_key, have_same_arguments
from gaverify.passes.randomness.packing import PackedRows
from gaverify.tracebacks import calling_frame, display_path, hands_over

_NAMES = {"numpy": "numpy.random"}
_HIDDEN = "its kernel draws random numbers that gaverify can neither see nor replace"
_FEWER = "a micro-batch drew random numbers less often than the full batch"
_UNMATCHED = "its rows are no samples, and their contents do not tell whose they are"
_MORE = "a micro-batch drew random numbers more often than the full batch"
_SEARCHED = 64  # draws of one place that are searched for contents
DrawCounts = Mapping[MicroBatch, Mapping[int, int]]
"""Micro-batch → call site → how many draws it makes there."""


@dataclass(frozen=True)
class Reading:
    """How a micro-batch's draws are matched with the full batch's."""

    by_contents: bool = False
    """The second reading: by place and contents; the batch is the inner index of folded dimensions. Else in order."""
    constant: bool = False
    """Every draw is replaced by one typical value (a control run)."""
    counts: DrawCounts = field(default_factory=dict)
    """The draws of each micro-batch, as a pass in the first reading counted them; the second reading needs them."""


@dataclass
class DealingReport:
    """The outcome of dealing in one pass."""

    unaligned: dict[str, str] = field(default_factory=dict)
    """Operation → why its draws could not be given to micro-batches."""
    places: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Operation → file and line of a draw that could not be given to micro-batches."""
    shared: dict[str, tuple[str, int] | None] = field(default_factory=dict)
    """Operation → file and line of a draw without rows per sample; every micro-batch gets all of it."""
    dealt: int = 0
    """How often a micro-batch got rows of a draw, another draw than the next, or a generator's end state."""
    ambiguous: bool = False
    """The draws that were dealt may be those of other samples."""
    uneven: bool = False
    """The rows of some draw are no samples: time steps of packed sequences, picked elements."""
    is_found: bool = False
    """Rows were found by their contents, elsewhere than at the samples' places."""
    unmatched: dict[str, str] = field(default_factory=dict)
    """Operation → why the contents of such rows do not show whose they are."""
    counts: dict[MicroBatch, Counter[int]] = field(default_factory=dict)
    """Micro-batch → call site → number of draws; empty in the second reading."""
    prints: dict[int, tuple[torch.Tensor, float]] = field(default_factory=dict)
    """Index of a draw → fingerprints of the rows that this run's full batch drew for, and their tolerance."""

    @property
    def is_doubtful(self) -> bool:
        """Whether a micro-batch may have got other draws than its samples'."""
        return self.ambiguous or bool(self.unaligned)

    def share(self, name: str) -> None:
        """Notes a draw without a row per sample, and the line of the user's code that is running."""
        if name not in self.shared:
            frame = calling_frame()
            self.shared[name] = (display_path(frame[0]), frame[1]) if frame is not None else None

    def refuse(self, operation: str, why: str) -> None:
        """Notes why a draw cannot be dealt, and where it was made; the micro-batch then keeps its own draw."""
        self.ambiguous = True
        self.unaligned.setdefault(operation, why)
        frame = calling_frame()
        if frame is not None:
            self.places.setdefault(operation, (display_path(frame[0]), frame[1]))


class Dealing:
    """The draws of a ledger on their way to the micro-batches of one pass; the ledger stays as it is.

    Args:
        ledger: The full batch's draws.
        reading: How they are matched.
        prints: Fingerprints of the rows that the full batch drew for in this precision and state, where it was run
            again (`DealingReport.prints`).
    """

    def __init__(
        self,
        ledger: DrawLedger,
        reading: Reading | None = None,
        prints: Mapping[int, tuple[torch.Tensor, float]] | None = None,
    ) -> None:
        self.ledger, self.reading = ledger, reading or Reading()
        self.report = DealingReport(unaligned=dict.fromkeys(ledger.fused, _HIDDEN), prints=dict(prints or {}))
        self.used: set[int] = set()  # indices of draws that some micro-batch got
        self.given: dict[int, GivenRows] = {}  # by the index of a draw

    def draw(self, index: int) -> Draw:
        """Returns a draw of the full batch, with the fingerprints of this run's full batch where there are any."""
        draw = self.ledger.draws[index]
        prints, tolerance = self.report.prints.get(index, (draw.prints, draw.tolerance))
        return replace(draw, prints=prints, tolerance=tolerance)

    def given_rows(self, index: int) -> GivenRows:
        """Returns which rows of a draw the micro-batches were given so far."""
        return self.given.get(index, GivenRows())


class Doubt(NamedTuple):
    """Whether rows were drawn for other contents, on their device: nothing waits for it before it is read."""

    differs: torch.Tensor
    """By more than what the dtype rounds: quickly told, and often true where products are rounded."""
    is_rounding: Callable[[], torch.Tensor | None] = lambda: None
    """Whether the rows' own distances show that it is rounding; None where nothing tells."""


@dataclass(frozen=True)
class DealtDraw:
    """The rows of a full batch's draw that belong to a micro-batch."""

    value: torch.Tensor
    """The draw of the full batch."""
    selection: Selection
    """Which rows of it; empty: all of it."""
    given: GivenRows
    """The rows that micro-batches have been given, with these."""
    guessed: bool
    """Whether the order of folded rows is a guess."""
    doubt: Doubt | None
    """Whether the rows were drawn for other contents; None where there is no way to tell."""
    is_found: bool = False
    """Whether the rows were found by their contents, elsewhere than at the samples' places."""


@dataclass(frozen=True)
class Refusal:
    """Why a micro-batch gets no rows of a draw."""

    why: str


def deal(draw: Draw, run: Drawing, rows: Rows, reading: Reading, given: GivenRows) -> DealtDraw | Refusal:
    """Returns the rows of the full batch's draw that are a micro-batch's; changes nothing.

    Args:
        draw: The full batch's draw.
        run: The micro-batch's own draw.
        rows: The micro-batch's rows.
        reading: How rows are found.
        given: Which rows of the draw micro-batches were given before.
    """
    if why := _why_not(draw, run, rows.shape):
        return Refusal(why)
    # the micro-batch may run in another precision than the full batch did
    rows = replace(rows, tolerance=max(rows.tolerance, draw.tolerance))
    selection, guessed, after = select_packed(draw, rows), False, given
    if selection is None:
        selection, guessed, after = select_by_position(draw, rows, reading.by_contents, given)
    doubt, is_found = None, False
    if reading.by_contents:
        selection, after, is_found = _look_elsewhere(draw, rows, selection, given, after)
    elif selection is not None:
        doubt = _doubt(draw, rows, selection)
    if selection is None:
        return Refusal(f"shapes {list(draw.value.shape)} and {list(rows.shape)} do not match")
    return DealtDraw(draw.value, selection, after, guessed, doubt, is_found)


def _doubt(draw: Draw, rows: Rows, selection: Selection) -> Doubt | None:
    differs = have_other_contents(draw, rows, selection)
    return None if differs is None else Doubt(differs, partial(are_rounded, draw, rows, selection))


def _look_elsewhere(
    draw: Draw, rows: Rows, selection: Selection | None, given: GivenRows, after: GivenRows
) -> tuple[Selection | None, GivenRows, bool]:
    """The selected rows where their contents are the micro-batch's; else those with its contents, if any, and True."""
    is_found = False
    # A layer before may compute in lower precision than its result shows: the loose tolerance only if nothing fits.
    for level in (rows, replace(rows, tolerance=max(rows.tolerance, LOOSE))):
        doubt = None if selection is None else _doubt(draw, level, selection)
        if selection is not None and (doubt is None or not _is_any([doubt])):
            break  # they stand in their place, or nothing tells
        found_rows = select_by_contents(draw, level, given)
        if found_rows is not None:
            selection, after, is_found = found_rows, after.withdraw(draw, rows), True
            break
    return selection, after if selection is None else after.take(draw, selection), is_found


class ForeignDealer:
    """Handles draws from Python's and NumPy's generators for one micro-batch.

    The first reading counts them. The second sets the generator to the state from which the full batch drew for the
    same sample.

    Args:
        dealing: The full batch's draws, and what comes of them in this pass.
        micro_batch: The samples.
        batch_size: B.
        made: How many draws were made at each place so far.
    """

    def __init__(self, dealing: Dealing, micro_batch: MicroBatch, batch_size: int, made: Counter[int]) -> None:
        self._ledger, self._reading, self._report = dealing.ledger, dealing.reading, dealing.report
        self._micro_batch, self._size, self._made = micro_batch, batch_size, made
        self._at: int | None = None  # the full batch's draw that the last one stands for
        self._lost = False  # a draw has no counterpart, so that the generators end elsewhere
        self._is_full_batch = micro_batch == (0, batch_size)
        self._once: dict[int, str] = {}  # places of the draws that gave no row per sample, and what was called there

    @property
    def _is_active(self) -> bool:
        return 0 < len(self._ledger.foreign) < foreign.MOST and not self._reading.constant

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sees the draws."""
        if not self._is_active:
            yield
            return
        with foreign.watch_generators(self._draw):
            yield

    def finish(self) -> None:
        """Leaves the generators where the full batch leaves them, if every draw was found and drew as much."""
        if not self._is_active or self._is_full_batch:
            return
        self._compare_with_full_batch()
        for site, name in self._once.items():  # a loop over samples draws more often in the full batch
            if self._made[site] != len(self._ledger.at(site, foreign=True)):
                self._report.shared.pop(name, None)
        end = self._ledger.foreign_end
        if not self._reading.by_contents:
            self._report.ambiguous |= not all(foreign.is_in_state(module, state) for module, state in end.items())
        elif not self._lost:
            self._report.dealt += 1
            for module, state in end.items():
                foreign.set_generator(module, state)

    @hands_over
    def _draw(self, call: foreign.UpcomingDraw, run: Callable[[], Any]) -> Any:
        self._compare_with_full_batch()
        site = call_site()
        at = self._made[site]
        self._made[site] += 1
        if not self._is_full_batch:
            self._note(site, call)
        if not self._reading.by_contents or self._is_full_batch:
            return run()
        draws = self._ledger.foreign
        of_site = self._ledger.at(site, foreign=True)
        self._at = place_draw(of_site, site, at, self._micro_batch, self._reading.counts)
        if self._at is None:  # a draw that follows another one: its generator may be where it has to be
            self._at = next((i for i in of_site if foreign.is_in_state(call.module, draws[i].state)), None)
        if self._at is None:
            self._lost = True
            return run()
        foreign.set_generator(call.module, draws[self._at].state)
        result = run()
        rows = foreign.rows_of_micro_batch(draws[self._at], call, result, self._micro_batch, self._size)
        if rows is None:
            return result
        self._report.shared.pop(self._once.pop(site, ""), None)
        foreign.set_generator(call.module, foreign.state_after(draws, self._at, self._ledger.foreign_end))
        return rows

    def _note(self, site: int, call: foreign.UpcomingDraw) -> None:
        """Notes a draw as one for all samples, until it turns out to have rows or to be made once per sample."""
        if site not in self._once:
            self._once[site] = f"{_NAMES.get(call.module, call.module)}.{call.name}"
            self._report.share(self._once[site])

    def _compare_with_full_batch(self) -> None:
        """The draw before this one must have left its generator where the full batch's left it."""
        at, self._at = self._at, None
        if at is not None:
            after = foreign.state_after(self._ledger.foreign, at, self._ledger.foreign_end)
            self._lost |= not foreign.is_in_state(self._ledger.foreign[at].call.module, after)


class Dealer:
    """Handles the random operations of one micro-batch: replaces each result by the rows of its own samples.

    Args:
        dealing: The full batch's draws, and what comes of them in this pass.
        start: The number of its first sample.
        stop: The number behind its last one.
        batch_size: B.
        order: The places of its samples in the full batch, where those are not `start` to `stop - 1`.
    """

    def __init__(
        self, dealing: Dealing, start: int, stop: int, batch_size: int, order: tuple[int, ...] | None = None
    ) -> None:
        self.packed = PackedRows()
        self._dealing, self._reading, self._report = dealing, dealing.reading, dealing.report
        self._draws = dealing.ledger.draws
        self._micro_batch = (start, stop)
        self._order = order
        self._size = batch_size
        # A repeated draw is dealt the same rows: by the generator's state before it, and the shape that was drawn.
        self.known: dict[Any, tuple[torch.Size, DealtDraw | None]] = {}
        self._next = 0
        self._made: Counter[int] = Counter()
        # They stay on their devices until the end: reading one waits for all before.
        self._doubts: list[Doubt] = []
        self._doubts_of_uneven: dict[str, list[Doubt]] = {}
        self._foreign = ForeignDealer(dealing, self._micro_batch, batch_size, self._made)
        if not self._reading.by_contents and not self._is_full_batch:
            self._report.counts[self._micro_batch] = self._made

    @property
    def _is_full_batch(self) -> bool:
        """Whether this is the full batch again."""
        return self._micro_batch == (0, self._size) and self._order is None

    @property
    def _searches(self) -> bool:
        """Whether draws and rows are looked for by place and contents: those of the full batch stand in order."""
        return self._reading.by_contents and not self._is_full_batch

    @hands_over
    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: torch.Tensor | None = None
    ) -> Any:
        """Runs the operation and returns the full batch's draw for these samples."""
        run = Drawing(func, args, kwargs, like)
        drawn = run.drawn
        if drawn is None:
            return run.result
        if self._reading.constant:
            return run.replace_numbers(drawn, run.kind.typical(args, drawn))
        if run.before not in self.known or self.known[run.before][0] != drawn.shape or drawn.numel() == 0:
            if not run.has_moved and drawn.numel() > 0:  # a dropout of probability 0, say
                return run.result
            rows = self._describe_rows(drawn, run.source)
            self.known[run.before] = drawn.shape, self._deal(self._find_index(run.operation, rows), run, rows)
        dealt = self.known[run.before][1]
        return run.result if dealt is None else run.replace_numbers(drawn, take_selection(dealt.value, dealt.selection))

    def watching(self) -> AbstractContextManager[None]:
        """Returns what sees Python's and NumPy's draws."""
        return self._foreign.watching()

    def finish(self) -> None:
        """Notes what was left over, and what is open to doubt."""
        if self._micro_batch[1] == self._size:  # the last one: now all rows must have been given
            self._finish_last()
        if not self._reading.by_contents:
            self._note_missed(range(self._next, len(self._draws)))
        self._report.ambiguous = self._report.ambiguous or _is_any(self._doubts)
        for operation, doubts in self._doubts_of_uneven.items():
            if _is_any(doubts):
                self._report.unmatched[operation] = _UNMATCHED
        self._foreign.finish()

    def _finish_last(self) -> None:
        for index, draw in enumerate(self._draws):
            count = self._dealing.given_rows(index).count
            if count and count not in draw.value.shape:
                self._report.refuse(draw.operation, "the micro-batches drew other rows than the full batch")
        if self._reading.by_contents:
            self._note_missed(index for index in range(len(self._draws)) if index not in self._dealing.used)

    def _note_missed(self, indices: Iterable[int]) -> None:
        """Notes the first of the full batch's draws that were not asked for."""
        index = next(iter(indices), None)
        if index is not None:
            self._report.ambiguous = True
            self._report.unaligned.setdefault(self._draws[index].operation, _FEWER)

    def _describe_rows(self, drawn: torch.Tensor, source: torch.Tensor | None) -> Rows:
        is_same_shape = source is not None and source.shape == drawn.shape
        prints = fingerprint(source) if source is not None and is_same_shape else None
        tolerance = tolerance_of(source) if source is not None else 0.0
        packed = self.packed.find(drawn.shape)
        return Rows(self._micro_batch, self._size, drawn.shape, prints, tolerance, self._order, packed)

    def _find_index(self, operation: str, rows: Rows) -> int | None:
        """Which of the full batch's draws this is: the next one, or by place and contents; None where it is none."""
        site = call_site()
        index: int | None = self._next
        self._next += 1
        if self._searches:
            of_site = self._dealing.ledger.at(site)
            index = place_draw(of_site, site, self._made[site], self._micro_batch, self._reading.counts)
            if index is None or not self._fits(index, operation, rows):
                draw_index = self._find_draw(of_site or range(len(self._draws)), operation, rows)
                index = draw_index if draw_index is not None else index
            self._report.dealt += index != self._next - 1
        self._made[site] += 1
        if index is None or index >= len(self._draws):
            return None
        self._dealing.used.add(index)
        return index

    def _fits(self, index: int, operation: str, rows: Rows) -> bool:
        """Whether a draw may be the one: of the same kind, and for these rows as far as that can be told."""
        draw = self._dealing.draw(index)
        has_prints = draw.prints is not None and rows.prints is not None
        has_rows = not has_prints or select_by_contents(draw, rows, self._dealing.given_rows(index)) is not None
        return are_interchangeable(operation, draw.operation) and has_rows

    def _find_draw(self, indices: Iterable[int], operation: str, rows: Rows) -> int | None:
        """The first draw that was made for these contents."""
        if rows.prints is None:
            return None
        # draws come in nearly the same order: the right one is among the nearest, and each comparison costs
        near = sorted(indices, key=lambda index: abs(index - self._next))[:_SEARCHED]
        with_prints = (index for index in near if self._draws[index].prints is not None)
        return next((index for index in with_prints if self._fits(index, operation, rows)), None)

    def _deal(self, index: int | None, run: Drawing, rows: Rows) -> DealtDraw | None:
        """The full batch's draw and the rows of it that are ours; None where there are none."""
        if index is None:
            self._report.refuse(run.operation, _MORE)
            return None
        if self._is_full_batch:  # its rows are its own, whatever moved since the record
            self._renew_prints(index, rows)
        dealt = deal(self._dealing.draw(index), run, rows, self._reading, self._dealing.given_rows(index))
        if isinstance(dealt, Refusal):
            self._report.refuse(run.operation, dealt.why)
            return None
        self._report.dealt += bool(dealt.selection)
        self._report.ambiguous = self._report.ambiguous or dealt.guessed
        if dealt.doubt is not None:
            self._doubts.append(dealt.doubt)
        # Time steps may be a multiple of the samples by chance: then their contents were found in other places.
        is_uneven = dealt.is_found or not _has_rows_of_samples(self._draws[index], rows)
        if dealt.selection and is_uneven:
            self._note_uneven(self._dealing.draw(index), dealt, rows)
        if not self._is_full_batch:
            self._dealing.given[index] = dealt.given
            if not dealt.selection:
                self._report.share(run.operation)
        return dealt

    def _note_uneven(self, draw: Draw, dealt: DealtDraw, rows: Rows) -> None:
        """Notes rows that are no samples, and whether they may be those of others."""
        self._report.uneven = True
        self._report.is_found = self._report.is_found or dealt.is_found
        doubt = dealt.doubt
        if dealt.is_found:
            doubt = Doubt(have_equal_contents(draw, dealt.selection))
        elif self._searches:
            doubt = _doubt(draw, replace(rows, tolerance=max(rows.tolerance, LOOSE)), dealt.selection)
        if doubt is None:
            self._report.unmatched[draw.operation] = _UNMATCHED
        else:
            self._doubts_of_uneven.setdefault(draw.operation, []).append(doubt)
        frame = calling_frame()
        if frame is not None:
            self._report.places.setdefault(draw.operation, (display_path(frame[0]), frame[1]))

    def _renew_prints(self, index: int, rows: Rows) -> None:
        """Takes the fingerprints of this run: micro-batches that follow have the same precision and weights."""
        recorded = self._draws[index].prints
        if recorded is not None and rows.prints is not None and recorded.shape == rows.prints.shape:
            self._report.prints[index] = rows.prints, rows.tolerance


def _is_any(doubts: Sequence[Doubt]) -> bool:
    """Whether any of some doubts remains; with two waits per device at most, not one per doubt."""
    for device in {doubt.differs.device for doubt in doubts}:
        doubts_on_device = [doubt for doubt in doubts if doubt.differs.device == device]
        flags = torch.stack([doubt.differs for doubt in doubts_on_device]).tolist()
        answers = [doubt.is_rounding() for doubt, differs in zip(doubts_on_device, flags, strict=True) if differs]
        decided = [answer for answer in answers if answer is not None]
        if len(decided) < len(answers) or (decided and not bool(torch.stack(decided).all())):
            return True
    return False


def _has_rows_of_samples(draw: Draw, rows: Rows) -> bool:
    """Whether a dimension of a draw has the same number of rows for each sample."""
    start, stop = rows.micro_batch
    layout = SampleLayout.find(draw.value.shape, rows.shape, rows.batch_size, stop - start)
    return layout is not None and any(dimension.fold for dimension in layout.dimensions)


def _why_not(draw: Draw, run: Drawing, shape: torch.Size) -> str:
    """Why a draw of the full batch has no rows for a micro-batch; empty where it has."""
    if not are_interchangeable(run.operation, draw.operation):
        return f"the full batch drew `{draw.operation}` here"
    if run.operation == "randperm" and shape != draw.value.shape:
        return "a permutation of the full batch cannot be cut into those of micro-batches"
    asked = run.kind.asked(run.args)
    if not have_same_arguments(asked, draw.arguments, shape, draw.value.shape):
        return f"its arguments depend on the batch: {draw.arguments} and {asked}"
    if run.operation == "multinomial" and draw.input_shape and draw.input_shape[-1] != run.args[0].shape[-1]:
        return "it picks samples of the batch at random"
    return ""


class Recomputing:
    """Gives each draw of a backward to the forward that made it first; the generator's state before it tells which.

    Args:
        handlers: Those of the window's forwards, in order.
    """

    def __init__(self, handlers: Sequence[DrawRecorder | Dealer]) -> None:
        self._handlers = handlers
        self.packed = PackedRows()  # those of the forwards are known by then

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
