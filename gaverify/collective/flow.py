"""The verdict of all ranks: the whole batch on every rank against the window as they train it.

Of ranks that a launcher has started:

    reference   every rank runs the same whole batch in one backward under the same engine: the mean of R equal
                gradients is the full batch's, and lies on the ranks as the model does
    window      K micro-batches of its own on each rank, reduced as the engine or the user's strategy does

Every number that decides something is one of all ranks (`Experiment.ranks`), so that all ask the same next
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

from gaverify.children.launching import working_folder
from gaverify.collective.engines import alone
from gaverify.collective.facts import facts_of_ranks, facts_of_reports, weights_of_strategy, with_shares
from gaverify.collective.membership import is_lost
from gaverify.collective.processes import RankReport, Ranks, on_ranks, run_rank, window_of
from gaverify.collective.traffic import gathers_with_gradient
from gaverify.collective.window import Moved, OwnCollectives, Trained, bare, cut_by_clipping
from gaverify.errors import Agreed, ProblemError
from gaverify.passes.batching import micro_batch_sizes
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import Gradients
from gaverify.passes.precision import unit_roundoff
from gaverify.passes.wrappers import RankSum, dividing, hooks_left_out
from gaverify.records.comparison import Method, Outcome, relative_total
from gaverify.records.facts import Facts
from gaverify.records.ranks import Engine, RankFacts, rounding_of
from gaverify.search.investigation import collect_facts, investigate
from gaverify.thresholds import CAPPED_UNITS, TOO_SMALL_TO_CLIP, U32, U64
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.comparison import left_between, measure
from gaverify.verdict.control import Float64Run, failure_sentence, judge_by_floor, noise_floor
from gaverify.verdict.criteria import Difference, decide_at_once, record
from gaverify.verdict.decision import Decision, decide_by_float64, measure_and_decide
from gaverify.verdict.measurement import Measurement

_PATIENCE = 10.0  # seconds, and as long again as the control took: others that fail in it fail by then


def judge_together(
    experiment: Experiment, trained: Trained, *, diagnose: bool, exact: bool
) -> tuple[Measurement, Decision, Facts]:
    """Returns the verdict on the gradient that the ranks end up with, and everything that was measured.

    Args:
        experiment: With the batch of all ranks, cut into K · R micro-batches, and the model as the ranks hold it.
        trained: How they train.
        diagnose: Whether to look for the cause of a divergence.
        exact: In float64 whatever working precision says.

    Raises:
        ProblemError: The problem cannot be verified by ranks.
    """
    member = trained.member
    begun = member.at("before its window")
    with begun, dividing(experiment.modules) as factors:
        trained = replace(trained, factors=factors)
        started = time.perf_counter()
        measurement, moved = _measure_window(experiment, trained)
        experiment = measurement.experiment
        measured_at = time.perf_counter()
        decision = _decide(trained, measurement, exact)
        unclipped = math.nan
        # float16 has no room for losses so small
        if trained.strategy is not None and decision.is_divergent and measurement.dtype is not torch.float16:
            small, unclipped = _measure_unclipped(trained, measurement, moved)
            if small is not None:
                trained, measurement = replace(trained, scale=TOO_SMALL_TO_CLIP), small
                decision = _decide(trained, measurement, exact)
        measurement.seconds = {"passes": measured_at - started, "control": time.perf_counter() - measured_at}
        own_sizes = tuple(experiment.sizes[k] for k in trained.own(experiment))
        own = replace(measurement, experiment=replace(experiment, sizes=own_sizes))
        if not decision.is_divergent:
            facts = replace(collect_facts(own, decision), ranks=facts_of_ranks(trained, measurement, decision, moved))
            return measurement, decision, facts
        one, facts = _search_cause(experiment, trained, diagnose)
        ranks = facts_of_ranks(trained, measurement, decision, moved, one, unclipped)
        if diagnose and ranks.counted is not None and not ranks.at_fault:
            weights = weights_of_strategy(trained, measurement, facts.window, ranks.counted)
            facts = replace(facts, window=weights)
    if not facts.compared.divergent:
        rows = replace(facts.compared, rows=decision.rows, method=decision.method)
        facts = replace(facts, compared=rows, diagnosed=diagnose)
    if trained.strategy is not None and ranks.is_rounding(ranks.weights_control):
        # the loop's own losses need what the ranks count and no more: it does not weigh micro-batches as one process
        facts = replace(facts, window=replace(facts.window, fit=None, remedy=None, failure="", counts=()))
    return measurement, decision, replace(facts, ranks=ranks)


def _measure_window(experiment: Experiment, trained: Trained) -> tuple[Measurement, Moved]:
    """The whole batch on every rank and the window, measured and not yet decided; what the window moved.

    Raises:
        ProblemError: A loss is not finite, or the user's code talks to other ranks itself.
    """
    # the engine has wrapped the model since the experiment was prepared
    member, listener = trained.member, OwnCollectives()
    experiment = replace(experiment, ranks=RankSum(member.count, member.total)).with_current_state()
    experiment.progress("the whole batch on every rank")
    recorded, full = trained.whole(experiment).record(listener)
    experiment = replace(experiment, draws=recorded.draws, reading=recorded.reading, math_kernels=recorded.math_kernels)
    if listener.found:
        raise ProblemError(
            f"the model or the loss calls `torch.distributed` itself ({listener.found}): every rank runs the whole "
            "batch for the reference, of which such a call would see as many copies; `gaverify run --ranks`, "
            "without a launcher, verifies it"
        )
    if not math.isfinite(full.loss):
        raise ProblemError(f"the loss of the full batch is {full.loss}; a gradient of it proves nothing")
    experiment.progress(f"the window of {trained.member.count} ranks")
    window, moved = trained.window(experiment, full)
    window.loss = float(trained.member.total(torch.tensor([window.loss], dtype=torch.float64, device="cpu")))
    return Measurement(experiment, full, window, _measure_by_name(experiment, window.gradients, full.gradients)), moved


def _measure_by_name(experiment: Experiment, gradients: Gradients, reference: Gradients) -> dict[str, Difference]:
    return {row.name: row for row in measure(gradients, reference, experiment.ranks)}


def _decide(trained: Trained, measurement: Measurement, exact: bool) -> Decision:
    """Decides every parameter by the passes of a window."""
    # each rank has seen its own micro-batches alone: what decides is the coarsest that any has seen
    unit = max(trained.member.everyones("unit", measurement.unit))
    decision = decide_window(measurement, unit, exact, lambda: _control(trained, measurement))
    if decision.float64 is not None and trained.has_own_hooks(measurement.experiment):
        return _decide_hooks(trained, measurement, decision)
    return decision


def _measure_unclipped(trained: Trained, measurement: Measurement, moved: Moved) -> tuple[Measurement | None, float]:
    """What a window shows whose losses are too small to be clipped.

    Returns:
        The same measurement of that, where it ends as this one but for clipping, by which a loop is not judged; None
        where it does not. And what it leaves of the difference, where something is clipped before that; else NaN.
    """
    window, full, ranks = measurement.accumulated, measurement.full, measurement.experiment.ranks
    unclipped, _ = replace(trained, scale=TOO_SMALL_TO_CLIP).window(measurement.experiment, full)
    rounding = rounding_of(measurement.unit)
    if left_between(unclipped.gradients, window.gradients, ranks) <= rounding:
        return None, math.nan
    early = any(trained.member.everyones("clipped", moved.clipped_early(window.gradients)))
    if early or cut_by_clipping(unclipped.gradients, window.gradients, ranks) > rounding:
        return None, left_between(unclipped.gradients, full.gradients, ranks)
    differences = _measure_by_name(measurement.experiment, unclipped.gradients, full.gradients)
    return Measurement(measurement.experiment, full, unclipped, differences), math.nan


def decide_window(
    measurement: Measurement, unit: float, exact: bool, run_control: Callable[[], Float64Run | str | None]
) -> Decision:
    """Decides every parameter of a window of ranks by its differences.

    Args:
        measurement: What was run.
        unit: Unit roundoff of the coarsest arithmetic that any rank computed in.
        exact: In float64 whatever working precision says.
        run_control: Runs full batch and window in float64; or returns why that was impossible.
    """
    rows = decide_at_once(measurement.differences.values(), unit, measurement.plain_terms)
    decision = Decision(tuple(rows), Method.WORKING_PRECISION)
    is_undecided = any(row.outcome is Outcome.INCONCLUSIVE and row.why is None for row in rows)
    if not is_undecided and (unit <= U64 or (unit <= U32 and not exact)):
        return decision
    control = run_control() if unit > U64 else None
    with (
        nullcontext() if measurement.experiment.ranks else alone()
    ):  # `alone` where this process stands beside the ranks
        if isinstance(control, Float64Run):
            return decide_by_float64(measurement, decision, control, unit)
        decision = replace(decision, float64_failure=control or "")
        if not is_undecided and unit <= U32:  # `exact` alone asked for float64
            return decision
        floor = noise_floor(measurement.experiment, measurement.full, unit)
    rows = judge_by_floor(measurement.differences, floor, measurement.plain_terms, unit)
    return replace(decision, rows=tuple(rows), method=Method.NOISE_FLOOR)


def _decide_hooks(trained: Trained, measurement: Measurement, decision: Decision) -> Decision:
    """Decides by a control without the user's communication hooks what these change by more than 16 bits round.

    The float64 control runs without them, for one that compresses rounds in any precision. The same window in the same
    arithmetic tells their share exactly, also below float32, where right runs are percents apart.
    """
    window = measurement.accumulated
    with hooks_left_out(measurement.experiment.modules):
        without, _ = trained.window(measurement.experiment, measurement.full)
    rows = measure(window.gradients, without.gradients, measurement.experiment.ranks)
    allowed = CAPPED_UNITS * unit_roundoff(torch.bfloat16)
    if relative_total((row.difference, row.reference) for row in rows if row.why is None) <= allowed:
        return decision
    decided_rows = tuple(
        record(row, Outcome.DIVERGENT, Method.WORKING_PRECISION, allowed * row.reference, row.difference)
        if row.why is None and changed.difference > allowed * changed.reference
        else decided
        for row, changed, decided in zip(measurement.differences.values(), rows, decision.rows, strict=True)
    )
    return replace(decision, rows=decided_rows)


def _control(trained: Trained, measurement: Measurement) -> Float64Run | str:
    """Runs both passes in float64, on every rank; on all of them returns why one could not, where one could not.

    Where one could not alone, such as for its memory, the others wait for it in a collective that no word ends.
    """
    failure, control, begun = "", None, time.monotonic()
    try:
        with measurement.experiment.in_float64() as exact:
            exact.progress("float64 control")
            full = trained.whole(exact).full_batch()
            window, _ = trained.window(exact, full)
        control = Float64Run(_measure_by_name(exact, window.gradients, full.gradients), full, window)
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
        return str(failures[0])
    return control


def _search_cause(experiment: Experiment, trained: Trained, diagnose: bool) -> tuple[Measurement, Facts]:
    """What the micro-batches of all ranks show where each rank runs all of them, as one process would.

    Under DDP every rank has the whole model and needs no other one for it; sharded ones run in step.
    """
    alone_on_rank = experiment if trained.engine is Engine.FSDP2 else replace(bare(experiment), ranks=None)
    one, decision = measure_and_decide(alone_on_rank.with_current_state(), exact=True, keep_gradients=True)
    return one, investigate(one, decision, diagnose=diagnose)


_Ran = tuple[list[RankReport], Gradients]


def judge_on_ranks(
    experiment: Experiment, ranks: Ranks, *, diagnose: bool, exact: bool = False
) -> tuple[Measurement, Decision, Facts]:
    """Returns the verdict on the ranks' gradient, and everything that was measured.

    The diagnosis runs in one process, where the ranks diverge: on K · R micro-batches, or, where the code calls
    `torch.distributed` itself on the ranks (in a group of one it may not) and so sees the samples of all at once, on K
    micro-batches that hold what the ranks hold together.

    Args:
        experiment: Cut into K · R micro-batches.
        ranks: What to run.
        diagnose: Whether to look for the cause of a divergence.
        exact: As `verify` takes it.

    Raises:
        ProblemError: The batch is too small for the ranks, a rank failed, or the problem cannot be verified.
    """
    least = 2 * ranks.count
    if experiment.batch_size < least:
        raise ProblemError(
            f"{ranks.count} ranks need a batch of at least {least} samples, it has {experiment.batch_size}"
        )
    with alone():
        measurement, decision = measure_and_decide(experiment, keep_gradients=True, exact=exact)
    begun = time.perf_counter()
    experiment = measurement.experiment
    experiment.progress(f"{ranks.count} ranks under {ranks.engine.value}")
    on_each = replace(measurement, experiment=replace(experiment, averaged_over=ranks.count))
    ran = _window_run(on_each, ranks)
    took = time.perf_counter() - begun
    asked = _of_one_process(measurement, ranks, talked=any(report.calls.count() for report in ran[0]))
    one, one_decision = measurement, decision
    if asked is not experiment:
        with alone():
            one, one_decision = measure_and_decide(asked, keep_gradients=True, exact=exact)
    begun = time.perf_counter()
    confirmed, rank_facts = _confirm_on_ranks(on_each, decision, ran, one, ranks, exact)
    took += time.perf_counter() - begun
    with alone():  # ranks that all agree with the full batch leave nothing to look for
        agree = all(row.outcome is Outcome.EQUIVALENT for row in confirmed.rows)
        facts = investigate(one, one_decision, diagnose=diagnose and not agree)
    measurement.seconds["ranks"] = took
    if not rank_facts.divergent:
        facts = replace(facts, compared=replace(facts.compared, rows=confirmed.rows, method=confirmed.method))
    return measurement, confirmed, replace(facts, ranks=rank_facts)


def _confirm_on_ranks(
    measurement: Measurement, decision: Decision, ran: _Ran, one: Measurement, ranks: Ranks, exact: bool
) -> tuple[Decision, RankFacts]:
    """Decides every parameter of the ranks' gradient as one process does, and runs the controls that it calls for.

    Args:
        measurement: Of the problem in this process, cut into K · R micro-batches, with its gradients.
        decision: What one process decided on them.
        ran: What the ranks did with them.
        one: What one process computes of what the ranks compute together, with its gradients: `measurement`, or that of
            K micro-batches where the code calls `torch.distributed` itself and sees the samples of all ranks.
        ranks: What to run.
        exact: In float64 whatever working precision says.

    Returns:
        The decision with the rows of the ranks' gradient, and what was measured on the way.

    Raises:
        ProblemError: A rank raised, died, or did not end in time.
    """
    together, (reports, gradients) = one.accumulated.gradients, ran
    unit = measurement.unit
    of_ranks = replace(
        measurement, differences=_measure_by_name(measurement.experiment, gradients, measurement.full.gradients)
    )
    decided = decide_window(of_ranks, unit, exact, lambda: _in_float64(of_ranks, ranks))
    decided = replace(
        decision,
        rows=decided.rows,
        method=decided.method,
        float64=decided.float64 or decision.float64,
        float64_failure=decided.float64_failure or decision.float64_failure,
    )
    facts = facts_of_reports(decided.rows, ranks.engine, reports, gradients, together, unit)

    def difference_left(**differing: Any) -> float:
        _, repaired = _window_run(measurement, ranks, **differing)
        return left_between(repaired, together)

    if facts.at_fault and facts.gathers:
        facts = replace(facts, gather_control=difference_left(around=gathers_with_gradient))
    if facts.at_fault:
        facts = with_shares(facts, lambda shares: difference_left(shares=shares))
    return decided, facts


def _window_run(measurement: Measurement, ranks: Ranks, **differing: Any) -> _Ran:
    """Runs every micro-batch on its rank; returns what they tell, and the gradient they end up with.

    Args:
        measurement: Cut into K · R micro-batches, with the full-batch pass.
        ranks: What to run.
        differing: Fields of the `Window` that are not those of the first one.

    Raises:
        ProblemError: A rank raised, died, or did not end in time.
    """
    experiment = measurement.experiment
    with working_folder("gaverify-ranks-") as folder:
        window = replace(window_of(experiment, measurement.full, ranks, folder), **differing)
        reports = on_ranks(run_rank, window)
        return reports, torch.load(window.gradients, map_location=experiment.device, weights_only=False)


def _in_float64(measurement: Measurement, ranks: Ranks) -> Float64Run | str:
    """Runs the ranks in float64, against the full batch of a pass for this purpose; or returns why it could not."""
    try:
        with measurement.experiment.in_float64() as exact:
            with alone():
                full = exact.full_batch()
            _, gradients = _window_run(Measurement(exact, full, full, {}), ranks, lifted=True)
            return Float64Run(_measure_by_name(exact, gradients, full.gradients), full, full)
    except Exception as error:
        if is_own_fault(error):
            raise
        return failure_sentence(error)


def _of_one_process(measurement: Measurement, ranks: Ranks, *, talked: bool) -> Experiment:
    """Returns what one process runs to compute what the ranks compute together.

    Args:
        measurement: Of the problem in this process, cut into K · R micro-batches.
        ranks: What was run.
        talked: Whether the code called `torch.distributed` itself on the ranks, and so saw the samples of all at once.
    """
    experiment = measurement.experiment
    count, weighting = ranks.count, experiment.weighting
    if talked:
        if isinstance(weighting, list | tuple):
            weighting = [sum(weighting[at : at + count]) for at in range(0, len(weighting), count)]
        sizes = micro_batch_sizes(experiment.batch_size, experiment.steps // count)
        return replace(experiment, sizes=sizes, weighting=weighting)
    micro, full = measurement.accumulated.micro_losses, measurement.full.loss
    # losses that were added up as they are come nearer to K · R times the full batch's than to it: means, whose mean
    # over the ranks is right; of sums it is a fault of the ranks
    if weighting == "none" and abs(sum(micro)) > math.sqrt(len(micro)) * abs(full):
        return replace(experiment, averaged_over=count)
    return experiment
