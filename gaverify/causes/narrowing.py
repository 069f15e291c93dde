"""What of many things that were neutralised together has to be neutralised?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gaverify.records.experiment import ControlRun

_FEW = 5  # things that are released one by one from the start; of more, halves are released first
T = TypeVar("T")


@dataclass(frozen=True)
class Needed(Generic[T]):
    """Something that cannot be released: the difference that it makes while the others stay neutralised.

    NaN where the run without it was impossible.
    """

    item: T
    alone: float


def released(
    items: Sequence[T], control: Callable[[list[T]], ControlRun | None], keep: Callable[[T], bool] = lambda _: False
) -> list[Needed[T]]:
    """Releases one by one what was neutralised together; what is not needed beside the others stays released.

    Args:
        items: All together bring the difference to rounding. Those that are the likelier causes come last.
        control: Runs with these neutralised and whatever is neutralised beside them; None where that is impossible or
            would tell nothing.
        keep: What stays neutralised although the others are enough, because it is a cause for other reasons.

    Returns:
        What is needed, in the order of `items`.
    """
    kept, made = list(range(len(items))), dict[int, float]()

    def release(group: list[int]) -> None:
        others = [place for place in kept if place not in group]
        run = control([items[place] for place in others])
        if run is not None and run.rounding and not any(keep(items[place]) for place in group):
            kept[:] = others
        elif len(group) > 1:
            release(group[: len(group) // 2])
            release(group[len(group) // 2 :])
        else:
            made[group[0]] = run.left if run is not None and not run.rounding else math.nan

    if len(items) > _FEW:
        release(kept[:])
    else:
        for place in kept[:]:
            release([place])
    return [Needed(items[place], made[place]) for place in kept]
