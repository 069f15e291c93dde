"""One factor too much or too little: GAV201, and GAV605 of a short window."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.comparison import Outcome
from gaverify.records.events import Backward
from gaverify.records.experiment import ControlRun, TermKind
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.records.numbers import count_text
from gaverify.records.windows import Window
from gaverify.rules.lost_passes import explains_skipped, find_skipped
from gaverify.rules.rule import (
    backward_place,
    control_evidence,
    count_calls,
    difference,
    exact,
    finding_of,
    line_of,
    measured_evidence,
    number_remedy,
    passes,
    quote_names,
    rule,
    rule_of_loops,
)
from gaverify.rules.scale import (
    NOT_ENOUGH,
    GradientFactor,
    WeightsTrial,
    constant_factor,
    factor_in_loop,
    factor_in_run,
    factor_of_some,
    find_steps,
    read_trial,
    repair_scale,
    repair_shares,
    weights_of,
    word_count_place,
    word_factor,
)
from gaverify.rules.steps import early_windows
from gaverify.rules.wrong_shares import (
    DIVIDE_ONCE,
    counts_remedy,
    explains_weights,
    find_wrong_shares,
    places,
)
from gaverify.thresholds import FIT_EXACT, FIT_MAGNIFIES, SAME_NUMBER, THREE_DIGITS


@rule("GAV201")
def wrong_loss_scale(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where one factor for all parameters and micro-batches makes the gradients agree."""
    if facts.loop is not None:  # no count of a script can be replaced: its fits and the noise of its runs decide
        yield from _judge_loop(facts, facts.loop)
        return
    counts, run = facts.window.counts, facts.window.remedy
    if counts and run is not None and all(count.term is not None for count in counts):
        yield from (
            _finding_of_terms(facts, run, kind) for kind in TermKind if any(count.term is kind for count in counts)
        )
        return
    factor = factor_in_run(facts)
    # A factor that is 1 to what it leaves over is none.
    if factor is None or abs(factor.value - 1) < max(SAME_NUMBER, factor.residual):
        return
    # Counts were read as they are; the weights of a fit are less exact than what it leaves over.
    close = FIT_EXACT if counts else max(FIT_EXACT, FIT_MAGNIFIES * factor.residual)
    right = exact([weight / factor.value for weight in facts.window.used], close)
    trial = read_trial(facts)
    # a model or loss that communicates by itself may count the ranks in its own way
    ranks = 1 if facts.ranks is None or facts.ranks.traffic.own.count() else facts.ranks.ranks
    remedy = (
        f"multiply each micro-batch's loss by {exact([1 / factor.value], close)} (loss weights {right}){trial.tested}"
    )
    if counts and run is not None:
        remedy = counts_remedy(facts, counts, run)
    meaning = word_factor(facts, factor.value, facts.window.steps, ranks=ranks)
    largest_and_place = facts.compared.largest + word_count_place(facts.window)
    yield finding_of(
        f"the accumulated gradient is {factor.value:.6g} times the full-batch gradient{meaning}",
        measured_evidence(
            "micro-batch-weights",
            "; ".join(filter(None, (largest_and_place, _word_factor_fit(factor.residual)))),
            factor=factor.value,
            residual=factor.residual,
        ),
        *trial.evidence("" if counts else f"loss weights {right}"),
        remedy=number_remedy(facts, trial.replace_refuted(remedy)),
        location=facts.window.place.location if facts.window.place is not None else None,
        proven=trial.proven,
    )


def _word_factor_fit(residual: float) -> str:
    # counts may tell a factor where no weights were fitted
    return f"apart from this factor the gradients agree up to {residual:.0e}" if math.isfinite(residual) else ""


def _finding_of_terms(facts: Facts, run: ControlRun, kind: TermKind) -> Finding:
    """The finding of the terms of one kind that get the weights of others."""
    counts = tuple(count for count in facts.window.counts if count.term is kind)
    source, trial = counts[0].operation.source, read_trial(facts)
    what = "is a sum over samples, but is weighted like a mean"
    if kind is TermKind.PENALTY:
        what = f"is the same in every micro-batch and is counted {sum(facts.window.used):.6g} times"
    line = f": `{source}`" if source else ""
    return finding_of(
        f"a term of the loss, {places(counts)}, {what}",
        measured_evidence("micro-batch-weights", f"{facts.compared.largest}{line}"),
        *trial.evidence("other weights of this term"),
        remedy=number_remedy(facts, counts_remedy(facts, counts, run)),
        location=counts[0].operation.location,
        proven=trial.proven,
        together=[count.operation.location for count in counts],
    )


def _judge_loop(facts: Facts, loop: Record) -> Iterator[Finding]:
    """Yields findings of the first update of a loop that differs, or of all its micro-batches with steps undone.

    Unless steps come too early, undoing them joins windows that were meant to be smaller than the full batch.
    """
    update, undone = loop.divergent, loop.controls.steps_undone
    if explains_weights(facts) or (update is not None and explains_skipped(loop, update)):
        return
    if update is not None:
        factor = factor_in_loop(loop, update)
        if factor is not None and short_by(loop, update) is None:  # GAV605 tells of a window that is short
            yield _finding_of_factor(facts, loop, factor, update.window.steps, update)
        # weights that explain the whole gradient leave nothing to single terms or parameters
        elif factor is None and weights_of(loop) is None:
            findings = list(_judge_some_parameters(facts, loop, update))
            yield from findings or _judge_terms(facts, loop, update)
        yield from _judge_total(facts, loop)
    elif undone is not None and undone.residual < loop.tolerance and early_windows(loop):
        factor = constant_factor(undone, loop.tolerance)
        if factor is not None:
            yield _finding_of_factor(facts, loop, factor, len(undone.weights), None)


def _judge_total(facts: Facts, loop: Record) -> Iterator[Finding]:
    """Yields a finding where weights are wrong one to another, and add up to K or 1/K and not to 1."""
    shares = find_wrong_shares(facts, loop)
    total = shares.total(loop.tolerance) if shares is not None else 1.0
    if shares is None or total == 1.0:
        return
    update, term = shares.update, shares.term
    trial = read_trial(facts, update.number) if term is None else WeightsTrial(proven=True)  # each term ran alone
    remedy = NOT_ENOUGH
    if trial.proven:
        remedy = f"multiply the weight of each micro-batch by {exact([1 / total], loop.tolerance)}"
        remedy += "; the factors that GAV202 gives include this one" if all(shares.weights) else ""
        remedy = _repair_beside_skipped(loop, update) or remedy
        if by_framework := repair_shares(loop, update, shares.shares_of):
            remedy = f"{by_framework}; this makes the shares right as well (GAV202)"
    if update.step.may_take_factor:
        factor = exact([1 / total], loop.tolerance)
        remedy = f"multiply the weight of each micro-batch by {factor}, unless the step itself divides by {total:.6g}"
    where, what = ("", "the loss") if term is None else (f" in term {term.number} of {term.count} of the loss", "it")
    meaning = _meaning_beside_skipped(loop, update, total, what)
    meaning = meaning or word_factor(facts, total, len(shares.weights), what=what)
    yield finding_of(
        f"the weights of the micro-batches in update {update.number} add up to {total:.6g} instead of "
        f"1{where}{meaning}",
        measured_evidence(
            "comparison",
            f"{difference(update)}; their ratios are wrong, too",
            total=total,
            update=update.number,
        ),
        *trial.evidence(),
        remedy=remedy,
        location=backward_place(facts, update.number),
        proven=trial.proven,
    )


def _judge_terms(facts: Facts, loop: Record, update: UpdateComparison) -> Iterator[Finding]:
    """Yields a finding per term of a loss with a factor of its own: a penalty that is not divided, say."""
    factors = {term: constant_factor(term.fit, loop.tolerance) for term in loop.controls.terms}
    for term, factor in factors.items():
        if factor is None:
            continue
        fits = [each_term.fit for each_term, own_factor in factors.items() if own_factor is None]
        alike = [fit for fit in fits if fit.factor_residual <= loop.tolerance and abs(fit.factor - 1) < loop.tolerance]
        which = "" if term.samples else ", which is the same in every micro-batch,"
        meaning = word_factor(facts, factor.value, update.window.steps, what="it")
        other_terms = (
            f"; {count_text(len(alike), 'other term')} {'has' if len(alike) == 1 else 'have'} the right weight"
            if alike
            else ""
        )
        advice = "and leave the others as they are" if len(alike) == term.count - 1 else "whatever the others need"
        yield finding_of(
            f"term {term.number} of {term.count} of the loss{which} counts {factor.value:.6g} times as much in update "
            f"{update.number} as in the full batch{meaning}",
            measured_evidence(
                "comparison",
                f"{difference(update)}{other_terms}",
                factor=factor.value,
                update=update.number,
                term=term.number,
                terms=term.count,
            ),
            control_evidence(
                "micro-batch-weights",
                f"for this term alone, the gradients agree up to {term.fit.factor_residual:.0e} apart from this "
                "factor; the terms add up to the whole gradient",
                residual=term.fit.factor_residual,
            ),
            remedy=f"multiply this term by {exact([1 / factor.value], loop.tolerance)} in each micro-batch, {advice}",
            location=line_of(term.file, term.line),
            proven=True,
        )


def _judge_some_parameters(facts: Facts, loop: Record, update: UpdateComparison) -> Iterator[Finding]:
    """Yields a finding where some parameters alone have a factor: their loss is counted in every micro-batch."""
    factor_and_rows = factor_of_some(loop, update)
    if factor_and_rows is None:
        return
    factor, rows = factor_and_rows
    other_count = len(update.parameters) - len(rows)
    names, meaning = [row.name for row in rows], "K"
    remedy = (
        "a loss term that reaches only these parameters is added in every micro-batch: divide it by K, or add it in "
        "one micro-batch only"
    )
    if factor < 1:
        meaning = "1/K"
        remedy = (
            "a loss term that reaches only these parameters is added in one of K micro-batches: do not divide it by K"
        )
    agreement = f"{count_text(other_count, 'other parameter')} {'agrees' if other_count == 1 else 'agree'}"
    yield finding_of(
        f"the gradient of {quote_names(names)} in update {update.number} is {factor:.6g} times the full batch's "
        f"(= {meaning}); {agreement}",
        measured_evidence("comparison", difference(update), factor=factor, update=update.number, parameters=names),
        remedy=remedy,
        location=backward_place(facts, update.number),
        proven=False,
    )


def _finding_of_factor(
    facts: Facts, loop: Record, gradient_factor: GradientFactor, count: int, update: UpdateComparison | None
) -> Finding:
    factor = gradient_factor.value
    count = count or find_steps(loop, factor)
    number = update.number if update is not None else 1
    right = exact([1 / factor], loop.tolerance)
    remedy = f"multiply each micro-batch's loss by {right}" + ("" if count < 2 else f" (loss weights {right} each)")
    # steps that are undone are a control already
    # no weights were run where the steps were undone
    trial = read_trial(facts, number) if update is not None else WeightsTrial(proven=True)
    moving = _other_factor(loop, update, factor) if update is not None else None
    if update is not None and (repair := repair_scale(loop, update, factor)):
        of_update = "" if moving is None else f"in update {number} "
        remedy = f"{repair} ({of_update}equivalent to a loss times {right}{trial.tested})"
    elif moving is not None:
        later, later_factor = moving
        remedy = "divide by the count over all micro-batches of the update: no constant repairs "
        remedy += f"{factor:.4g} in update {number} and {later_factor:.4g} in update {later.number}"
    else:
        remedy += trial.tested
    meaning = ""
    if update is not None:
        remedy = _repair_beside_skipped(loop, update) or remedy
        meaning = _meaning_beside_skipped(loop, update, factor, "the loss")
    meaning = meaning or word_factor(facts, factor, count, ranks=facts.ranks.ranks if facts.ranks is not None else 1)
    what = (
        f"the gradient of update {number}"
        if update is not None
        else "the gradient summed over the update's micro-batches"
    )
    before = f"{difference(update)}; " if update is not None else "with the weights put back after each step, "
    divisor = _find_shared_divisor(loop, update) if update is not None else None
    if divisor is not None:
        before += f"both runs divide each loss by {divisor}, so that the full batch's is no mean; "
        remedy += "; or divide in each run by its own number of micro-batches"
    may_take_factor = update is not None and update.step.may_take_factor
    if may_take_factor:
        before += "the weights change alike, since the script's own step hides the gradient's size; "
        before += "a division inside that step would not be seen; "
    return finding_of(
        f"{what} is {factor:.6g} times the full batch's{meaning}",
        measured_evidence(
            "micro-batch-weights",
            f"{before}{_word_factor_fit(gradient_factor.residual)}",
            factor=factor,
            residual=gradient_factor.residual,
            update=number,
        ),
        *trial.evidence(),
        remedy=trial.replace_refuted(remedy),
        location=backward_place(facts, number),
        proven=trial.proven,
    )


def _find_shared_divisor(loop: Record, update: UpdateComparison) -> int | None:
    """The whole number that both runs divide every loss by, although one pass of the full batch needs no division."""
    full_window = next((window for window in loop.calls.full_windows if window.number == update.number), None)
    full_scales = [backward.scales for backward in full_window.of(Backward)] if full_window is not None else []
    scales = [each[-1] if each else math.nan for each in (*full_scales, *update.window.scales)]
    if len(full_scales) != 1 or not 0 < scales[0] < 1:  # several passes of the full batch may have a weight each
        return None
    divisor = round(1 / scales[0])
    return divisor if all(math.isclose(each * divisor, 1.0, rel_tol=loop.tolerance) for each in scales) else None


def _other_factor(loop: Record, update: UpdateComparison, factor: float) -> tuple[UpdateComparison, float] | None:
    """Returns an update of as many passes with another factor, and that factor; None where all have the same."""
    for later in loop.updates:
        # windows of other lengths, or with skipped micro-batches, have other factors for a reason of their own
        if not later.judged or later.window.steps != update.window.steps or find_skipped(loop, later) is not None:
            continue
        agrees = later.outcome is Outcome.EQUIVALENT
        later_factor = GradientFactor(1.0, 0.0) if agrees else factor_in_loop(loop, later)
        if later_factor is not None and not math.isclose(later_factor.value, factor, rel_tol=loop.tolerance):
            return later, later_factor.value
    return None


def _meaning_beside_skipped(loop: Record, update: UpdateComparison, factor: float, what: str) -> str:
    """Says that a factor is the number of micro-batches that are not skipped, which is not K; empty where it is not."""
    skipped = find_skipped(loop, update)
    if skipped is None or not math.isclose(factor, skipped.window.backwards, rel_tol=loop.tolerance):
        return ""
    divisor = f"the {skipped.window.backwards} micro-batches that are used, of {skipped.count}"
    return f": {what} is not divided by {divisor}"


def _repair_beside_skipped(loop: Record, update: UpdateComparison) -> str:
    """The repair of a factor where micro-batches are skipped; empty where none is."""
    return DIVIDE_ONCE if find_skipped(loop, update) is not None else ""


@rule_of_loops("GAV605")
def trailing_window_misscaled(facts: Facts, loop: Record) -> Iterator[Finding]:
    """Yields a finding where a short window differs by r/K."""
    if not loop.updates:
        yield from _judge_calls(facts, loop)
        return
    for update in loop.updates:
        pass_counts = short_by(loop, update)
        if pass_counts is None or explains_skipped(loop, update):  # GAV203 tells why it is short
            continue
        (short, full_count), trial = pass_counts, read_trial(facts, update.number)
        difference_left = update.window.fit.factor_residual if update.window.fit else math.nan
        yield finding_of(
            f"update {update.number} sums {passes(short)} but divides by K = {full_count}: its gradient is "
            f"{short / full_count:.4g} of the full batch's",
            measured_evidence(
                "micro-batch-weights",
                f"{difference(update)}; apart from the factor r/K = {short}/{full_count} the gradients "
                f"agree up to {difference_left:.0e}",
                factor=short / full_count,
                update=update.number,
            ),
            count_calls(loop.calls.complete, "counts"),
            *trial.evidence(),
            remedy=f"divide the losses of this update by {short}, its number of micro-batches (weights "
            f"{1 / short:.4g} each)",
            location=backward_place(facts, update.number),
            proven=trial.proven,
        )
        return


def short_by(loop: Record, update: UpdateComparison) -> tuple[int, int] | None:
    """Returns r and K where an update's gradient is r/K of the full batch's and its window has r < K micro-batches."""
    factor = factor_in_loop(loop, update)
    full_count = loop.calls.steps or loop.calls.usual(loop.calls.window_of(update.number))
    short = update.window.steps
    if factor is None or not 0 < short < full_count:
        return None
    return (short, full_count) if math.isclose(factor.value, short / full_count, rel_tol=loop.tolerance) else None


def _judge_calls(facts: Facts, loop: Record) -> Iterator[Finding]:
    """Yields a finding where losses are multiplied by 1/K in a window of fewer than K micro-batches as well."""
    for window in loop.calls.complete:
        full_count, short = loop.calls.steps or loop.calls.usual(window), window.backwards
        alike = [similar for similar in loop.calls.complete if similar.optimizers == window.optimizers]
        weights = {weight for similar in alike for weight in _round_weights(similar)}
        if not 0 < short < full_count or alike[0].backwards != full_count or len(weights) != 1:
            continue
        weight = weights.pop()
        if weight is not None and math.isclose(weight * full_count, 1.0, rel_tol=THREE_DIGITS):
            yield finding_of(
                f"update {window.number} sums {passes(short)} but divides by K = {full_count}: the weights of its "
                f"losses add up to {short / full_count:.4g}",
                measured_evidence(
                    "events", f"every loss is multiplied by {weight:.4g} = 1/{full_count}", weight=weight
                ),
                count_calls(loop.calls.complete, "counts"),
                remedy=f"divide the losses of this update by {short}, its number of micro-batches",
                location=backward_place(facts, window.number),
                proven=False,
            )
            return


def _round_weights(window: Window) -> list[float | None]:
    """What each loss of a window was multiplied by, rounded; None where it is not known."""
    event_weights = [backward.weight for backward in window.of(Backward)]
    return [None if weight is None else float(f"{weight:.3g}") for weight in event_weights]
