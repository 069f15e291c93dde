"""Makes what `verify` was given ready to run: problem, experiment, words as what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from gaverify.errors import ProblemError, SpecError, TimeLimit
from gaverify.loading import load_problem
from gaverify.loading.bare import as_loss, first_batch, has_training_step, training_step_loss
from gaverify.passes import batching
from gaverify.passes.batching import Loss, Problem, Split
from gaverify.passes.experiment import Experiment, Placement
from gaverify.passes.gradients import Fitting
from gaverify.passes.isolation import (
    ModelState,
    deterministic,
    eager_when_compiled,
    gradients_kept,
    isolated_generators,
    rewindable_iterators,
    seed_everything,
)
from gaverify.passes.modes import check_queries, mode_set
from gaverify.passes.precision import DTYPES, convert_weights, resolve_device
from gaverify.passes.user_code import named_parameters
from gaverify.records.outcomes import Reference
from gaverify.spec import Spec
from gaverify.spec.fields import explain_spec
from gaverify.verdict.settings import Settings

Progress = Callable[[str, int, int], None]


def problem_of(
    model: Any,
    loss: Loss | None = None,
    batch: Any = None,
    split: Split | None = None,
    batch_size: int | None = None,
    name: str | None = None,
) -> Problem:
    """Returns the problem that the first arguments of `verify` describe.

    Raises:
        ProblemError: There is no loss, or the model is no module.
    """
    if isinstance(model, Problem):
        problem = replace(
            model, split=split or model.split, batch_size=batch_size or model.batch_size, name=name or model.name
        )
    else:
        if loss is None and has_training_step(model):
            loss = training_step_loss(model, name or type(model).__name__)
        if loss is None or not callable(loss):
            raise ProblemError("verify needs `loss(model, batch)`, a function that returns the loss of that batch")
        problem = Problem(model, loss, batch, split, batch_size, name)
    problem = replace(problem, loss=as_loss(problem.loss), batch=first_batch(problem.batch))
    if not isinstance(problem.model, nn.Module):
        raise ProblemError(
            f"the model is a {type(problem.model).__name__}, not a torch.nn.Module; "
            "wrap several modules into an nn.ModuleDict"
        )
    for module in (problem.model, problem.loss):
        if isinstance(module, nn.Module):
            check_queries(module)
    return problem


def problem_of_spec(spec: Spec) -> Problem:
    """Returns the problem that a spec names, with as many samples as it asks for."""
    return problem_of(trim_batch(load_problem(spec), spec.batch_size), name=spec.model)


_WORDS = ("weighting", "mode", "strategy", "reference", "rtol", "atol", "time_limit", "dtype", "autocast")
"""Settings that are checked as those of a spec; the others are checked where they are used."""


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Returns what a verification is asked to do.

    Args:
        given: The fields of `Settings` as `verify` and specs have them, with the steps of one rank; a spec's `ranks`.

    Raises:
        ProblemError: A word is unknown, or options contradict each other.
    """
    words = {entry.name: given[entry.name] for entry in fields(Settings)}
    if not isinstance(words["weighting"], str):
        with suppress(TypeError, ValueError):
            words["weighting"] = tuple(map(float, words["weighting"]))
    # Functions and dtypes stand for themselves, and None leaves a choice open.
    plain = {
        name: words[name]
        for name in _WORDS
        if not (words[name] is None or callable(words[name]) or isinstance(words[name], torch.dtype))
    }
    sizes = {"model": "given", "steps": int(words["steps"]), "ranks": given.get("ranks")}
    problems = list(explain_spec({**sizes, **plain}))
    if words["exact"] and words["rtol"] is not None:
        problems.append("exact asks float64 and rtol and atol judge by tolerance: give one or the other")
    if problems:
        raise ProblemError("; ".join(problems))
    words |= {name: dtype_of(words[name]) for name in ("dtype", "autocast")}
    return Settings(**{**words, "reference": Reference(words["reference"])})


def trim_batch(problem: Problem, batch_size: int | None) -> Problem:
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


def prepare_experiment(stack: ExitStack, problem: Problem, settings: Settings) -> Experiment:
    """Puts a problem where it shall run, seeded and with nothing left to chance, for as long as `stack` is open."""
    modules = [module for module in (problem.model, problem.loss) if isinstance(module, nn.Module)]
    for context in (
        isolated_generators(),
        rewindable_iterators(),
        deterministic(),
        eager_when_compiled(modules),
        mode_set(modules, settings.mode),
        gradients_kept([p for module in modules for p in module.parameters()]),
    ):
        stack.enter_context(context)
    experiment = place_experiment(
        stack, problem, settings.steps, settings.device, settings.dtype, settings.autocast, seed=settings.seed
    )
    return replace(
        experiment,
        weighting=settings.weighting,
        ignore_index=settings.ignore_index,
        strategy=settings.strategy,
        fitting=Fitting(settings.reference),
        limit=TimeLimit(settings.time_limit),
    )


def place_experiment(
    stack: ExitStack,
    problem: Problem,
    steps: int,
    device: Any,
    dtype: torch.dtype | None,
    autocast: torch.dtype | None,
    *,
    seed: int | None = None,
) -> Experiment:
    """Puts model and batch where they shall run, for as long as `stack` is open; seeds all generators there."""
    modules = [module for module in (problem.model, problem.loss) if isinstance(module, nn.Module)]
    target = resolve_device(device)
    placed_before = _devices(modules)
    if any(device.type == "meta" for device in placed_before):
        raise ProblemError(
            "the model is on the `meta` device, where tensors have no values: build it on a real device "
            '(was `torch.set_default_device("meta")` left on, or `to_empty` forgotten?)'
        )
    size = batching.batch_size_of(problem.batch, steps, problem.batch_size, problem.split)
    sizes = batching.micro_batch_sizes(size, steps)
    if target is not None or dtype is not None:
        stack.enter_context(convert_weights(modules, device=target, dtype=dtype))
        split = problem.split and batching.move_split(problem.split, target, dtype)
        problem = replace(problem, batch=batching.fresh(problem.batch, target, dtype), split=split)
    parameters = _parameters(problem)
    where = next(iter(parameters.values())).device
    if seed is not None:
        seed_everything(seed)
    return Experiment(
        problem=problem,
        parameters=parameters,
        modules=modules,
        state=ModelState(modules, (problem.loss,)),
        batch_size=size,
        sizes=sizes,
        placement=Placement(tuple(dict.fromkeys((where, *_devices(modules)))), placed_before),
        autocast=autocast,
    )


def _devices(modules: list[nn.Module]) -> tuple[torch.device, ...]:
    """Where the parameters lie, each device once: a model may be spread over several."""
    return tuple(dict.fromkeys(parameter.device for module in modules for parameter in module.parameters()))


def _parameters(problem: Problem) -> dict[str, nn.Parameter]:
    """The trainable parameters by name."""
    named = named_parameters(problem)
    trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if not trainable:
        state = "it has no parameters" if not named else f"all {len(named)} parameters are frozen (requires_grad=False)"
        raise ProblemError(f"the model has nothing to train: {state}; there is no gradient to compare")
    return trainable


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype that a word names; None and dtypes as they are."""
    return DTYPES[dtype] if isinstance(dtype, str) else dtype


def reporter(progress: Progress | None, steps: int) -> Callable[[str], None]:
    """Returns a function that reports what begins, and how many of the K + 1 passes are done before it.

    Behind these passes a search for a cause goes on, of which nobody knows how long it takes: its total is 0.
    """
    if progress is None:
        return lambda _: None
    done = 0

    def report(description: str) -> None:
        nonlocal done
        progress(description, done, steps + 1 if done <= steps else 0)
        done += 1

    return report
