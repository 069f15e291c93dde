"""How many micro-batches a batch has: counted by backward passes, or by rows where others' passes are among them."""

from __future__ import annotations

import pytest

from gaverify.audit.replay import parts_of
from gaverify.records.audit import Record
from gaverify.records.events import Event, Ledger
from gaverify.records.windows import Window

CRITIC, GENERATOR = 0, 1


def window(passes: list[list[int]], rows: int) -> Window:
    """A window that ends with the critic's step; every pass touches some optimizers and follows a forward."""
    events = []
    for touched in passes:
        events.append(Event("forward", 1, "train.py", 1, {"rows": rows, "model": 0}))
        events.append(Event("backward", 1, "train.py", 2, {"touched": touched, "targets": []}))
    events.append(Event("step", 1, "train.py", 3, {"optimizer": CRITIC}))
    return Window(1, tuple(events))


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        ([[CRITIC]], [[CRITIC]] * 4),
        ([[CRITIC], [CRITIC]], [*[[CRITIC], [CRITIC], [CRITIC, GENERATOR]] * 3, [CRITIC], [CRITIC]]),
    ],
    ids=["one network", "a generator's passes through its critic"],
)
def test_parts(whole: list[list[int]], part: list[list[int]]) -> None:
    record = Record((window(part, 4),), Ledger((), ()), (window(whole, 16),))
    assert parts_of(record) == 4


def test_rows_that_do_not_divide_tell_nothing() -> None:
    record = Record((window([[CRITIC, GENERATOR]], 5),), Ledger((), ()), (window([[CRITIC]], 16),))
    assert parts_of(record) == 0
