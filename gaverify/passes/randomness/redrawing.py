"""Makes the draws of Python's and NumPy's generators that a micro-batch asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gaverify.passes.randomness import foreign
from gaverify.passes.randomness.draws import DrawRecord, MicroBatch, placed
from gaverify.passes.randomness.sites import call_site
from gaverify.tracebacks import hands_over

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
        with foreign.watched(self._draw):
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
        self._at = placed(of_site, site, at, self._micro_batch, self._record.made)
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
