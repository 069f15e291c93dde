"""What watches over the ranks of a launcher: how they end where the main thread does not come back."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from gaverify.collective.membership import Member, Said
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


def test_nothing_watches_any_more_when_the_ranks_are_done() -> None:
    """Python may end right after it: a thread that is in the store then aborts the process."""
    before = threading.active_count()
    with Member(0, 1, Slow(), 5.0).together():
        time.sleep(0.4)
    assert threading.active_count() == before


def test_who_waits_for_others_names_them() -> None:
    told = r"^rank 1 did not come as far as the others within 0.1 s: every rank has to call this"
    with pytest.raises(Agreed, match=told), Member(0, 2, dist.HashStore(), 0.1).together():
        Member(0, 2, dist.HashStore(), 0.1).everyones("unit", 1.0)


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        (("RuntimeError: Timed out", ""), "rank 1 did not come as far as the others within 3 s: "),
        (("RuntimeError: Timed out", "waited"), "the ranks lost their connection: "),
        (("RuntimeError: Timed out",), "rank 1 ended before there was a verdict"),
    ],
    ids=["hangs", "each waits for the other", "died"],
)
def test_a_rank_that_others_lost_is_named(errors: tuple[str, ...], told: str) -> None:
    store = dist.HashStore()
    for rank, error in enumerate(errors):
        store.set(f"failed/{rank}", pickle.dumps(Said("", about_itself=True, error=error)))
    sentence = Member(0, 2, store, 3.0)._reason()
    assert sentence.startswith(told) and ("rank 0: RuntimeError: Timed out" in sentence) is (len(errors) == 2)
