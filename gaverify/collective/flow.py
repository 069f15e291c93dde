"""The verdict of all ranks: the whole batch on every rank against the window as they train it.

    reference   every rank runs the same whole batch. A model that the user's code put under an engine stays under it:
                the mean of R equal gradients is the full batch's. One that gaverify wraps runs it before that, alone
    window      K micro-batches of its own on each rank, reduced as the engine or the user's strategy does

Every number that decides something is one of all ranks (`Experiment.ranks`), so that all ask the same next question.
The cause is looked for where a window diverges: with the same micro-batches, all of them on every rank.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch

from gaverify.collective.facts import facts_of_ranks, weights_of_strategy
from gaverify.collective.membership import is_lost
from gaverify.collective.plain import WithoutEngine
from gaverify.collective.window import Moved, OwnCollectives, Trained, bare, cut_by_clipping
from gaverify.errors import Agreed, ProblemError
from gaverify.passes.batching import micro_batch_sizes
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import Gradients, PassResult
from gaverify.passes.precision import unit_roundoff
from gaverify.passes.wrappers import RankSum, dividing, hooks_left_out
from gaverify.records.comparison import Method, Outcome, relative_total
from gaverify.records.facts import Facts
from gaverify.records.ranks import Engine, rounding_of
from gaverify.search.investigation import collect_facts, investigate
from gaverify.thresholds import CAPPED_UNITS, TOO_SMALL_TO_CLIP, U32, U64
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.comparison import left_between, measure
from gaverify.verdict.control import Float64Run, failure_sentence, judge_by_floor, noise_floor
from gaverify.verdict.criteria import Difference, decide_at_once, record
from gaverify.verdict.decision import Decision, decide_by_float64, measure_and_decide
from gaverify.verdict.measurement import Measurement, measure_strategies

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
        full = None
        if trained.plain is not None and trained.engine is not None:
            experiment, full, without_engine = _run_without_engine(trained)
            experiment = trained.plain.wrap(experiment, trained.engine, without_engine.reach)
            trained = replace(trained, without_engine=without_engine)
        measurement, moved = _measure_window(experiment, trained, full)
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
        one, one_decision = _measure_alone(experiment, trained)
        ranks = facts_of_ranks(trained, measurement, decision, moved, one, unclipped)
        facts = _search_cause(trained, one, one_decision, diagnose)
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


def _run_without_engine(trained: Trained) -> tuple[Experiment, PassResult, WithoutEngine]:
    """Runs the full batch and this rank's micro-batches before the model is put under an engine.

    Returns:
        The plain experiment with the draws of the full batch, that pass, and what the micro-batches showed.

    Raises:
        ProblemError: The loss of the full batch is not finite.
    """
    plain = trained.plain
    assert plain is not None
    with plain.alone() as single:
        single.progress("the whole batch on every rank")
        recorded, full = single.record()
    _check_loss(full)
    own = trained.own(recorded)
    without_engine = plain.run_own(recorded, full, own)
    if without_engine.ambiguous_draws:
        # One process tries both readings of the draws on all micro-batches, and keeps the one that fits.
        with plain.alone() as single:
            measurement = measure_strategies(single)
        recorded, full = measurement.experiment, measurement.full
        without_engine = plain.run_own(recorded, full, own)
    if without_engine.calls.count() and not trained.shared_batch:
        raise ProblemError(
            "the model or the loss calls `torch.distributed` itself, and the ranks have different batches; give every "
            "rank the full batch, and gaverify selects its micro-batches"
        )
    return recorded, full, without_engine


def _check_loss(full: PassResult) -> None:
    if not math.isfinite(full.loss):
        raise ProblemError(
            f"the full batch's loss is {full.loss}, so its gradient proves nothing; check the model and the batch"
        )


def _measure_window(experiment: Experiment, trained: Trained, full: PassResult | None) -> tuple[Measurement, Moved]:
    """The window, and the whole batch on every rank where that has not run yet, measured and not yet decided.

    Returns:
        The measurement, and what the window moved.

    Raises:
        ProblemError: A loss is not finite, or the user's code talks to other ranks itself.
    """
    # the engine has wrapped the model since the experiment was prepared
    member, listener = trained.member, OwnCollectives()
    experiment = replace(experiment, ranks=RankSum(member.count, member.total)).with_current_state()
    if full is None:
        experiment.progress("the whole batch on every rank")
        with trained.reference(experiment) as reference:
            recorded, full = reference.record(listener)
        if listener.found:
            raise ProblemError(
                f"the model or the loss calls `torch.distributed` itself ({listener.found}). The reference runs the "
                "full batch on every rank, and this call would combine copies of it. Use `gaverify run --ranks` "
                "without a launcher"
            )
        _check_loss(full)
        experiment = replace(
            experiment, draws=recorded.draws, reading=recorded.reading, math_kernels=recorded.math_kernels
        )
    full = replace(full, gradients=trained.place(full.gradients))
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
    decision = _decide_window(trained, measurement, unit, exact)
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


def _decide_window(trained: Trained, measurement: Measurement, unit: float, exact: bool) -> Decision:
    """Decides every parameter of a window by its differences.

    Args:
        trained: How the ranks train.
        measurement: What was run.
        unit: Unit roundoff of the coarsest arithmetic that any rank computed in.
        exact: In float64 whatever working precision says.
    """
    rows = decide_at_once(measurement.differences.values(), unit, measurement.plain_terms)
    decision = Decision(tuple(rows), Method.WORKING_PRECISION)
    is_undecided = any(row.outcome is Outcome.INCONCLUSIVE and row.why is None for row in rows)
    if not is_undecided and (unit <= U64 or (unit <= U32 and not exact)):
        return decision
    control = _control(trained, measurement) if unit > U64 else None
    if isinstance(control, Float64Run):
        return decide_by_float64(measurement, decision, control, unit)
    decision = replace(decision, float64_failure=control or "")
    if not is_undecided and unit <= U32:  # `exact` alone asked for float64
        return decision
    full, gradients = measurement.full, trained.gather(measurement.full.gradients)
    with trained.reference(measurement.experiment) as reference:
        floor = noise_floor(reference, replace(full, gradients=gradients), unit)
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
        with trained.reference(measurement.experiment) as reference, reference.in_float64() as exact:
            exact.progress("float64 control")
            full = exact.full_batch()
        full = replace(full, gradients=trained.place(full.gradients))
        with trained.in_float64(measurement.experiment) as exact:
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


def _measure_alone(experiment: Experiment, trained: Trained) -> tuple[Measurement, Decision]:
    """What the micro-batches of all ranks show where each rank runs all of them, as one process would.

    Under DDP every rank has the whole model and needs no other one for it; sharded ones run in step.
    """
    if trained.plain is None:
        alone_on_rank = experiment if trained.engine is Engine.FSDP2 else replace(bare(experiment), ranks=None)
        return measure_and_decide(alone_on_rank.with_current_state(), exact=True, keep_gradients=True)
    with trained.plain.alone(experiment) as single:
        measurement, decision = measure_and_decide(single, exact=True, keep_gradients=True)
        asked = _ask_of_one_process(trained, measurement)
        if asked is not single:
            measurement, decision = measure_and_decide(asked, exact=True, keep_gradients=True)
    return measurement, decision


def _ask_of_one_process(trained: Trained, measurement: Measurement) -> Experiment:
    """Returns what one process runs to compute what the ranks compute together.

    Args:
        trained: How the ranks train.
        measurement: Of the K · R micro-batches in one process.
    """
    experiment, count = measurement.experiment, trained.member.count
    weighting = experiment.weighting
    assert trained.without_engine is not None
    if trained.without_engine.calls.count():
        # The code saw the samples of all ranks at once: K micro-batches that hold what the ranks hold together.
        if isinstance(weighting, list | tuple):
            weighting = [sum(weighting[at : at + count]) for at in range(0, len(weighting), count)]
        sizes = micro_batch_sizes(experiment.batch_size, experiment.steps // count)
        return replace(experiment, sizes=sizes, weighting=weighting)
    micro, full = measurement.accumulated.micro_losses, measurement.full.loss
    # Losses that were added up as they are come nearer to K · R times the full batch's than to it: means, whose mean
    # over the ranks is right; of sums it is a fault of the ranks.
    if weighting == "none" and abs(sum(micro)) > math.sqrt(len(micro)) * abs(full):
        return experiment.with_weights([1.0 / count] * experiment.steps)
    return experiment


def _search_cause(trained: Trained, one: Measurement, decision: Decision, diagnose: bool) -> Facts:
    """Looks for the cause of a divergence in what one process shows.

    Under an engine of the user's all ranks search in step, because sharded ones need each other for every pass. A plain
    model needs none of them: rank 0 searches, and the others have nothing to tell.
    """
    if trained.plain is None:
        return investigate(one, decision, diagnose=diagnose)
    # How long a search takes says nothing about the ranks: the timeout is one of their windows.
    with trained.member.unlimited(), trained.plain.alone(one.experiment):
        if trained.member.rank:
            return collect_facts(one, decision)
        return investigate(one, decision, diagnose=diagnose)
