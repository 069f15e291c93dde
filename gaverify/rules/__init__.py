"""Names causes: one judgement per code, from facts to findings, read by run and audit alike. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gaverify.records.comparison import Comparison, comparison_of
from gaverify.records.findings import Finding
from gaverify.rules.calls import (
    clip_per_micro_batch,
    scaler_per_micro_batch,
    scheduler_per_micro_batch,
    step_settings_differ,
)
from gaverify.rules.coupling import (
    batch_coupled_loss,
    batch_dependent_backward,
    batch_statistics,
    cross_sample_operation,
    loss_inputs_differ,
)
from gaverify.rules.lost_passes import gradients_cleared_inside_window, trailing_window_lost
from gaverify.rules.ranks import (
    gather_without_gradient,
    gradients_never_reduced,
    mean_over_ranks,
    rank_statistics,
    ranks_hold_different_gradients,
    shard_local_norm,
    synchronised_every_micro_batch,
    wrong_rank_scale,
)
from gaverify.rules.remainder import (
    low_precision_accumulation,
    missing_gradient,
    non_finite_gradient,
    unexplained,
    uninformative_batch,
)
from gaverify.rules.rule import Rule, show_harm
from gaverify.rules.shares import (
    empty_micro_batch,
    find_shares,
    mean_of_means,
    trailing_window_misscaled,
    wrong_loss_scale,
)
from gaverify.rules.state import (
    aligned_randomness,
    buffer_drift,
    hidden_state,
    state_changed_by_forward,
    unalignable_randomness,
    unrepeatable_backward,
)
from gaverify.rules.steps import gradients_not_cleared, step_inside_window

FORWARD = (batch_statistics, cross_sample_operation, batch_coupled_loss)
"""Rules about samples that meet in a forward: beside them it is told how far outputs depend on other samples."""

COUPLING = (*FORWARD, batch_dependent_backward)
"""Rules about samples that act on each other: they need the traces of a run."""

EVENTS = (
    step_inside_window,
    gradients_not_cleared,
    gradients_cleared_inside_window,
    trailing_window_lost,
    clip_per_micro_batch,
    scheduler_per_micro_batch,
    scaler_per_micro_batch,
    step_settings_differ,
)
"""Rules about the order of a script's calls: they need the windows of an audit."""

WEIGHTS = (wrong_loss_scale, mean_of_means, empty_micro_batch, trailing_window_misscaled)
"""Rules about what each micro-batch counts; meaningless where its gradient was changed on the way to the step."""

RANKS = (
    ranks_hold_different_gradients,
    gradients_never_reduced,
    mean_over_ranks,
    wrong_rank_scale,
    gather_without_gradient,
    shard_local_norm,
    rank_statistics,
    synchronised_every_micro_batch,
)
"""Rules about what several ranks make of their gradients."""

RULES = (
    *COUPLING,
    *EVENTS,
    loss_inputs_differ,
    *RANKS,
    *WEIGHTS,
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


def findings_for(comparison: Comparison) -> tuple[Finding, ...]:
    """Returns the findings of all rules, faults first."""
    findings: list[Finding] = []
    for rule in _rules_in_order(comparison):
        if rule in WEIGHTS and comparison.record.controls.state is not None:
            # weights make up for state that moves as well: what counts is the fit with the state put back
            findings += _beside_coupling(rule, comparison)
        elif rule not in WEIGHTS or not (changed := _gradients_changed(comparison, findings)):
            findings += rule.judge(comparison)
            findings += _beside_coupling(rule, comparison) if rule in WEIGHTS else ()
        elif comparison.record.controls.unclipped and changed == {clip_per_micro_batch.code}:
            results = comparison.record.controls
            without_clips = replace(
                comparison.record, updates=results.unclipped, controls=replace(results, unclipped=())
            )
            findings += rule.judge(comparison_of(without_clips))
    first = comparison.record.controls.first_difference
    if first is not None and first.control is not None and first.control.proves:
        # what is proven leaves nothing to those that were only suspected before
        findings = [finding for finding in findings if finding.proven or finding.severity != "fault"]
    findings += unexplained.judge(comparison, tuple(findings))
    codes_first = {rule.code for rule in WEIGHTS} if comparison.weights_first else set()
    ordered = sorted(findings, key=lambda finding: (finding.severity != "fault", finding.code not in codes_first))
    return tuple(_with_harm(comparison, ordered))


def _rules_in_order(comparison: Comparison) -> tuple[Rule[[Comparison]], ...]:
    """All rules; of a wrong factor and wrong shares of one update the larger fault comes first."""
    shares = find_shares(comparison)
    if shares is None or shares.share_error <= abs(shares.total - 1):
        return RULES
    at = RULES.index(wrong_loss_scale)
    return (*RULES[:at], mean_of_means, wrong_loss_scale, *RULES[at + 2 :])


def _beside_coupling(rule: Rule[[Comparison]], comparison: Comparison) -> Iterator[Finding]:
    """Yields what the rule finds in the weights that are left once what couples samples is held in a training loop."""
    record, controls, update = comparison.record, comparison.record.controls, comparison.record.divergent
    run = controls.coupling[-1].control if controls.coupling else None
    if controls.state is not None:
        run = controls.state.control
    if run is None or run.fit is None or update is None:
        return
    refitted = replace(update, window=update.window.refit(run.fit))
    controls = replace(controls, coupling=(), state=None)
    without_coupling = replace(record, updates=(refitted,), controls=controls)
    for finding in rule.judge(comparison_of(without_coupling)):
        yield replace(finding, summary=f"with {run.what}, {finding.summary}")


def _gradients_changed(comparison: Comparison, found: list[Finding]) -> set[str]:
    """The codes by which the first differing update's gradient is no weighted sum of its micro-batches' any more."""
    faults = {finding.code for finding in found if finding.severity == "fault"}
    changed = {clip_per_micro_batch.code, scaler_per_micro_batch.code}
    if comparison.record.controls.overwritten is not None:  # weights fit to passes that add nothing
        changed.add(gradients_cleared_inside_window.code)
    # Weights of micro-batches say nothing where it is the ranks' that are wrong: the fit of a script's passes holds
    # those of all ranks, and of a model none may be fitted.
    is_of_ranks = comparison.ranks is not None and comparison.ranks.at_fault and comparison.window.fit is None
    if comparison.record.ranks > 1 or is_of_ranks:
        changed |= {rule.code for rule in RANKS}
    if (comparison.compared.update or 1) > 1:  # the first window has nothing of an earlier one
        changed.add(gradients_not_cleared.code)
    return faults & changed


def _with_harm(comparison: Comparison, found: list[Finding]) -> Iterator[Finding]:
    """Adds to the first finding how much the divergence matters: it is one number for all causes together."""
    for position, finding in enumerate(found):
        is_reported = finding.severity == "fault" or finding.code == unexplained.code
        matters = position == 0 and bool(comparison.compared.divergent) and is_reported
        extra = show_harm(comparison) if matters else ()
        yield replace(finding, evidence=(*finding.evidence, *extra)) if extra else finding
