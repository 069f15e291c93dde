"""Controls for what goes wrong between ranks: the same ranks again, with one thing put right or held still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gaverify.audit.rank_facts import left_by, rank_facts
from gaverify.audit.ranks import RankedRun
from gaverify.audit.reading import Run
from gaverify.audit.running import Trial
from gaverify.collective.facts import with_shares
from gaverify.errors import ProblemError
from gaverify.records.audit import Record
from gaverify.records.comparison import Outcome
from gaverify.records.stages import Stage
from gaverify.records.windows import windows_of


def with_rank_facts(trial: Trial, record: Record) -> Record:
    """Returns the record with what its ranks did."""
    accumulated = trial.accumulated
    if not isinstance(accumulated, RankedRun) or not record.updates:
        return record
    facts = rank_facts(trial.full, accumulated, record.updates[0], record.unit)
    windows = tuple(windows_of(run.events, trial.numbers) for run in accumulated.ranks[1:])
    return replace(record, together=facts, rank_windows=windows)


def controlled_ranks(trial: Trial, record: Record) -> Record:
    """Returns the record with the controls that its ranks call for."""
    ranks = record.together
    if ranks is None:
        return record

    full = trial.full

    def left(own: Run | None, change: Mapping[str, Any]) -> float:
        return _left(trial, own, change, summed=not _differs_at_the_step(record))

    if ranks.stepped_without:
        ranks = replace(ranks, sync_control=left(None, {"synchronise": True}))
    elif ranks.at_fault and (ranks.apart > ranks.rounding or ranks.ends_unreduced):
        ranks = replace(ranks, sync_control=left(full, {"synchronise": True}))
    elif ranks.at_fault and ranks.buffers_apart:
        ranks = replace(ranks, frozen_control=left(None, {"frozen": ranks.buffers_apart}))
    elif ranks.at_fault and ranks.gathers and not ranks.shares_to_try:
        ranks = replace(ranks, gather_control=left(full, {"gathers": True}))
    elif ranks.at_fault:
        ranks = with_shares(ranks, lambda shares: left(full, {"shares": shares}))
    return replace(record, together=ranks)


def _differs_at_the_step(record: Record) -> bool:
    """Whether the optimizers saw other gradients: what a script reduces by hand is right or wrong there only."""
    stages = record.updates[0].stages if record.updates else ()
    return any(stage.stage is Stage.USED and stage.outcome is Outcome.DIVERGENT for stage in stages)


def _left(trial: Trial, full: Run | None, change: Mapping[str, Any], *, summed: bool) -> float:
    """What a changed run of the ranks leaves; against a full-batch run with the same change where `full` is None."""
    try:
        full = full or trial.again("full", shown_as="ranks", **change)
        accumulated = trial.again("accumulated", source=full, shown_as="ranks", **change)
    except ProblemError:
        return float("nan")
    return left_by(full, accumulated, summed=summed)
