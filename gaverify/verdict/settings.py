"""The options of `verify`, and what its report says was run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gaverify.passes.modes import layers_in_evaluation, mode_word
from gaverify.passes.precision import short_name
from gaverify.passes.user_code import count_tokens
from gaverify.records.outcomes import Reference
from gaverify.records.verdict import CountedTargets, Losses, RunInfo
from gaverify.verdict.decision import Decision
from gaverify.verdict.measurement import Measurement

Weighting = str | list[float] | tuple[float, ...] | Callable[..., float]


@dataclass(frozen=True)
class Settings:
    """The options of `verify`, checked."""

    steps: int
    """Number of micro-batches of all ranks together."""
    weighting: Weighting
    """Rule's name, one number per micro-batch, or a function that returns the loss's factor."""
    device: str | torch.device | None
    """Where to run; None: where the model is."""
    dtype: torch.dtype | None
    """Dtype of the parameters; None: the model's."""
    seed: int
    """Seeds all generators before the full-batch pass."""
    mode: str | None
    """`train`, `eval` or `auto`; None: the mode that the model is in."""
    autocast: torch.dtype | None
    """Dtype of `torch.autocast` in the forwards; None: no autocast."""
    strategy: str
    """`accumulate`: K backward passes; `summed-loss`: one over the summed losses."""
    rtol: float | None
    """Relative tolerance of `assert_close`, with `atol`; None: rounding is measured."""
    atol: float | None
    """Absolute tolerance, in the gradient's unit, with `rtol`; None: rounding is measured."""
    ignore_index: int
    """Target value that the weighting `tokens` does not count, unless the loss has its value."""
    trace: bool
    """Record the state after every micro-batch, and one step of SGD."""
    lr: float
    """Learning rate of the trace."""
    diagnose: bool
    """Look for the cause of a divergence."""
    time_limit: float | None
    """Seconds until the search for the cause stops; None: no limit."""
    exact: bool
    """Decide every parameter by float64, also where working precision could."""
    reference: Reference
    """How the full batch runs: on the device, with activations on the host, or the first that fits."""


def run_info(measurement: Measurement, decision: Decision, settings: Settings) -> RunInfo:
    """Returns what was run: the model, the batch, the recipe and the arithmetic."""
    experiment, runs = measurement.experiment, measurement.in_users_precision
    parameters = {id(p): p for module in experiment.modules for p in module.parameters()}
    weighting, in_evaluation = experiment.weighting, layers_in_evaluation(experiment.modules)
    if not isinstance(weighting, str):
        # A report shows what was asked for, and a function or numbers have no word of their own.
        weighting = getattr(weighting, "__name__", "function") if callable(weighting) else "numbers"
    return RunInfo(
        model=experiment.problem.name or type(experiment.problem.model).__name__,
        parameters=sum(p.numel() for p in parameters.values()),
        trainable=sum(p.numel() for p in experiment.parameters.values()),
        batch_size=experiment.batch_size,
        micro_batches=experiment.sizes,
        weights=measurement.accumulated.weights,
        weighting=weighting,
        strategy=experiment.strategy,
        device=" and ".join(map(str, experiment.devices)),
        dtype=short_name(runs.dtype),
        seed=settings.seed,
        mode=mode_word(settings.mode, in_evaluation),
        in_evaluation=in_evaluation,
        autocast=short_name(runs.autocast) if runs.autocast else None,
        reference=experiment.fitting.way,
        reference_failed=tuple(experiment.fitting.failed),
        rounded=tuple(f"{kind} {to}" for kind, to in runs.rounded.items()),
        part=decision.part,
        losses=Losses(*runs.losses),
        targets=_count_targets(measurement),
    )


def _count_targets(measurement: Measurement) -> CountedTargets | None:
    experiment, (observed, *_) = measurement.experiment, measurement.full.observed
    # A strategy of the user's gives its micro-batches no weights that gaverify knows.
    if experiment.weighting != "tokens" or not measurement.accumulated.weights:
        return None
    return count_tokens(experiment, experiment.problem.batch, observed, observed)
