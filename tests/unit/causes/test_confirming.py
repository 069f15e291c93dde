"""What a part of the batch showed is looked for on the whole where it is one thing, told without a doubt."""

from __future__ import annotations

from dataclasses import replace

import measured
import pytest

from gaverify.causes import confirming
from gaverify.causes.bench import Bench
from gaverify.records.experiment import ControlKind, ControlRun
from gaverify.records.facts import Repeatability

CONTROL = ControlRun("with the weights that fit", 1e-9, True, kind=ControlKind.HELD)
FOUND = measured.divergent(weight_remedy=CONTROL, cleared=True, left=1e-9)
NOT_ALONE = replace(FOUND, forward=replace(FOUND.forward, causes=(measured.cause(control=CONTROL),)))
DOUBTFUL = {
    "something is left": replace(FOUND, cleared=False),
    "forwards that do not repeat": replace(FOUND, repeatability=Repeatability(1e-5, 0.0)),
    "backwards that do not repeat": replace(FOUND, repeatability=Repeatability(0.0, 1e-5)),
    "nobody asked whether they repeat": replace(FOUND, repeatability=None),
    "draws that matter": replace(FOUND, draws=replace(FOUND.draws, control=CONTROL)),
    "gradients that a forward clears": replace(FOUND, backward=replace(FOUND.backward, kept=CONTROL)),
    "two causes": NOT_ALONE,
    "a control that leaves something": replace(
        FOUND, weights=replace(FOUND.weights, remedy=replace(CONTROL, rounding=False))
    ),
    "a control that failed": replace(FOUND, weights=replace(FOUND.weights, remedy=None, failure="no room")),
}


class Asked(Bench):
    """A bench that says that it was asked."""

    def __init__(self) -> None:
        pass

    def __getattribute__(self, name: str) -> None:
        raise AssertionError("the whole batch was run")


@pytest.mark.parametrize("why", DOUBTFUL)
def test_what_is_doubtful_in_the_part_is_not_looked_for_on_the_whole(why: str) -> None:
    assert confirming.confirmed(Asked(), FOUND, DOUBTFUL[why]) is None


def test_one_thing_is() -> None:
    with pytest.raises(AssertionError, match="the whole batch was run"):
        confirming.confirmed(Asked(), FOUND, FOUND)
