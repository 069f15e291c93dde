"""Verifies a problem. `verify` takes these steps, in this order:

prepare    `prepare_experiment`: the problem on its device and seeded; every pass starts from the same state
measure    `measure_strategies`: one pass of the full batch, then the K micro-batches, in the user's precision
           `measure_again`: the same in float32 where rounded products (TF32) leave parameters open, and below float32
           where the host is the limit, so that it costs less than a few samples; the rest then happens in float32
decide     `decide`: equivalent is what that precision's rounding explains. Where it leaves a few parameters open,
           or is below float32, two to four samples are run in float64 as well, together and one by one
float64    `examine_first_samples`: a difference that is clearly more than rounding is measured, decided and searched
           on a batch of the first samples, at a fraction of the cost
           `decide_open`: what is still undecided, by both strategies in float64 on all of the batch; where a kernel
           or memory does not allow that, by how far gradients move when each weight moves by one roundoff
search     `_find_causes`: what the first samples showed is confirmed on all of the batch; where nothing was shown,
           or it is not confirmed, all of the batch is searched by control runs, in which a suspect is neutralised
report     `findings_for`: rules turn what was measured into findings; `--trace` runs the micro-batches once more
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gaverify.acceptance import with_excerpts
from gaverify.collective.membership import membership
from gaverify.errors import ProblemError, TimeUp
from gaverify.launched import read_launcher
from gaverify.passes.batching import Loss, Problem, Split
from gaverify.passes.experiment import Experiment
from gaverify.passes.isolation import exact_products
from gaverify.passes.precision import available_devices, resolve_device
from gaverify.preparation import Progress, prepare_experiment, problem_of, problem_of_spec, reporter, settings_of
from gaverify.records.answers import Environment
from gaverify.records.comparison import Comparison
from gaverify.records.outcomes import Method, NotCompared, Outcome, Reference
from gaverify.records.ranks import Engine
from gaverify.records.verdict import Verdict
from gaverify.rules import findings_for
from gaverify.search.confirming import confirm_in_working_precision, confirm_on_batch
from gaverify.search.investigation import (
    FirstSamplesAnswer,
    collect_facts,
    examine_first_samples,
    open_control_runs,
    search_causes,
    watch_passes,
)
from gaverify.thresholds import U32
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.decision import (
    Decision,
    decide,
    decide_by_tolerance,
    decide_open,
    name_float32_runs,
    needs_gradients,
    rounded_products_leave_rows_open,
)
from gaverify.verdict.measurement import Measurement, measure_again, measure_strategies, trace_passes
from gaverify.verdict.settings import Settings, Weighting, run_info

if TYPE_CHECKING:
    from gaverify.collective.flow import Asked
    from gaverify.collective.membership import Member
    from gaverify.spec import Spec


TellEnd = Callable[[str], None]
_Decided = tuple[Measurement, Decision, FirstSamplesAnswer]
"""The measurement, the decision, and the answer of the first samples."""


def verify(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    batch: Any = None,
    steps: int = 4,
    weighting: Weighting = "uniform",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
    split: Split | None = None,
    *,
    batch_size: int | None = None,
    mode: str | None = "auto",
    autocast: str | torch.dtype | None = None,
    strategy: str = "accumulate",
    rtol: float | None = None,
    atol: float | None = None,
    ignore_index: int = -100,
    trace: bool = False,
    lr: float = 0.01,
    diagnose: bool = True,
    time_limit: float | None = None,
    exact: bool = False,
    reference: str | Reference = Reference.FULL,
    name: str | None = None,
    engine: str | Engine = Engine.DDP,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Verifies that accumulating over K micro-batches computes the gradient of the full batch.

    Args:
        model: The model, or a `Problem` that holds model, loss and batch.
        loss: `loss(model, batch)` returns the scalar loss of exactly that (micro-)batch, or an object with `.loss`. A
            criterion of torch stands for that of a batch `(inputs, targets)`; a `training_step` needs no loss.
        batch: The full batch of B samples (see `gaverify.passes.batching` for what it may be), or a loader: its first.
        steps: K, 1 to B.
        weighting: The recipe under test: "uniform" (1/K), "samples" (n_k/N), "tokens" (shares of valid targets),
            "none", K numbers, or a function `f(micro_batch)` or `f(micro_batch, batch)` that returns the loss's factor.
            Under a launcher each loss counts R times that, because the engine averages; under "none" it stays as it is.
        device: "cpu", "cuda", "cuda:1", "mps", "auto"; None: where the model is.
        dtype: "float32", "float64", "bfloat16", "float16" or a torch dtype; None: the model's own.
        seed: Seeds all generators before the full-batch pass.
        split: `split(batch, start, stop)` where a slice of the leading dimension is wrong.
        batch_size: B, where the batch does not tell it.
        mode: "train" and "eval" set all layers, as `model.train()` and `model.eval()` do; "auto" is "train", but layers
            in different modes stay as they are; None: all layers stay as they are.
        autocast: Runs the forward passes under `torch.autocast` in "bfloat16" or "float16".
        strategy: "accumulate", or "summed-loss": one backward over the summed micro-batch losses.
        rtol: With `atol`: judge by `torch.testing.assert_close`'s criterion instead of the arithmetic's own rounding.
        atol: With `rtol`.
        ignore_index: The target value that "tokens" does not count where the loss does not tell.
        trace: Record the state after every micro-batch, and one step of SGD.
        lr: Learning rate for `trace`, of SGD.
        diagnose: Look for the cause of a divergence.
        time_limit: Seconds after which the search for the cause stops; the verdict comes in any case.
        exact: Ask float64 for every parameter, also where the working precision could tell.
        reference: How the full batch is run: "full"; "offload", its activations on the host; "auto", the first of
            these that fits into memory.
        name: How reports call the model.
        engine: "ddp" or "fsdp2": what a plain model is put under where a launcher has started several ranks.
        timeout: Seconds that one rank of a launcher waits for another; None: torch's own limit.
        progress: Called as `progress(description, done, total)` when something begins; `total` is 0 where nobody
            knows it.

    Returns:
        The verdict. Nothing of the model, the generators or torch's global flags is changed afterwards.

    Raises:
        ProblemError: The problem cannot be verified; the message says what is wrong, and where.
    """
    # `settings_of` takes the options by their names.
    settings = settings_of(locals())
    problem = problem_of(model, loss, batch, split, batch_size, name)
    with membership(timeout) as member:
        if member is not None:
            return _verify_together(member, _ask_ranks(problem, settings, engine), progress)
    return _verify_here(problem, settings, progress)


def verify_spec(spec: Spec, progress: Progress | None = None) -> Verdict:
    """Builds the problem of a spec and verifies it: here, by all ranks of a launcher, or by ranks that this starts."""
    verdict = _start_ranks(spec, progress) if spec.ranks is not None else _verify_loaded(spec, progress)
    return replace(verdict, spec=spec.to_dict())


def _verify_loaded(spec: Spec, progress: Progress | None, tell_end: TellEnd | None = None) -> Verdict:
    """Verifies a spec in this process, alone or as one of the ranks that a launcher has started."""
    problem, settings = problem_of_spec(spec), settings_of(vars(spec))
    with membership(spec.timeout, tell_end) as member:
        if member is not None:
            return _verify_together(member, _ask_ranks(problem, settings, spec.engine, fresh=True), progress)
    return _verify_here(problem, settings, progress)


def _start_ranks(spec: Spec, progress: Progress | None) -> Verdict:
    """Verifies a spec on the ranks that it asks for, which are started on this machine."""
    launched = read_launcher()
    if launched is not None:
        raise ProblemError(f"a launcher has started {launched[1]} ranks already: leave `ranks` out")
    if not torch.distributed.is_available():
        raise ProblemError("this torch was built without torch.distributed; ranks cannot be run")
    from gaverify.collective.flow import explain_options
    from gaverify.collective.launching import run_on_ranks

    problem = explain_options(spec)
    if problem:
        raise ProblemError(problem)
    assert spec.ranks is not None
    device = resolve_device(spec.device) or torch.device("cpu")
    # Neither CUDA nor, beside it, autograd runs in a forked process.
    forks = device.type == "cpu" and len(available_devices()) == 1
    return run_on_ranks(partial(_verify_loaded, spec), spec.ranks, progress, forks=forks)


def _ask_ranks(problem: Problem, settings: Settings, engine: str | Engine, *, fresh: bool = False) -> Asked:
    from gaverify.collective.engines import engine_of_word
    from gaverify.collective.flow import Asked

    return Asked(problem, settings, engine_of_word(engine), fresh)


def _verify_together(member: Member, asked: Asked, progress: Progress | None) -> Verdict:
    """Verifies with all ranks of a launcher, each of which returns rank 0's verdict."""
    from gaverify.collective.flow import verify_together

    answer = partial(_make_verdict, asked.settings, time.perf_counter())
    with member.together():
        return verify_together(asked, member, progress, answer)


def _verify_here(problem: Problem, settings: Settings, progress: Progress | None) -> Verdict:
    """Verifies in this process."""
    started = time.perf_counter()
    with ExitStack() as stack:
        experiment = prepare_experiment(stack, problem, settings)
        experiment = replace(experiment, progress=reporter(progress, settings.steps))
        measurement, decision, first_samples = _measure_and_decide(experiment, settings, stack)
        searched_at = time.perf_counter()
        decision, comparison = _find_causes(measurement, decision, first_samples, diagnose=settings.diagnose)
        measurement.seconds["diagnosis"] = time.perf_counter() - searched_at
        return _make_verdict(settings, started, measurement, decision, comparison)


def _measure_and_decide(
    experiment: Experiment, settings: Settings, stack: ExitStack, *, in_float32: bool = True
) -> _Decided:
    """Runs both strategies and decides every parameter: in the user's precision, or in a finer one.

    Args:
        experiment: The experiment to run.
        settings: The options of the call.
        stack: Closed behind the search, which has to run in the arithmetic that decided.
        in_float32: Whether both may run in float32 once more.

    Returns:
        The measurement, the decision, and the answer of the first samples, if they were looked into.
    """
    if settings.rtol is not None and settings.atol is not None:
        # Tolerances are the user's own criterion: nothing is left to decide.
        measurement = measure_strategies(experiment, find_worst=True)
        decision = decide_by_tolerance(measurement, settings.rtol, settings.atol)
        if not settings.trace:
            measurement.free_gradients()
        return measurement, decision, FirstSamplesAnswer(decision)
    # what `trace` shows are the user's own runs
    repeats = in_float32 and not settings.trace
    measurement = measure_strategies(experiment, with_sketch=not settings.exact, repeats=repeats)
    if measurement.decides_in_float32 or (
        in_float32 and not settings.exact and rounded_products_leave_rows_open(measurement)
    ):
        decided = _decide_in_float32(measurement, settings, stack)
        return decided or _measure_and_decide(measurement.experiment, settings, stack, in_float32=False)
    return _decide(measurement, settings, stack)


def _decide(measurement: Measurement, settings: Settings, stack: ExitStack) -> _Decided:
    """Decides what was measured, by float64 where its own precision cannot tell."""
    measured_at = time.perf_counter()
    decision = decide(measurement, exact=settings.exact)
    first_samples = FirstSamplesAnswer(decision)  # not examined yet
    if not settings.trace and not needs_gradients(measurement, decision):
        measurement.free_gradients()
    # More than rounding, so a fault or coarse arithmetic: the first samples in float64 tell at a fraction of the cost.
    if decision.exceeds_rounding and not settings.exact:
        first_samples = examine_first_samples(measurement, decision, searches=settings.diagnose)
        decision = first_samples.decision or decision
    # Float64 on all of the batch decides the parameters still open; a search for the cause watches its micro-batches.
    if decision.needs_float64:
        make_watch = watch_passes if settings.diagnose else None
        decision = decide_open(measurement, decision, exact=settings.exact, make_watch=make_watch)
    if not settings.trace:
        measurement.free_gradients()
    if settings.exact and decision.float64_failure:
        # A kernel has no float64: the answer is what it would have been without `exact`, and says so.
        failure = decision.float64_failure
        experiment = measurement.experiment
        del measurement, decision, first_samples  # their gradients take the memory of the next passes
        measurement, decision, first_samples = _measure_and_decide(experiment, replace(settings, exact=False), stack)
        decision = replace(decision, float64_failure=decision.float64_failure or failure)
        return measurement, decision, first_samples
    measurement.seconds["control"] = time.perf_counter() - measured_at
    return measurement, decision, first_samples


def _decide_in_float32(measurement: Measurement, settings: Settings, stack: ExitStack) -> _Decided | None:
    """Runs both strategies once more in float32 without rounded products, which stays so until the stack closes.

    Args:
        measurement: In the user's precision; its gradients are freed.
        settings: The options of the call.
        stack: As there.

    Returns:
        As `_measure_and_decide`; None where float32 does not fit into memory, or some kernel has none.
    """
    first_runs, seconds = measurement.leave_to_float32(), sum(measurement.seconds.values())
    with ExitStack() as switches:
        try:
            if measurement.unit > U32:
                experiment = switches.enter_context(measurement.experiment.in_precision(torch.float32))
            else:
                switches.enter_context(exact_products())
                # The state from before the switch would put the rounding back after every pass.
                experiment = measurement.experiment.with_current_state()
            repeated = measure_again(first_runs, experiment)
        except Exception as error:
            if is_own_fault(error):
                raise
            return None
        repeated, decision, first_samples = _decide(repeated, settings, switches)
        repeated.seconds["control"] += seconds
        stack.push(switches.pop_all())
    return repeated, name_float32_runs(decision, repeated), first_samples


def _find_causes(
    measurement: Measurement, decision: Decision, first_samples: FirstSamplesAnswer, *, diagnose: bool
) -> tuple[Decision, Comparison]:
    """Looks for the cause of a divergence, and confirms on all of the batch what the first samples showed.

    Returns:
        The decision, by float64 on all of the batch where the first samples were not confirmed; and everything that
        was measured.
    """
    comparison, limit = collect_facts(measurement, decision), measurement.experiment.limit
    if not diagnose or not comparison.compared.divergent or comparison.window.steps < 2:
        return decision, comparison
    comparison = replace(comparison, diagnosed=True)
    try:
        with limit.searching():
            if decision.method is Method.FLOAT64_PART and first_samples.comparison is not None:
                # The cause that the first samples showed, tried on the whole batch in the user's precision.
                confirmed = confirm_in_working_precision(measurement, decision, comparison, first_samples.comparison)
                if confirmed is not None:
                    return decision, confirmed
                # It is not the whole batch's, so that what they decided counts no more: float64 on all of it decides.
                decision = decide_open(measurement, first_samples.open_decision, make_watch=watch_passes)
                comparison = collect_facts(measurement, decision)
                if not comparison.compared.divergent:
                    return decision, comparison
                comparison = replace(comparison, diagnosed=True)
            # Control runs happen in float64 where that decided, else in the user's precision.
            with open_control_runs(measurement, decision, comparison.compared.total) as bench:
                if decision.float64 is not None and first_samples.comparison is not None:
                    confirmed = confirm_on_batch(bench, comparison, first_samples.comparison)
                    if confirmed is not None:
                        return replace(decision, part=first_samples.comparison.window.sizes), confirmed
                return decision, search_causes(bench, comparison)
    except TimeUp:
        # A time limit ends the search, never the verdict: what had been decided by then stands.
        return decision, replace(comparison, stopped_after=limit.seconds)


def _make_verdict(
    settings: Settings, started: float, measurement: Measurement, decision: Decision, comparison: Comparison
) -> Verdict:
    """The answer: what was decided, with the findings that the rules make of the facts."""
    findings = with_excerpts(findings_for(comparison))
    if comparison.undecided:
        decision = decision.leave_open()
    outcome = decision.outcome(findings)
    if outcome is Outcome.EQUIVALENT and comparison.blind:
        outcome = Outcome.INCONCLUSIVE
    parameters = measurement.experiment.parameters
    rows = tuple(  # one without a gradient on either side was measured without knowing its shape
        row._replace(shape=tuple(parameters[row.name].shape)) if row.why is NotCompared.UNUSED else row
        for row in decision.rows
    )
    steps_shown = trace_passes(measurement, settings.lr) if settings.trace else None
    return Verdict(
        outcome=outcome,
        parameters=rows,
        findings=findings,
        run=run_info(measurement, decision, settings),
        method=decision.method,
        resolution=decision.resolution,
        environment=Environment(torch.__version__),
        timings={**measurement.seconds, "total": time.perf_counter() - started},
        trace=steps_shown,
        control_failure=decision.float64_failure,
        ranks=comparison.ranks,
        few_samples=decision.few if decision.method == Method.FEW_SAMPLES else None,
        modules=comparison.forward.modules,
    )


def assert_equivalent(
    model: nn.Module | Problem, loss: Loss | None = None, batch: Any = None, *args: Any, **options: Any
) -> Verdict:
    """Verifies as `verify` does, and raises unless the verdict is equivalent.

    Raises:
        AssertionError: Divergent or inconclusive; the message is the whole report.
    """
    __tracebackhide__ = True  # pytest shows the caller's line and the report, not this function
    verdict = verify(model, loss, batch, *args, **options)
    if verdict.outcome is not Outcome.EQUIVALENT:
        from gaverify.report import render

        error = AssertionError("\n" + render([verdict], "text"))
        error.__dict__["gaverify_verdict"] = verdict  # the pytest plugin shows it in colour
        raise error
    return verdict
