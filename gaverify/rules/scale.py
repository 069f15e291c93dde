"""Measures a difference in weights of micro-batches, and reads what the run with the right ones showed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.comparison import Comparison
from gaverify.records.experiment import ControlRun, LossTerm, WeightFit, alike, are_shares, is_constant
from gaverify.records.findings import Evidence
from gaverify.records.outcomes import Method, Outcome, ParameterComparison
from gaverify.records.windows import AccumulationWindow
from gaverify.rules.rule import control_evidence, word_other_fixes, word_trial
from gaverify.thresholds import FIT_FLOAT32, FIT_FLOAT64, FIT_MAGNIFIES, LOST_SHARE

# The outcome of the accumulated run with the right weights of its micro-batches: a run and an audit fill one record.


NOT_ENOUGH = (
    "other micro-batch weights alone do not repair it: look for what else changes the gradients between micro-batches "
    "(cleared gradients, state, a step)"
)
"""The remedy of weights that fit and whose control run came out otherwise."""


@dataclass(frozen=True)
class WeightsTrial:
    """The run with the right weights, and what it says of weights and of repairs by them."""

    run: ControlRun | None = None
    """The run; None where none was made."""
    failure: str = ""
    """Why none could be made; empty where one was made, or nobody asked for it."""
    probe: str = "micro-batch-weights"
    """The name of the control that made it."""
    result: str = ""
    """The difference that it left, in words."""
    proven: bool = False
    """Whether the weights are proven to be wrong, by this run or by what needs none."""
    refuted: bool = False
    """Whether it left a difference that no cause beside the weights explains."""
    tested: str = ""
    """`: tested, equivalent` and the like, behind a repair by these weights; empty where the run left something."""

    def evidence(self, what: str = "", more: str = "", **values: Any) -> tuple[Evidence, ...]:
        """Returns the evidence of the run, or why there is none; empty where nobody asked for it.

        Args:
            what: With what it was made, where that is not the run's own name.
            more: Words that the sentence adds to the difference that was left.
            values: Numbers behind the sentence, beside what was left.
        """
        if self.run is not None:
            text = f"with {what or self.run.what} {self.result}{more}"
            return (control_evidence(self.probe, text, left=self.run.left, **values),)
        text = f"no control run was possible ({self.failure}): suspected, not proven"
        return (control_evidence(self.probe, text),) if self.failure else ()

    def replace_refuted(self, remedy: str) -> str:
        """Returns the remedy, or where else to look if the run shows that weights do not repair it."""
        return NOT_ENOUGH if self.refuted else remedy


_MAY_DIVIDE = ", but the script's own step may divide as well: suspected, not proven"


def read_trial(comparison: Comparison, number: int | None = None, *, means: bool = True) -> WeightsTrial:
    """Returns what the accumulated run with the right weights of an update's micro-batches showed.

    Args:
        comparison: The facts of the run or audit.
        number: The update; None: the one that was compared.
        means: Whether the weights stand for something; others make up for a number that moves as well.
    """
    record, run = comparison.record, comparison.weights_run
    if record.ranks > 1:  # the fit alone tells: its weights are those of the passes of all ranks
        return WeightsTrial(proven=means)
    # weights of another update were not tried
    if comparison.weights_update != (number or comparison.compared.update):
        return WeightsTrial()
    if run is None:
        return WeightsTrial(failure=comparison.window.failure)
    # A script's own step that may divide uses other gradients than those which the weights were tried on.
    may_take_factor = record.divergent is not None and record.divergent.step.may_take_factor
    means = means and not may_take_factor
    # A search adds up the repairs that it finds, and tries weights beside them.
    is_explained = comparison.runs_repairs and (comparison.cleared or comparison.weights_first)
    result = f"the difference is {run.left:.0e}" + (": proven" if means else "")
    if not run.rounding:
        share = run.left / comparison.compared.total if comparison.weights_first else 0.0  # 0 where there was no number
        result = f"a difference of {run.left:.0e} is left{f', {share:.1g} of what it was' if share else ''}: "
        result += (
            "the other causes listed explain it"
            if comparison.runs_repairs and comparison.cleared
            else "another cause remains"
        )
    return WeightsTrial(
        run,
        probe=comparison.weights_probe,
        result=result + _MAY_DIVIDE * may_take_factor,
        proven=means and (run.rounding or (comparison.weights_first and comparison.cleared)),
        refuted=means and not (run.rounding or is_explained),
        tested=f"; {word_trial(run, word_other_fixes(comparison) if comparison.runs_repairs else '')}"
        if run.rounding and not may_take_factor
        else "",
    )


# Reads a difference as weights: one factor for everything, or other weights for the micro-batches.


@dataclass(frozen=True)
class GradientFactor:
    """The one number by which an accumulated gradient differs from the full batch's; a run and an audit find it."""

    value: float
    """How many times the full batch's gradient the accumulated one is."""
    residual: float
    """The difference that it leaves over, relative to the full batch's gradient."""


def factor_in_loop(record: Record, update: UpdateComparison) -> GradientFactor | None:
    """Returns the factor of an update whose accumulated gradient is c ≠ 1 times the full batch's, to rounding."""
    if (
        not update.judged
        or not _differs(update)
        or update.window.fit is None
        or _of_one_rank(record, update.window.fit)
    ):
        return None
    if record.edit is not None:  # the passes have the right weights
        return None
    # Not as in `factor_in_run`: this fit found the weights in use as well, to the noise of the script's own runs.
    return None if contradict_losses(record, update) else constant_factor(update.window.fit, record.tolerance)


def word_count_place(weights: AccumulationWindow) -> str:
    """Names the loss call or division that counts otherwise than the micro-batches are weighted; empty if unknown."""
    place = weights.place
    if place is None:
        return ""
    line = f": `{place.source}`" if place.source else ""
    return f"; computed by {place}{line}" + (f" ({place.caller})" if place.caller else "")


def factor_of_some(record: Record, update: UpdateComparison) -> tuple[float, tuple[ParameterComparison, ...]] | None:
    """Returns K or 1/K, and the parameters whose gradients are so many times the full batch's while all others agree.

    ‖a‖ = c ‖f‖ and ‖a − f‖ = |c − 1| ‖f‖ together mean a = c f.
    """
    rows = tuple(row for row in update.parameters if row.outcome is Outcome.DIVERGENT)
    agree = [row for row in update.parameters if row.outcome is Outcome.EQUIVALENT]
    # every parameter has to be judged: an undecided one could have any factor
    if (
        update.window.steps < 2
        or not rows
        or len(rows) + len(agree) < len(update.parameters)
        or record.edit is not None
    ):
        return None
    for factor in (float(update.window.steps), 1 / update.window.steps):
        # Without a parameter that agrees, this is one factor for the whole gradient.
        if agree and all(_is_times(row, factor, record.tolerance) for row in rows):
            return factor, rows
    return None


def _is_times(row: ParameterComparison, factor: float, tolerance: float) -> bool:
    pairs = ((row.accumulated_norm, factor), (row.difference_norm, abs(factor - 1)))
    return all(math.isclose(size, share * row.reference_norm, rel_tol=tolerance) for size, share in pairs)


def _differs(update: UpdateComparison) -> bool:
    """Whether a gradient that both runs have differs; one that is missing has no weight to speak of."""
    return any(row.outcome is Outcome.DIVERGENT and math.isfinite(row.difference_norm) for row in update.parameters)


def constant_factor(fit: WeightFit, tolerance: float) -> GradientFactor | None:
    """Returns c ≠ 1 where used = c · full, or where every micro-batch is short of its right weight by the same c."""
    # The whole gradient tells first: its factor needs no weights, which equal micro-batches leave undetermined.
    factor = GradientFactor(fit.factor, fit.factor_residual)
    if fit.factor_residual > tolerance:
        if fit.residual > tolerance or not constant(fit.multipliers, tolerance):
            return None
        factor = GradientFactor(1 / fit.multipliers[0], fit.residual)
    # a factor of 1 is no finding, and a gradient of zero has none
    if not math.isfinite(factor.value) or abs(factor.value - 1) < tolerance:
        return None
    return factor


def fitted_weights_of(record: Record) -> WeightFit | None:
    """Returns the weights with which the first differing update's micro-batches give the full batch's gradient."""
    update = record.divergent
    fit = update.window.fit if update is not None else None
    if update is None or fit is None or fit.residual > record.tolerance or not fit.weights or not _differs(update):
        return None
    if record.edit is not None:
        return None
    return fit if _unequal(fit, record.tolerance) and not _of_one_rank(record, fit) else None


def weights_of(record: Record) -> WeightFit | None:
    """Returns these weights unless the update's losses contradict them."""
    fit, update = fitted_weights_of(record), record.divergent
    return None if fit is None or update is None or contradict_losses(record, update) else fit


def contradict_losses(record: Record, update: UpdateComparison) -> bool:
    """Whether weights explain an update's gradients, and its losses add up to the full batch's without them.

    A micro-batch that weighs wrongly does so in its loss and in its gradient. Where the losses are right, the backward
    depends on the batch.
    """
    fit, losses, full = update.window.fit, update.window.losses, update.window.full_loss
    if fit is None or record.ranks > 1 or not fit.determined or fit.residual > record.tolerance:
        return False
    if record.controls.overwritten is not None:  # weights fit to passes that set the gradients, whatever the losses are
        return False
    # a loss that was not seen is NaN
    if len(losses) != len(fit.weights) or not all(map(math.isfinite, (full, *losses))):
        return False
    parts = [weight * loss for weights in (fit.used, fit.weights) for weight, loss in zip(weights, losses, strict=True)]
    scale = max(map(abs, (full, *parts)))
    misses, misses_fitted = (
        abs(sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) - full)
        for weights in (fit.used, fit.weights)
    )
    # Constants and terms without a gradient make both sums wrong: such losses say nothing about the fitted weights.
    return misses <= record.tolerance * scale and misses_fitted > weight_tolerance(record.tolerance) * scale


def multipliers_of(record: Record) -> tuple[float, ...]:
    """Returns what each loss of the first differing update should be multiplied by; empty where nothing tells."""
    update, weights = record.divergent, weights_of(record)
    factor = factor_in_loop(record, update) if update is not None else None
    if update is not None and factor is not None:
        return (1 / factor.value,) * update.window.steps
    return weights.multipliers if weights is not None else ()


def _of_one_rank(record: Record, fit: WeightFit) -> bool:
    """Whether a gradient holds the backward passes of some ranks only: it was taken before a script reduced by hand.

    A missing part is no weight of a loss then. The parts of one micro-batch stand side by side, one for each rank.
    """
    used = [fit.used[at : at + record.ranks] for at in range(0, len(fit.used), record.ranks)]
    most = LOST_SHARE * max(map(abs, fit.used), default=0.0)
    reached = [[abs(weight) > most for weight in micro_batch] for micro_batch in used]
    return any(any(micro_batch) and not all(micro_batch) for micro_batch in reached)


def weighted_term(record: Record) -> LossTerm | None:
    """Returns the first term of the loss that alone gives the full batch's gradient with other weights."""
    for term in record.controls.terms:
        fit = term.fit
        fits = fit.residual <= record.tolerance < fit.factor_residual and bool(fit.weights) and not fit.vacuous
        if term.samples and fits and _unequal(fit, record.tolerance):
            return term
    return None


def unexplained_term(record: Record) -> bool:
    """Whether a term of the loss has no weights that alone give the full batch's gradient: samples meet in it."""
    state = record.controls.state
    if state is not None and state.control is not None and state.control.rounding:
        return False  # with other state all terms agree
    fits = [term.fit for term in record.controls.terms if term.samples and not term.fit.vacuous]
    return any(record.tolerance < min(fit.residual, fit.factor_residual) < math.inf for fit in fits)


def _unequal(fit: WeightFit, tolerance: float) -> bool:
    return all(map(math.isfinite, fit.multipliers)) and not constant(fit.multipliers, tolerance)


def constant(values: tuple[float, ...], tolerance: float) -> bool:
    """Whether all values are the same number and not zero."""
    finite = bool(values) and all(map(math.isfinite, values)) and values[0] != 0
    return finite and alike(values, weight_tolerance(tolerance))


def are_near_shares(fitted: Sequence[float], amounts: Sequence[float], tolerance: float) -> bool:
    """Whether weights are the shares of some amounts, as far as a fit can tell."""
    return are_shares(fitted, amounts, *share_tolerances(len(fitted), tolerance))


def share_tolerances(steps: int, tolerance: float) -> tuple[float, float]:
    """Returns how far each of K fitted weights may be from a share: relative, and absolute for one of about zero."""
    close = weight_tolerance(tolerance)
    return close, close / max(steps, 1)


def weight_tolerance(tolerance: float) -> float:
    """How far two fitted weights may be apart: a fit magnifies the noise of what it is fitted to."""
    return min(FIT_MAGNIFIES * tolerance, max(FIT_FLOAT32, 2 * tolerance))


def factor_in_run(comparison: Comparison) -> GradientFactor | None:
    """Returns the factor in accumulated = factor · full, which is 1 where only the window's counts are wrong.

    Where a search ran, its weights or counts tell, and the norms of the gradients do not.
    """
    if not (comparison.compared.divergent and comparison.compared.comparable):
        return None
    exact = comparison.compared.method in (Method.FLOAT64_CONTROL, Method.TOLERANCE)
    accurate = FIT_FLOAT64 if exact else FIT_FLOAT32
    fit = comparison.window.fit
    # Counts tell where fitted weights do not explain everything.
    if comparison.window.counts and (fit is None or fit.residual > FIT_FLOAT32 or comparison.weights_first):
        factor = _factor_of_counts(comparison.window)
        return None if factor is None else GradientFactor(factor, math.inf if fit is None else fit.residual)
    if fit is not None and comparison.window.has_wrong_weights:
        # Not `fit.used`: a search may have fitted with other weights in use than those of the run.
        ratios = [w / c for w, c in zip(comparison.window.used, fit.weights, strict=True) if c]
        is_one_factor = len(ratios) == len(fit.weights) and is_constant(ratios, fit.residual)
        if is_one_factor and not is_constant(
            [*ratios, 1.0], fit.residual
        ):  # 1: counts of the window, beside right weights
            return GradientFactor(ratios[0], fit.residual)
        return None
    factor, residual = comparison.compared.scale
    return GradientFactor(factor, residual) if not comparison.diagnosed and residual < accurate else None


def _factor_of_counts(known: AccumulationWindow) -> float | None:
    """How many times too much the micro-batches count by the numbers that divide them; None where it is no one factor.

    Those of several terms are the same factor, or no weights explain them together.
    """
    counts, fit = known.counts, known.fit
    if not all(all(count.micro_batches) for count in counts):  # one that holds nothing to count adds nothing
        return None
    ratios = [
        w * count.window / in_micro_batch
        for count in counts
        for w, in_micro_batch in zip(known.used, count.micro_batches, strict=True)
    ]
    if not is_constant(ratios) or any(count.term is not None or not count.adds_up for count in counts):
        return None
    fitted = [] if fit is None else [w / c for w, c in zip(known.used, fit.weights, strict=True) if c]
    agrees = fit is not None and alike([ratios[0], *fitted], FIT_MAGNIFIES * fit.residual)
    return ratios[0] if len(counts) == 1 or agrees else None


def find_steps(record: Record, factor: float) -> int:
    """K where no backward pass was seen: the number among the run's own arguments that the factor is, or is one over.

    Returns 0 where there is none.
    """
    numbers = (number for number in record.calls.numbers if number > 1)
    near = {"rel_tol": record.tolerance}
    return next((n for n in numbers if math.isclose(factor, n, **near) or math.isclose(factor, 1 / n, **near)), 0)
