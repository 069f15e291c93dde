"""Names causes from what the probes measured: probes first, then an explicit tuple of rules."""

from __future__ import annotations

from contextlib import ExitStack

from gaverify.control import failure_sentence, in_float64
from gaverify.diagnosis import batch_quality, coupling, gradients, randomness, weights
from gaverify.diagnosis.measurements import Measurements
from gaverify.gradients import Task, full_batch_gradients
from gaverify.judging import Judgement
from gaverify.probes.module_coupling import find_coupling
from gaverify.probes.micro_batch_weights import fit_micro_batch_weights
from gaverify.results import Finding, Outcome

RULES = (
    gradients.missing_gradient,
    gradients.non_finite_gradient,
    weights.wrong_loss_scale,
    weights.mean_of_means,
    coupling.batch_statistics,
    coupling.cross_sample_operation,
    coupling.batch_coupled_loss,
    randomness.unalignable_randomness,
    randomness.aligned_randomness,
    batch_quality.uninformative_batch,
)
# A fit that leaves less than this over explains the divergence by weights alone: float64 fits of additive losses
# leave 1e-12 or less, a coupled loss more than 1e-4 (design, section 6: 3e-8 in float32).
EXPLAINED = 1e-6


def findings_for(task: Task, judgement: Judgement, *, diagnose: bool) -> tuple[Finding, ...]:
    """Returns the findings of a judged task, faults first. Probes run only after a divergence."""
    measured = measure_causes(task, judgement, diagnose=diagnose)
    found = [finding for rule in RULES if (finding := rule(measured)) is not None]
    return tuple(sorted(found, key=lambda finding: finding.severity != "fault"))


def measure_causes(task: Task, judgement: Judgement, *, diagnose: bool) -> Measurements:
    """Runs the probes that a divergence calls for; one that cannot run says so and the others go on."""
    measured = Measurements.of(task, judgement)
    divergent = any(row.outcome is Outcome.DIVERGENT for row in judgement.rows)
    if not (diagnose and divergent):
        return measured
    lift = judgement.control is not None
    with ExitStack() as stack:
        state = judgement.state
        if lift:
            task, state = stack.enter_context(in_float64(task, state))
        if measured.comparable:
            try:
                full, _ = full_batch_gradients(task, state, judgement.record, lift=lift)
                measured.fit = fit_micro_batch_weights(task, state, judgement.record, full, lift)
            except Exception as error:
                measured.failures["micro-batch weights"] = failure_sentence(error)
        if measured.fit is None or measured.fit.residual > EXPLAINED:
            try:
                measured.coupling = find_coupling(task, state, judgement.record, lift=lift)
            except Exception as error:
                measured.failures["module coupling"] = failure_sentence(error)
    return measured
