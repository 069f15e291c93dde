"""What a verification showed, and where it diverged: questions in an explicit order, each with control runs.

The search goes on until nothing is left. It hears of the float64 control, whose micro-batches it would run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from gaverify.causes import again, backward, counts, coupling, operations, state, weights
from gaverify.causes.bench import Bench
from gaverify.causes.confirming import confirm_on_batch
from gaverify.passes.gradients import AfterBackward, PassProbe, PassResult
from gaverify.passes.isolation import ModelState
from gaverify.passes.lifting import has_hooks
from gaverify.passes.nesting import leaves
from gaverify.passes.precision import buffers_differ
from gaverify.passes.task import Task, TimeUp
from gaverify.records.comparison import Compared, Method
from gaverify.records.experiment import ControlKind
from gaverify.records.facts import EXPLICIT, Backward, Buffers, Draws, Facts, Repeatability, Weights
from gaverify.verdict.comparison import measure
from gaverify.verdict.control import in_float64
from gaverify.verdict.judging import Judgement, judge_whole, working_unit
from gaverify.verdict.sketches import Earlier, Sums, keep_sketch


def _ask_draws(bench: Bench, facts: Facts) -> Facts:
    """Holds every random draw at one typical value in both runs, where some could not be dealt out."""
    if not facts.draws.unaligned:
        return facts
    what = "every random draw held constant"
    control = bench.attempt("random draws", lambda: _hold_draws(bench).run(what, kind=ControlKind.DRAWS_HELD))
    if control is None or math.isinf(control.left):
        return facts
    draws = replace(facts.draws, control=control)
    return replace(facts, draws=draws, left=control.left, cleared=control.rounding)


def _choose_bench(bench: Bench, facts: Facts) -> Bench:
    """The bench for the questions after this one: the draws stay held where they had to be."""
    return _hold_draws(bench) if facts.draws.control is not None else bench


def _hold_draws(bench: Bench) -> Bench:
    return replace(bench, record=replace(bench.record, constant=True, unaligned={}), earlier=None, live=bench)


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


def ask_questions(
    task: Task,
    judgement: Judgement,
    facts: Facts,
    listener: ControlListener,
    part_facts: Facts | None = None,
    *,
    in_part: bool = False,
) -> Facts:
    """Returns the facts with what the questions found; a question that could not be asked is noted.

    What a part of the batch showed is confirmed instead, where the float64 control decided and that goes.

    Args:
        task: What was run.
        judgement: With the passes.
        facts: What they showed.
        listener: What was heard of the float64 control.
        part_facts: What the search showed in a part of the batch.
        in_part: Whether this is such a part.
    """
    with ExitStack() as stack:
        state_, control = judgement.state, judgement.control
        if control is not None:
            task, state_ = stack.enter_context(in_float64(task, state_))
        earlier = listener.add_to(keep_sketch(control.full), control.accumulated) if control is not None else None
        facts = replace(facts, left=facts.compared.total)
        bench = Bench(task, state_, judgement.record, control is not None, earlier=earlier, total=facts.left)
        confirmed_facts = (
            confirm_on_batch(bench, facts, part_facts) if part_facts is not None and control is not None else None
        )
        if confirmed_facts is not None and part_facts is not None:
            judgement.part = part_facts.weights.sizes
            return confirmed_facts
        try:
            questions = QUESTIONS if not facts.compared.one_sided else (operations.ask_branch,)
            counted_bench, facts = counts.ask_first(bench, facts)
            before = facts
            for ask in questions:
                if _is_settled(facts):
                    break
                facts = ask(_choose_bench(counted_bench, facts), facts)
            if _needs_repeats(facts):
                difference = bench.attempt("repetitions", lambda: state.differs_from_itself(bench, facts))
                if difference:  # then no control compares what it is meant to compare
                    return replace(before, repeatability=Repeatability(difference, difference), failures=bench.failures)
            facts = again.ask(bench, facts, in_part=in_part)
            facts = weights.ask_place(_choose_bench(bench, facts), state.ask_lines(bench, facts))
        except TimeUp:
            facts = replace(facts, stopped_after=task.limit.seconds)
    return replace(facts, cleared=facts.left <= bench.rounding, failures=bench.failures)


def _is_settled(facts: Facts) -> bool:
    """Whether nothing is left to ask: all is explained, or a batch that differs from itself explains nothing."""
    explained_by_weights = facts.weights.blamed and not facts.weights_first
    return facts.cleared or explained_by_weights or not facts.repeats_itself


def _needs_repeats(facts: Facts) -> bool:
    """Whether the search found what a schedule of the forwards may look like: weights, or samples that interact."""
    unnamed = facts.state is not None and any(change.place == "unnamed" for change in facts.state.blamed)
    return bool(facts.forward.causes) or facts.weights.blamed or unnamed or facts.backward.place is not None


class ControlListener:
    """Watches the state through the micro-batches, and keeps a sketch of the gradient after each of them."""

    def __init__(self) -> None:
        self._watch_and_sums: tuple[PassProbe, Sums] | None = None

    def begin(self, task: Task, state: ModelState) -> tuple[PassProbe, AfterBackward]:
        """Returns what watches the state through the micro-batches, and what sketches."""
        from gaverify.causes.trace.state import StateWatch  # an equivalent verdict does not wait for this import

        watch, sums = self._watch_and_sums = StateWatch(task, state), Sums(task)
        return watch, sums.note

    def forget(self) -> None:
        """Drops what was heard."""
        self._watch_and_sums = None

    def add_to(self, earlier: Earlier, accumulated: PassResult) -> Earlier:
        """Returns the earlier pass with its micro-batches, where they were heard."""
        if self._watch_and_sums is None:
            return earlier
        watch, sums = self._watch_and_sums
        shares = sums.shares(earlier.gradient, accumulated.weights)
        return replace(earlier, watch=watch, shares=shares, losses=accumulated.micro_losses)


def collect_facts(task: Task, judgement: Judgement) -> Facts:
    """Returns what the two strategies showed already, without another pass."""
    accumulated, record = judgement.accumulated, judgement.record
    counts = [
        max(observation.target_counts, key=lambda c: c[1])
        for observation in accumulated.observed
        if observation.target_counts
    ]
    valid = tuple(float(total) for total, _, _ in counts) if len(counts) == task.steps else ()
    ignored = bool(valid) and sum(valid) != sum(count for _, count, _ in counts)
    weighting = task.weighting if isinstance(task.weighting, str) else EXPLICIT
    return Facts(
        steps=task.steps,
        batch_size=task.batch_size,
        compared=Compared(
            tuple(judgement.rows), judgement.method, judgement.control_failure, precision=judgement.precision
        ),
        weights=Weights(accumulated.weights, weighting, task.sizes, accumulated.micro_losses, valid, ignored),
        draws=Draws(
            record.count,
            record.sliced,
            dict(record.unaligned),
            dict(record.places),
            accumulated.foreign_draws_differ,
            dict(record.shared),
        ),
        buffers=Buffers(_drift(task, judgement)),
        backward=Backward(hooked=tuple(n for n, p in task.parameters.items() if has_hooks(p))),
        identical=_identical_samples(task.problem.batch, task.batch_size),
    )


def _drift(task: Task, judgement: Judgement) -> dict[str, float]:
    """The buffers that K micro-batches leave otherwise than the full batch, with their relative difference.

    One with a row per sample (a recurrent state, a cache) holds those of the last batch: there is nothing to compare.
    """
    full, accumulated = judgement.full.buffers, judgement.accumulated.buffers
    shapes = {name: value.shape for name, value in accumulated.items()}
    common = {name: value for name, value in full.items() if shapes.get(name) == value.shape}
    if not common:
        return {}
    unit = working_unit(task, judgement.full, judgement.accumulated)
    rows = measure({name: accumulated[name] for name in common}, common)
    differences = {row.name: row.difference / row.scale for row in rows if row.difference > 0}
    return {name: far for name, far in differences.items() if buffers_differ(accumulated[name], full[name], unit)}


def _identical_samples(batch: Any, batch_size: int) -> bool:
    """Returns whether all samples of the batch are the same, so that no coupling between them could show."""
    compared = False
    for _, leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            return False  # samples of lengths of their own
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.dim() > 0:
            if leaf.shape[0] != batch_size or batch_size < 2:
                return False
            if not bool((leaf == leaf[:1]).all()):
                return False
            compared = True
    return compared


def investigate(
    task: Task,
    judgement: Judgement,
    *,
    diagnose: bool,
    listener: ControlListener | None = None,
    part_facts: Facts | None = None,
    in_part: bool = False,
) -> Facts:
    """Returns everything that was measured; questions are asked only after a divergence; one that fails says so.

    A search that has a time limit returns what it found until then.

    Args:
        task: What was run.
        judgement: What was decided, with its passes.
        diagnose: Whether to look for the cause of a divergence.
        listener: What listened to the float64 control.
        part_facts: What the search showed in a part of the batch, where there was one: it is confirmed on all of it.
        in_part: Whether this is such a part.
    """
    facts = collect_facts(task, judgement)
    if not diagnose or not facts.compared.divergent or task.steps < 2:
        return facts
    facts = replace(facts, diagnosed=True)
    try:
        with task.limit.searching():
            return _search_causes(task, judgement, facts, listener, part_facts, in_part=in_part)
    except TimeUp:
        return replace(facts, stopped_after=task.limit.seconds)


def _search_causes(
    task: Task,
    judgement: Judgement,
    facts: Facts,
    listener: ControlListener | None,
    part_facts: Facts | None,
    *,
    in_part: bool,
) -> Facts:
    """The facts with what the search found, as far as it came in its time."""
    if judgement.method is not Method.FLOAT64_PART or part_facts is None:
        return ask_questions(task, judgement, facts, listener or ControlListener(), part_facts, in_part=in_part)
    from gaverify.causes.confirming import confirm_in_working_precision

    confirmed_facts = confirm_in_working_precision(task, judgement, facts, part_facts)
    if confirmed_facts is not None:
        return confirmed_facts
    judge_whole(task, judgement, listener)
    return investigate(task, judgement, diagnose=True, listener=listener, part_facts=part_facts)
