"""Searches for the causes of a divergence: questions in an explicit order, each with control runs.

The search goes on until nothing is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from gaverify.errors import TimeUp
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import PassProbe
from gaverify.passes.isolation.objects import is_users_class
from gaverify.passes.layouts import leaves
from gaverify.passes.lifting import has_hooks
from gaverify.passes.user_code import DEFAULT_IGNORED, largest_mean
from gaverify.records.comparison import BackwardComparison, Buffers, Comparison, Draws, Repeatability
from gaverify.records.experiment import ControlKind, is_constant
from gaverify.records.outcomes import Compared, Method, NotCompared, Outcome, ParameterComparison
from gaverify.records.windows import EXPLICIT, AccumulationWindow
from gaverify.search import backward, confirming, counts, operations, state, weights
from gaverify.search.bench import Bench, Intervention
from gaverify.thresholds import COMPUTED_FLOAT32, FEW_TIMES, FEW_UNITS, MANY_UNITS, SAME_ORDER, SHOWS_UNITS, TINY, U32
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.comparison import measure
from gaverify.verdict.control import MakeWatch, enter_float64, run_in_float64
from gaverify.verdict.criteria import Difference, record, zero_in_float64
from gaverify.verdict.decision import Decision, decide_by_float64, measure_and_decide
from gaverify.verdict.measurement import Measurement, is_large
from gaverify.verdict.sketches import keep_sketch

_CONSTANT_DRAWS = Intervention(
    "every random draw kept constant", ControlKind.DRAWS_PINNED, change=Experiment.with_constant_draws
)


def _ask_draws(bench: Bench, comparison: Comparison) -> Comparison:
    """Replaces every random draw by one typical value in both runs, if some could not be distributed to samples."""
    if not comparison.draws.unaligned:
        return comparison
    pin = Intervention(
        "every random draw kept constant", ControlKind.DRAWS_PINNED, change=Experiment.with_constant_draws
    )
    control = bench.attempt("random draws", lambda: bench.run(pin))
    if control is None or math.isinf(control.left):
        return comparison
    draws = replace(comparison.draws, control=control)
    return replace(comparison, draws=draws, left=control.left, cleared=control.rounding)


def _choose_bench(bench: Bench, comparison: Comparison) -> Bench:
    """The bench for the questions after this one, with constant draws where these were needed."""
    return _hold_draws(bench) if comparison.draws.control is not None else bench


def _hold_draws(bench: Bench) -> Bench:
    return replace(bench.neutralise(_CONSTANT_DRAWS), reference=None, live=bench)


QUESTIONS: tuple[Callable[[Bench, Comparison], Comparison], ...] = (
    _ask_draws,
    weights.ask,
    state.ask,
    state.ask_unnamed_before_weights,
    counts.ask,
    weights.ask_at_moved_parameters,
    operations.ask,
    state.ask_unnamed,
    backward.ask,
)
"""In this order: what is cheap to ask, and what the later questions have to know, comes first."""


def watch_passes(experiment: Experiment) -> PassProbe:
    """Makes what looks on at the passes that decide, for the first questions of a search."""
    return counts.SearchWatch(experiment)


@contextmanager
def open_control_runs(measurement: Measurement, decision: Decision, total: float) -> Iterator[Bench]:
    """Gives where control runs happen: in float64, where that decided, else in working precision.

    Args:
        measurement: In working precision.
        decision: With the float64 runs, whose full batch need not be run again; its gradients are freed.
        total: The relative difference that is looked into.
    """
    control, experiment, reference = decision.float64, measurement.experiment, None
    with ExitStack() as stack:
        if control is not None:
            experiment = stack.enter_context(enter_float64(experiment, lifted=control.lifted))
            reference = keep_sketch(experiment, control.full)
            if control.watched is not None:
                used = control.accumulated.weights
                # a weight of 0 hides the micro-batch's own gradient, so that these are sketched again
                shares = control.watched.sums.shares(reference.gradient, used) if all(used) else None
                losses = control.accumulated.micro_losses
                watch = control.watched.probe
                # The questions look at every micro-batch from the restored state, and these ran one after the other.
                if isinstance(watch, counts.SearchWatch) and state.read_changes(watch.changes()):
                    watch.forwards.clear()
                reference = replace(reference, watch=watch, shares=shares, losses=losses)
        divergent = frozenset(row.name for row in decision.rows if row.outcome is Outcome.DIVERGENT)
        yield Bench(experiment, reference=reference, total=total, divergent=divergent)


def search_causes(bench: Bench, comparison: Comparison) -> Comparison:
    """Returns the comparison with what the questions found; a question that could not be asked is noted.

    Args:
        bench: Where controls run.
        comparison: Of the passes.
    """
    comparison = replace(comparison, left=comparison.compared.total)
    try:
        questions = QUESTIONS if not comparison.compared.one_sided else (operations.ask_branch,)
        counted_bench, comparison = counts.ask_first(bench, comparison)
        before, with_fit = comparison, None
        for ask in questions:
            if _is_settled(comparison):
                break
            comparison = ask(_choose_bench(counted_bench, comparison), comparison)
            with_fit = with_fit or (comparison if comparison.window.fit is not None else None)
        comparison = operations.ask_next_update(_choose_bench(counted_bench, comparison), comparison)
        is_explained = _is_explained_by_evaluation_mode(bench, comparison)
        if with_fit is not None and with_fit.repeatability is None:
            repeatability = _measure_repeatability(_choose_bench(counted_bench, with_fit), comparison, is_explained)
            comparison = replace(comparison, repeatability=repeatability)
            if not comparison.repeats_itself:  # then nothing that was asked after the weights has an answer
                comparison = replace(with_fit, repeatability=repeatability)
        if _needs_repeats(comparison) and not is_explained:
            difference = bench.attempt("repetitions", lambda: state.measure_repetition(bench, comparison))
            if difference:  # then no control compares what it is meant to compare
                return replace(before, repeatability=Repeatability(difference, difference), failures=bench.failures)
        comparison = confirming.ask(bench, comparison)
        comparison = weights.ask_place(_choose_bench(bench, comparison), state.ask_lines(bench, comparison))
    except TimeUp:
        comparison = replace(comparison, stopped_after=bench.experiment.limit.seconds)
    return replace(comparison, cleared=comparison.left <= bench.rounding, failures=bench.failures)


def _measure_repeatability(bench: Bench, comparison: Comparison, is_explained: bool) -> Repeatability | None:
    """How much two equal runs differ; a control in evaluation mode that leaves nothing compared such runs."""
    if is_explained:
        return Repeatability(comparison.left, comparison.left)
    return bench.attempt("micro-batch weights", lambda: weights.measure_repeatability(bench, comparison))


def _is_settled(comparison: Comparison) -> bool:
    """Whether nothing is left to ask: all is explained, or a batch that differs from itself explains nothing."""
    explained_by_weights = comparison.window.has_wrong_weights and not comparison.weights_first
    return comparison.cleared or explained_by_weights or not comparison.repeats_itself


def _needs_repeats(comparison: Comparison) -> bool:
    """Whether the search found what a schedule of the forwards may look like: weights, or samples that interact."""
    unnamed = comparison.state is not None and any(change.place == "unnamed" for change in comparison.state.blamed)
    may_be_weights = comparison.window.has_wrong_weights and not _are_counted_weights(comparison)
    return bool(comparison.forward.causes) or may_be_weights or unnamed or comparison.backward.place is not None


def _are_counted_weights(comparison: Comparison) -> bool:
    """Whether weights that leave nothing are the shares of samples or targets, and no one factor of the used ones."""
    window, run = comparison.window, comparison.window.remedy
    if window.fit is None or run is None or not run.rounding:
        return False
    # A schedule that makes the fit multiplies the K + 1 losses by its own numbers, and those know nothing of the data:
    # with another number for any micro-batch, the weights would be no shares. One factor may be its first number.
    factors = [right / used for right, used in zip(window.fit.weights, window.used, strict=True) if used]
    return bool(window.name_shares(window.fit.weights)) and not is_constant(factors, COMPUTED_FLOAT32)


def _is_explained_by_evaluation_mode(bench: Bench, comparison: Comparison) -> bool:
    """Whether nothing is left of the difference with layers of torch or of another library in evaluation mode.

    That control compares one forward with K: a schedule of the forwards would still show. The user's own layers may
    follow one in training mode alone, which the control takes away with them.
    """
    is_state_to_blame = comparison.state is not None and (
        comparison.state.control is not None or bool(comparison.state.blamed)
    )
    if not comparison.cleared or comparison.window.has_wrong_weights or is_state_to_blame:
        return False
    # The last of several was in evaluation mode beside those before it, and their controls were not to leave nothing.
    controls = [cause.control for cause in comparison.forward.causes]
    if not all(run is not None and run.kind is ControlKind.EVALUATION_MODE for run in controls):
        return False
    modules = dict(bench.experiment.named_modules())
    kinds = {type(modules[name]) for run in controls if run is not None for name in run.modules}
    return bool(kinds) and not any(is_users_class(kind, frozenset()) for kind in kinds)


def collect_facts(measurement: Measurement, decision: Decision) -> Comparison:
    """Returns what the two strategies showed already, without another pass."""
    experiment, accumulated = measurement.experiment, measurement.accumulated
    draws = accumulated.draws
    means = [mean for mean in map(largest_mean, accumulated.observed) if mean is not None]
    valid = tuple(float(mean.divisor) for mean in means) if len(means) == experiment.steps else ()
    ignored = bool(valid) and any(float(mean.valid) < mean.total for mean in means)
    weighting = experiment.weighting if isinstance(experiment.weighting, str) else EXPLICIT
    is_divergent = any(row.outcome is Outcome.DIVERGENT for row in decision.rows)
    return Comparison(
        batch_size=experiment.batch_size,
        compared=Compared(decision.rows, decision.method, decision.float64_failure, precision=decision.precision),
        window=AccumulationWindow(
            accumulated.weights,
            weighting,
            experiment.sizes,
            experiment.steps,
            accumulated.micro_losses,
            measurement.full.loss,
            valid,
            ignored,
            has_class_weights=any(mean.is_weighted for mean in means),
        ),
        draws=Draws(
            experiment.draws.count,
            draws.dealt,
            uneven=draws.uneven,
            # Gradients that agree show that each row got its own draws.
            unaligned={**(draws.unmatched if is_divergent else {}), **draws.unaligned},
            unmatched=frozenset(draws.unmatched if is_divergent else ()),
            places=dict(draws.places),
            foreign_differ=accumulated.foreign_draws_differ,
            shared=dict(draws.shared),
        ),
        buffers=Buffers(_find_drift(measurement)),
        backward=BackwardComparison(hooked=tuple(n for n, p in experiment.parameters.items() if has_hooks(p))),
        identical=_identical_samples(experiment.problem.batch, experiment.batch_size),
        unpadded=tuple(_list_unpadded(measurement)),
    )


def _find_drift(measurement: Measurement) -> dict[str, float]:
    """The buffers that K micro-batches leave otherwise than the full batch, with their relative difference.

    A buffer with a row per sample (a recurrent state, a cache) has other samples after the last micro-batch: it is not
    compared.
    """
    full, accumulated = measurement.full.buffers, measurement.accumulated.buffers
    shapes = {name: value.shape for name, value in accumulated.items()}
    common = {name: value for name, value in full.items() if shapes.get(name) == value.shape}
    if not common:
        return {}
    rows = measure({name: accumulated[name] for name in common}, common, measurement.experiment.ranks)
    # by the norms that were read for all buffers at once; NaN is no distance
    allowed = MANY_UNITS * measurement.unit
    drifting = (row for row in rows if row.difference > allowed * max(row.accumulated, row.reference))
    return {row.name: row.difference / row.scale for row in drifting}


def _list_unpadded(measurement: Measurement) -> Iterator[str]:
    """Yields the value that the loss ignores, where no target has it, and masks of the batch that hide nothing."""
    experiment, calls = measurement.experiment, measurement.full.observed[0].target_counts
    # torch's default ignores -100 in every loss: one target per sample is seldom padded
    may_be_padded = any(call.ignored != DEFAULT_IGNORED or call.total > experiment.batch_size for call in calls)
    if may_be_padded and all(float(call.valid) == call.total for call in calls):
        yield f"no target is {calls[0].ignored}, which the loss ignores"
    for path, leaf in leaves(experiment.problem.batch):
        is_mask = isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.layout is torch.strided
        if is_mask and "mask" in path.lower() and leaf.dim() > 1 and bool((leaf != 0).all()):
            yield f"`{path}` hides nothing"


def _identical_samples(batch: Any, batch_size: int) -> bool:
    """Returns whether all samples of the batch are the same, so that no coupling between them could show."""
    compared = False
    for _, leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            return False  # its samples have different lengths
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.dim() > 0:
            if leaf.shape[0] != batch_size or batch_size < 2:
                return False
            if not bool((leaf == leaf[:1]).all()):
                return False
            compared = True
    return compared


def investigate(measurement: Measurement, decision: Decision, *, diagnose: bool, in_part: bool = False) -> Comparison:
    """Returns everything that was measured; questions are asked only after a divergence; one that fails says so.

    A search that has a time limit returns what it found until then.

    Args:
        measurement: The measurement of both strategies.
        decision: The verdict about them.
        diagnose: Whether to look for the cause of a divergence.
        in_part: Whether the batch is the first samples of a larger one.
    """
    comparison, limit = collect_facts(measurement, decision), measurement.experiment.limit
    if not diagnose or not comparison.compared.divergent or comparison.window.steps < 2:
        return comparison
    comparison = replace(comparison, diagnosed=True)
    try:
        with limit.searching(), open_control_runs(measurement, decision, comparison.compared.total) as bench:
            return search_causes(replace(bench, in_part=in_part), comparison)
    except TimeUp:
        return replace(comparison, stopped_after=limit.seconds)


# Decides and searches a divergence on the first samples: float64 and the search cost twice the memory.
#
# A fault of structure shows in any few samples. Where working precision shows clearly more than rounding, the first
# samples of the batch, cut into two micro-batches, are measured like a batch. Their result counts only where every
# parameter agrees with it on the full batch in working precision; else float64 runs on the full batch. Below
# float32 one parameter shows little: there the gradient of all parameters has shown the divergence
# (`verdict/control`).


# Sizes of the two micro-batches: a quarter of the first micro-batch, at least two samples, and no more than 1,024,
# which show a fault as well as any larger number.
_QUARTER, _LEAST, _MOST = 4, 2, 1024


@dataclass(frozen=True)
class FirstSamplesAnswer:
    """The results of the first samples, which were measured, decided and searched instead of the whole batch."""

    open_decision: Decision
    """The decision in the user's precision, which is open."""
    decision: Decision | None = None
    """The parameters of the whole batch, decided by the first samples; None where these decide nothing."""
    comparison: Comparison | None = None
    """The comparison of the first samples, with what the search found; None where they were not searched."""


def examine_first_samples(measurement: Measurement, decision: Decision, *, searches: bool) -> FirstSamplesAnswer:
    """Measures, decides and searches the first samples in float64, in the place of the whole batch.

    First samples that diverge are searched even if they decide nothing; float64 then decides the whole batch.

    Args:
        measurement: The measurement of the whole batch, in working precision.
        decision: The open decision from that measurement.
        searches: Whether to look for the cause of a divergence.
    """
    comparison = None
    try:
        part = _take_first_samples(measurement, decision)
        if part is None:
            return FirstSamplesAnswer(decision)
        part.progress(f"a part of the batch: {part.batch_size} samples")
        part_answer = _judge_first_samples(part, measurement, decision, watch_passes if searches else None)
        rows = _decide_by_first_samples(measurement, decision, *part_answer)
        if searches:
            comparison = investigate(*part_answer, diagnose=True, in_part=True)
    except Exception as error:  # a model that does not take so few samples, a loss that is no number
        if is_own_fault(error):
            raise
        return FirstSamplesAnswer(decision)
    if rows is None:
        return FirstSamplesAnswer(decision, comparison=comparison)
    decided = replace(decision, rows=rows, method=Method.FLOAT64_PART, part=part.sizes, needs_float64=False)
    return FirstSamplesAnswer(decision, decided, comparison)


def _take_first_samples(measurement: Measurement, decision: Decision) -> Experiment | None:
    """The experiment with the first samples as its batch; None where they are unlike the whole, or save little."""
    experiment = measurement.experiment
    first, last = experiment.sizes[0], experiment.sizes[-1]
    size = min(first, max(_LEAST, first // _QUARTER), _MOST)
    sizes = (size, size if last == first else max(1, size - 1))
    is_float32 = measurement.coarse_unit == U32 and experiment.autocast is None
    # a weighting in words has the same meaning for any samples; numbers and functions of the user's may not
    plain = isinstance(experiment.weighting, str) and (decision.few is not None or is_float32)
    comparable = all(row.why in (None, NotCompared.UNUSED) for row in decision.rows)
    if not plain or not comparable or 2 * sum(sizes) > experiment.batch_size or not is_large(experiment):
        return None
    return experiment.first_samples(sizes)


def _judge_first_samples(
    part: Experiment, measurement: Measurement, decision: Decision, make_watch: MakeWatch | None
) -> tuple[Measurement, Decision]:
    """Measures and decides the first samples: in float64 only, where their own result follows from the whole's."""
    full_experiment = measurement.experiment
    is_low = decision.few is not None  # below float32 only float64 decides them
    recorded = part.record()[0] if full_experiment.draws.count else part
    if full_experiment.reading.by_contents:  # what was right for the draws of the whole batch is right for these
        recorded = recorded.with_second_reading()
    control = run_in_float64(recorded, make_watch)
    losses = (control.full.loss, *control.accumulated.micro_losses)
    # the second reading is chosen only where the first one was ambiguous
    is_ambiguous = full_experiment.reading.by_contents or measurement.accumulated.draws.ambiguous
    if control.accumulated.draws.ambiguous > is_ambiguous or not all(map(math.isfinite, losses)):
        return measure_and_decide(part, exact=is_low, make_watch=make_watch)
    # Working precision is not run on the first samples: its differences are those of the whole batch, to scale.
    scale = _norm(control.rows.values()) / max(_norm(measurement.differences.values()), TINY)
    working = {name: row._replace(difference=scale * row.difference) for name, row in measurement.differences.items()}
    scales = {name: scale * terms for name, terms in measurement.plain_terms.items()}
    estimated = Measurement(recorded, control.full, control.accumulated, working, plain_terms=scales)
    open_decision = Decision((), Method.FLOAT64_CONTROL, needs_float64=True)
    part_decision = decide_by_float64(estimated, open_decision, control, measurement.coarse_unit)
    # without the estimated differences, which must decide nothing else
    return Measurement(recorded, control.full, control.accumulated, {}), part_decision


def _decide_by_first_samples(
    measurement: Measurement, decision: Decision, part: Measurement, part_decision: Decision
) -> tuple[ParameterComparison, ...] | None:
    """The records of all parameters, where the first samples and the whole batch agree; None where they do not."""
    if part_decision.float64 is None:
        return None
    part_rows, unit = {row.name: row for row in part_decision.rows}, measurement.coarse_unit
    # A fault that comes from the samples' differences falls with the square root of their number.
    order = SAME_ORDER * math.sqrt(measurement.experiment.sizes[0] / part.experiment.sizes[0])
    rounds = _bound_rounding(measurement, part, part_decision)
    rows = []
    for row in decision.rows:
        difference, part_row = measurement.differences[row.name], part_rows[row.name]
        decided = row if row.why is part_row.why is NotCompared.UNUSED else None
        if row.why is None and part_row.why is None:
            least = SHOWS_UNITS * unit if decision.few is None else 0.0
            decided = _decide_parameter(row, difference, part_row, rounds, least, order)
        if decided is None:
            return None
        rows.append(decided)
    return tuple(rows) if any(row.outcome is Outcome.DIVERGENT for row in rows) else None


def _bound_rounding(measurement: Measurement, part: Measurement, part_decision: Decision) -> Callable[[str], float]:
    """How much working precision may round the whole batch's gradient of a parameter that is equivalent in float64."""
    unit, norm = measurement.coarse_unit, _norm(measurement.differences.values())
    zero = zero_in_float64(row.reference_norm for row in part_decision.rows)
    nothing = {row.name for row in part_decision.rows if max(row.reference_norm, row.accumulated_norm) <= zero}
    part_differences: dict[str, Difference] = dict(part.differences)

    def rounding(name: str) -> float:
        # a gradient that is zero: what shifts the logits of a softmax rounds like the gradients behind it
        if name in nothing and measurement.differences[name].scale <= FEW_UNITS * unit * norm:
            return FEW_UNITS * unit * norm
        if not part_differences:
            part_differences.update(_measure_in_working_precision(part.experiment))
        return FEW_TIMES * norm / max(_norm(part_differences.values()), TINY) * part_differences[name].difference

    return rounding


def _measure_in_working_precision(part: Experiment) -> dict[str, Difference]:
    full = part.full_batch()
    accumulated = part.micro_batches(full)
    return {row.name: row for row in measure(accumulated.gradients, full.gradients, part.ranks)}


def _decide_parameter(
    row: ParameterComparison,
    whole: Difference,
    part: ParameterComparison,
    rounds: Callable[[str], float],
    least: float,
    order: float,
) -> ParameterComparison | None:
    """The record of a parameter on which the first samples (float64) and the whole batch (working precision) agree."""
    if part.outcome is Outcome.EQUIVALENT:
        if row.outcome is Outcome.EQUIVALENT:
            return row
        rounding = rounds(row.name)
        if whole.difference > rounding:
            return None
        return record(whole, Outcome.EQUIVALENT, Method.FLOAT64_PART, rounding, whole.difference)
    most = max(least, part.relative_difference / order)
    if part.outcome is not Outcome.DIVERGENT or not whole.difference > most * whole.reference:
        return None
    allowed = part.relative_allowed * whole.reference
    return record(whole, Outcome.DIVERGENT, Method.FLOAT64_PART, allowed, whole.difference)


def _norm(rows: Iterable[Difference]) -> float:
    return math.hypot(*(row.reference for row in rows if math.isfinite(row.reference)))
