"""Draws of a script's loop, outside the model's forwards: kept in the full-batch run, dealt out in the others.

A first audit only finds out, cheaply, whether there are any: did a generator move outside the forwards?

A loop draws at a place once per batch, or m times (two crops of every image). If it draws m times, draws 1, m+1, 2m+1,
… of the place are matched with each other, then draws 2, m+2, …. How a draw is matched depends on its shape:

    by rows       The shape follows the batch (noise, time steps, indices of samples). The micro-batches take the rows
                  of the full batch's draw one behind the other, also if the loop draws for its next batch ahead.
    whole         The shape does not follow the batch (the share of a mixup). All micro-batches of a window are given
                  the same draw. Windows are told apart by the optimizer's steps, which are as many in both runs.
    one by one    A loop over the samples draws a single number for each: every draw is given the next one.

If there are several ranks, each takes the next block of rows, or they take turns, row by row.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gaverify.audit.recording.values import place_in_group
from gaverify.passes.isolation.globals import foreign_generator_states, torch_generator_states
from gaverify.passes.layouts import SampleLayout, take_entries
from gaverify.passes.randomness import Refusal, draw_mode, foreign
from gaverify.passes.randomness.foreign import loop_site
from gaverify.passes.randomness.operations import Drawing
from gaverify.torch_internals import current_dispatch_mode
from gaverify.tracebacks import user_place


@dataclass(frozen=True)
class LoopDraw:
    """A draw of the full-batch run's loop."""

    site: Hashable
    """The place in the code that drew (`foreign.loop_site`)."""
    steps: int
    """Optimizer steps before it."""
    backwards: int
    """Backward passes before it."""
    operation: str
    """The operation that drew: `randn`, `numpy.random.normal`."""
    shape: tuple[int, ...]
    """The shape of the value; empty for a single number."""
    value: Any
    """The drawn value."""


@dataclass(frozen=True)
class LoopLedger:
    """Every draw of the full-batch run's loop, in order. Dealing them to micro-batches changes nothing here."""

    draws: tuple[LoopDraw, ...] = ()
    """The draws from torch's, Python's and NumPy's generators."""
    rows: Mapping[int, int] = field(default_factory=dict)
    """Backward passes before a forward → the samples of that forward; 0 where unknown."""

    @property
    def steps(self) -> int:
        """How many optimizer steps have draws before them, or behind the last one."""
        return max((draw.steps for draw in self.draws), default=-1) + 1

    @cached_property
    def sites(self) -> dict[Hashable, list[LoopDraw]]:
        """The draws by the place in the code that made them."""
        sites: dict[Hashable, list[LoopDraw]] = {}
        for draw in self.draws:
            sites.setdefault(draw.site, []).append(draw)
        return sites


class DealtLoopDraw(NamedTuple):
    """The part of a draw that belongs to a micro-batch."""

    draw: LoopDraw
    """The full-batch run's draw."""
    dimension: int = -1
    """The dimension that the rows are taken along; −1: all of the draw is the micro-batch's."""
    rows: range = range(0)
    """The rows."""


class DrawingRank(NamedTuple):
    """Which of the ranks draws, of how many, and whether they take turns row by row."""

    rank: int = 0
    ranks: int = 1
    turns: bool = False


_ALONE = DrawingRank()


class _Series:
    """Draws k, k + m, k + 2m, … of a place whose line draws m times per batch, and how far they were dealt."""

    def __init__(self, draws: Sequence[LoopDraw]) -> None:
        self._draws = draws
        self._next_draw = self._next_row = 0
        self._visits: Counter[int] = Counter()

    def deal_whole(self, steps: int, parts: int) -> DealtLoopDraw | Refusal:
        """All micro-batches of a window get the same draw: that of the window's batch they belong to."""
        draws_of_window = [draw for draw in self._draws if draw.steps == steps]
        self._visits[steps] += 1
        if not draws_of_window:
            return Refusal("the full-batch run drew nothing at this line in this window")
        if len(draws_of_window) > 1 and not parts:
            return Refusal("the full-batch run drew several times at this line in this window")
        # The full-batch run may have had several batches in this window: each draw serves `parts` micro-batches.
        batch = (self._visits[steps] - 1) // max(parts, 1)
        return DealtLoopDraw(draws_of_window[min(batch, len(draws_of_window) - 1)])

    def deal_rows(self, shape: tuple[int, ...], share: DrawingRank) -> DealtLoopDraw | Refusal:
        """The micro-batches get the rows of a draw one behind the other."""
        while self._next_draw < len(self._draws):
            draw = self._draws[self._next_draw]
            layout = SampleLayout.find(draw.shape, shape)
            if layout is None:
                break
            if len(layout.dimensions) != 1:
                return Refusal("more than one dimension of its shape depends on the batch size")
            dimension = layout.first.at
            size, start = shape[dimension], self._next_row
            # Every rank skips the rows of all ranks, so that all count alike.
            if start + size * share.ranks <= draw.shape[dimension]:
                self._next_row += size * share.ranks
                first, step = (share.rank, share.ranks) if share.turns else (share.rank * size, 1)
                return DealtLoopDraw(draw, dimension, range(start + first, start + first + size * step, step))
            # Rows that are fewer than a micro-batch belong to none: the loop goes on with its next batch.
            self._next_draw, self._next_row = self._next_draw + 1, 0
        return Refusal("the full-batch run drew fewer rows at this line")


class _Site:
    """The draws of one place, and how far they were dealt."""

    def __init__(self, draws: Sequence[LoopDraw], rows: Mapping[int, int]) -> None:
        self._draws, self._visits = draws, 0
        counts = Counter(draw.backwards for draw in draws)
        # The fewest, because a loop that draws a batch ahead draws more before the first backward pass.
        per_batch = min(counts.values())
        self._series = [_Series(draws[at::per_batch]) for at in range(per_batch)]
        # As many single numbers as the forward has samples: one for each.
        self._is_per_sample = len({draw.shape for draw in draws}) == 1 and all(
            rows.get(backwards, 0) > 1 and count % rows[backwards] == 0 for backwards, count in counts.items()
        )

    def deal(
        self, steps: int, operation: str, shape: tuple[int, ...], parts: int, share: DrawingRank
    ) -> DealtLoopDraw | Refusal:
        first = self._draws[0]
        visit, self._visits = self._visits, self._visits + 1
        if first.operation != operation or len(first.shape) != len(shape):
            return Refusal("the full-batch run drew something else at this line")
        if self._is_per_sample and first.shape == shape:
            if share.ranks > 1:
                return Refusal("random numbers per sample cannot be assigned to several ranks")
            if visit >= len(self._draws):
                return Refusal("the full-batch run drew less often at this line")
            return DealtLoopDraw(self._draws[visit])
        series = self._series[visit % len(self._series)]
        # A shape that some draw of the full batch has as well does not follow the batch's size.
        if any(draw.shape == shape for draw in self._draws):
            return series.deal_whole(steps, parts)
        return series.deal_rows(shape, share)


class LoopDealing:
    """The draws of a ledger on their way to the micro-batches of one run; the ledger stays as it is.

    Args:
        ledger: The full-batch run's draws.
        parts: Micro-batches per batch of the full-batch run; 0 where that is not known.
    """

    def __init__(self, ledger: LoopLedger, parts: int) -> None:
        self.ledger, self._parts = ledger, parts
        self._sites = {site: _Site(draws, ledger.rows) for site, draws in ledger.sites.items()}

    def deal(
        self, site: Hashable, steps: int, operation: str, shape: tuple[int, ...], share: DrawingRank = _ALONE
    ) -> DealtLoopDraw | Refusal:
        """Returns the part of the full-batch run's draw that is a micro-batch's, or why there is none.

        Args:
            site: The place in the code of the accumulated run that draws.
            steps: Optimizer steps before it.
            operation: The operation that draws.
            shape: The shape of the draw.
            share: Which rank draws.
        """
        if site not in self._sites:
            return Refusal("the full-batch run drew nothing at this line")
        return self._sites[site].deal(steps, operation, shape, self._parts, share)


_ORDERS = ("randperm", "permutation", "shuffle")
"""Functions that draw an order of the whole batch: a part of it is no order of a micro-batch."""
_FILE = "loop.pt"
_LARGEST = 1 << 28  # elements of a draw that is kept: more is no noise for a batch


class Loop:
    """Compares the generators' states after every call that the recorder sees with those before the next.

    Only torch's are asked every time: the states of Python's and NumPy's take a hundred microseconds, so that these are
    compared once, at the end, whoever drew from them. Nothing is seen before the first optimizer is made: weights and
    data sets are drawn before, and alike in all runs.
    """

    def __init__(self) -> None:
        self.steps = self.backwards = 0  # of the script so far
        self.unaligned: dict[str, str] = {}
        self.moved = False
        self.count = 0  # draws that were kept, or given the full-batch run's
        self._started = False
        self._paused = 0
        self._states: list[bytes] = []
        self._others: tuple[Any, ...] = ()

    def start(self) -> None:
        """Starts to compare generators, until the run ends."""
        if not self._started:
            self._started = True
            self._open()

    @contextmanager
    def ignore_draws(self) -> Iterator[None]:
        """Surrounds what is not the loop's own: a forward, a backward, a step, a loader."""
        off = self._started and not self._paused and self._pause()
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            if off:
                self._resume()

    def forward(self, rows: int | None) -> None:
        """A forward of so many rows begins."""

    def close(self) -> None:
        """The run is over: looks at the generators that were not watched."""
        self.moved = self.moved or (self._started and foreign_generator_states() != self._others)

    def _open(self) -> None:
        self._others = foreign_generator_states()
        self._resume()

    def _pause(self) -> bool:
        """Looks at the generators before something that is not the loop's; returns whether to look again later."""
        self.moved = self.moved or torch_generator_states() != self._states
        return not self.moved

    def _resume(self) -> None:
        self._states = torch_generator_states()


class LoopDraws(Loop):
    """Listens to the draws of the loop, also by Python's and NumPy's functions; subclasses keep or deal them out."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = True
        self._mode = draw_mode(self._operation)
        self._process = os.getpid()
        self._foreign = foreign.watch_generators(self._call)

    def close(self) -> None:
        """The run is over."""

    def _open(self) -> None:
        self._foreign.__enter__()
        self._resume()

    def _pause(self) -> bool:
        """Takes the mode off the stack altogether: a compiled forward does not run under one."""
        # Only the top of the stack can be left. Below a mode of the script's, `_paused` silences this one instead.
        is_on_top = current_dispatch_mode() is self._mode
        if is_on_top:
            self._mode.__exit__(None, None, None)
        return is_on_top

    def _resume(self) -> None:
        self._mode.__enter__()

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        into = args[0] if args and isinstance(args[0], torch.Tensor) else None
        # Weights that are initialised late are no noise of a batch: they are drawn alike in all runs.
        sets_weights = into is not None and (into.requires_grad or isinstance(into, torch.nn.Parameter))
        if self._paused or os.getpid() != self._process or sets_weights:
            return func(*args, **kwargs)
        run = Drawing(func, args, kwargs)
        drawn = run.drawn
        if drawn is not None and (drawn.is_meta or type(drawn) is not torch.Tensor):
            return run.result
        if drawn is None or drawn.numel() > _LARGEST:
            self.unaligned.setdefault(run.operation, "drawn in the loop by an operation that gaverify cannot record")
            return run.result
        value = self._answer(run.operation, tuple(drawn.shape), drawn)
        return run.result if value is None else run.replace_numbers(drawn, value)

    def _call(self, call: foreign.UpcomingDraw, run: Callable[[], Any]) -> Any:
        result = run()
        if self._paused or os.getpid() != self._process:
            return result
        operation, shape = f"{call.module}.{call.name}", tuple(getattr(result, "shape", ()))
        if result is None and call.args and isinstance(call.args[0], list):  # it has put a list in another order
            value = self._answer(operation, shape, call.args[0])
            if value is not None and len(value) == len(call.args[0]):
                call.args[0][:] = value
            elif value is not None:
                self._lose(operation, "the full-batch run shuffled something else")
            return result
        value = self._answer(operation, (len(result),) if isinstance(result, list) else shape, result)
        return result if value is None else value

    def _answer(self, operation: str, shape: tuple[int, ...], drawn: Any) -> Any:
        """Returns what is given in place of a draw; None for what was drawn."""
        raise NotImplementedError

    def _lose(self, operation: str, why: str) -> None:
        name = f"{operation} in the loop"
        place = user_place()
        if name not in self.unaligned and place is not None:
            why = f"{why} ({place[0]}:{place[1]})"
        self.unaligned.setdefault(name, why)


class KeptLoopDraws(LoopDraws):
    """The full-batch run: everything that its loop draws is written when it ends.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._draws: list[LoopDraw] = []
        self._rows: dict[int, int] = {}

    def forward(self, rows: int | None) -> None:
        """Notes the rows of a forward."""
        self._rows.setdefault(self.backwards, rows or 0)

    def close(self) -> None:
        """Writes the draws."""
        torch.save(LoopLedger(tuple(self._draws), self._rows), self._folder / _FILE)

    def _answer(self, operation: str, shape: tuple[int, ...], drawn: Any) -> None:
        if isinstance(drawn, torch.Tensor):
            value = drawn.detach().to("cpu", copy=True)
        else:
            value = copy.copy(drawn)
            try:
                # One value that cannot be stored would fail the file of all draws when the run ends.
                pickle.dumps(value)
            except Exception:
                return
        self.count += 1
        self._draws.append(LoopDraw(loop_site(), self.steps, self.backwards, operation, shape, value))


class DealtLoopDraws(LoopDraws):
    """The other runs: each draw becomes the rows of the same samples in the full-batch run's.

    Args:
        source: Folder of the full-batch run.
        parts: Micro-batches per batch of the full-batch run; 0 where that is not known.
        turns: Whether the ranks, where there are several, take turns row by row.
    """

    def __init__(self, source: Path, parts: int, turns: bool = False) -> None:
        super().__init__()
        self._turns = turns
        ledger = torch.load(source / _FILE, weights_only=False) if (source / _FILE).exists() else LoopLedger()
        self._dealing = LoopDealing(ledger, parts)

    def _answer(self, operation: str, shape: tuple[int, ...], drawn: Any) -> Any:
        if self.steps >= self._dealing.ledger.steps:
            return None  # behind what the full-batch run recorded
        dealt = self._dealing.deal(
            loop_site(), self.steps, operation, shape, DrawingRank(*place_in_group(), self._turns)
        )
        if isinstance(dealt, DealtLoopDraw) and dealt.dimension >= 0 and operation.rpartition(".")[2] in _ORDERS:
            dealt = Refusal("the order of a full batch does not say the order of a micro-batch")
        if isinstance(dealt, Refusal):
            self._lose(operation, dealt.why)
            return None
        self.count += 1
        value, is_whole = dealt.draw.value, dealt.dimension < 0
        if isinstance(value, torch.Tensor):
            rows = value if is_whole else take_entries(value, dealt.dimension, dealt.rows)
            return rows.to(drawn.device, drawn.dtype)
        if is_whole:
            return copy.copy(value)  # the loop may change what it was given
        if isinstance(value, list):
            return [value[at] for at in dealt.rows]
        return value.take(dealt.rows, dealt.dimension)
