"""Whether the runs are made once more with the data and draws of the full-batch run, and how ranks share them.

A first audit watches. Where its runs did not see the same samples, or drew numbers outside the model's forwards, the
runs are made again: the full-batch run keeps what its loaders gave and what its loop drew, and the others are given the
rows of the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from gaverify.records.audit import Record
from gaverify.records.windows import Window
from gaverify.thresholds import CUT, STARTED_APART

if TYPE_CHECKING:
    from gaverify.audit.reading import Run

Order = Literal["turns", "blocks"]


def replay_helps(record: Record, full: Mapping[str, Any], accumulated: Mapping[str, Any]) -> bool:
    """Whether a comparison may have failed for what lies outside the model's forwards.

    Args:
        record: The comparison.
        full: The closing record of the full-batch run.
        accumulated: That of the accumulated run.
    """
    draws = full["loop_draws"] or accumulated["loop_draws"]
    if not record.updates or not (draws or full["loaders"]):
        return False
    first = record.updates[0]
    if first.started_apart > STARTED_APART or record.same_pieces:
        return False
    rows = first.data.full, first.data.accumulated
    if first.data.checked and not max(rows) < CUT * min(rows):
        return False
    if not all(update.data.same for update in record.updates):
        return True
    return draws and (bool(record.unaligned) or record.divergent is not None or bool(first.unrepeatable))


def inputs_help(record: Record, full: Mapping[str, Any]) -> bool:
    """Whether the runs may be given the same inputs where loaders and draws do not make them the same.

    That is right only where the forwards return their losses: else the script holds targets that would be others'.

    Args:
        record: The comparison.
        full: The closing record of the full-batch run.
    """
    if not record.updates or record.same_pieces or not full["returns_loss"]:
        return False
    first = record.updates[0]
    rows = first.data.full, first.data.accumulated
    comparable = first.data.checked and max(rows) < CUT * min(rows)
    return comparable and not first.data.same and not first.started_apart > STARTED_APART


def parts_of(record: Record) -> int:
    """Micro-batches per batch of the full-batch run; 0 where that is not known.

    Backward passes count them, unless the window holds some of another optimizer's loss (of a generator's through its
    critic): then the rows of the first forwards do.
    """
    first = record.first
    if first is not None and any(set(event.touched) - set(first.optimizers) for event in first.of("backward")):
        whole_rows, rows = (_first_rows(windows) for windows in (record.full_windows, record.windows))
        return whole_rows // rows if rows and whole_rows % rows == 0 else 0
    whole = next((window.backwards for window in record.full_windows if first and window.number == first.number), 0)
    steps = (record.expected(first) or 0) if first is not None else 0
    return steps // whole if whole and steps % whole == 0 else 0


def _first_rows(windows: Sequence[Window]) -> int:
    """The rows of a run's first forward; 0 where that has none."""
    forwards = windows[0].of("forward") if windows else ()
    return int(forwards[0].values.get("rows") or 0) if forwards else 0


def orders(full: Run, accumulated: Run, *, same: bool) -> tuple[Order, ...]:
    """Returns the orders in which ranks may share the samples of a batch, the likelier first.

    Args:
        full: The full-batch run.
        accumulated: That of the ranks.
        same: Both fed the same rows to their models, so that the rows tell the order. Else the draws are among them,
            and a replay in the wrong order will have other rows.
    """
    from gaverify.audit.same_data import Matcher  # which needs torch

    if not same:
        return "turns", "blocks"
    last, rows = getattr(accumulated, "ranks", (accumulated,))[-1].rows(1), full.rows(1)
    spot = Matcher(rows).find(range(len(rows)), last[0]) if last else None
    if spot is None:
        return ()
    return ("turns",) if spot.scattered else ("blocks",)
