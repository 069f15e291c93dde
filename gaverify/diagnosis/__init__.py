"""Names causes: one rule per file, from what the probes measured to findings. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gaverify.diagnosis import (
    aligned_randomness,
    batch_coupled_loss,
    batch_dependent_backward,
    batch_statistics,
    buffer_drift,
    cross_sample_operation,
    empty_micro_batch,
    hidden_state,
    low_precision_accumulation,
    mean_of_means,
    missing_gradient,
    non_finite_gradient,
    state_changed_by_forward,
    unalignable_randomness,
    unexplained,
    uninformative_batch,
    unrepeatable_backward,
    wrong_loss_scale,
)
from gaverify.diagnosis.wording import coupling, harm
from gaverify.measurements import Measurements
from gaverify.results import Finding

RULES = (
    batch_statistics,
    cross_sample_operation,
    batch_coupled_loss,
    batch_dependent_backward,
    wrong_loss_scale,
    mean_of_means,
    empty_micro_batch,
    aligned_randomness,
    unalignable_randomness,
    unrepeatable_backward,
    state_changed_by_forward,
    buffer_drift,
    hidden_state,
    low_precision_accumulation,
    missing_gradient,
    non_finite_gradient,
    uninformative_batch,
)


def findings_for(measured: Measurements) -> tuple[Finding, ...]:
    """Returns the findings of all rules, faults first."""
    found = tuple(finding for rule in RULES for finding in rule.judge(measured))
    found += tuple(unexplained.judge(measured, found))
    ordered = sorted(found, key=lambda finding: finding.severity != "fault")
    return tuple(_with_harm(measured, ordered))


def _with_harm(measured: Measurements, found: list[Finding]) -> Iterator[Finding]:
    """Adds to the first finding how much the divergence matters: it is one number for all causes together."""
    for position, finding in enumerate(found):
        matters = position == 0 and measured.divergent and (finding.severity == "fault" or finding.code == "GAV000")
        extra = harm(measured) if matters else ()
        if matters and finding.code in ("GAV101", "GAV102", "GAV103"):
            extra = (*coupling(measured, finding.code), *extra)
        yield replace(finding, evidence=(*finding.evidence, *extra)) if extra else finding
