"""The whole flow: problem → gradients → comparison → control → findings → verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gaverify import batching
from gaverify.devices import resolve_device
from gaverify.diagnosis import findings_for
from gaverify.errors import ProblemError, SpecError
from gaverify.gradients import Task, seed_everything
from gaverify.investigation import investigate
from gaverify.isolation import (
    deterministic,
    eager_when_compiled,
    gradients_kept,
    isolated_generators,
    mode_set,
)
from gaverify.judging import Judgement, judge
from gaverify.precision import DTYPES, converted, short_name
from gaverify.problem import Loss, Problem, Split
from gaverify.results import Outcome, RunInfo, Verdict
from gaverify.tracing import traced
from gaverify.version import __version__
from gaverify.weighting import check_weighting

Progress = Callable[[str, int, int], None]
Weighting = str | list[float] | tuple[float, ...] | Callable[..., float]


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
    mode: str | None = "train",
    autocast: str | torch.dtype | None = None,
    strategy: str = "accumulate",
    rtol: float | None = None,
    atol: float | None = None,
    ignore_index: int = -100,
    trace: bool = False,
    optimizer: str = "sgd",
    lr: float | None = None,
    diagnose: bool = True,
    name: str | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Verifies that accumulating over K micro-batches computes the gradient of the full batch.

    Args:
        model: The model, or a `Problem` that holds model, loss and batch.
        loss: `loss(model, batch)` returns the scalar loss of exactly that (micro-)batch, or an object with `.loss`.
        batch: The full batch of B samples (see `gaverify.batching` for what it may be).
        steps: K, 1 to B.
        weighting: The recipe under test: "uniform" (1/K), "samples" (n_k/N), "tokens" (shares of valid targets),
            "none", K numbers, or a function `f(micro_batch)` or `f(micro_batch, batch)` that returns the loss's factor.
        device: "cpu", "cuda", "cuda:1", "mps", "auto"; None: where the model is.
        dtype: "float32", "float64", "bfloat16", "float16" or a torch dtype; None: the model's own.
        seed: Seeds all generators before the full-batch pass.
        split: `split(batch, start, stop)` where a slice of the leading dimension is wrong.
        batch_size: B, where the batch does not tell it.
        mode: "train", "eval", or None for the mode that the model is in.
        autocast: Runs the forward passes under `torch.autocast` in "bfloat16" or "float16".
        strategy: "accumulate", or "summed-loss": one backward over the summed micro-batch losses.
        rtol: With `atol`: judge by `torch.testing.assert_close`'s criterion instead of the arithmetic's own rounding.
        atol: With `rtol`.
        ignore_index: The target value that "tokens" does not count where the loss does not tell.
        trace: Record the state after every micro-batch, and one optimizer step.
        optimizer: "sgd", "adam" or "adamw", for `trace`.
        lr: Learning rate for `trace`; None: 0.01 for SGD, 0.001 otherwise.
        diagnose: Look for the cause of a divergence.
        name: How reports call the model.
        progress: Called as `progress(description, done, total)`.

    Returns:
        The verdict. Nothing of the model, the generators or torch's global flags is changed afterwards.

    Raises:
        ProblemError: The problem cannot be verified; the message says what is wrong, and where.
    """
    started = time.perf_counter()
    problem = _problem(model, loss, batch, split, batch_size, name)
    check_weighting(weighting, steps)
    _check_choices(mode=mode, strategy=strategy, rtol=rtol, atol=atol)
    modules = [module for module in (problem.model, problem.loss) if isinstance(module, nn.Module)]
    with ExitStack() as stack:
        for context in (isolated_generators(), deterministic(), eager_when_compiled(modules), mode_set(modules, mode)):
            stack.enter_context(context)
        stack.enter_context(gradients_kept([p for module in modules for p in module.parameters()]))
        task = _task(stack, problem, modules, steps, device, _dtype(dtype), _dtype(autocast))
        task = replace(
            task, weighting=weighting, ignore_index=ignore_index, strategy=strategy, progress=_reporter(progress, steps)
        )
        seed_everything(seed)
        judgement = judge(task, rtol=rtol, atol=atol, keep_gradients=trace)
        judged_at = time.perf_counter()
        findings = findings_for(investigate(task, judgement, diagnose=diagnose))
        outcome = judgement.outcome(findings)
        steps_shown = traced(task, judgement, optimizer, lr) if trace else None
    return Verdict(
        outcome, tuple(judgement.rows), findings, _run_info(task, judgement, seed, mode), judgement.method,
        judgement.resolution,
        {**judgement.timings, "diagnosis": time.perf_counter() - judged_at, "total": time.perf_counter() - started},
        steps_shown,
    )  # fmt: skip


def verify_spec(spec: Any, progress: Progress | None = None) -> Verdict:
    """Builds the problem of a `gaverify.spec.Spec` and verifies it."""
    from gaverify.loading import load_problem

    problem = trimmed(load_problem(spec), spec.batch_size)
    verdict = verify(
        problem, steps=spec.steps, weighting=spec.weighting, device=spec.device, dtype=spec.dtype, seed=spec.seed,
        mode=spec.mode, autocast=spec.autocast, strategy=spec.strategy, rtol=spec.rtol, atol=spec.atol,
        ignore_index=spec.ignore_index, trace=spec.trace, optimizer=spec.optimizer, lr=spec.lr, diagnose=spec.diagnose,
        name=spec.model, progress=progress,
    )  # fmt: skip
    return replace(verdict, spec=spec.to_dict())


def trimmed(problem: Problem, batch_size: int | None) -> Problem:
    """Returns the problem with its first `batch_size` samples, where fewer were asked for than the factory made."""
    if batch_size is None or problem.batch_size == batch_size:
        return problem
    try:
        size = batching.batch_size_of(problem.batch, batch_size=problem.batch_size, split=problem.split)
    except ProblemError:
        return replace(problem, batch_size=batch_size)  # only the option tells
    if batch_size > size:
        raise SpecError(f"--batch-size {batch_size}: the factory made a batch of {size}; make it larger there")
    if batch_size == size:
        return replace(problem, batch_size=size)
    batch = batching.take(problem.batch, 0, batch_size, size, problem.split)
    return replace(problem, batch=batch, batch_size=batch_size)


def assert_equivalent(model: nn.Module | Problem, loss: Loss | None = None, batch: Any = None, *args: Any,
                      **options: Any) -> Verdict:  # fmt: skip
    """Verifies as `verify` does, and raises unless the verdict is equivalent.

    Raises:
        AssertionError: Divergent or inconclusive; the message is the whole report.
    """
    verdict = verify(model, loss, batch, *args, **options)
    if verdict.outcome is not Outcome.EQUIVALENT:
        from gaverify.report import render

        raise AssertionError("\n" + render([verdict], "text"))
    return verdict


def _problem(
    model: Any, loss: Loss | None, batch: Any, split: Split | None, batch_size: int | None, name: str | None
) -> Problem:
    if isinstance(model, Problem):
        problem = replace(model, split=split or model.split, batch_size=batch_size or model.batch_size,
                          name=name or model.name)  # fmt: skip
    else:
        if loss is None or not callable(loss):
            raise ProblemError("verify needs `loss(model, batch)`, a function that returns the loss of that batch")
        problem = Problem(model, loss, batch, split, batch_size, name)
    if not isinstance(problem.model, nn.Module):
        raise ProblemError(
            f"the model is a {type(problem.model).__name__}, not a torch.nn.Module; "
            "wrap several modules into an nn.ModuleDict"
        )
    return problem


def _task(
    stack: ExitStack, problem: Problem, modules: list[nn.Module], steps: int, device: Any, dtype: torch.dtype | None,
    autocast: torch.dtype | None,
) -> Task:  # fmt: skip
    """Puts model and batch where they shall run, for as long as `stack` is open."""
    target = resolve_device(device)
    size = batching.batch_size_of(problem.batch, steps, problem.batch_size, problem.split)
    sizes = batching.micro_batch_sizes(size, steps)
    if target is not None or dtype is not None:
        stack.enter_context(converted(modules, device=target, dtype=dtype))
        problem = replace(problem, batch=batching.fresh(problem.batch, target, dtype))
    parameters = _parameters(problem)
    where = next(iter(parameters.values())).device
    return Task(problem=problem, parameters=parameters, modules=modules, batch_size=size, sizes=sizes,
                weighting="uniform", device=where, autocast=autocast)  # fmt: skip


def _parameters(problem: Problem) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; those of a loss that is a module itself are prefixed `loss.`."""
    named = dict(problem.model.named_parameters())
    if isinstance(problem.loss, nn.Module):
        known = {id(parameter) for parameter in named.values()}
        named |= {f"loss.{name}": p for name, p in problem.loss.named_parameters() if id(p) not in known}
    trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if not trainable:
        state = "it has no parameters" if not named else f"all {len(named)} parameters are frozen (requires_grad=False)"
        raise ProblemError(f"the model has nothing to train: {state}; there is no gradient to compare")
    return trainable


def _check_choices(*, mode: str | None, strategy: str, rtol: float | None, atol: float | None) -> None:
    if mode not in ("train", "eval", None):
        raise ProblemError(f'unknown mode {mode!r}; write "train" or "eval"')
    if strategy not in ("accumulate", "summed-loss"):
        raise ProblemError(f'unknown strategy {strategy!r}; write "accumulate" or "summed-loss"')
    if (rtol is None) != (atol is None):
        raise ProblemError("rtol and atol go together: give both or neither")


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ProblemError(f"unknown dtype `{dtype}`; write one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _reporter(progress: Progress | None, steps: int) -> Callable[[str], None]:
    if progress is None:
        return lambda _: None
    done = 0

    def report(description: str) -> None:
        nonlocal done
        done += 1
        progress(description, min(done, steps + 1), steps + 1)

    return report


def _run_info(task: Task, judgement: Judgement, seed: int, mode: str | None) -> RunInfo:
    parameters = {id(p): p for module in task.modules for p in module.parameters()}
    weighting = task.weighting
    if not isinstance(weighting, str):
        weighting = getattr(weighting, "__name__", "function") if callable(weighting) else "numbers"
    return RunInfo(
        model=task.problem.name or type(task.problem.model).__name__,
        parameters=sum(p.numel() for p in parameters.values()),
        trainable=sum(p.numel() for p in task.parameters.values()),
        batch_size=task.batch_size, micro_batches=task.sizes, weights=judgement.accumulated.weights,
        weighting=weighting, strategy=task.strategy, device=str(task.device),
        dtype=short_name(judgement.dtype), seed=seed, mode=mode or "as is", torch=torch.__version__,
        gaverify=__version__, autocast=short_name(task.autocast) if task.autocast else None,
        loss_full=judgement.full.loss, loss_accumulated=judgement.accumulated.loss,
    )  # fmt: skip
