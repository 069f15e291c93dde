"""Micro-batch weights: the factor that a recipe puts on each micro-batch's loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from gaverify.errors import ProblemError
from gaverify.passes.dispatch import Observed
from gaverify.passes.nesting import leaves
from gaverify.tracebacks import hands_over

if TYPE_CHECKING:
    from gaverify.passes.experiment import Experiment

WEIGHTINGS = ("uniform", "samples", "tokens", "none")
_TARGET_NAMES = ("labels", "targets", "target", "label", "y")


def micro_batch_weight(experiment: Experiment, k: int, micro_batch: Any, observed: Observed, full: Observed) -> float:
    """Returns w_k.

        uniform   1/K                 samples  n_k/N
        none      1                   tokens   valid tokens of k / valid tokens of the batch

    Raises:
        ProblemError: "tokens" finds no targets, or a callable returns no number.
    """
    weighting = experiment.weighting
    if weighting == "uniform":
        return 1.0 / experiment.steps
    if weighting == "none":
        return 1.0
    if weighting == "samples":
        return experiment.sizes[k] / experiment.batch_size
    if weighting == "tokens":
        return _token_share(experiment, micro_batch, observed, full)
    if callable(weighting):
        return _call_weighting(weighting, micro_batch, experiment.problem.batch)
    return float(weighting[k])


def check_weighting(weighting: Any, steps: int) -> None:
    """Raises `ProblemError` when `weighting` is neither a known word, K numbers, nor a callable."""
    if isinstance(weighting, str):
        if weighting not in WEIGHTINGS:
            raise ProblemError(f"unknown weighting `{weighting}`; write one of {', '.join(WEIGHTINGS)}, or K numbers")
    elif not callable(weighting):
        try:
            numbers = [float(weight) for weight in weighting]
        except (TypeError, ValueError) as error:
            raise ProblemError(
                f"weighting {weighting!r} is not accepted; give {', '.join(WEIGHTINGS)}, K numbers or a function"
            ) from error
        if len(numbers) != steps:
            raise ProblemError(f"weighting has {len(numbers)} numbers for steps = {steps} micro-batches; give one each")


def valid_targets(observed: Observed) -> float | None:
    """The divisor that a negative log-likelihood mean used; with several, that of the one with the most targets."""
    if not observed.target_counts:
        return None
    total, _, _ = max(observed.target_counts, key=lambda count: count[1])
    return float(total)


def targets_of(batch: Any) -> torch.Tensor | None:
    """The integer targets of a batch: an entry of a usual name, else the last integer tensor."""
    if isinstance(batch, Mapping):
        for name in _TARGET_NAMES:
            if isinstance(batch.get(name), torch.Tensor):
                return batch[name]  # type: ignore[no-any-return]
    integers = [leaf for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point()]
    return integers[-1] if integers else None


def _token_share(experiment: Experiment, micro_batch: Any, observed: Observed, full: Observed) -> float:
    part, total = valid_targets(observed), valid_targets(full)
    if part is None or total is None:
        # The loss is none of torch's that divide by a count: the targets of the batch are counted.
        part, total = _valid(experiment, micro_batch), _valid(experiment, experiment.problem.batch)
    if total == 0:
        raise ProblemError("weighting `tokens`: the batch has no target that the loss counts; check `ignore_index`")
    return part / total


def _valid(experiment: Experiment, batch: Any) -> float:
    targets = targets_of(batch)
    if targets is None:
        raise ProblemError(
            "weighting `tokens` found no integer targets in the batch; name them `labels`, "
            "or give the weights as numbers or as a function"
        )
    return float((targets != experiment.ignore_index).sum())


@hands_over
def _call_weighting(weighting: Any, micro_batch: Any, batch: Any) -> float:
    """Calls `weighting(micro_batch)` or `weighting(micro_batch, batch)`."""
    try:
        parameters = inspect.signature(weighting).parameters.values()
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        takes_batch = len([p for p in positional if p.default is p.empty]) >= 2
    except (TypeError, ValueError):
        takes_batch = False
    weight = weighting(micro_batch, batch) if takes_batch else weighting(micro_batch)
    try:
        return float(weight)
    except (TypeError, ValueError) as error:
        raise ProblemError(f"the weighting function returned {weight!r}; return a number per micro-batch") from error
