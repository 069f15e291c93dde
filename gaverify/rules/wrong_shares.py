"""Micro-batches that count otherwise than in the full batch: GAV202 and GAV203."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import combinations
from typing import Any

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.experiment import (
    ControlRun,
    Count,
    LossTerm,
    TermKind,
    WeightFit,
    are_ones,
    is_constant,
)
from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence, Finding
from gaverify.records.windows import AccumulationWindow
from gaverify.rules.lost_passes import explains_skipped, find_skipped, missed_boundaries
from gaverify.rules.rule import (
    backward_place,
    control_evidence,
    difference,
    exact,
    finding_of,
    join_texts,
    largest,
    measured_evidence,
    number_remedy,
    rule,
    share_texts,
    weights_text,
    word_control,
    word_other_fixes,
    word_trial,
)
from gaverify.rules.scale import (
    WeightsTrial,
    are_near_shares,
    constant,
    factor_in_loop,
    factor_in_run,
    read_trial,
    repair_shares,
    share_tolerances,
    weighted_term,
    weights_of,
    word_count_place,
)
from gaverify.rules.steps import is_meant
from gaverify.thresholds import COMPUTED_FLOAT32, FIT_EXACT, FIT_MAGNIFIES

# Which weights a training loop gives its micro-batches, read from those that a fit shows to be right.
#
# For micro-batch k of K, with n_k of N samples:
#
# s_k            what the script multiplies the micro-batch's loss by: 1/K, n_k/N, ...
# c_k            what that loss should be multiplied by on top of s_k, from a fit
# w_k = s_k c_k  the right weight; the weights of a mean add up to 1


class ScriptShares(Enum):
    """What the weights of a script are shares of."""

    EQUAL = auto()
    SAMPLES = auto()
    TARGETS = auto()
    OTHER = auto()


@dataclass(frozen=True)
class ScriptWeights:
    """The weights s_k of a script, and how many times a mean they count together: 1 where they add up to one mean."""

    shares: ScriptShares
    weights: tuple[float, ...]
    total: float = 1.0

    def right_weights(self, multipliers: Sequence[float]) -> tuple[float, ...]:
        """Returns the weights w_k that a mean over the full batch has, given the multipliers c_k."""
        products = [weight * multiplier for weight, multiplier in zip(self.weights, multipliers, strict=True)]
        total = sum(products)
        return tuple(product / total for product in products)


def identify_script_weights(
    update: UpdateComparison, multipliers: Sequence[float], tolerance: float
) -> ScriptWeights | None:
    """Returns the weights of a script with which the right ones add up to a mean; None where no known ones do.

    Multipliers that make up for a divisor of each micro-batch that is no count (a moving average, which the next
    forward finds changed) add up to a mean with no such weights: a fit alone does not tell the two apart.

    Args:
        update: The update that differs.
        multipliers: c_k, one for each backward pass.
        tolerance: How far the sum may be off, relative.
    """
    steps = len(multipliers)
    for shares, amounts in (
        (ScriptShares.EQUAL, (1,) * steps),
        (ScriptShares.SAMPLES, update.window.sizes),
        (ScriptShares.TARGETS, update.window.valid_targets),
    ):
        if len(amounts) != steps or not sum(amounts) > 0:
            continue
        weights = tuple(amount / sum(amounts) for amount in amounts)
        total = sum(weight * multiplier for weight, multiplier in zip(weights, multipliers, strict=True))
        # A script that does not divide by K, or divides by it once too often, has K or 1/K times these weights.
        if any(math.isclose(total, usual_total, rel_tol=tolerance) for usual_total in (1 / steps, 1.0, float(steps))):
            return ScriptWeights(shares, weights, 1 / total)
    return next(_from_graph(update, multipliers, tolerance), None)


def _from_graph(update: UpdateComparison, multipliers: Sequence[float], tolerance: float) -> Iterator[ScriptWeights]:
    """Yields weights that the graph of the losses shows, where the right ones add up to a mean with them."""
    steps, scales = len(multipliers), update.window.scales
    depths = {len(each) for each in scales}
    if len(scales) != steps or len(depths) != 1:
        return
    # The outermost factor may be that of a gradient scaler, which the step divides out: any stretch of factors counts.
    for outer, inner in combinations(range(depths.pop()), 2):
        weights = tuple(each[inner] / each[outer] if each[outer] else math.nan for each in scales)
        products = [weight * multiplier for weight, multiplier in zip(weights, multipliers, strict=True)]
        # Where samples are what counts, the weights may be a divisor with state, such as a moving average that is 1 for
        # the full batch.
        by_samples = are_near_shares(products, update.window.sizes, tolerance)
        if math.isclose(sum(products), 1.0, rel_tol=tolerance) and not by_samples:
            yield ScriptWeights(ScriptShares.OTHER, weights, sum(weights))


# The findings: empty and skipped micro-batches (GAV203), then wrong weights (GAV202).


DIVIDE_ONCE = (
    "sum the losses of an update and divide once by its valid targets: the right factor differs from update to update, "
    "so no constant repairs it"
)
"""The repair of a factor where micro-batches are skipped."""
_DIFFERENTIATE_ALL = "run `backward()` on every micro-batch, or leave the same samples out of the full batch"

_SUMMARIES = {
    "samples": "micro-batches with different numbers of samples get the same loss weight",
    "targets": "micro-batches with different numbers of valid targets get the same loss weight",
    "class-weights": "micro-batches with different sums of class weights get the same loss weight",
    "running-sum": "each backward pass repeats the earlier micro-batches",
    "equal-sizes": "micro-batches of equal size get different weights",
    "moving": "micro-batches have other weights than in the full batch",
}
"""What is wrong with weights, by kind; the first three are said of micro-batches that are averaged equally."""
_SAME_WEIGHT = "micro-batches that count differently in the full batch's mean get the same loss weight"

_MEANINGS = {
    "samples": "; these are the micro-batches' shares of the samples, n_k/N",
    "targets": "; these are the micro-batches' shares of valid targets",
    "class-weights": "; these are the micro-batches' shares of the sums of class weights",
    "counted": "; these are the shares of the numbers that the losses are divided by",
    "running-sum": "; the last loss alone already contains all micro-batches",
    "weighted-means": "; probable cause: class weights or a mask, by which the full batch's mean weights its samples",
    "unseen": "; no loss function with countable targets was seen",
}
"""What the right weights of a loop's micro-batches are, by kind."""

_SHARE_OF_MEAN = "weight each micro-batch by its share of what the full batch's mean averages over"
_DIVIDE_BY_WINDOW = (
    "sum the losses (`reduction='sum'`) and divide by the total over all micro-batches (the count, or the sum of class "
    "weights)"
)
_LOOP_REMEDIES = {
    "samples": "weight each micro-batch by n_k/N",
    "targets": "sum the losses and divide by the valid targets of all micro-batches",
    "counted": _DIVIDE_BY_WINDOW,
    "running-sum": "call `backward()` on each micro-batch's own loss, not on the running sum",
    "weighted-means": _DIVIDE_BY_WINDOW,
    "equal-sizes": "give each micro-batch the same weight, 1/K",
}
"""Repairs of a loop whose right weights are known, by kind."""


@rule("GAV203")
def empty_micro_batch(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where a micro-batch without valid targets gives NaN or drops out of the mean."""
    empty = empty_micro_batches(facts)
    if facts.loop is not None and (facts.loop.divergent is None or facts.loop.divergent.number > 1):
        yield from _judge_other_samples(facts.loop)
    if not facts.compared.divergent:
        return
    # an empty micro-batch explains a weight of zero, so skipped ones are looked for only where there is none
    if not empty:
        yield from _judge_skipped(facts)
        return
    losses, counts = facts.window.losses, facts.window.valid_targets
    # A script's loss is also NaN where it was not seen, so that only a run's own losses tell.
    lost = [k for k in empty if facts.loop is None and k < len(losses) and not math.isfinite(losses[k])]
    rows = [row for row in facts.compared.rows if row.why is not None and row.why.not_finite]
    which = ", ".join(str(k + 1) for k in empty)
    window = f"of {facts.window.steps}" if facts.loop is None else f"of update {facts.compared.update}"
    effect = "its mean loss is 0/0" if lost else "it gets a share of the mean but adds nothing"
    measured_text = f"gradients {rows[0].reason}: `{rows[0].name}`" if rows else largest(facts)
    yield finding_of(
        f"micro-batch {which} {window} has no valid target: {effect}",
        measured_evidence(
            "micro-batch-weights",
            f"{measured_text}; valid targets per micro-batch: {', '.join(f'{count:g}' for count in counts)}",
            valid_targets=list(map(float, counts)),
        ),
        *_weighing_evidence(facts),
        remedy="sum the losses and divide by the valid targets of all micro-batches, which are never zero",
        location=backward_place(facts),
        proven=bool(rows) or (facts.weights_run is not None and facts.weights_run.rounding),
    )


def _weighing_evidence(facts: Facts) -> Iterator[Evidence]:
    fit, run = facts.window.fit, facts.weights_run
    if fit is not None and run is not None and run.rounding:
        what = f"with loss weights {weights_text(fit.weights, each=False)} the difference"
        yield word_control("micro-batch-weights", what, run.left, True, weights=list(fit.weights))


def _judge_skipped(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where a loop leaves out the backward pass of a micro-batch, and the full batch's does not."""
    loop, number = facts.loop, facts.compared.update
    update = loop.update_of(number) if loop is not None and number is not None else None
    if loop is None or update is None or update.window.fit is None:
        return
    skipped, explained = find_skipped(loop, update), explains_skipped(loop, update)
    if skipped is None or (update.window.fit.residual <= loop.tolerance and not explained):
        return
    trial = read_trial(facts, update.number) if explained else WeightsTrial()
    summary = f"{skipped.subject} no backward pass: {skipped.number} of {skipped.count} do not reach the gradient"
    measured_text, remedy = difference(update), _DIFFERENTIATE_ALL
    if explained:
        summary = (
            f"{skipped.subject} no backward pass and nothing to add, but the loss is divided by all {skipped.count} "
            "micro-batches"
        )
        measured_text += f"; {skipped.number} of {skipped.count} micro-batches skipped"
        remedy = DIVIDE_ONCE
    yield finding_of(
        summary,
        measured_evidence("events", measured_text, update=update.number, dropped=list(skipped.positions)),
        *trial.evidence(),
        remedy=remedy,
        location=skipped.location,
        proven=trial.proven,
    )


def _judge_other_samples(loop: Record) -> Iterator[Finding]:
    """Yields a finding of the first update that is not judged because skipped micro-batches leave it other samples."""
    joined = {each.window.number for each in missed_boundaries(loop)}
    for update in loop.updates:
        skipped = find_skipped(loop, update)
        # updates that were joined by a skipped step are GAV602
        if update.data.is_comparable or skipped is None or update.number in joined:
            continue
        window, steps = skipped.window, loop.calls.expected_passes(skipped.window)
        if skipped.positions or (steps is not None and is_meant(loop, [(window, steps)])):
            summary = f"{skipped.subject} no backward pass, and samples of the next update are used instead"
            values: dict[str, Any] = {"update": update.number, "dropped": list(skipped.positions)}
            if not skipped.positions:
                summary = (
                    f"update {update.number} leaves out {skipped.samples} of the full batch's {update.data.full} "
                    "samples: no update uses them"
                )
                del values["dropped"]
            skipped_text = f"{skipped.number} of {skipped.count} micro-batches skipped"
            yield finding_of(
                summary,
                measured_evidence("events", skipped_text, **values),
                remedy=_DIFFERENTIATE_ALL,
                location=skipped.location,
                proven=False,
            )
            return


def empty_micro_batches(facts: Facts) -> list[int]:
    """Returns the positions of micro-batches whose loss counted no target, where others counted some."""
    counts = facts.window.valid_targets
    return (
        [k for k, valid_count in enumerate(counts) if not valid_count > 0]
        if any(valid_count > 0 for valid_count in counts)
        else []
    )


def explains_weights(facts: Facts) -> bool:
    """Whether empty micro-batches are all that is wrong with the weights: the others have equal ones."""
    empty, fit, loop = empty_micro_batches(facts), facts.window.fit, facts.loop
    if not empty or fit is None:
        return False
    # A recipe's own weights are known. Those of a script may lack their division by K, which GAV201 has to tell.
    if loop is None:
        return is_constant([c for k, c in enumerate(fit.weights) if k not in empty], fit.residual)
    counts = facts.window.valid_targets
    if len(fit.multipliers) != len(counts) or fit.residual > loop.tolerance:
        return False
    filled = tuple(factor for at, factor in enumerate(fit.multipliers) if at not in empty)
    return constant((*filled, len(counts) / len(filled)), loop.tolerance)


@rule("GAV202")
def mean_of_means(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where other micro-batch weights give the full-batch gradient exactly."""
    if explains_weights(facts):
        return
    if facts.loop is not None:  # the script's own weights are not known, and have to be found first
        yield from _judge_loop(facts, facts.loop)
        return
    fit, run, counts = facts.window.fit, facts.window.remedy, facts.window.counts
    if counts and all(count.term is not None for count in counts):
        return  # of terms that nothing divides GAV201 tells
    if counts and run is not None and factor_in_run(facts) is None:
        yield _finding_of_counts(facts, facts.window.counts, run)
        return
    # GAV201 tells of one factor for all micro-batches.
    if fit is None or not facts.window.has_wrong_weights or factor_in_run(facts) is not None:
        return
    meaning, remedy = _word_shares(facts, fit)
    trial = read_trial(facts)
    if meaning:
        remedy += trial.tested
    summary = _describe_average(facts, fit)
    # weights that the user gave are wrong as such: nothing was averaged
    if facts.window.given_wrong:
        summary = "the given weights are not the micro-batches' shares of the samples"
    used, weights = list(facts.window.used), list(fit.weights)
    difference_left = trial.result or f"a relative difference of {fit.residual:.0e} is left"
    yield finding_of(
        summary,
        measured_evidence(
            "micro-batch-weights",
            f"{facts.compared.largest} with loss weights {weights_text(used, each=False)}"
            f"{_word_zero_weights(used)}{word_count_place(facts.window)}",
            used=used,
        ),
        control_evidence(
            "micro-batch-weights",
            f"with loss weights {weights_text(weights, each=False)} {difference_left}{meaning}{_word_doubt(fit)}",
            weights=weights,
            residual=fit.residual,
            determined=fit.determined,
        ),
        *trial.evidence() if run is None else (),
        remedy=number_remedy(facts, trial.replace_refuted(remedy)),
        location=facts.window.place.location if facts.window.place is not None else None,
        proven=trial.proven,
    )


def _word_zero_weights(used: Sequence[float]) -> str:
    zeros = [str(k + 1) for k, weight in enumerate(used) if weight == 0]
    return (
        f"; micro-batch{'es' * (len(zeros) > 1)} {join_texts(zeros)} {'have' if len(zeros) > 1 else 'has'} weight 0"
        if zeros
        else ""
    )


def _describe_average(facts: Facts, fit: WeightFit | None) -> str:
    if facts.window.weighting != "uniform":
        return "micro-batches get wrong loss weights"
    return _SUMMARIES.get(_name_amounts(facts.window, fit) if fit is not None else "", _SAME_WEIGHT)


def _finding_of_counts(facts: Facts, counts: tuple[Count, ...], run: ControlRun) -> Finding:
    """The finding where the window's counts in every micro-batch give the full batch's gradient."""
    count_texts = "; ".join(map(_describe_count, counts))
    fit, text, weights = facts.window.fit, "", dict[str, Any]()
    if fit is not None and fit.determined and fit.residual < COMPUTED_FLOAT32 and not word_other_fixes(facts):
        weights = {"weights": list(fit.weights), "residual": fit.residual}
        text = f"; on this batch they are loss weights {weights_text(fit.weights, each=False)}"
    windows, trial = [count.window for count in counts], read_trial(facts)
    line = f": `{counts[0].operation.source}`" if counts[0].operation.source else ""
    return finding_of(
        _describe_average(facts, None),
        measured_evidence(
            "micro-batch-weights",
            f"{facts.compared.largest}; {count_texts}{line}",
            used=list(facts.window.used),
            counts=[list(count.micro_batches) for count in counts],
        ),
        *trial.evidence(more=text, counts=windows, **weights),
        remedy=number_remedy(facts, counts_remedy(facts, counts, run)),
        location=counts[0].operation.location,
        proven=trial.proven,
        together=[count.operation.location for count in counts],
    )


def _describe_count(count: Count) -> str:
    if count.term is not None:
        return f"{count.operation} is {'a sum ' * (count.term is TermKind.SUM)}{count.term.value}"
    does = "multiplies" if count.times else "divides"
    numbers = weights_text(count.micro_batches, each=False)
    return f"{count.operation} {does} by {numbers}, in the full batch by {count.window:.4g}"


def counts_remedy(facts: Facts, counts: tuple[Count, ...], run: ControlRun) -> str:
    """The rule behind weights that differ from window to window, and behind those of terms that nothing divides."""
    divided = [count for count in counts if count.term is None]
    # the full batch's number stands in place of the micro-batch's own, and of 1/K where the micro-batches' add up to it
    without = ", and do not divide this term by K" if any(count.adds_up for count in divided) else ""
    if counts[0].added_up:
        without = ", and do not divide the loss by K"
    steps = [f"in {_word_window_numbers(divided)} in every micro-batch{without}"] if divided else []
    if sums := [count for count in counts if count.term is TermKind.SUM]:
        steps.append(
            f"do not divide {places(sums)} by K, because it is a sum over samples: divide only the other terms"
        )
    if penalties := [count for count in counts if count.term is TermKind.PENALTY]:
        steps.append(f"divide {places(penalties)} by K, because each micro-batch counts it again")
    return f"{'; '.join(steps)}; {word_trial(run, word_other_fixes(facts))}"


def _word_window_numbers(counts: Sequence[Count]) -> str:
    """Says of each operation by which number of the full batch it has to divide or multiply."""
    parts = [
        f"{count.operation} {'multiply' if count.times else 'divide'} by the full batch's number ({count.window:.4g})"
        for count in counts
    ]
    return " and in ".join(parts)


def places(counts: Sequence[Count]) -> str:
    """Names the operations that count."""
    return " and ".join(str(count.operation) for count in counts)


def _word_doubt(fit: WeightFit) -> str:
    return "" if fit.determined else " (other weights fit as well: these micro-batches cannot tell them apart)"


_SHARES = {
    "samples": ("n_k/N, its share of the samples", "samples"),
    "targets": ("n_k/N, its share of all valid targets", "tokens"),
    "class-weights": ("its share of the class weights of all targets", "tokens"),
}
"""The right weights of a recipe, by the amounts that they are shares of, and how to ask for them."""


def _name_amounts(window: AccumulationWindow, fit: WeightFit) -> str:
    named = window.name_shares(fit.weights)
    return "class-weights" if named == "targets" and window.has_class_weights else named


def _word_shares(facts: Facts, fit: WeightFit) -> tuple[str, str]:
    """What the fitted weights are, and how to ask for them; numbers that stand for nothing known are no repair."""
    window = facts.window
    if named := _name_amounts(window, fit):
        amounts = window.sizes if named == "samples" else window.valid_targets
        share, option = _SHARES[named]
        remedy = f"in your loop, weight each micro-batch's loss by {share}"
        remedy += f" (gaverify: --weighting {option})"
        return f"{_MEANINGS[named]}: {share_texts(amounts)}", remedy
    if are_ones(fit.weights, fit.residual):
        return (
            "; each loss is a sum over its samples, divided by the same number in every micro-batch",
            "in your loop, add the losses up as they are, without 1/K or n_k/N (gaverify: --weighting none)",
        )
    return "", _SHARE_OF_MEAN


@dataclass(frozen=True)
class WrongShares:
    """Micro-batches of an update that need other weights: those of the whole loss, or of one term of it.

    `multipliers` is what each loss, or the term in it, should be multiplied by; `weights` are the right weights where
    the script's are known, and the multipliers where they are not. `shares_of` names what the weights are shares of.
    """

    update: UpdateComparison
    fit: WeightFit
    term: LossTerm | None
    multipliers: tuple[float, ...]
    script: ScriptWeights | None
    weights: tuple[float, ...]
    shares_of: str

    def total(self, tolerance: float) -> float:
        """How many times a mean the script's weights count together; 1 where they add up to one, or are not known."""
        is_known = self.script is not None and bool(self.shares_of) and abs(self.script.total - 1) >= tolerance
        return self.script.total if self.script is not None and is_known else 1.0

    @property
    def share_error(self) -> float:
        """Σ |s_k - w_k|: how far the script's shares of one mean are from the right ones."""
        return sum(abs(a - b) for a, b in zip(self.script.weights, self.weights, strict=True)) if self.script else 0.0


def find_wrong_shares(facts: Facts, loop: Record) -> WrongShares | None:
    """Returns what other weights of the micro-batches explain of the first update of a training loop that differs."""
    loop_weights, term, update = weights_of(loop), weighted_term(loop), loop.divergent
    if update is None or factor_in_loop(loop, update) is not None or explains_weights(facts):
        return None
    # Weights of the whole loss say more than those of one of its terms.
    if loop_weights is not None:
        (update, fit), term = loop_weights, None
    elif term is not None:
        fit = term.fit
    else:
        return None
    multipliers = _needed_multipliers(fit, update)
    script = identify_script_weights(update, multipliers, loop.tolerance)
    if script is None:
        return WrongShares(update, fit, term, multipliers, None, multipliers, "")
    weights = script.right_weights(multipliers)
    # A fit leaves rounding where a micro-batch has no right to any weight.
    weights = tuple(0.0 if abs(weight) < loop.tolerance else weight for weight in weights)
    named = _name_shares(update, weights, script, loop.tolerance)
    return WrongShares(update, fit, term, multipliers, script, weights, named)


def _judge_loop(facts: Facts, loop: Record) -> Iterator[Finding]:
    """Yields a finding of the first update of a loop that differs."""
    shares = find_wrong_shares(facts, loop)
    if shares is None or (shares.term is None and explains_skipped(loop, shares.update)):
        return
    update, fit, script, weights = shares.update, shares.fit, shares.script, shares.weights
    kind = shares.shares_of or _classify_weights(shares, loop.tolerance)
    adds_up = script is not None or kind == "running-sum"
    trial = WeightsTrial(proven=adds_up)  # each term ran alone
    if shares.term is None:
        trial = read_trial(facts, update.number, means=adds_up)
        # Weights without a meaning that fit, and do not repair: two gradients per micro-batch, say, fit anything.
        if trial.run is not None and not trial.run.rounding and not shares.shares_of:
            return
    remedy, doubt = _LOOP_REMEDIES.get(kind, _SHARE_OF_MEAN), _word_doubt(fit)
    if not adds_up:
        remedy = (
            "look for what this loss is divided by: a norm over samples must cover all micro-batches, and a moving "
            "average must be updated once per optimizer step"
        )
        doubt += (
            "; they are not the weights of a mean, so a divisor that depends on the micro-batch or a moving average "
            "fits as well: suspected, not proven"
        )
    # nothing is said of a script that weights by nothing, or by 1/K
    unequal = "" if script is None or _is_equal(script) else _word_script_weights(script)
    remedy += f", in place of {unequal}" if unequal else ""
    multiply = ""
    if all(weights) and trial.proven:
        multiply = _word_multipliers(loop, shares) + trial.tested
    if adds_up and (repair := repair_shares(loop, update, kind)):
        remedy, multiply = repair, f" (with the right weights{trial.tested})" if trial.tested else ""
    summary = _SUMMARIES.get(kind, _SAME_WEIGHT)
    if not _is_equal(script) and (kind in ("samples", "targets") or kind not in _SUMMARIES):
        summary = "micro-batches get loss weights that are not their shares of the full batch's mean"
    where = f", in term {shares.term.number} of {shares.term.count} of the loss" if shares.term is not None else ""
    meaning = _MEANINGS.get(kind, "")
    if kind == "equal-sizes":
        ratios = " : ".join(f"{min(weights) / weight:.3g}" for weight in weights[:12])
        meaning = f"; the script weights them {ratios}"
    right = f"loss weights {weights_text(weights)}" if adds_up else f"losses multiplied by {weights_text(weights)}"
    yield finding_of(
        f"{summary} in update {update.number}{where}",
        measured_evidence("micro-batch-weights", difference(update), update=update.number),
        Evidence(
            "micro-batch-weights",
            "weights",
            f"{right} reproduce the full-batch gradient to "
            f"{fit.residual:.0e}{meaning}{f'; the script weights them by {unequal}' if unequal else ''}{doubt}",
            {
                "weights": list(weights),
                "multipliers": list(fit.multipliers),
                "residual": fit.residual,
                "determined": fit.determined,
            },
        ),
        *trial.evidence(),
        remedy=trial.replace_refuted(remedy) + multiply,
        location=backward_place(facts, update.number),
        proven=trial.proven,
    )


def _is_equal(script: ScriptWeights | None) -> bool:
    return script is None or script.shares is ScriptShares.EQUAL


def _name_shares(update: UpdateComparison, weights: tuple[float, ...], script: ScriptWeights, tolerance: float) -> str:
    """Returns the name of the amounts that right weights are the shares of; empty where they are of none seen."""
    counted = update.window.divisors
    if len(counted) == len(script.weights):
        # What flows into a row is the script's weight over the count, so that the weight is multiplied back.
        counted = tuple(abs(count * weight) for count, weight in zip(counted, script.weights, strict=True))
    return update.window.name_shares(weights, *share_tolerances(len(weights), tolerance), counted)


def _word_script_weights(script: ScriptWeights) -> str:
    named = {
        ScriptShares.SAMPLES: "their shares of samples n_k/N",
        ScriptShares.TARGETS: "their shares of valid targets",
    }
    return named.get(script.shares) or weights_text(script.weights, each=False)


def _classify_weights(shares: WrongShares, tolerance: float) -> str:
    """What is wrong with weights that are no shares of anything seen."""
    window, weights, script = shares.update.window, shares.weights, shares.script
    if all(abs(weight) < tolerance for weight in weights[:-1]):
        return "running-sum"
    if len(set(window.sizes)) == 1 and len(set(window.valid_targets)) == 1 and all(weights) and _is_equal(script):
        used = shares.fit.used
        # as the script counts them equally, it is the loss that divides by an amount of each micro-batch
        counted_equally = bool(used) and all(abs(each - used[0]) < tolerance * abs(used[0]) for each in used)
        return "weighted-means" if counted_equally and script is not None else "equal-sizes"
    if script is None:
        return "moving"
    return "uncounted" if window.valid_targets else "unseen"


def _needed_multipliers(fit: WeightFit, update: UpdateComparison) -> tuple[float, ...]:
    """What the losses should be multiplied by; 0 for one without a valid target, to which any number would fit."""
    counts = update.window.valid_targets
    if fit.determined or len(counts) != len(fit.multipliers) or not any(counts):
        return fit.multipliers
    return tuple(multiplier if count else 0.0 for multiplier, count in zip(fit.multipliers, counts, strict=True))


def _word_multipliers(loop: Record, shares: WrongShares) -> str:
    """The factors for the losses as the script has them now: the fit is of the gradient before any clipping."""
    tolerance = min(loop.tolerance, max(FIT_MAGNIFIES * shares.fit.residual, FIT_EXACT))
    what = "the losses" if shares.term is None else f"term {shares.term.number}"  # the other terms may be right
    return (
        f"; in update {shares.update.number} that means: multiply {what} by {exact(shares.fit.multipliers, tolerance)}"
    )
