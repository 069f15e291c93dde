"""The weights of micro-batches: which would be right, what is wrong with those in use, and what repairs it.

A fit tells with which weights the micro-batches' gradients add up to the full batch's. The first row of `SHARES` that
the fitted weights match says what they are, and so what is wrong: with their sum (GAV201, and GAV605 in a short
window), with micro-batches that add nothing (GAV203), or with their ratios (GAV202).

For micro-batch k of K, with n_k of N samples:

s_k            the weight in use: 1/K, n_k/N, ...
c_k            what that micro-batch's loss should be multiplied by on top of s_k, from a fit
w_k = s_k c_k  the right weight; the weights of a mean add up to 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Any

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.comparison import Comparison
from gaverify.records.events import Backward, Framework, FrameworkLoop
from gaverify.records.experiment import (
    ControlRun,
    Count,
    LossTerm,
    TermKind,
    WeightFit,
    are_ones,
    are_shares,
    is_constant,
)
from gaverify.records.findings import Evidence, Finding, Location
from gaverify.records.numbers import count_text
from gaverify.records.outcomes import Outcome
from gaverify.records.windows import AccumulationWindow, Window
from gaverify.rules.lost_passes import Skipped, explains_skipped, find_skipped, missed_boundaries
from gaverify.rules.rule import (
    backward_place,
    control_evidence,
    count_calls,
    finding_of,
    join_texts,
    line_of,
    measured_evidence,
    number_remedy,
    quote_names,
    rule,
    weights_text,
    word_control,
    word_difference,
    word_largest,
    word_other_fixes,
    word_passes,
    word_share_of_each,
    word_trial,
    write_exactly,
)
from gaverify.rules.scale import (
    NOT_ENOUGH,
    WeightsTrial,
    are_near_shares,
    constant,
    constant_factor,
    factor_in_loop,
    factor_in_run,
    factor_of_some,
    find_steps,
    read_trial,
    share_tolerances,
    weighted_term,
    weights_of,
    word_count_place,
)
from gaverify.rules.steps import early_windows, is_meant
from gaverify.thresholds import (
    COMPUTED_FLOAT32,
    FIT_EXACT,
    FIT_MAGNIFIES,
    NO_WEIGHT,
    SAME_NUMBER,
    THREE_DIGITS,
)

# The weights that are judged.


@dataclass(frozen=True)
class FittedWeights:
    """The weights of one window's micro-batches, or of a term of its loss: those in use and those that fit."""

    comparison: Comparison
    """The facts of the run or audit."""
    update: UpdateComparison | None
    """The update of a training loop; None in a run, or where all steps were undone."""
    residual: float
    """The share of the full batch's gradient that they leave unexplained."""
    fit: WeightFit = field(default_factory=lambda: WeightFit((), math.inf))
    """The fit of `right`."""
    total: float = 1.0
    """How many times a mean the weights in use count together: 1 where they add up to one, or are not known."""
    right: tuple[float, ...] = ()
    """w_k, or c_k where no s_k is known; empty where only `total` is wrong."""
    in_use: tuple[float, ...] = ()
    """s_k, as shares of one mean; empty where they are not known."""
    basis: str = ""
    """The measure that those in use are shares of: "equal", "samples", "targets" or other numbers; empty: not known."""
    term: LossTerm | None = None
    """The term of the loss; None for the whole loss."""
    micro_batches: int = 0
    """Their number; 0 where not known."""

    @property
    def window(self) -> AccumulationWindow:
        """The micro-batches."""
        return self.comparison.window if self.update is None else self.update.window

    @property
    def tolerance(self) -> float:
        """Below this two numbers are the same."""
        return self.comparison.tolerance

    @property
    def precision(self) -> float:
        """How far numbers for a repair may be off, relative."""
        if not self.window.has_recipe:
            return self.tolerance
        # Counts were read as they are; the weights of a fit are less exact than what it leaves over.
        return FIT_EXACT if self.window.counts else max(FIT_EXACT, FIT_MAGNIFIES * self.residual)

    @property
    def trial(self) -> WeightsTrial:
        """The run with the right weights; each term ran alone, and so did steps that were undone."""
        is_alone = self.term is not None or (self.update is None and not self.window.has_recipe)
        if is_alone:
            return WeightsTrial(proven=self.adds_up)
        number = self.update.number if self.update is not None else None
        return read_trial(self.comparison, number, means=self.adds_up)

    @property
    def adds_up(self) -> bool:
        """Whether the right weights are those of a mean, and no numbers that happen to fit."""
        return not self.right or bool(self.basis) or self.is_last_alone

    @property
    def is_last_alone(self) -> bool:
        """Whether the last micro-batch alone has a weight."""
        return all(abs(weight) < self.tolerance for weight in self.right[:-1])

    @property
    def are_equal(self) -> bool:
        """Whether the micro-batches in use count the same, as far as is known."""
        return self.basis in ("equal", "")

    @property
    def share_error(self) -> float:
        """Σ |s_k - w_k|: how far the weights in use are from the right shares."""
        return sum(abs(a - b) for a, b in zip(self.in_use, self.right, strict=True)) if self.in_use else 0.0

    @property
    def divisors(self) -> tuple[float, ...]:
        """The numbers that the losses are divided by."""
        divisors = self.window.divisors
        if len(divisors) != len(self.in_use):
            return divisors
        # The gradient of a row is the script's weight over the count, so that the weight is multiplied back.
        return tuple(abs(count * weight) for count, weight in zip(divisors, self.in_use, strict=True))

    @property
    def has_equal_micro_batches(self) -> bool:
        """Whether all micro-batches hold as many samples and targets, and are weighted alike as far as is known."""
        window = self.window
        alike = len(set(window.sizes)) == 1 and len(set(window.valid_targets)) == 1
        return alike and all(self.right) and self.are_equal

    @property
    def reach_step_equally(self) -> bool:
        """Whether the gradients of all micro-batches reach the step with one weight."""
        used = self.window.used if self.window.has_recipe else self.fit.used
        is_one = bool(used) and all(abs(each - used[0]) < self.tolerance * abs(used[0]) for each in used)
        return is_one and bool(self.basis)

    @property
    def skipped(self) -> Skipped | None:
        """The micro-batches that get no backward pass."""
        return find_skipped(self.comparison.record, self.update) if self.update is not None else None

    @property
    def is_short(self) -> bool:
        """Whether the window has fewer micro-batches than K, as the last of an epoch may."""
        is_of_loss = self.update is not None and self.term is None and not self.right
        return is_of_loss and 0 < self.micro_batches < self.full_count

    @property
    def full_count(self) -> int:
        """K as the user gave it, or as most windows have it."""
        calls = self.comparison.calls
        return calls.steps or calls.usual(calls.window_of(self.update.number if self.update is not None else None))

    @property
    def framework(self) -> FrameworkLoop | None:
        """The framework whose loop ran the window; None where it is the script's own."""
        window = self.comparison.calls.window_of(self.update.number if self.update is not None else None)
        # the last backward pass is the one that steps: a script may run passes of its own before
        backwards = window.of(Backward) if window is not None else ()
        return backwards[-1].framework if backwards else None

    @property
    def is_divided_twice(self) -> bool:
        """Whether each loss shows two divisions by the framework's K in its graph: one is the script's."""
        steps, scales = self.framework.steps if self.framework is not None else 0, self.window.scales
        divisions = [
            sum(math.isclose(inner * steps, outer, rel_tol=self.tolerance) for outer, inner in pairwise(of_pass))
            for of_pass in scales
        ]
        # without a graph that shows the divisions, the framework's own one is what is known
        return bool(divisions) and min(divisions) > 1

    @property
    def framework_factor(self) -> float:
        """1/K of a framework that divides by K; 0 where it does not, or where its loss function may as well."""
        framework = self.framework
        if framework is None or not framework.divides:
            return 0.0
        # Where the Trainer has no number of targets to hand on, it divides whatever the loss accepts.
        is_plain = framework.framework is Framework.TRANSFORMERS and not framework.counts_items
        return 0.0 if is_plain and not self.is_divided_twice else 1 / framework.steps

    @property
    def ranks(self) -> int:
        """R, the ranks over which the gradient may be summed or averaged wrongly."""
        ranks = self.comparison.ranks
        # a model or loss that communicates by itself may count the ranks in its own way
        return 1 if ranks is None or (self.window.has_recipe and ranks.traffic.own.count()) else ranks.ranks

    @property
    def steps(self) -> float:
        """K of one rank."""
        # A run's micro-batches are those of all ranks, a script's those of one rank.
        return self.micro_batches / (self.ranks if self.window.has_recipe else 1)

    @property
    def may_be_ranks(self) -> bool:
        """Whether a factor of K is one of the ranks as well, by chance."""
        return not self.window.has_recipe and self.ranks == self.micro_batches > 1

    @property
    def samples(self) -> int:
        """B; 0 in a training loop, where it is not known by how many samples a loss is divided."""
        return self.comparison.batch_size if self.window.has_recipe else 0

    @property
    def steps_per_sample(self) -> float:
        """K/B; 0 in a training loop."""
        return self.steps * _invert(self.samples)

    @property
    def are_of_skipped(self) -> bool:
        """Whether the micro-batches that get no backward pass are all that is wrong with the weights."""
        return self.update is not None and explains_skipped(self.comparison.record, self.update)

    def are_shares_of(self, amounts: Sequence[float]) -> bool:
        """Whether the right weights are the shares of some amounts."""
        recipe_tolerances = (COMPUTED_FLOAT32, NO_WEIGHT)
        steps = len(self.right)
        return are_shares(
            self.right,
            amounts,
            *(recipe_tolerances if self.window.has_recipe else share_tolerances(steps, self.tolerance)),
        )


# The table. Its sentences stand in findings; `{steps}` and the like are numbers of the window.


@dataclass(frozen=True)
class ShareKind:
    """A row of the table: weights that may fit, and what that means. One of `amounts`, `total`, `applies` is given."""

    name: str
    """The meaning of the right weights, or the sum of those in use, in one word or two."""
    code: str
    """The rule that tells of it."""
    amounts: Callable[[FittedWeights], Sequence[float]] | None = None
    """Counts something in each micro-batch, if the right weights are the shares of that."""
    total: Callable[[FittedWeights], float] | None = None
    """The sum of the weights in use, if it alone is wrong; 0: this row does not match."""
    applies: Callable[[FittedWeights], bool] | None = None
    """Another question that tells whether the weights are these."""
    wrong: str = ""
    """The fault in words; behind the factor where the sum alone is wrong."""
    wrong_if_equal: str = ""
    """The same where all micro-batches in use count equally; empty where there is no other sentence."""
    meaning: str = ""
    """The meaning of the right weights, in words; empty where they stand for nothing known."""
    repair: str = "multiply each micro-batch's loss by {correction}"
    """The change to make in a training loop."""
    in_frameworks: Mapping[Framework, str] = field(default_factory=dict)
    """The same for loops of frameworks that need something else."""
    option: str = ""
    """The value of `--weighting` that repairs a run; empty where none does."""

    def matches(self, weights: FittedWeights) -> bool:
        """Whether the fitted weights are these."""
        if self.amounts is not None:
            return bool(weights.right) and weights.are_shares_of(self.amounts(weights))
        if self.total is not None:
            total = self.total(weights)
            return not weights.right and total > 0 and math.isclose(weights.total, total, rel_tol=weights.tolerance)
        return self.applies is not None and self.applies(weights)


def _invert(number: float) -> float:
    return 1 / number if number else 0.0


DIVIDE_ONCE = (
    "sum the losses of an update and divide once by its valid targets: the right factor differs from update to update, "
    "so no constant repairs it"
)
_DIVIDE_BY_WINDOW = (
    "sum the losses (`reduction='sum'`) and divide by the total over all micro-batches (the count, or the sum of class "
    "weights)"
)
_SHARE_OF_MEAN = "weight each micro-batch by its share of what the full batch's mean averages over"
_TWICE = " (= 1/{parts}): {what} is divided by {parts} once too often"
_NOT_SHARES = "micro-batches get loss weights that are not their shares of the full batch's mean"
_SAME_WEIGHT = "micro-batches that count differently in the full batch's mean get the same loss weight"
_ASK_TRAINER = {Framework.TRANSFORMERS: "{items}"}
_ALREADY_COUNTED = "multiply the loss by {configured} if it is already divided by the count over all micro-batches"
_FRAMEWORK_DIVIDES = {
    Framework.TRANSFORMERS: "the Trainer divides each loss by `gradient_accumulation_steps` = {configured}",
    Framework.ACCELERATE: "Accelerate divides each loss by `gradient_accumulation_steps` = {configured}",
    Framework.LIGHTNING: "Lightning's Trainer divides each loss by `accumulate_grad_batches` = {configured}",
}
_SECOND_DIVISION = {
    Framework.TRANSFORMERS: "remove the division by {configured} from `compute_loss` or the model",
    Framework.ACCELERATE: "remove the script's own division by {configured}",
    Framework.LIGHTNING: "remove the division by {configured} from `training_step`",
}

SHARES = (
    # Micro-batches that add nothing explain the weights by themselves.
    ShareKind(
        "no valid target",
        "GAV203",
        applies=lambda weights: explains_weights(weights.comparison),
        repair="sum the losses and divide by the valid targets of all micro-batches, which are never zero",
    ),
    ShareKind(
        "skipped micro-batches",
        "GAV203",
        applies=lambda weights: weights.term is None and weights.are_of_skipped,
        wrong="{subject} no backward pass and nothing to add, but the loss is divided by all {count} micro-batches",
        repair=DIVIDE_ONCE,
    ),
    # The sum of the weights is wrong, their ratios are right.
    ShareKind(
        "r/K in a short window",
        "GAV605",
        total=lambda weights: weights.steps / weights.full_count if weights.is_short else 0,
        wrong="update {update} sums {passes} but divides by K = {full_count}: its gradient is {total} of the full "
        "batch's",
        repair="divide the losses of this update by {steps}, its number of micro-batches (weights {weight} each)",
    ),
    ShareKind(
        "micro-batches that are not skipped",
        "GAV201",
        total=lambda weights: weights.skipped.window.backwards if weights.skipped is not None else 0,
        wrong=": {what} is not divided by the {used} micro-batches that are used, of {count}",
        repair=DIVIDE_ONCE,
    ),
    ShareKind(
        "K, as many as ranks",
        "GAV201",
        total=lambda weights: weights.steps if weights.may_be_ranks else 0,
        wrong=" (= K = R): {what} is not divided by K, or gradients are summed over the ranks instead of averaged",
        in_frameworks=_ASK_TRAINER,
    ),
    ShareKind(
        "K",
        "GAV201",
        total=lambda weights: weights.steps,
        wrong=" (= K): {what} is not divided by K",
        in_frameworks=_ASK_TRAINER,
    ),
    ShareKind(
        "1/K of a framework and 1/K of the script",
        "GAV201",
        total=lambda weights: weights.framework_factor if weights.is_divided_twice else 0,
        wrong=_TWICE,
        in_frameworks={each: f"{_FRAMEWORK_DIVIDES[each]} already: {_SECOND_DIVISION[each]}" for each in Framework},
    ),
    ShareKind(
        "1/K of a framework",
        "GAV201",
        total=lambda weights: weights.framework_factor,
        wrong=_TWICE,
        in_frameworks={
            Framework.TRANSFORMERS: _FRAMEWORK_DIVIDES[Framework.TRANSFORMERS]
            + ": set its `model_accepts_loss_kwargs` to True, which turns this off",
            Framework.ACCELERATE: f"{_FRAMEWORK_DIVIDES[Framework.ACCELERATE]}: {_ALREADY_COUNTED}",
            Framework.LIGHTNING: f"{_FRAMEWORK_DIVIDES[Framework.LIGHTNING]}: {_ALREADY_COUNTED}",
        },
    ),
    ShareKind(
        "1/K, as many as ranks",
        "GAV201",
        total=lambda weights: 1 / weights.steps if weights.may_be_ranks else 0,
        wrong=" (= 1/K = 1/R): {what} is divided by K once too often, or by the number of ranks",
    ),
    ShareKind("1/K", "GAV201", total=lambda weights: _invert(weights.micro_batches), wrong=_TWICE),
    # With B = K² the quotients with the batch size are K or 1/K, which come first.
    ShareKind("K/B", "GAV201", total=lambda weights: weights.steps_per_sample, wrong=" (= K/B)"),
    ShareKind("B/K", "GAV201", total=lambda weights: _invert(weights.steps_per_sample), wrong=" (= B/K)"),
    ShareKind("1/B", "GAV201", total=lambda weights: _invert(weights.samples), wrong=" (= 1/B)"),
    ShareKind("B", "GAV201", total=lambda weights: weights.samples, wrong=" (= B)"),
    ShareKind("another factor", "GAV201", applies=lambda weights: not weights.right),
    # The ratios of the weights are wrong. Samples come first: where each has as many targets, both shares are the same.
    ShareKind(
        "samples",
        "GAV202",
        amounts=lambda weights: weights.window.sizes,
        wrong=_NOT_SHARES,
        wrong_if_equal="micro-batches with different numbers of samples get the same loss weight",
        meaning="these are the micro-batches' shares of the samples, n_k/N",
        repair="weight each micro-batch by n_k/N",
        option="samples",
    ),
    ShareKind(
        "class weights",
        "GAV202",
        amounts=lambda weights: weights.window.valid_targets if weights.window.has_class_weights else (),
        wrong=_NOT_SHARES,
        wrong_if_equal="micro-batches with different sums of class weights get the same loss weight",
        meaning="these are the micro-batches' shares of the sums of class weights",
        repair="sum the losses and divide by the sum of the class weights of all targets in all micro-batches",
        option="tokens",
    ),
    ShareKind(
        "targets",
        "GAV202",
        amounts=lambda weights: weights.window.valid_targets,
        wrong=_NOT_SHARES,
        wrong_if_equal="micro-batches with different numbers of valid targets get the same loss weight",
        meaning="these are the micro-batches' shares of valid targets",
        repair="sum the losses and divide by the valid targets of all micro-batches",
        in_frameworks=_ASK_TRAINER,
        option="tokens",
    ),
    ShareKind(
        "divisors",
        "GAV202",
        amounts=lambda weights: weights.divisors,
        wrong=_NOT_SHARES,
        wrong_if_equal=_SAME_WEIGHT,
        meaning="these are the shares of the numbers that the losses are divided by",
        repair=_DIVIDE_BY_WINDOW,
        in_frameworks=_ASK_TRAINER,
    ),
    ShareKind(
        "ones",
        "GAV202",
        applies=lambda weights: are_ones(weights.right, weights.residual),
        wrong="micro-batches get loss weights although their losses are sums",
        meaning="each loss is a sum over its samples, divided by the same number in every micro-batch",
        repair="add the losses up as they are, without 1/K or n_k/N",
        option="none",
    ),
    ShareKind(
        "running sum",
        "GAV202",
        applies=lambda weights: weights.is_last_alone,
        wrong="each backward pass repeats the earlier micro-batches",
        meaning="the last loss alone already contains all micro-batches",
        repair="call `backward()` on each micro-batch's own loss, not on the running sum",
    ),
    ShareKind(
        "equal sizes, unequal means",
        "GAV202",
        applies=lambda weights: weights.has_equal_micro_batches and weights.reach_step_equally,
        wrong=_SAME_WEIGHT,
        meaning="probable cause: class weights or a mask, by which the full batch's mean weights its samples",
        repair=_DIVIDE_BY_WINDOW,
    ),
    ShareKind(
        "equal sizes, unequal weights",
        "GAV202",
        applies=lambda weights: weights.has_equal_micro_batches,
        wrong="micro-batches of equal size get different weights",
        meaning="the script weights them {ratios}",
        repair="give each micro-batch the same weight, 1/K",
    ),
    ShareKind(
        "a number that moves",
        "GAV202",
        applies=lambda weights: not weights.adds_up,
        wrong="micro-batches have other weights than in the full batch",
        repair="look for what this loss is divided by: a norm over samples must cover all micro-batches, and a moving "
        "average must be updated once per optimizer step",
    ),
    ShareKind(
        "nothing that was counted",
        "GAV202",
        applies=lambda weights: not weights.window.valid_targets,
        wrong=_NOT_SHARES,
        wrong_if_equal=_SAME_WEIGHT,
        meaning="no loss function with countable targets was seen",
        repair=_SHARE_OF_MEAN,
    ),
    ShareKind(
        "numbers without a meaning",
        "GAV202",
        applies=lambda weights: True,
        wrong=_NOT_SHARES,
        wrong_if_equal=_SAME_WEIGHT,
        repair=_SHARE_OF_MEAN,
    ),
)
"""Weights that micro-batches may need: the first row that matches is told."""


_ROWS = {share.name: share for share in SHARES}
_DIFFERENTIATE_ALL = "run `backward()` on every micro-batch, or leave the same samples out of the full batch"


def find_share(weights: FittedWeights, table: Sequence[ShareKind] = SHARES) -> ShareKind:
    """Returns the first row that the weights match."""
    return next(share for share in table if share.matches(weights))


def word(weights: FittedWeights, text: str) -> str:
    """Returns a sentence of the table with the numbers of a window in it."""
    framework, skipped, right = weights.framework, weights.skipped, weights.right
    return text.format(
        what="the loss" if weights.term is None else "it",
        parts="(K · R)" if weights.window.has_recipe and weights.ranks > 1 else "K",
        steps=weights.micro_batches,
        weight=f"{_invert(weights.micro_batches):.4g}",
        passes=word_passes(weights.micro_batches),
        full_count=weights.full_count,
        update=weights.update.number if weights.update is not None else 1,
        total=f"{weights.total:.4g}",
        correction=write_exactly([1 / weights.total], weights.precision),
        configured=framework.steps if framework is not None else 0,
        items=_word_items(framework) if framework is not None else "",
        ratios=" : ".join(f"{min(right) / weight:.3g}" for weight in right[:12] if weight),
        subject=skipped.subject if skipped is not None else "",
        used=skipped.window.backwards if skipped is not None else 0,
        count=skipped.count if skipped is not None else 0,
    )


def word_in_framework(weights: FittedWeights, share: ShareKind) -> str:
    """Returns the repair in the words of the framework that runs the loop; empty where it needs none of its own."""
    framework = weights.framework
    return "" if framework is None else word(weights, share.in_frameworks.get(framework.framework, ""))


def _word_items(framework: FrameworkLoop) -> str:
    """How a loss uses the number of targets that the Trainer counts; empty where the Trainer hands on none."""
    if framework.counts_items is None:
        return (
            "use transformers 4.46 or newer, whose Trainer passes the number of targets in all micro-batches to the "
            "loss as `num_items_in_batch`"
        )
    if not framework.counts_items:
        return ""
    remedy = (
        "sum the losses and divide by `num_items_in_batch`, which the Trainer passes to `compute_loss`, and to a model "
        "whose forward accepts it"
    )
    if not framework.divides:
        return remedy
    return (
        f"{remedy}, and set the Trainer's `model_accepts_loss_kwargs` to True, because otherwise it divides by "
        "`gradient_accumulation_steps` as well"
    )


# Which weights are to be judged: those in use of a recipe are known, those of a script are found from the fit.


def find_shares(comparison: Comparison) -> FittedWeights | None:
    """Returns the weights of micro-batches, or of a term of the loss, whose ratios are wrong; None where none are."""
    if comparison.window.has_recipe:
        fit, basis = comparison.window.fit, comparison.window.weighting
        # GAV201 tells of one factor for all micro-batches.
        if fit is None or not comparison.window.has_wrong_weights or factor_in_run(comparison) is not None:
            return None
        basis = "equal" if basis == "uniform" else basis
        return FittedWeights(
            comparison, None, fit.residual, fit, right=fit.weights, in_use=comparison.window.used, basis=basis
        )
    record, update = comparison.record, comparison.record.divergent
    if update is None or factor_in_loop(record, update) is not None:
        return None
    # Weights of the whole loss say more than those of one of its terms.
    fit = weights_of(record)
    term = weighted_term(record) if fit is None else None
    fit = term.fit if term is not None else fit
    if fit is None:
        return None
    multipliers = _needed_multipliers(fit, update)
    micro_batches = len(multipliers)
    found = FittedWeights(
        comparison, update, fit.residual, fit, right=multipliers, term=term, micro_batches=micro_batches
    )
    script = next(identify_weights(update, multipliers, record.tolerance), None)
    if script is None:
        return found
    basis, in_use, total = script
    products = [weight * multiplier for weight, multiplier in zip(in_use, multipliers, strict=True)]
    right = [product / sum(products) for product in products]
    # A fit leaves rounding where a micro-batch has no right to any weight.
    right = [0.0 if abs(weight) < record.tolerance else weight for weight in right]
    found = replace(found, right=tuple(right), in_use=in_use, basis=basis)
    is_named = abs(total - 1) >= record.tolerance and find_share(found).amounts is not None
    return replace(found, total=total) if is_named else found


def identify_weights(
    update: UpdateComparison, multipliers: Sequence[float], tolerance: float
) -> Iterator[tuple[str, tuple[float, ...], float]]:
    """Yields weights of a script with which the right ones add up to a mean: their basis, the weights and their sum.

    Multipliers that make up for a divisor of each micro-batch that is no count (a moving average, which the next
    forward finds changed) add up to a mean with no such weights: a fit alone does not tell the two apart.

    Args:
        update: The update that differs.
        multipliers: c_k, one for each backward pass.
        tolerance: How far the sum may be off, relative.
    """
    steps, window = len(multipliers), update.window
    for basis, amounts in (("equal", (1,) * steps), ("samples", window.sizes), ("targets", window.valid_targets)):
        if len(amounts) != steps or not sum(amounts) > 0:
            continue
        weights = tuple(amount / sum(amounts) for amount in amounts)
        total = sum(weight * multiplier for weight, multiplier in zip(weights, multipliers, strict=True))
        # A script that does not divide by K, or divides by it once too often, has K or 1/K times these weights.
        if any(math.isclose(total, usual_total, rel_tol=tolerance) for usual_total in (1 / steps, 1.0, float(steps))):
            yield basis, weights, 1 / total
    scales = window.scales
    depths = {len(each) for each in scales}
    # The outermost factor may be that of a gradient scaler, which the step divides out: any stretch of factors counts.
    stretches = combinations(range(min(depths)), 2) if len(scales) == steps and len(depths) == 1 else ()
    for outer, inner in stretches:
        weights = tuple(each[inner] / each[outer] if each[outer] else math.nan for each in scales)
        products = [weight * multiplier for weight, multiplier in zip(weights, multipliers, strict=True)]
        # Where samples are what counts, the weights may be a divisor with state, such as a moving average that is 1 for
        # the full batch.
        by_samples = are_near_shares(products, window.sizes, tolerance)
        if math.isclose(sum(products), 1.0, rel_tol=tolerance) and not by_samples:
            yield "numbers", weights, sum(weights)


def _needed_multipliers(fit: WeightFit, update: UpdateComparison) -> tuple[float, ...]:
    """Returns the factors for the losses; 0 for one without a valid target, to which any number would fit."""
    counts = update.window.valid_targets
    if fit.determined or len(counts) != len(fit.multipliers) or not any(counts):
        return fit.multipliers
    return tuple(multiplier if count else 0.0 for multiplier, count in zip(fit.multipliers, counts, strict=True))


def weigh_total(comparison: Comparison, update: UpdateComparison | None) -> FittedWeights | None:
    """Returns the weights of an update where one factor makes up for all that is wrong with its gradient, else None.

    Without an update that differs, those with all steps undone: unless steps come too early, undoing them joins windows
    that were meant to be smaller than the full batch.
    """
    record, undone, steps = comparison.record, comparison.record.controls.steps_undone, comparison.window.steps
    if comparison.window.has_recipe:
        factor = factor_in_run(comparison)
        # A factor that is 1 to what it leaves over is none.
        if factor is not None and abs(factor.value - 1) < max(SAME_NUMBER, factor.residual):
            factor = None
    elif update is not None:
        factor, steps = factor_in_loop(record, update), update.window.steps
    elif undone is not None and undone.residual < record.tolerance and early_windows(record):
        factor, steps = constant_factor(undone, record.tolerance), len(undone.weights)
    else:
        return None
    if factor is None:
        return None
    steps = steps or find_steps(record, factor.value)
    return FittedWeights(comparison, update, factor.residual, total=factor.value, micro_batches=steps)


# GAV201: their sum.


@rule("GAV201")
def wrong_loss_scale(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where one factor for all parameters and micro-batches makes the gradients agree."""
    counts, run, update = comparison.window.counts, comparison.window.remedy, comparison.record.divergent
    kinds = [kind for kind in TermKind if any(count.term is kind for count in counts)]
    if run is not None and kinds and all(count.term is not None for count in counts):
        yield from (_finding_of_terms(comparison, run, kind) for kind in kinds)
        return
    whole, shares = weigh_total(comparison, update), find_shares(comparison)
    if whole is not None and find_share(whole).code == "GAV201":
        yield _finding_of_factor(whole)
    # weights that explain the whole gradient leave nothing to single terms or parameters
    elif whole is None and update is not None and (shares is None or shares.term is not None):
        yield from list(_judge_some_parameters(comparison, update)) or _judge_terms(comparison, update)
    if update is not None and shares is not None and shares.total != 1.0 and find_share(shares).code == "GAV202":
        yield _finding_of_sum(shares, update)


def _finding_of_factor(weights: FittedWeights) -> Finding:
    comparison, update, share, trial = weights.comparison, weights.update, find_share(weights), weights.trial
    factor, right = weights.total, write_exactly([1 / weights.total], weights.precision)
    right_weights = f"{right} each" if weights.micro_batches > 1 else ""
    if comparison.window.has_recipe:
        right_weights = write_exactly([weight / factor for weight in comparison.window.used], weights.precision)
    number = update.number if update is not None else 1
    later = _other_factor(weights)
    remedy = word(weights, share.repair) + (f" (loss weights {right_weights})" if right_weights else "")
    remedy += trial.tested
    if by_framework := word_in_framework(weights, share):
        of_update = f"in update {number} " if later is not None else ""
        remedy = f"{by_framework} ({of_update}equivalent to a loss times {right}{trial.tested})"
    elif later is not None:
        remedy = "divide by the count over all micro-batches of the update: no constant repairs "
        remedy += f"{factor:.4g} in update {number} and {later[1]:.4g} in update {later[0]}"
    elif comparison.window.counts and comparison.window.remedy is not None:
        remedy = counts_remedy(comparison, comparison.window.counts, comparison.window.remedy)
    remedy = DIVIDE_ONCE if weights.skipped is not None else remedy
    notes = [word_largest(comparison) + word_count_place(comparison.window)]
    subject = "the accumulated gradient" if update is None else f"the gradient of update {number}"
    if update is None and not comparison.window.has_recipe:
        subject = "the gradient summed over the update's micro-batches"
        notes = ["with the weights put back after each step"]
    if (divisor := _find_shared_divisor(weights)) is not None:
        notes.append(f"both runs divide each loss by {divisor}, so that the full batch's is no mean")
        remedy += "; or divide in each run by its own number of micro-batches"
    if update is not None and update.step.may_take_factor:
        notes.append("the weights change alike, since the script's own step hides the gradient's size")
        notes.append("a division inside that step would not be seen")
    # counts may tell a factor where no weights were fitted
    if math.isfinite(weights.residual):
        notes.append(f"apart from this factor the gradients agree up to {weights.residual:.0e}")
    values: dict[str, Any] = {} if comparison.window.has_recipe else {"update": number}
    return finding_of(
        f"{subject} is {factor:.6g} times the full batch's{word(weights, share.wrong)}",
        measured_evidence("micro-batch-weights", "; ".join(notes), factor=factor, residual=weights.residual, **values),
        *trial.evidence(
            f"loss weights {right_weights}" if comparison.window.has_recipe and not comparison.window.counts else ""
        ),
        remedy=number_remedy(comparison, trial.replace_refuted(remedy)),
        location=_locate(comparison, number),
        proven=trial.proven,
    )


def _locate(comparison: Comparison, number: int | None) -> Location | None:
    """Returns the line that weights the losses: known in a run only, in a loop it differentiates them."""
    place = comparison.window.place
    return backward_place(comparison, number) if place is None else place.location


def _finding_of_terms(comparison: Comparison, run: ControlRun, kind: TermKind) -> Finding:
    """The finding of the terms of one kind that get the weights of others."""
    counts = tuple(count for count in comparison.window.counts if count.term is kind)
    source, trial = counts[0].operation.source, read_trial(comparison)
    what = "is a sum over samples, but is weighted like a mean"
    if kind is TermKind.PENALTY:
        what = f"is the same in every micro-batch and is counted {sum(comparison.window.used):.6g} times"
    line = f": `{source}`" if source else ""
    return finding_of(
        f"a term of the loss, {places(counts)}, {what}",
        measured_evidence("micro-batch-weights", f"{comparison.compared.largest}{line}"),
        *trial.evidence("other weights of this term"),
        remedy=number_remedy(comparison, counts_remedy(comparison, counts, run)),
        location=counts[0].operation.location,
        proven=trial.proven,
        together=[count.operation.location for count in counts],
    )


def _judge_terms(comparison: Comparison, update: UpdateComparison) -> Iterator[Finding]:
    """Yields a finding per term of a loss with a factor of its own: a penalty that is not divided, say."""
    tolerance, terms = comparison.tolerance, comparison.record.controls.terms
    factors = [constant_factor(term.fit, tolerance) for term in terms]
    fits = [term.fit for term, factor in zip(terms, factors, strict=True) if factor is None]
    are_right = [fit.factor_residual <= tolerance and abs(fit.factor - 1) < tolerance for fit in fits]
    right_count = sum(are_right)
    for term, factor in zip(terms, factors, strict=True):
        if factor is None:
            continue
        number, residual = update.number, term.fit.factor_residual
        weights = FittedWeights(
            comparison, update, residual, total=factor.value, term=term, micro_batches=update.window.steps
        )
        which = "" if term.samples else ", which is the same in every micro-batch,"
        rest = f"; {count_text(right_count, 'other term')} {'has' if right_count == 1 else 'have'} the right weight"
        advice = "and leave the others as they are" if right_count == term.count - 1 else "whatever the others need"
        yield finding_of(
            f"term {term.number} of {term.count} of the loss{which} counts {factor.value:.6g} times as much in update "
            f"{number} as in the full batch{word(weights, find_share(weights).wrong)}",
            measured_evidence(
                "comparison",
                word_difference(update) + (rest if right_count else ""),
                factor=factor.value,
                update=number,
                term=term.number,
                terms=term.count,
            ),
            control_evidence(
                "micro-batch-weights",
                f"for this term alone, the gradients agree up to {residual:.0e} apart from this factor; the terms add "
                "up to the whole gradient",
                residual=residual,
            ),
            remedy=f"multiply this term by {write_exactly([1 / factor.value], tolerance)} in each micro-batch, "
            f"{advice}",
            location=line_of(term.file, term.line),
            proven=True,
        )


def _judge_some_parameters(comparison: Comparison, update: UpdateComparison) -> Iterator[Finding]:
    """Yields a finding where some parameters alone have a factor: their loss is counted in every micro-batch."""
    factor_and_rows = factor_of_some(comparison.record, update)
    if factor_and_rows is None:
        return
    factor, rows = factor_and_rows
    others, names = len(update.parameters) - len(rows), [row.name for row in rows]
    meaning, where, advice = ("K", "every micro-batch", "divide it by K, or add it in one micro-batch only")
    if factor < 1:
        meaning, where, advice = "1/K", "one of K micro-batches", "do not divide it by K"
    agreement = f"{count_text(others, 'other parameter')} {'agrees' if others == 1 else 'agree'}"
    yield finding_of(
        f"the gradient of {quote_names(names)} in update {update.number} is {factor:.6g} times the full batch's "
        f"(= {meaning}); {agreement}",
        measured_evidence("comparison", word_difference(update), factor=factor, update=update.number, parameters=names),
        remedy=f"a loss term that reaches only these parameters is added in {where}: {advice}",
        location=backward_place(comparison, update.number),
        proven=False,
    )


def _finding_of_sum(weights: FittedWeights, update: UpdateComparison) -> Finding:
    """The finding where weights are wrong one to another, and add up to K or 1/K and not to 1."""
    comparison, trial, total, term = weights.comparison, weights.trial, weights.total, weights.term
    of_sum = replace(weights, right=())
    factor, remedy = write_exactly([1 / total], comparison.tolerance), NOT_ENOUGH
    if trial.proven:
        remedy = f"multiply the weight of each micro-batch by {factor}"
        remedy += "; the factors that GAV202 gives include this one" if all(weights.right) else ""
        remedy = DIVIDE_ONCE if weights.skipped is not None else remedy
        if by_framework := word_in_framework(weights, find_share(weights)):
            remedy = f"{by_framework}; this makes the shares right as well (GAV202)"
    if update.step.may_take_factor:
        remedy = f"multiply the weight of each micro-batch by {factor}, unless the step itself divides by {total:.6g}"
    where = "" if term is None else f" in term {term.number} of {term.count} of the loss"
    return finding_of(
        f"the weights of the micro-batches in update {update.number} add up to {total:.6g} instead of 1{where}"
        f"{word(of_sum, find_share(of_sum).wrong)}",
        measured_evidence(
            "comparison",
            f"{word_difference(update)}; their ratios are wrong, too",
            total=total,
            update=update.number,
        ),
        *trial.evidence(),
        remedy=remedy,
        location=backward_place(comparison, update.number),
        proven=trial.proven,
    )


def _find_shared_divisor(weights: FittedWeights) -> int | None:
    """The whole number that both runs divide every loss by, although one pass of the full batch needs no division."""
    update, record = weights.update, weights.comparison.record
    full_windows = [
        window for window in record.calls.full_windows if update is not None and window.number == update.number
    ]
    full_scales = [backward.scales for window in full_windows[:1] for backward in window.of(Backward)]
    scales = [each[-1] if each else math.nan for each in (*full_scales, *weights.window.scales)]
    if len(full_scales) != 1 or not 0 < scales[0] < 1:  # several passes of the full batch may have a weight each
        return None
    divisor = round(1 / scales[0])
    return divisor if all(math.isclose(each * divisor, 1.0, rel_tol=record.tolerance) for each in scales) else None


def _other_factor(weights: FittedWeights) -> tuple[int, float] | None:
    """Returns the number of an update of as many passes with another factor, and that factor; None where none has."""
    record, update = weights.comparison.record, weights.update
    if update is None:
        return None
    for later in record.updates:
        # another optimizer's update has another loss
        if {row.name for row in later.parameters}.isdisjoint(row.name for row in update.parameters):
            continue
        # windows of other lengths, or with skipped micro-batches, have other factors for a reason of their own
        if not later.judged or later.window.steps != weights.window.steps or find_skipped(record, later) is not None:
            continue
        factor = factor_in_loop(record, later)
        value = factor.value if factor is not None else 1.0 if later.outcome is Outcome.EQUIVALENT else None
        if value is not None and not math.isclose(weights.total, value, rel_tol=weights.tolerance):
            return later.number, value
    return None


# GAV605: their sum, in a window that is short.


@rule("GAV605")
def trailing_window_misscaled(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where a short window differs by r/K."""
    record = comparison.record
    if not record.updates:
        yield from _judge_calls(comparison, record)
    for update in record.updates:
        weights = weigh_total(comparison, update)
        share = find_share(weights) if weights is not None else None
        if weights is None or share is None or share.code != "GAV605":
            continue
        trial, short, full_count = weights.trial, weights.micro_batches, weights.full_count
        yield finding_of(
            word(weights, share.wrong),
            measured_evidence(
                "micro-batch-weights",
                f"{word_difference(update)}; apart from the factor r/K = {short}/{full_count} the gradients agree up "
                f"to {weights.residual:.0e}",
                factor=short / full_count,
                update=update.number,
            ),
            count_calls(record.calls.complete, "counts"),
            *trial.evidence(),
            remedy=word(weights, share.repair),
            location=backward_place(comparison, update.number),
            proven=trial.proven,
        )
        return


def _judge_calls(comparison: Comparison, record: Record) -> Iterator[Finding]:
    """Yields a finding where losses are multiplied by 1/K in a window of fewer than K micro-batches as well."""
    for window in record.calls.complete:
        full_count, short = record.calls.steps or record.calls.usual(window), window.backwards
        alike = [similar for similar in record.calls.complete if similar.optimizers == window.optimizers]
        weights = {weight for similar in alike for weight in _round_weights(similar)}
        if not 0 < short < full_count or alike[0].backwards != full_count or len(weights) != 1:
            continue
        weight = weights.pop()
        if weight is not None and math.isclose(weight * full_count, 1.0, rel_tol=THREE_DIGITS):
            yield finding_of(
                f"update {window.number} sums {word_passes(short)} but divides by K = {full_count}: the weights of its "
                f"losses add up to {short / full_count:.4g}",
                measured_evidence(
                    "events", f"every loss is multiplied by {weight:.4g} = 1/{full_count}", weight=weight
                ),
                count_calls(record.calls.complete, "counts"),
                remedy=f"divide the losses of this update by {short}, its number of micro-batches",
                location=backward_place(comparison, window.number),
                proven=False,
            )
            return


def _round_weights(window: Window) -> list[float | None]:
    """Returns the factor of each loss of a window, rounded; None where it is not known."""
    event_weights = [backward.weight for backward in window.of(Backward)]
    return [None if weight is None else float(f"{weight:.3g}") for weight in event_weights]


# GAV203: micro-batches that add nothing.


@rule("GAV203")
def empty_micro_batch(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where a micro-batch without valid targets gives NaN or drops out of the mean."""
    empty = empty_micro_batches(comparison)
    if comparison.weights_update != 1:
        yield from _judge_other_samples(comparison.record)
    if not comparison.compared.divergent:
        return
    # an empty micro-batch explains a weight of zero, so skipped ones are looked for only where there is none
    if not empty:
        yield from _judge_skipped(comparison)
        return
    losses, counts, fit, run = (
        comparison.window.losses,
        comparison.window.valid_targets,
        comparison.window.fit,
        comparison.weights_run,
    )
    # A script's loss is also NaN where it was not seen, so that only a run's own losses tell.
    lost = [k for k in empty if comparison.window.has_recipe and k < len(losses) and not math.isfinite(losses[k])]
    rows = [row for row in comparison.compared.rows if row.why is not None and row.why.not_finite]
    which = ", ".join(str(k + 1) for k in empty)
    number = comparison.compared.update
    window = f"of {comparison.window.steps}" if number is None else f"of update {number}"
    effect = "its mean loss is 0/0" if lost else "it gets a share of the mean but adds nothing"
    measured_text = f"gradients {rows[0].reason}: `{rows[0].name}`" if rows else word_largest(comparison)
    evidence = [
        measured_evidence(
            "micro-batch-weights",
            f"{measured_text}; valid targets per micro-batch: {', '.join(f'{count:g}' for count in counts)}",
            valid_targets=list(map(float, counts)),
        )
    ]
    if fit is not None and run is not None and run.rounding:
        what = f"with loss weights {weights_text(fit.weights, each=False)} the difference"
        evidence.append(word_control("micro-batch-weights", what, run.left, True, weights=list(fit.weights)))
    yield finding_of(
        f"micro-batch {which} {window} has no valid target: {effect}",
        *evidence,
        remedy=_ROWS["no valid target"].repair,
        location=backward_place(comparison),
        proven=bool(rows) or (run is not None and run.rounding),
    )


def _judge_skipped(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where a loop leaves out the backward pass of a micro-batch, and the full batch's does not."""
    record, update = comparison.record, comparison.record.update_of(comparison.compared.update)
    skipped = find_skipped(record, update) if update is not None else None
    if update is None or skipped is None or update.window.fit is None:
        return
    explained = explains_skipped(record, update)
    if update.window.fit.residual <= record.tolerance and not explained:
        return
    trial = read_trial(comparison, update.number) if explained else WeightsTrial()
    summary = f"{skipped.subject} no backward pass: {skipped.number} of {skipped.count} do not reach the gradient"
    measured_text, remedy = word_difference(update), _DIFFERENTIATE_ALL
    if explained:
        summary = _ROWS["skipped micro-batches"].wrong.format(subject=skipped.subject, count=skipped.count)
        measured_text += f"; {skipped.number} of {skipped.count} micro-batches skipped"
        remedy = _ROWS["skipped micro-batches"].repair
    yield finding_of(
        summary,
        measured_evidence("events", measured_text, update=update.number, dropped=list(skipped.positions)),
        *trial.evidence(),
        remedy=remedy,
        location=skipped.location,
        proven=trial.proven,
    )


def _judge_other_samples(record: Record) -> Iterator[Finding]:
    """Yields a finding of the first update that is not judged because skipped micro-batches leave it other samples."""
    joined = {each.window.number for each in missed_boundaries(record)}
    for update in record.updates:
        skipped = find_skipped(record, update)
        # updates that were joined by a skipped step are GAV602
        if update.data.is_comparable or skipped is None or update.number in joined:
            continue
        window, steps = skipped.window, record.calls.expected_passes(skipped.window)
        if skipped.positions or (steps is not None and is_meant(record, [(window, steps)])):
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


def empty_micro_batches(comparison: Comparison) -> list[int]:
    """Returns the positions of micro-batches whose loss counted no target, where others counted some."""
    counts = comparison.window.valid_targets
    return (
        [k for k, valid_count in enumerate(counts) if not valid_count > 0]
        if any(valid_count > 0 for valid_count in counts)
        else []
    )


def explains_weights(comparison: Comparison) -> bool:
    """Whether empty micro-batches are all that is wrong with the weights: the others have equal ones."""
    empty, fit, counts = empty_micro_batches(comparison), comparison.window.fit, comparison.window.valid_targets
    if not empty or fit is None:
        return False
    # A recipe's own weights are known. Those of a script may lack their division by K, which GAV201 has to tell.
    if comparison.window.has_recipe:
        return is_constant([c for k, c in enumerate(fit.weights) if k not in empty], fit.residual)
    if len(fit.multipliers) != len(counts) or fit.residual > comparison.tolerance:
        return False
    filled = tuple(factor for at, factor in enumerate(fit.multipliers) if at not in empty)
    return constant((*filled, len(counts) / len(filled)), comparison.tolerance)


# GAV202: their ratios.


@rule("GAV202")
def mean_of_means(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where other micro-batch weights give the full-batch gradient exactly."""
    run, counts = comparison.window.remedy, comparison.window.counts
    if counts and (run is not None or all(count.term is not None for count in counts)):
        # of terms that nothing divides GAV201 tells, and of one factor for all micro-batches
        is_told = all(count.term is not None for count in counts) or factor_in_run(comparison) is not None
        if run is not None and not is_told and not explains_weights(comparison):
            yield _finding_of_counts(comparison, counts, run)
        return
    weights = find_shares(comparison)
    if weights is None:
        return
    share, trial = find_share(weights), weights.trial
    # Weights without a meaning that fit, and do not repair: two gradients per micro-batch, say, fit anything.
    is_refuted = weights.update is not None and trial.run is not None and not trial.run.rounding
    if share.code == "GAV202" and not (is_refuted and share.amounts is None):
        yield finding_of_shares(weights, share, trial)


def finding_of_shares(weights: FittedWeights, share: ShareKind, trial: WeightsTrial) -> Finding:
    """The finding of weights whose ratios are wrong."""
    comparison, fit, right, term = weights.comparison, weights.fit, list(weights.right), weights.term
    number = weights.update.number if weights.update is not None else None
    in_use = "" if weights.are_equal else _BASES.get(weights.basis) or weights_text(weights.in_use, each=False)
    summary = share.wrong_if_equal if weights.are_equal and share.wrong_if_equal else share.wrong
    # weights that the user gave are wrong as such: nothing was averaged
    if comparison.window.given_wrong:
        summary = "the given weights are not the micro-batches' shares of the samples"
    summary += f" in update {number}" if number is not None else ""
    summary += f", in term {term.number} of {term.count} of the loss" if term is not None else ""
    remedy = word(weights, share.repair if weights.adds_up else _ROWS["a number that moves"].repair)
    remedy += f", in place of {in_use}" if in_use else ""
    multiply = ""
    if number is None:
        remedy += f" (gaverify: --weighting {share.option})" if share.option else ""
        multiply = trial.tested if share.option else ""  # numbers that stand for nothing known are no repair
    elif by_framework := word_in_framework(weights, share):
        remedy, multiply = by_framework, f" (with the right weights{trial.tested})" if trial.tested else ""
    elif all(right) and trial.proven:
        multiply = _word_multipliers(weights, number) + trial.tested
    # divisors are known up to a common factor only
    amounts = f": {word_share_of_each(share.amounts(weights))}" if share.amounts is not None and share.option else ""
    numbers = "loss weights" if weights.adds_up else "losses multiplied by"
    text = [f"{numbers} {weights_text(right)} reproduce the full-batch gradient to {weights.residual:.0e}"]
    text += [word(weights, share.meaning) + amounts] if share.meaning else []
    text += [f"the script weights them by {in_use}"] if in_use and number is not None else []
    doubt = "" if fit.determined else " (other weights fit as well: these micro-batches cannot tell them apart)"
    if not weights.adds_up:
        doubt += (
            "; they are not the weights of a mean, so a divisor that depends on the micro-batch or a moving average "
            "fits as well: suspected, not proven"
        )
    measured_text, values = word_largest(comparison), dict[str, Any](update=number)
    if comparison.window.has_recipe:
        measured_text += f" with loss weights {weights_text(weights.in_use, each=False)}"
        measured_text += _word_zero_weights(weights.in_use) + word_count_place(comparison.window)
        values = {"used": list(weights.in_use)}
    return finding_of(
        summary,
        measured_evidence("micro-batch-weights", measured_text, **values),
        Evidence(
            "micro-batch-weights",
            "weights",
            "; ".join(text) + doubt,
            {"weights": right, "residual": fit.residual, "determined": fit.determined}
            | ({} if comparison.window.has_recipe else {"multipliers": list(fit.multipliers)}),
        ),
        *trial.evidence("these weights" if comparison.window.has_recipe else ""),
        remedy=number_remedy(comparison, trial.replace_refuted(remedy) + multiply),
        location=_locate(comparison, number),
        proven=trial.proven,
    )


_BASES = {"samples": "their shares of samples n_k/N", "targets": "their shares of valid targets"}


def _word_zero_weights(used: Sequence[float]) -> str:
    zeros = [str(k + 1) for k, weight in enumerate(used) if weight == 0]
    return (
        f"; micro-batch{'es' * (len(zeros) > 1)} {join_texts(zeros)} {'have' if len(zeros) > 1 else 'has'} weight 0"
        if zeros
        else ""
    )


def _finding_of_counts(comparison: Comparison, counts: tuple[Count, ...], run: ControlRun) -> Finding:
    """The finding where the window's counts in every micro-batch give the full batch's gradient."""
    count_texts = "; ".join(map(_describe_count, counts))
    fit, text, weights = comparison.window.fit, "", dict[str, Any]()
    if fit is not None and fit.determined and fit.residual < COMPUTED_FLOAT32 and not word_other_fixes(comparison):
        weights = {"weights": list(fit.weights), "residual": fit.residual}
        text = f"; on this batch they are loss weights {weights_text(fit.weights, each=False)}"
    windows, trial = [count.window for count in counts], read_trial(comparison)
    line = f": `{counts[0].operation.source}`" if counts[0].operation.source else ""
    return finding_of(
        _SAME_WEIGHT if comparison.window.weighting == "uniform" else _NOT_SHARES,
        measured_evidence(
            "micro-batch-weights",
            f"{comparison.compared.largest}; {count_texts}{line}",
            used=list(comparison.window.used),
            counts=[list(count.micro_batches) for count in counts],
        ),
        *trial.evidence(more=text, counts=windows, **weights),
        remedy=number_remedy(comparison, counts_remedy(comparison, counts, run)),
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


def counts_remedy(comparison: Comparison, counts: tuple[Count, ...], run: ControlRun) -> str:
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
    return f"{'; '.join(steps)}; {word_trial(run, word_other_fixes(comparison))}"


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


def _word_multipliers(weights: FittedWeights, number: int) -> str:
    """The factors for the losses as the script has them now: the fit is of the gradient before any clipping."""
    tolerance = min(weights.tolerance, max(FIT_MAGNIFIES * weights.fit.residual, FIT_EXACT))
    what = "the losses" if weights.term is None else f"term {weights.term.number}"  # the other terms may be right
    return f"; in update {number} that means: multiply {what} by {write_exactly(weights.fit.multipliers, tolerance)}"
