"""Searches for the causes of a divergence: questions in an explicit order, each with control runs.

The search goes on until nothing is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from gaverify.passes.experiment import Experiment, TimeUp
from gaverify.passes.gradients import PassProbe
from gaverify.passes.isolation.origins import is_users_class
from gaverify.passes.lifting import has_hooks
from gaverify.passes.nesting import leaves
from gaverify.passes.precision import buffers_differ
from gaverify.records.accumulation import EXPLICIT, AccumulationWindow
from gaverify.records.comparison import Compared
from gaverify.records.experiment import ControlKind
from gaverify.records.facts import Backward, Buffers, Draws, Facts, Repeatability
from gaverify.search import backward, counts, coupling, operations, second_batch, state, weights
from gaverify.search.bench import Bench
from gaverify.verdict.comparison import measure
from gaverify.verdict.decision import Decision
from gaverify.verdict.measurement import Measurement
from gaverify.verdict.sketches import keep_sketch


def _ask_draws(bench: Bench, facts: Facts) -> Facts:
    """Replaces every random draw by one typical value in both runs, if some could not be distributed to samples."""
    if not facts.draws.unaligned:
        return facts
    what = "every random draw kept constant"
    control = bench.attempt("random draws", lambda: _hold_draws(bench).run(what, kind=ControlKind.DRAWS_PINNED))
    if control is None or math.isinf(control.left):
        return facts
    draws = replace(facts.draws, control=control)
    return replace(facts, draws=draws, left=control.left, cleared=control.rounding)


def _choose_bench(bench: Bench, facts: Facts) -> Bench:
    """The bench for the questions after this one, with constant draws where these were needed."""
    return _hold_draws(bench) if facts.draws.control is not None else bench


def _hold_draws(bench: Bench) -> Bench:
    return replace(bench, experiment=bench.experiment.with_constant_draws(), reference=None, live=bench)


QUESTIONS: tuple[Callable[[Bench, Facts], Facts], ...] = (
    _ask_draws,
    weights.ask,
    state.ask,
    counts.ask,
    coupling.ask,
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
            experiment = stack.enter_context(experiment.in_float64())
            reference = keep_sketch(experiment, control.full)
            if control.watched is not None:
                shares = control.watched.sums.shares(reference.gradient, control.accumulated.weights)
                losses = control.accumulated.micro_losses
                watch = control.watched.probe
                # The questions look at every micro-batch from the restored state, and these ran one after the other.
                if isinstance(watch, counts.SearchWatch) and state.read_changes(watch.changes()):
                    watch.forwards.clear()
                reference = replace(reference, watch=watch, shares=shares, losses=losses)
        yield Bench(experiment, reference=reference, total=total)


def search_causes(bench: Bench, facts: Facts) -> Facts:
    """Returns the facts with what the questions found; a question that could not be asked is noted.

    Args:
        bench: Where controls run.
        facts: What the passes showed.
    """
    facts = replace(facts, left=facts.compared.total)
    try:
        questions = QUESTIONS if not facts.compared.one_sided else (operations.ask_branch,)
        counted_bench, facts = counts.ask_first(bench, facts)
        before, with_fit = facts, None
        for ask in questions:
            if _is_settled(facts):
                break
            facts = ask(_choose_bench(counted_bench, facts), facts)
            with_fit = with_fit or (facts if facts.window.fit is not None else None)
        is_explained = _is_explained_by_evaluation_mode(bench, facts)
        if with_fit is not None and with_fit.repeatability is None:
            repeatability = _measure_repeatability(_choose_bench(counted_bench, with_fit), facts, is_explained)
            facts = replace(facts, repeatability=repeatability)
            if not facts.repeats_itself:  # then nothing that was asked after the weights has an answer
                facts = replace(with_fit, repeatability=repeatability)
        if _needs_repeats(facts) and not is_explained:
            difference = bench.attempt("repetitions", lambda: state.measure_repetition(bench, facts))
            if difference:  # then no control compares what it is meant to compare
                return replace(before, repeatability=Repeatability(difference, difference), failures=bench.failures)
        facts = second_batch.ask(bench, facts)
        facts = weights.ask_place(_choose_bench(bench, facts), state.ask_lines(bench, facts))
    except TimeUp:
        facts = replace(facts, stopped_after=bench.experiment.limit.seconds)
    return replace(facts, cleared=facts.left <= bench.rounding, failures=bench.failures)


def _measure_repeatability(bench: Bench, facts: Facts, is_explained: bool) -> Repeatability | None:
    """How much two equal runs differ; a control in evaluation mode that leaves nothing compared such runs."""
    if is_explained:
        return Repeatability(facts.left, facts.left)
    return bench.attempt("micro-batch weights", lambda: weights.measure_repeatability(bench, facts))


def _is_settled(facts: Facts) -> bool:
    """Whether nothing is left to ask: all is explained, or a batch that differs from itself explains nothing."""
    explained_by_weights = facts.window.has_wrong_weights and not facts.weights_first
    return facts.cleared or explained_by_weights or not facts.repeats_itself


def _needs_repeats(facts: Facts) -> bool:
    """Whether the search found what a schedule of the forwards may look like: weights, or samples that interact."""
    unnamed = facts.state is not None and any(change.place == "unnamed" for change in facts.state.blamed)
    return bool(facts.forward.causes) or facts.window.has_wrong_weights or unnamed or facts.backward.place is not None


def _is_explained_by_evaluation_mode(bench: Bench, facts: Facts) -> bool:
    """Whether nothing is left of the difference with layers of torch or of another library in evaluation mode.

    That control compares one forward with K: a schedule of the forwards would still show. The user's own layers may
    follow one in training mode alone, which the control takes away with them.
    """
    is_state_to_blame = facts.state is not None and (facts.state.control is not None or bool(facts.state.blamed))
    if not facts.cleared or facts.window.has_wrong_weights or is_state_to_blame:
        return False
    # The last of several was in evaluation mode beside those before it, and their controls were not to leave nothing.
    controls = [cause.control for cause in facts.forward.causes]
    if not all(run is not None and run.kind is ControlKind.EVALUATION_MODE for run in controls):
        return False
    modules = dict(bench.experiment.named_modules())
    kinds = {type(modules[name]) for run in controls if run is not None for name in run.modules}
    return bool(kinds) and not any(is_users_class(kind, frozenset()) for kind in kinds)


def collect_facts(measurement: Measurement, decision: Decision) -> Facts:
    """Returns what the two strategies showed already, without another pass."""
    experiment, accumulated = measurement.experiment, measurement.accumulated
    draws = accumulated.draws
    counts = [
        max(observation.target_counts, key=lambda c: c[1])
        for observation in accumulated.observed
        if observation.target_counts
    ]
    valid = tuple(float(total) for total, _, _ in counts) if len(counts) == experiment.steps else ()
    ignored = bool(valid) and sum(valid) != sum(count for _, count, _ in counts)
    weighting = experiment.weighting if isinstance(experiment.weighting, str) else EXPLICIT
    return Facts(
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
        ),
        draws=Draws(
            experiment.draws.count,
            draws.dealt,
            dict(draws.unaligned),
            dict(draws.places),
            accumulated.foreign_draws_differ,
            dict(draws.shared),
        ),
        buffers=Buffers(_find_drift(measurement)),
        backward=Backward(hooked=tuple(n for n, p in experiment.parameters.items() if has_hooks(p))),
        identical=_identical_samples(experiment.problem.batch, experiment.batch_size),
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
    unit = measurement.unit
    differences = {row.name: row.difference / row.scale for row in rows if row.difference > 0}
    return {name: far for name, far in differences.items() if buffers_differ(accumulated[name], full[name], unit)}


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


def investigate(measurement: Measurement, decision: Decision, *, diagnose: bool, in_part: bool = False) -> Facts:
    """Returns everything that was measured; questions are asked only after a divergence; one that fails says so.

    A search that has a time limit returns what it found until then.

    Args:
        measurement: Of both strategies.
        decision: What was decided about them.
        diagnose: Whether to look for the cause of a divergence.
        in_part: Whether the batch is the first samples of a larger one.
    """
    facts, limit = collect_facts(measurement, decision), measurement.experiment.limit
    if not diagnose or not facts.compared.divergent or facts.window.steps < 2:
        return facts
    facts = replace(facts, diagnosed=True)
    try:
        with limit.searching(), open_control_runs(measurement, decision, facts.compared.total) as bench:
            return search_causes(replace(bench, in_part=in_part), facts)
    except TimeUp:
        return replace(facts, stopped_after=limit.seconds)
