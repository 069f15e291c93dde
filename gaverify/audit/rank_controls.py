"""Controls for what goes wrong between ranks: the same ranks again, with one thing put right or held still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gaverify.audit.running import Runner
from gaverify.errors import ProblemError
from gaverify.records.audit import Record
from gaverify.records.comparison import Outcome
from gaverify.records.stages import Stage

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

    def left(own: Run | None, change: Mapping[str, Any]) -> float:
        return _left(runner, own, options, change, summed=not _differs_at_the_step(record))

    if ranks.stepped_without:
        ranks = replace(ranks, sync_control=left(None, {"synchronise": True}))
    elif ranks.at_fault and (ranks.apart > ranks.rounding or ranks.ends_unreduced):
        ranks = replace(ranks, sync_control=left(full, {"synchronise": True}))
    elif ranks.at_fault and ranks.buffers_apart:
        ranks = replace(ranks, frozen_control=left(None, {"frozen": ranks.buffers_apart}))
    elif ranks.at_fault and ranks.gathers and not ranks.shares_to_try:
        ranks = replace(ranks, gather_control=left(full, {"gathers": True}))
    elif ranks.at_fault:
        for shares in ranks.shares_to_try:
            ranks = replace(ranks, weights_control=left(full, {"shares": shares}), shares_tried=shares)
            if ranks.is_rounding(ranks.weights_control):
                break
    return replace(record, together=ranks)


def _differs_at_the_step(record: Record) -> bool:
    """Whether the optimizers saw other gradients: what a script reduces by hand is right or wrong there only."""
    stages = record.updates[0].stages if record.updates else ()
    return any(stage.stage is Stage.USED and stage.outcome is Outcome.DIVERGENT for stage in stages)


def _left(
    runner: Runner, full: Run | None, options: dict[str, Any], change: Mapping[str, Any], *, summed: bool
) -> float:
    """What a changed run of the ranks leaves; against a full-batch run with the same change where `full` is None."""
    from gaverify.audit.rank_facts import left_by

    try:
        if full is None:
            own = {name: value for name, value in options.items() if name not in ("source", "parts")}
            full = runner.full(**own, **change)
            options = {**options, "source": full}
        (accumulated,) = runner.runs(runner.jobs("accumulated", **options, **change))
    except ProblemError:
        return float("nan")
    return left_by(full, accumulated, summed=summed)
