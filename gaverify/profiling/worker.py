"""One row, measured in a process of its own, which says what each finished stage has found.

Everything that the user's code prints goes to stderr. A stage that is done is sent at once, so that what was measured
survives when the process is killed for its memory later.
"""

from __future__ import annotations

import os
import platform
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from gaverify.children.launching import open_pipes
from gaverify.profiling.launching import RowEnd, RowJob
from gaverify.records.profile import Row, Seconds, Setting


def main() -> None:
    """Measures the row that it is sent."""
    hears, says = open_pipes()
    job = hears.recv()
    _prefer_for_killing()

    def say(*messages: object) -> None:
        for message in messages:
            says.send(message)

    try:
        _measure(job, say)
        say(RowEnd("measured"))
    except BaseException as error:
        traceback.print_exc()
        say(_conclude_failure(error))
    sys.stderr.flush()
    os._exit(0)  # everything is said; taking torch and the model apart would take the better part of a second


def _measure(job: RowJob, say: Callable[..., None]) -> None:
    spec, plan, repeats, optimizer = job
    say("loading")
    problem = _load_trimmed(spec)
    _check_fits(problem, plan)

    from gaverify.profiling.workload import (
        WARM_UP,
        activation_bytes,
        compare_with_full_batch,
        peak_memory,
        update_seconds,
        workload,
    )

    with workload(problem, spec, plan, optimizer) as work, _group(spec):
        row = Row(plan.strategy, plan.steps, "measured", micro_batches=tuple(work.experiment.sizes))
        say(_setting(work, job), row, "memory")
        # The peak comes first: what another stage has freed would stay with the process and hide it.
        row = replace(row, memory=peak_memory(work))
        say(row, "time")
        times = update_seconds(work, repeats, lambda k: say(f"time {k + 1}/{WARM_UP + repeats}"))
        row = replace(row, seconds=Seconds.of(times))
        say(row, "activations")
        row = replace(row, activation_bytes=activation_bytes(work))
        say(row, "verdict")
        work.optimizer = None  # `verify` takes no step; the state would only take memory from it
        if plan.strategy != "full-batch":
            say(replace(row, **compare_with_full_batch(work, spec)))


def _group(spec: Any) -> AbstractContextManager[None]:
    """A group of world size 1, where the code of the spec may ask for one."""
    if spec.ranks is None:
        return nullcontext()
    from gaverify.collective.engines import alone

    return alone()


class _Refusal(Exception):
    """The problem could not even be loaded: no other row would fare better."""


def _load_trimmed(spec: Any) -> Any:
    from gaverify.errors import GaverifyError, is_out_of_memory
    from gaverify.loading import load_problem
    from gaverify.passes.precision import resolve_device
    from gaverify.preparation import trim_batch

    try:
        resolve_device(spec.device)
        return trim_batch(load_problem(spec), spec.batch_size)
    except GaverifyError as error:
        if is_out_of_memory(error):
            raise
        raise _Refusal(str(error)) from error


class _Unfit(Exception):
    """K micro-batches cannot be cut from this batch."""


def _check_fits(problem: Any, plan: Any) -> None:
    from gaverify.errors import ProblemError
    from gaverify.passes.batching import batch_size_of, micro_batch_sizes

    try:
        size = batch_size_of(problem.batch, plan.steps, problem.batch_size, problem.split)
    except ProblemError as error:
        raise _Refusal(str(error)) from error
    try:
        micro_batch_sizes(size, plan.steps)
    except ProblemError as error:
        raise _Unfit(str(error)) from error


def _setting(work: Any, job: RowJob) -> Setting:
    import torch

    from gaverify.passes.modes import layers_in_evaluation, mode_word
    from gaverify.passes.precision import counts_memory, short_name

    experiment = work.experiment
    unique = {id(p): p for module in experiment.modules for p in module.parameters()}.values()
    # Parameters of several types are named by the coarsest, which decides how much rounding there is.
    lowest = max({p.dtype.to_real() for p in experiment.parameters.values()}, key=lambda dtype: torch.finfo(dtype).eps)
    module = torch.get_device_module(experiment.device) if counts_memory(experiment.device) else None
    return Setting(
        model=job.spec.model,
        parameters=sum(p.numel() for p in unique),
        trainable=sum(p.numel() for p in experiment.parameters.values()),
        batch_size=experiment.batch_size,
        device=str(experiment.device),
        device_name=module.get_device_name(experiment.device)
        if module
        else platform.processor() or platform.machine(),  # Linux often names no processor
        device_memory=module.get_device_properties(experiment.device).total_memory if module else None,
        dtype=short_name(lowest),
        autocast=job.spec.autocast,
        mode=mode_word(job.spec.mode, layers_in_evaluation(experiment.modules)),
        seed=job.spec.seed,
        threads=torch.get_num_threads(),
        optimizer=job.optimizer,
        repeats=job.repeats,
        torch=str(torch.__version__),  # a class of torch's, which the other side does not import
    )


def _conclude_failure(error: BaseException) -> RowEnd:
    """Returns how a row ended that raised."""
    from gaverify.errors import GaverifyError, exit_call, is_out_of_memory, text_of

    message = text_of(error) or type(error).__name__
    if isinstance(error, _Refusal):
        return RowEnd("refused", message)
    if isinstance(error, _Unfit):
        return RowEnd("does-not-fit", message)
    if is_out_of_memory(error):
        if not isinstance(error, GaverifyError):
            message = f"out of memory: {message.splitlines()[0]}"
        return RowEnd("out-of-memory", message)
    if isinstance(error, SystemExit):
        return RowEnd("failed", f"the model's code called {exit_call(error)}")
    if isinstance(error, GaverifyError) and error.exit_code == GaverifyError.exit_code:
        return RowEnd("failed", message)
    return RowEnd("internal", f"{type(error).__name__}: {message}")


def _prefer_for_killing() -> None:
    """When the system runs out of memory, this process shall go and not the user's shell; see proc(5)."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("1000")
