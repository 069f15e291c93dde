"""Controls for what goes wrong between ranks: the same ranks again, with one thing put right or held still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gaverify.audit.running import Runner
from gaverify.errors import ProblemError
from gaverify.records.audit import Record

if TYPE_CHECKING:
    from gaverify.audit.reading import Run


def controlled_ranks(runner: Runner, full: Run, record: Record, options: dict[str, Any]) -> Record:
    """Returns the record with the controls that its ranks call for.

    Args:
        runner: Makes the runs.
        full: The full-batch run.
        record: With what the ranks did.
        options: Fields of `Job` that the compared runs had.
    """
    ranks = record.together
    if ranks is None:
        return record
    if ranks.stepped_without:
        ranks = replace(ranks, sync_control=_left(runner, None, options, {"synchronise": True}))
    elif ranks.at_fault and ranks.engine is None and ranks.apart > ranks.rounding:
        ranks = replace(ranks, sync_control=_left(runner, full, options, {"synchronise": True}))
    elif ranks.at_fault and ranks.buffers_apart:
        ranks = replace(ranks, frozen_control=_left(runner, None, options, {"frozen": ranks.buffers_apart}))
    elif ranks.at_fault and (shares := ranks.shares_to_try):
        ranks = replace(ranks, weights_control=_left(runner, full, options, {"shares": shares}))
    return replace(record, together=ranks)


def _left(runner: Runner, full: Run | None, options: dict[str, Any], change: Mapping[str, Any]) -> float:
    """What a changed run of the ranks leaves; against a full-batch run with the same change where `full` is None."""
    from gaverify.audit.ranks import left_by

    try:
        if full is None:
            own = {name: value for name, value in options.items() if name not in ("source", "parts")}
            full = runner.full(**own, **change)
            options = {**options, "source": full}
        (accumulated,) = runner.runs(runner.jobs("accumulated", **options, **change))
    except ProblemError:
        return float("nan")
    return left_by(full, accumulated)
