"""What watches over the ranks of a launcher: how they end where the main thread does not come back."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from gaverify.collective import membership
from gaverify.collective.membership import Member
from gaverify.errors import Agreed


class Slow:
    """A store that takes the watching thread a while to look into."""

    def __init__(self) -> None:
        self._store = dist.HashStore()

    def check(self, keys: list[str]) -> bool:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(1.0)
        return bool(self._store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Clock:
    """Stands for `time`: only what is waited for in the main thread lets it go on."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(0.03)  # the watching thread looks about every hundredth of a second
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(membership, "time", clock)
    monkeypatch.setattr(membership, "_LINGER", 0.1)
    return clock


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes that the watching thread ends the process with; the thread goes on as if it had not."""
    codes: list[int] = []
    monkeypatch.setattr(membership, "leave", codes.append)
    return codes


def test_nothing_watches_any_more_when_the_ranks_are_done() -> None:
    """Python may end right after it: a thread that is in the store then aborts the process."""
    before = threading.active_count()
    with Member(0, 1, Slow(), 5.0).together():
        time.sleep(0.4)
    assert threading.active_count() == before


@pytest.mark.parametrize("further", [False, True])
def test_a_rank_that_gets_no_further_is_ended_with_how_far_it_came(
    further: bool, clock: Clock, left: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    member = Member(0, 1, dist.HashStore(), 10.0)
    with member.together(), member.at("at the start"):
        for _ in range(10):
            clock.sleep(4.0)
            if further:
                member.further("in the window after 1 backward pass")
        waited = time.monotonic() + 20
        while not further and not left and time.monotonic() < waited:
            time.sleep(0.01)
    assert left[:1] == ([] if further else [2])
    told = "rank 0 got no further in 10 s (rank 0: at the start): every rank has to run the same"
    assert (told in capfd.readouterr().err) is not further


def test_who_waits_for_others_names_them(clock: Clock, left: list[int]) -> None:
    """Its own limit begins with the waiting, and ends before it counts as one that gets no further."""
    store = dist.HashStore()
    member = Member(0, 2, store, 0.5)
    told = re.escape("rank 1 did not come as far as the others within 0.5 s (rank 0: at the start; rank 1: elsewhere)")
    with pytest.raises(Agreed, match=told), member.together(), member.at("at the start"):
        while not store.check(["at/0"]):
            time.sleep(0.01)
        clock.sleep(0.4)
        member.everyones("unit", 1.0)
    assert not left
