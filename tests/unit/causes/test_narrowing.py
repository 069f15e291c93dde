"""Release one by one: what is needed stays, what is not goes, and nothing is run that tells nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from gaverify.causes.narrowing import released
from gaverify.records.experiment import ControlRun


def _enough(needed: set[int], runs: list[list[int]]) -> Callable[[list[int]], ControlRun]:
    def control(some: list[int]) -> ControlRun:
        runs.append(some)
        missing = len(needed - set(some))
        return ControlRun("held", 0.1 * missing, missing == 0)

    return control


@pytest.mark.parametrize("needed", [{0}, {3}, {1, 2}, {0, 1, 2, 3}])
@pytest.mark.parametrize("size", [4, 9, 17])
def test_what_is_needed_stays(needed: set[int], size: int) -> None:
    found = released(list(range(size)), _enough(needed, []))
    assert {entry.item for entry in found} == needed


def test_what_something_makes_alone_is_noted() -> None:
    found = released([0, 1, 2], _enough({0, 2}, []))
    assert [(entry.item, entry.alone) for entry in found] == [(0, pytest.approx(0.1)), (2, pytest.approx(0.1))]


def test_of_two_that_are_enough_the_last_stays() -> None:
    def control(some: list[str]) -> ControlRun:
        return ControlRun("held", 0.0, bool(some))

    assert [entry.item for entry in released(["attribute", "buffer"], control)] == ["buffer"]


def test_what_is_kept_is_released_for_its_number_alone() -> None:
    runs: list[list[int]] = []
    found = released([0, 1], _enough({1}, runs), keep=lambda item: item == 0)
    assert [entry.item for entry in found] == [0, 1]
    assert math.isnan(found[0].alone)
    assert found[1].alone == pytest.approx(0.1)


def test_a_run_that_is_impossible_keeps_the_item() -> None:
    assert [entry.item for entry in released([0, 1], lambda _: None)] == [0, 1]


def test_what_stays_neutralised_beside_the_items_may_be_enough() -> None:
    assert released([7], _enough(set(), [])) == []
    assert [entry.item for entry in released([7], _enough({7}, []))] == [7]


def test_many_things_are_halved() -> None:
    runs: list[list[int]] = []
    found = released(list(range(64)), _enough({40}, runs))
    assert [entry.item for entry in found] == [40]
    assert len(runs) <= 14
