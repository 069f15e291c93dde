"""The verdict of all ranks: the whole batch on every rank against the window as they train it.

Of ranks that a launcher has started:

    reference   every rank runs the same whole batch in one backward under the same engine: the mean of R equal
                gradients is the full batch's, and lies on the ranks as the model does
    window      K micro-batches of its own on each rank, reduced as the engine or the user's strategy does

Every number that decides something is one of all ranks (`passes.wrappers.summed_over`), so that all ask the same next
question. The cause is looked for where a window diverges: with the same micro-batches, all of them on every rank.
Local ranks stand beside a process that has the whole batch: that judges and searches, and they confirm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from gaverify.causes.investigation import collect_facts, investigate
from gaverify.children.launching import working_folder
from gaverify.collective.engines import alone
from gaverify.collective.facts import facts_of_ranks, facts_of_reports, weights_of_strategy, with_shares
from gaverify.collective.membership import is_lost
from gaverify.collective.processes import RankReport, Ranks, on_ranks, run_rank, window_of
from gaverify.collective.traffic import gathers_with_gradient
from gaverify.collective.window import Moved, OwnCollectives, Trained, bare, cut_by_clipping
from gaverify.errors import Agreed, ProblemError
from gaverify.passes.batching import micro_batch_sizes
from gaverify.passes.gradients import Gradients, PassResult, full_batch_gradients
from gaverify.passes.isolation import ModelState
from gaverify.passes.precision import unit_roundoff
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.task import Task
from gaverify.passes.wrappers import dividing, hooks_left_out, over_ranks, summed_over
from gaverify.records.comparison import Method, Outcome, relative_total
from gaverify.records.facts import Facts
from gaverify.records.ranks import Engine, RankFacts, rounding_of
from gaverify.thresholds import CAPPED_UNITS, TOO_SMALL_TO_CLIP, U32, U64
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.comparison import left_between, measure
from gaverify.verdict.control import (
    Control,
    failure_sentence,
    in_float64,
    judge_by_floor,
    lowest_precision,
    noise_floor,
)
from gaverify.verdict.criteria import decide_at_once, record
from gaverify.verdict.judging import Judgement, decide_by_control, judge, working_unit

_PATIENCE = 10.0  # seconds, and as long again as the control took: others that fail in it fail by then


def judge_together(task: Task, trained: Trained, *, diagnose: bool, exact: bool) -> tuple[Judgement, Facts]:
    """Returns the verdict on the gradient that the ranks end up with, and everything that was measured.

    Args:
        task: With the batch of all ranks, cut into K · R micro-batches, and the model as the ranks hold it.
        trained: How they train.
        diagnose: Whether to look for the cause of a divergence.
        exact: In float64 whatever working precision says.

    Raises:
        ProblemError: The problem cannot be verified by ranks.
    """
    member = trained.member
    begun = member.at("before its window")
    with begun, summed_over(member.count, member.total), dividing(task.modules) as factors:
        trained = replace(trained, factors=factors)
        started = time.perf_counter()
        judgement, moved = _passes(task, trained)
        passed = time.perf_counter()
        _decide(task, trained, judgement, exact)
        unclipped = math.nan
        # float16 has no room for losses so small
        if trained.strategy is not None and judgement.is_divergent and judgement.dtype is not torch.float16:
            small, unclipped = _judge_unclipped(task, trained, judgement, moved)
            if small is not None:
                trained, judgement = replace(trained, scale=TOO_SMALL_TO_CLIP), small
                _decide(task, trained, judgement, exact)
        judgement.timings = {"passes": passed - started, "control": time.perf_counter() - passed}
        divergent = judgement.is_divergent
        rank_task = replace(task, sizes=tuple(task.sizes[k] for k in trained.own(task)))
        if not divergent:
            return judgement, replace(
                collect_facts(rank_task, judgement), ranks=facts_of_ranks(task, trained, judgement, moved)
            )
        one, facts = _search_cause(task, trained, diagnose)
        ranks = facts_of_ranks(task, trained, judgement, moved, one, unclipped)
        if diagnose and ranks.counted is not None and not ranks.at_fault:
            weights = weights_of_strategy(task, trained, judgement, facts.weights, ranks.counted)
            facts = replace(facts, weights=weights)
    if not facts.compared.divergent:
        rows = replace(facts.compared, rows=tuple(judgement.rows), method=judgement.method)
        facts = replace(facts, compared=rows, diagnosed=diagnose)
    if trained.strategy is not None and ranks.is_rounding(ranks.weights_control):
        # the loop's own losses need what the ranks count and no more: it does not weigh micro-batches as one process
        facts = replace(facts, weights=replace(facts.weights, fit=None, remedy=None, failure="", counts=()))
    return judgement, replace(facts, ranks=ranks)


def _passes(task: Task, trained: Trained) -> tuple[Judgement, Moved]:
    """The whole batch on every rank and the window, measured and not yet decided; what the window moved.

    Raises:
        ProblemError: A loss is not finite, or the user's code talks to other ranks itself.
    """
    state, listener = ModelState(task.modules, (task.problem.loss,)), OwnCollectives()
    task.progress("the whole batch on every rank")
    full, record = full_batch_gradients(trained.whole(task), state, probe=listener)
    if record.fused and not task.math_kernels:
        task.math_kernels = True
        full, record = full_batch_gradients(trained.whole(task), state, probe=listener)
    if listener.found:
        raise ProblemError(
            f"the model or the loss calls `torch.distributed` itself ({listener.found}): every rank runs the whole "
            "batch for the reference, of which such a call would see as many copies; `gaverify run --ranks`, "
            "without a launcher, verifies it"
        )
    if not math.isfinite(full.loss):
        raise ProblemError(f"the loss of the full batch is {full.loss}; a gradient of it proves nothing")
    task.progress(f"the window of {trained.member.count} ranks")
    window, moved = trained.window(task, state, record, full)
    window.loss = float(trained.member.total(torch.tensor([window.loss], dtype=torch.float64, device="cpu")))
    working = {row.name: row for row in measure(window.gradients, full.gradients)}
    precision, method = lowest_precision(task), Method.WORKING_PRECISION
    return Judgement([], method, full, window, record, state, precision, working, {}, {}), moved


def _decide(task: Task, trained: Trained, judgement: Judgement, exact: bool) -> None:
    """Decides every parameter by the passes of a judgement."""
    # each rank has seen its own micro-batches alone: what decides is the coarsest that any has seen
    unit = max(trained.member.everyones("unit", working_unit(task, judgement.full, judgement.accumulated)))
    decide_window(task, judgement, unit, exact, lambda: _control(task, trained, judgement))
    if judgement.control is not None and trained.has_own_hooks(task):
        _decide_hooks(task, trained, judgement)


def _judge_unclipped(
    task: Task, trained: Trained, judgement: Judgement, moved: Moved
) -> tuple[Judgement | None, float]:
    """What a window shows whose losses are too small to be clipped.

    Returns:
        The same judgement of that, where it ends as this one but for clipping, by which a loop is not judged; None
        where it does not. And what it leaves of the difference, where something is clipped before that; else NaN.
    """
    window, small = judgement.accumulated, replace(trained, scale=TOO_SMALL_TO_CLIP)
    unclipped, _ = small.window(task, judgement.state, judgement.record, judgement.full)
    rounding = rounding_of(working_unit(task, judgement.full, window))
    if left_between(unclipped.gradients, window.gradients) <= rounding:
        return None, math.nan
    early = any(trained.member.everyones("clipped", moved.clipped_early(window.gradients)))
    if early or cut_by_clipping(unclipped.gradients, window.gradients) > rounding:
        return None, left_between(unclipped.gradients, judgement.full.gradients)
    working = {row.name: row for row in measure(unclipped.gradients, judgement.full.gradients)}
    return replace(judgement, accumulated=unclipped, working=working, control=None, control_failure=""), math.nan


def decide_window(
    task: Task, judgement: Judgement, unit: float, exact: bool, controlled: Callable[[], Control | None]
) -> None:
    """Decides every parameter of a window of ranks by its differences in `working`.

    Args:
        task: What was run.
        judgement: Its rows and method are replaced.
        unit: Unit roundoff of the coarsest arithmetic that any rank computed in.
        exact: In float64 whatever working precision says.
        controlled: Runs full batch and window in float64; None where that was impossible.
    """
    judgement.rows = decide_at_once(judgement.working.values(), unit, judgement.scales)
    is_undecided = any(row.outcome is Outcome.INCONCLUSIVE and row.why is None for row in judgement.rows)
    if not is_undecided and (unit <= U64 or (unit <= U32 and not exact)):
        return
    control = controlled() if unit > U64 else None
    with nullcontext() if over_ranks() else alone():  # `alone` where this process stands beside the ranks
        if control is not None:
            decide_by_control(task, judgement, control, unit)
            return
        if not is_undecided and unit <= U32:  # `exact` alone asked for float64
            return
        floor = noise_floor(task, judgement.state, judgement.record, judgement.full, unit)
    judgement.rows = judge_by_floor(judgement.working, floor, judgement.scales, unit)
    judgement.method = Method.NOISE_FLOOR


def _decide_hooks(task: Task, trained: Trained, judgement: Judgement) -> None:
    """Decides by a control without the user's communication hooks what these change by more than 16 bits round.

    The float64 control runs without them, for one that compresses rounds in any precision. The same window in the same
    arithmetic tells their share exactly, also below float32, where right runs are percents apart.
    """
    window = judgement.accumulated
    with hooks_left_out(task.modules):
        without, _ = trained.window(task, judgement.state, judgement.record, judgement.full)
    rows = measure(window.gradients, without.gradients)
    allowed = CAPPED_UNITS * unit_roundoff(torch.bfloat16)
    if relative_total((row.difference, row.reference) for row in rows if row.why is None) <= allowed:
        return
    judgement.rows = [
        record(row, Outcome.DIVERGENT, Method.WORKING_PRECISION, allowed * row.reference, row.difference)
        if row.why is None and changed.difference > allowed * changed.reference
        else decided
        for row, changed, decided in zip(judgement.working.values(), rows, judgement.rows, strict=True)
    ]


def _control(task: Task, trained: Trained, judgement: Judgement) -> Control | None:
    """Runs both passes in float64, on every rank; None on all where one could not.

    Where one could not alone, such as for its memory, the others wait for it in a collective that no word ends.
    """
    failure, control, begun = "", None, time.monotonic()
    try:
        with in_float64(task, judgement.state) as (lifted, state):
            task.progress("float64 control")
            full, _ = full_batch_gradients(trained.whole(lifted), state, judgement.record, lift=True)
            window, _ = trained.window(lifted, state, judgement.record, full, lift=True)
            rows = {row.name: row for row in measure(window.gradients, full.gradients)}
        control = Control(rows, full, window)
    except Agreed:
        raise
    except Exception as error:
        if is_own_fault(error) or is_lost(error):
            raise
        failure = failure_sentence(error)
    within = 2 * (time.monotonic() - begun) + _PATIENCE if failure else None
    own_failure = f"the float64 control failed on this rank alone: {failure}" if failure else ""
    failures = [said for said in trained.member.everyones("control", failure, within, own_failure) if said]
    if failures or control is None:
        judgement.control_failure = failures[0]
        return None
    return control


def _search_cause(task: Task, trained: Trained, diagnose: bool) -> tuple[Judgement, Facts]:
    """What the micro-batches of all ranks show where each rank runs all of them, as one process would.

    Under DDP every rank has the whole model and needs no other one for it; sharded ones run in step.
    """
    sharded = trained.engine is Engine.FSDP2
    with nullcontext() if sharded else summed_over(1, lambda numbers: numbers):
        rank_task = task if sharded else bare(task)
        one = judge(rank_task, rtol=None, atol=None, keep_gradients=True, exact=True)
        return one, investigate(rank_task, one, diagnose=diagnose)


_Ran = tuple[list[RankReport], Gradients]


def judge_on_ranks(task: Task, ranks: Ranks, *, diagnose: bool, exact: bool = False) -> tuple[Judgement, Facts]:
    """Returns the verdict on the ranks' gradient, and everything that was measured.

    The diagnosis runs in one process, where the ranks diverge: on K · R micro-batches, or, where the code calls
    `torch.distributed` itself on the ranks (in a group of one it may not) and so sees the samples of all at once, on K
    micro-batches that hold what the ranks hold together.

    Args:
        task: Cut into K · R micro-batches.
        ranks: What to run.
        diagnose: Whether to look for the cause of a divergence.
        exact: As `verify` takes it.

    Raises:
        ProblemError: The batch is too small for the ranks, a rank failed, or the problem cannot be verified.
    """
    least = 2 * ranks.count
    if task.batch_size < least:
        raise ProblemError(f"{ranks.count} ranks need a batch of at least {least} samples, it has {task.batch_size}")

    on_each = replace(task, averaged_over=ranks.count)
    with alone():
        judgement = judge(task, rtol=None, atol=None, keep_gradients=True, exact=exact)
    begun = time.perf_counter()
    task.progress(f"{ranks.count} ranks under {ranks.engine.value}")
    ran = _window_run(on_each, judgement.record, judgement.full, ranks)
    took = time.perf_counter() - begun
    asked = _of_one_process(task, judgement, ranks, talked=any(report.calls.count() for report in ran[0]))
    one_process = judgement
    if asked is not task:
        with alone():
            one_process = judge(asked, rtol=None, atol=None, keep_gradients=True, exact=exact)
    begun = time.perf_counter()
    confirmed, rank_facts = _confirm_on_ranks(on_each, judgement, ran, one_process, ranks, exact)
    took += time.perf_counter() - begun
    with alone():  # ranks that all agree with the full batch leave nothing to look for
        agree = all(row.outcome is Outcome.EQUIVALENT for row in confirmed.rows)
        facts = investigate(asked, one_process, diagnose=diagnose and not agree)
    confirmed.timings = {**judgement.timings, "ranks": took}
    if not rank_facts.divergent:
        facts = replace(facts, compared=replace(facts.compared, rows=tuple(confirmed.rows), method=confirmed.method))
    return confirmed, replace(facts, ranks=rank_facts)


def _confirm_on_ranks(
    task: Task, judgement: Judgement, ran: _Ran, one: Judgement, ranks: Ranks, exact: bool
) -> tuple[Judgement, RankFacts]:
    """Decides every parameter of the ranks' gradient as one process does, and runs the controls that it calls for.

    Args:
        task: The problem in this process, cut into K · R micro-batches.
        judgement: The verdict of one process on them, with its gradients.
        ran: What the ranks did with them.
        one: The verdict of one process on what the ranks compute together, with its gradients: `judgement`, or that of
            K micro-batches where the code calls `torch.distributed` itself and sees the samples of all ranks.
        ranks: What to run.
        exact: In float64 whatever working precision says.

    Returns:
        The judgement with the rows of the ranks' gradient, and what was measured on the way.

    Raises:
        ProblemError: A rank raised, died, or did not end in time.
    """
    together, (reports, gradients) = one.accumulated.gradients, ran
    unit = working_unit(task, judgement.full, judgement.accumulated)
    decided = replace(judgement, method=Method.WORKING_PRECISION)
    decided.working = {row.name: row for row in measure(gradients, judgement.full.gradients)}
    decide_window(task, decided, unit, exact, lambda: _in_float64(task, decided, ranks))
    facts = facts_of_reports(decided.rows, ranks.engine, reports, gradients, together, unit)

    def difference_left(**differing: Any) -> float:
        _, repaired = _window_run(task, judgement.record, judgement.full, ranks, **differing)
        return left_between(repaired, together)

    if facts.at_fault and facts.gathers:
        facts = replace(facts, gather_control=difference_left(around=gathers_with_gradient))
    if facts.at_fault:
        facts = with_shares(facts, lambda shares: difference_left(shares=shares))
    return decided, facts


def _window_run(task: Task, record: DrawRecord, full: PassResult, ranks: Ranks, **differing: Any) -> _Ran:
    """Runs every micro-batch of a task on its rank; returns what they tell, and the gradient they end up with.

    Args:
        task: Cut into K · R micro-batches.
        record: What the full batch drew.
        full: What it showed.
        ranks: What to run.
        differing: Fields of the `Window` that are not those of the first one.

    Raises:
        ProblemError: A rank raised, died, or did not end in time.
    """
    with working_folder("gaverify-ranks-") as folder:
        window = replace(window_of(task, record, full, ranks, folder), **differing)
        reports = on_ranks(run_rank, window)
        return reports, torch.load(window.gradients, map_location=task.device, weights_only=False)


def _in_float64(task: Task, judgement: Judgement, ranks: Ranks) -> Control | None:
    """Runs the ranks in float64, against the full batch of a pass for this purpose; None where that is impossible."""
    try:
        with in_float64(task, judgement.state) as (lifted, state):
            with alone():
                full, _ = full_batch_gradients(lifted, state, judgement.record, lift=True)
            _, gradients = _window_run(lifted, judgement.record, full, ranks, lifted=True)
            return Control({row.name: row for row in measure(gradients, full.gradients)}, full, full)
    except Exception as error:
        if is_own_fault(error):
            raise
        judgement.control_failure = failure_sentence(error)
        return None


def _of_one_process(task: Task, judgement: Judgement, ranks: Ranks, *, talked: bool) -> Task:
    """Returns what one process runs to compute what the ranks compute together.

    Args:
        task: The problem in this process, cut into K · R micro-batches.
        judgement: The verdict of one process on them.
        ranks: What was run.
        talked: Whether the code called `torch.distributed` itself on the ranks, and so saw the samples of all at once.
    """
    count, weighting = ranks.count, task.weighting
    if talked:
        if isinstance(weighting, list | tuple):
            weighting = [sum(weighting[at : at + count]) for at in range(0, len(weighting), count)]
        return replace(task, sizes=micro_batch_sizes(task.batch_size, task.steps // count), weighting=weighting)
    micro, full = judgement.accumulated.micro_losses, judgement.full.loss
    # losses that were added up as they are come nearer to K · R times the full batch's than to it: means, whose mean
    # over the ranks is right; of sums it is a fault of the ranks
    if weighting == "none" and abs(sum(micro)) > math.sqrt(len(micro)) * abs(full):
        return replace(task, averaged_over=count)
    return task
