"""Names what a training loop does wrong: one rule per file, from an audit's record to findings. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.audit.records import Record
from gaverify.audit.rules import (
    aligned_randomness,
    buffer_drift,
    clip_per_micro_batch,
    empty_micro_batch,
    gradients_cleared_inside_window,
    gradients_not_cleared,
    mean_of_means,
    missing_gradient,
    non_finite_gradient,
    scaler_per_micro_batch,
    scheduler_per_micro_batch,
    step_inside_window,
    trailing_window_lost,
    trailing_window_misscaled,
    unalignable_randomness,
    unexplained,
    uninformative_batch,
    unrepeatable_backward,
    wrong_loss_scale,
)
from gaverify.results import Finding

EVENT_RULES = (
    step_inside_window,
    gradients_not_cleared,
    gradients_cleared_inside_window,
    trailing_window_lost,
    clip_per_micro_batch,
    scheduler_per_micro_batch,
    scaler_per_micro_batch,
)
"""Rules that need the order of calls only."""

WEIGHT_RULES = (wrong_loss_scale, mean_of_means, empty_micro_batch, trailing_window_misscaled)
"""Rules about what each micro-batch counts; meaningless where its gradient was changed on the way to the step."""

RULES = (
    *EVENT_RULES,
    *WEIGHT_RULES,
    aligned_randomness,
    unalignable_randomness,
    unrepeatable_backward,
    buffer_drift,
    missing_gradient,
    non_finite_gradient,
    uninformative_batch,
)


def findings_for(record: Record) -> tuple[Finding, ...]:
    """Returns the findings of all rules, faults first."""
    events = [finding for rule in EVENT_RULES for finding in rule.judge(record)]
    changed = _changed(record, events)
    rest = [finding for rule in RULES if rule not in EVENT_RULES and not (changed and rule in WEIGHT_RULES)
            for finding in rule.judge(record)]  # fmt: skip
    found = (*events, *rest)
    found += tuple(unexplained.judge(record, found))
    return tuple(sorted(found, key=lambda finding: finding.severity != "fault"))


def _changed(record: Record, events: list[Finding]) -> bool:
    """Whether the gradients of the first differing update are no weighted sum of its micro-batches' any more."""
    late = record.divergent is not None and record.divergent.number > 1
    return any(code in ("GAV606", "GAV608") or (code == "GAV602" and late) for code in _faults(events))


def _faults(found: list[Finding]) -> Iterator[str]:
    return (finding.code for finding in found if finding.severity == "fault")
