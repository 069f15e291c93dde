"""How several ranks share the samples of a batch: what their loops draw is dealt in the same order."""

from __future__ import annotations

from typing import Literal

from gaverify.audit.reading import Run
from gaverify.audit.same_data import Matcher

Order = Literal["turns", "blocks"]


def orders(full: Run, accumulated: Run, *, same: bool) -> tuple[Order, ...]:
    """Returns the orders in which ranks may share the samples of a batch, the likelier first.

    Args:
        full: The full-batch run.
        accumulated: That of the ranks.
        same: Both fed the same rows to their models, so that the rows tell the order. Else the draws are among them,
            and a replay in the wrong order will have other rows.
    """
    if not same:
        return "turns", "blocks"
    last, rows = getattr(accumulated, "ranks", (accumulated,))[-1].rows(1), full.rows(1)
    spot = Matcher(rows).find(range(len(rows)), last[0]) if last else None
    if spot is None:
        return ()
    return ("turns",) if spot.scattered else ("blocks",)
