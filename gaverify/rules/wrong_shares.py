"""Micro-batches that count otherwise than in the full batch: GAV202 and GAV203."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.experiment import ControlRun
from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence, Finding
from gaverify.records.weights import Count, WeightFit, are_shares, is_constant
from gaverify.rules.controls import behind, in_order
from gaverify.rules.rule import controlled, finding_of, measured, rule
from gaverify.rules.scale import constant, counted_at, factor_in_loop, factor_of, shares, weighted_term, weights_of
from gaverify.rules.wording import (
    NOT_ENOUGH,
    backward_place,
    difference,
    exact,
    largest,
    listed,
    located,
    not_run,
    share_texts,
    tested,
    weights_text,
)
from gaverify.thresholds import FIT_EXACT, FIT_FLOAT32, FIT_MAGNIFIES


@rule("GAV203")
def empty_micro_batch(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where a micro-batch without valid targets gives NaN or drops out of the mean."""
    empty = empty_micro_batches(facts)
    if not facts.compared.divergent:
        return
    if not empty:
        yield from _without_backward(facts)
        return
    which = ", ".join(str(k + 1) for k in empty)
    window = f"of {facts.steps}" if facts.loop is None else f"of update {facts.compared.update}"
    losses, counts = facts.weights.losses, facts.weights.valid_targets
    lost = [k for k in empty if k < len(losses) and not math.isfinite(losses[k])]
    effect = "its mean loss is 0/0" if lost else "it takes a share of the mean and adds nothing"
    rows = [row for row in facts.compared.rows if row.why is not None and row.why.not_finite]
    shown = f"gradients {rows[0].reason}: `{rows[0].name}`" if rows else largest(facts)
    yield finding_of(
        f"micro-batch {which} {window} has no valid target: {effect}",
        measured(
            "micro-batch-weights",
            f"{shown}; valid targets per micro-batch: {', '.join(f'{n:g}' for n in counts)}",
            valid_targets=list(counts),
        ),
        *_weighed(facts),
        location=backward_place(facts),
        remedy="divide the summed loss by the valid targets of the whole window, which is never zero",
        proven=bool(rows) or _weights_leave_nothing(facts),
    )


def _weights_leave_nothing(facts: Facts) -> bool:
    """Whether other weights give the full batch's gradient: what a run with them left, or the fit of an update."""
    fit, run = facts.weights.fit, facts.weights.remedy
    if facts.loop is not None:
        return fit is not None and fit.residual <= facts.loop.tolerance
    return run is not None and run.rounding


def _weighed(facts: Facts) -> Iterator[Evidence]:
    fit, run = facts.weights.fit, facts.weights.remedy
    if fit is not None and _weights_leave_nothing(facts):
        left = run.left if run is not None else fit.residual
        text = f"with weights {weights_text(fit.weights, each=False)} the difference is {left:.0e}: proven"
        yield controlled("micro-batch-weights", text, weights=list(fit.weights), left=left)


def _without_backward(facts: Facts) -> Iterator[Finding]:
    """The same where a training loop leaves out the backward pass of a micro-batch, and the full batch's does not."""
    loop, number = facts.loop, facts.compared.update
    update = loop.update_of(number) if loop is not None and number is not None else None
    if loop is None or update is None or update.fit is None or update.fit.residual <= loop.tolerance:
        return
    windows = [next((w for w in each if w.number == number), None) for each in (loop.full_windows, loop.windows)]
    whole, window = windows
    if whole is None or window is None or whole.dropped or not 0 < len(window.dropped) < len(update.sizes):
        return
    forwards = window.of("forward")
    which = f"{listed([str(at + 1) for at in window.dropped], 6)} of update {number}"
    which = f"micro-batches {which} have" if len(window.dropped) > 1 else f"micro-batch {which} has"
    yield finding_of(
        f"{which} no backward pass: {len(window.dropped)} of {len(forwards)} do not reach the gradient",
        measured("events", difference(update), update=number, dropped=list(window.dropped)),
        location=located(forwards[at] for at in window.dropped),
        remedy="differentiate every micro-batch of the window, or leave the same samples out of the full batch",
        proven=False,
    )


def empty_micro_batches(facts: Facts) -> list[int]:
    """Returns the positions of micro-batches whose loss counted no target, where others counted some."""
    counts = facts.weights.valid_targets
    return [k for k, found in enumerate(counts) if not found > 0] if any(found > 0 for found in counts) else []


def explains_weights(facts: Facts) -> bool:
    """Whether empty micro-batches are all that is wrong with the weights: the others have equal ones."""
    empty, fit, loop = empty_micro_batches(facts), facts.weights.fit, facts.loop
    if not empty or fit is None:
        return False
    if loop is None:
        return is_constant([c for k, c in enumerate(fit.weights) if k not in empty], fit.residual)
    counts = facts.weights.valid_targets
    if len(fit.multipliers) != len(counts) or fit.residual > loop.tolerance:
        return False
    filled = tuple(factor for at, factor in enumerate(fit.multipliers) if at not in empty)
    return constant((*filled, len(counts) / len(filled)), loop.tolerance)


_EQUALLY = "micro-batches of unequal weight are averaged equally"
_WRONGLY = "micro-batches of unequal weight are averaged wrongly"
_SHARE = "weight each micro-batch by its share of what the full batch's mean counts"
_SAMPLES = "; they are the shares of samples n_k/N"
_TARGETS = "; they are the shares of valid targets"
_COUNTED = "; they are the shares of what each micro-batch's loss is divided by"


@rule("GAV202")
def mean_of_means(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where other micro-batch weights give the full-batch gradient exactly."""
    if explains_weights(facts):
        return
    if facts.loop is not None:
        yield from _in_loop(facts, facts.loop)
        return
    fit, run = facts.weights.fit, facts.weights.remedy
    if facts.weights.counts and run is not None and factor_of(facts)[0] is None:
        yield _counted(facts, facts.weights.counts, run)
        return
    if fit is None or not facts.weights.blamed or factor_of(facts)[0] is not None:
        return
    meaning, remedy = _meaning(facts, fit.weights)
    if run is not None and run.rounding and meaning:
        remedy = f"{remedy}: {tested(run, behind(facts.forward.causes))}"
    elif run is not None and not run.rounding and not facts.cleared:
        remedy = NOT_ENOUGH
    left = f"a fit leaves {fit.residual:.0e} of the gradient over"
    if run is not None:
        left = f"the difference is {run.left:.0e}{': proven' if run.rounding else ''}"
    summary = _WRONGLY
    if facts.weights.given_wrong:
        summary = "the weights that were given are not the micro-batches' shares of the samples"
    elif facts.weights.weighting == "uniform":
        summary = _EQUALLY
    yield finding_of(
        summary,
        measured(
            "micro-batch-weights",
            f"{facts.compared.largest} with weights {weights_text(facts.weights.used, each=False)}"
            + counted_at(facts.weights),
            used=list(facts.weights.used),
        ),
        controlled(
            "micro-batch-weights",
            f"with weights {weights_text(fit.weights, each=False)} {left}{meaning}{_unsure(fit)}",
            weights=list(fit.weights),
            residual=fit.residual,
            determined=fit.determined,
        ),
        *not_run(facts) if run is None else (),
        location=facts.weights.place.location if facts.weights.place is not None else None,
        remedy=in_order(facts, len(facts.forward.causes), remedy),
        proven=run is not None and run.rounding,
    )


def _counted(facts: Facts, counts: tuple[Count, ...], run: ControlRun) -> Finding:
    """The finding where the window's counts in every micro-batch give the full batch's gradient."""
    own = "; ".join(
        f"{count.operation} {'multiplies' if count.times else 'divides'} by {weights_text(count.own, each=False)}, "
        f"in the full batch by {count.window:.4g}"
        for count in counts
    )
    line = f": `{counts[0].operation.source}`" if counts[0].operation.source else ""
    fit, weights = facts.weights.fit, {}
    text = f"with {run.what} the difference is {run.left:.0e}: proven"
    if fit is not None and fit.determined and fit.residual < FIT_FLOAT32:
        weights = {"weights": list(fit.weights), "residual": fit.residual}
        text += f"; on this batch they are weights {weights_text(fit.weights, each=False)}"
    return finding_of(
        _EQUALLY if facts.weights.weighting == "uniform" else _WRONGLY,
        measured(
            "micro-batch-weights",
            f"{facts.compared.largest}; {own}{line}",
            used=list(facts.weights.used),
            counts=[list(count.own) for count in counts],
        ),
        controlled("micro-batch-weights", text, left=run.left, counts=[count.window for count in counts], **weights),
        location=counts[0].operation.location,
        remedy=in_order(facts, len(facts.forward.causes), counts_remedy(facts, counts, run)),
        proven=run.rounding,
    )


def counts_remedy(facts: Facts, counts: tuple[Count, ...], run: ControlRun) -> str:
    """The rule behind weights that differ from window to window."""
    places = " and ".join(str(count.operation) for count in counts)
    instead = "in place of its own" + (" and of 1/K" if any(count.counts for count in counts) else "")
    if counts[0].added_up:
        instead = "and add the losses up, without 1/K"
    return f"take the number of {places} once over the window, for every micro-batch, {instead}: " + tested(
        run, behind(facts.forward.causes)
    )


def _unsure(fit: WeightFit) -> str:
    return "" if fit.determined else " (other weights fit as well: these micro-batches cannot tell them apart)"


def _meaning(facts: Facts, fitted: tuple[float, ...]) -> tuple[str, str]:
    """What the fitted weights are, and how to ask for them; numbers that stand for nothing known are no repair."""
    sizes = tuple(map(float, facts.weights.sizes))
    if are_shares(fitted, sizes):
        return (
            f"; they are the shares of samples n_k/N: {share_texts(sizes)}",
            "weight each micro-batch by n_k/N (--weighting samples)",
        )
    if are_shares(fitted, facts.weights.valid_targets):
        return (
            f"; they are the shares of valid targets: {share_texts(facts.weights.valid_targets)}",
            "weight each micro-batch by its share of the window's valid targets (--weighting tokens)",
        )
    return "", _SHARE


def _in_loop(facts: Facts, loop: Record) -> Iterator[Finding]:
    """The same for the first differing update of a training loop."""
    found, term, update = weights_of(loop), weighted_term(loop), loop.divergent
    if update is None or factor_in_loop(loop, update) is not None:
        return
    if found is not None:
        (update, fit), where = found, ""
    elif term is not None:
        fit, where = term.fit, f", in term {term.number} of {term.count} of the loss"
    else:
        return
    multipliers = _seen(fit, update)
    total = sum(multipliers)
    weights = tuple(multiplier / total for multiplier in multipliers) if total else multipliers
    weights = tuple(0.0 if abs(weight) < loop.tolerance else weight for weight in weights)
    summary, meaning, remedy = _in_update(update, weights, loop.tolerance)
    altogether = _altogether(multipliers, loop.tolerance) if meaning in (_SAMPLES, _TARGETS, _COUNTED) else ""
    yield finding_of(
        f"{summary} in update {update.number}{where}",
        measured("micro-batch-weights", difference(update), update=update.number),
        Evidence(
            "micro-batch-weights",
            "weights",
            f"{weights_text(weights)} give the full-batch gradient to {fit.residual:.0e}{meaning}"
            f"{altogether}{_unsure(fit)}",
            {
                "weights": list(weights),
                "multipliers": list(fit.multipliers),
                "residual": fit.residual,
                "determined": fit.determined,
            },
        ),
        location=backward_place(facts, update.number),
        remedy=remedy + (_multiply(loop, fit) if all(weights) else ""),
        proven=True,
    )


def _in_update(update: UpdateComparison, weights: tuple[float, ...], tolerance: float) -> tuple[str, str, str]:
    """What is wrong, what the fitted weights are, and what to do to get them."""
    if shares(weights, update.sizes, tolerance):
        return _EQUALLY, _SAMPLES, "weight each micro-batch by n_k/N"
    if shares(weights, update.valid_targets, tolerance):
        return _EQUALLY, _TARGETS, "sum the losses and divide by the valid targets of the whole window"
    if shares(weights, update.counted, tolerance):
        return _EQUALLY, _COUNTED, "sum the losses and divide by what the whole window counts"
    if not any(weights[:-1]):
        return (
            "each backward pass repeats the micro-batches before it",
            "; the last one alone holds the whole window",
            "call `backward()` on each micro-batch's own loss, not on the running sum",
        )
    if len(set(update.sizes)) == 1 and len(set(update.valid_targets)) == 1 and all(weights):
        usual = [f"{min(weights) / weight:.3g}" for weight in weights[:12]]
        return (
            "micro-batches of equal size are weighted unequally",
            f"; the script counts them {', '.join(usual)} to one another",
            "give each micro-batch the same weight, 1/K",
        )
    unseen = "" if update.valid_targets else "; no loss was seen whose targets could be counted"
    return _EQUALLY, unseen, _SHARE


def _seen(fit: WeightFit, update: UpdateComparison) -> tuple[float, ...]:
    """What the losses should be multiplied by; 0 for one without a valid target, to which any number would fit."""
    counts = update.valid_targets
    if fit.determined or len(counts) != len(fit.multipliers) or not any(counts):
        return fit.multipliers
    return tuple(multiplier if count else 0.0 for multiplier, count in zip(fit.multipliers, counts, strict=True))


def _altogether(multipliers: tuple[float, ...], tolerance: float) -> str:
    """How many times too much the micro-batches count together, where right weights add up to 1; empty where right."""
    steps = len(multipliers)
    factor = steps / sum(multipliers)
    if abs(factor - 1) < tolerance:
        return ""
    if abs(factor / steps - 1) < tolerance:
        return f"; beside that nothing divides by K = {steps}: together they count {steps} times"
    return f"; beside that they count {factor:.6g} times together"


def _multiply(loop: Record, fit: WeightFit) -> str:
    """The factors for the losses as the script has them now: the fit is of the gradient before any clipping."""
    tolerance = min(loop.tolerance, max(FIT_MAGNIFIES * fit.residual, FIT_EXACT))
    return f": here, multiply the losses by {exact(fit.multipliers, tolerance)}"
