"""Calls of the user's own code in a pass: split, loss and model; and the factors on the losses of micro-batches.

Whatever these raise becomes a sentence that names the samples and the line.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gaverify.errors import (
    GaverifyError,
    HiddenDraw,
    NoMemory,
    ProblemError,
    TimeUp,
    is_out_of_memory,
    kind_of_value,
    text_of,
)
from gaverify.passes.batching import Problem, other_reading, take
from gaverify.passes.dispatch import Observed, TargetCount
from gaverify.passes.isolation import variables
from gaverify.passes.layouts import leaves
from gaverify.records.verdict import CountedTargets
from gaverify.tracebacks import hands_over, is_own_fault, user_frame

if TYPE_CHECKING:
    from gaverify.passes.experiment import Experiment


# Micro-batch weights: the factor that a recipe puts on each micro-batch's loss.


DEFAULT_IGNORED = -100  # torch's default of `ignore_index`
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


def largest_mean(observed: Observed) -> TargetCount | None:
    """The counts of the negative log-likelihood mean with the most targets; None without any."""
    means = [count for count in observed.target_counts if count.is_mean]
    return max(means, key=lambda count: count.total, default=None)


def valid_targets(micro_batches: Sequence[Observed]) -> list[float | None]:
    """The divisor that each one's negative log-likelihood mean used; with several, that of the one with most targets.

    None for one that had no such mean.
    """
    means = [largest_mean(observed) for observed in micro_batches]
    divisors = [mean.divisor.double() for mean in means if mean is not None]
    # fetched at once: each number for itself would wait for the device
    numbers = iter(torch.stack(divisors).tolist() if divisors else ())
    return [None if mean is None else next(numbers) for mean in means]


def targets_of(batch: Any) -> torch.Tensor | None:
    """The integer targets of a batch: an entry of a usual name, else the last integer tensor."""
    if isinstance(batch, Mapping):
        for name in _TARGET_NAMES:
            if isinstance(batch.get(name), torch.Tensor):
                return batch[name]  # type: ignore[no-any-return]
    integers = [leaf for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point()]
    return integers[-1] if integers else None


def _token_share(experiment: Experiment, micro_batch: Any, observed: Observed, full: Observed) -> float:
    part = count_tokens(experiment, micro_batch, observed, full)
    total = count_tokens(experiment, experiment.problem.batch, full, full)
    if total.counted == 0:
        raise ProblemError("weighting `tokens`: the batch has no target that the loss counts; check `ignore_index`")
    return part.counted / total.counted


def count_tokens(experiment: Experiment, batch: Any, observed: Observed, full: Observed) -> CountedTargets:
    """Returns what the weighting `tokens` counts in a batch.

    Args:
        experiment: Says which target is ignored where the loss does not.
        batch: The full batch, or a micro-batch.
        observed: Its pass.
        full: The full batch's pass, which decides what is counted in every micro-batch.
    """
    mean = largest_mean(observed)
    if mean is not None and largest_mean(full) is not None:
        return CountedTargets(float(mean.divisor), mean.total, (mean.ignored,), mean.is_weighted)
    # A mean that the user divides by hand: its calls say what they ignore. Those that ignore none of their targets say
    # nothing, because the user may have masked what does not count.
    if observed.target_counts and any(float(call.valid) < call.total for call in full.target_counts):
        ignored = tuple(sorted({call.ignored for call in full.target_counts}))
        calls = observed.target_counts
        return CountedTargets(sum(float(call.valid) for call in calls), sum(call.total for call in calls), ignored)
    targets = targets_of(batch)
    if targets is None:
        raise ProblemError(
            "weighting `tokens` found no integer targets in the batch; name them `labels`, "
            "or give the weights as numbers or as a function"
        )
    ignored_targets = experiment.ignore_index
    return CountedTargets(float((targets != ignored_targets).sum()), targets.numel(), (ignored_targets,))


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


# Calls of the user's own code in a pass: split, loss and model.


_OUTPUTS = ("input", "output", "out", "pred", "prediction", "logit", "y_pred", "y_hat", "yhat", "score", "y")
"""How criteria name the model's output, their first parameter, but for a plural's s."""


def named_parameters(problem: Problem) -> dict[str, nn.Parameter]:
    """Returns the parameters of the model and, with `loss.` in front, those of a loss that is a module itself."""
    named = dict(problem.model.named_parameters())
    if isinstance(problem.loss, nn.Module):
        model_ids = {id(parameter) for parameter in named.values()}
        named |= {f"loss.{name}": p for name, p in problem.loss.named_parameters() if id(p) not in model_ids}
    return named


@contextmanager
def explain_user_errors(where: str, experiment: Experiment) -> Iterator[None]:
    """Turns whatever the user's code raises into a sentence that says on which samples and where.

    Errors of gaverify's own code, while it watches a pass, go on as they are: they are no finding about a model.
    """
    try:
        yield
    except (GaverifyError, KeyboardInterrupt, SystemExit, TimeUp, HiddenDraw):
        raise
    except BaseException as error:
        if is_out_of_memory(error):
            advice = "a smaller --batch-size" if where == "the full batch" else "more steps or a smaller --batch-size"
            advice += "" if experiment.device.type == "cpu" else ", or --device cpu"
            raise NoMemory(f"out of memory on {experiment.device} while running {where}; try {advice}") from error
        # A fault of gaverify's must never read as a finding about the user's model.
        if is_own_fault(error):
            raise
        text = text_of(error)
        frame = user_frame(error)
        hint = ""
        # Torch's own message for a BatchNorm that gets one sample; it has no class of its own.
        if "more than 1 value per channel" in text:
            hint = "; a BatchNorm needs at least two samples per micro-batch: lower steps or raise the batch size"
        raise ProblemError(
            f"the model or loss raised on {where}: {type(error).__name__}: {text or 'no message'}"
            + (f" ({frame})" if frame else "")
            + (hint or _left_behind(experiment, text) or _criterion(experiment.problem) or _other_reading(experiment))
        ) from error


def _left_behind(experiment: Experiment, text: str) -> str:
    """A hint where tensors of several devices meet: those that the loss and the model hold themselves nobody moved."""
    if "on the same device" not in text and not ("input type" in text.lower() and "weight type" in text.lower()):
        return ""
    if len(experiment.placement.before) > 1:
        places = " and ".join(map(str, experiment.placement.before))
        if len(experiment.devices) == 1:
            return f"; the model was on {places} and `device` moved it to {experiment.device}: leave `device` out"
        return f"; gaverify does not move a model on {places}, nor its batch: let the loss move the batch"
    owned = [(place.name, place.get()) for place in variables(experiment.problem.loss)]
    for root in experiment.modules:
        for path, module in root.named_modules():
            owned += [(f"{path}.{name}" if path else name, value) for name, value in vars(module).items()]
    names = [
        f"`{name}`"
        for name, value in owned
        if any(leaf.device not in experiment.devices for leaf in _tensors_in(value))
    ]
    what = ", ".join(dict.fromkeys(names)) or "tensors that the loss or the model makes without a device"
    return f"; gaverify moves model and batch to {experiment.device}; move the rest yourself: {what}"


def _tensors_in(value: Any) -> list[torch.Tensor]:
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return [entry for entry in entries if isinstance(entry, torch.Tensor)]


def _criterion(problem: Problem) -> str:
    """A hint where the loss has the parameters of a criterion, which takes the model's outputs and not the model."""
    called = problem.loss.forward if isinstance(problem.loss, nn.Module) else problem.loss
    try:
        first = next(iter(inspect.signature(called).parameters), "")
    except (TypeError, ValueError):  # written in C
        return ""
    if first.rstrip("s") not in _OUTPUTS:
        return ""
    return (
        f"; gaverify calls `loss(model, batch)`, and this one takes `{first}`: "
        "write `lambda model, batch: criterion(model(batch[0]), batch[1])`"
    )


def _other_reading(experiment: Experiment) -> str:
    problem = experiment.problem
    settled = problem.batch_size is not None or problem.split is not None
    return "" if settled else other_reading(problem.batch, experiment.batch_size)


def micro_batch_of(experiment: Experiment, start: int, stop: int, where: str) -> Any:
    """Returns the samples `start` to `stop - 1` of the experiment's batch, by the user's split where there is one."""
    with explain_user_errors(f"split for {where}", experiment):
        return take(experiment.problem.batch, start, stop, experiment.batch_size, experiment.problem.split)


@hands_over
def loss_of(experiment: Experiment, batch: Any, where: str) -> torch.Tensor:
    """Runs the user's loss and returns it as a scalar tensor with a graph.

    Raises:
        TimeUp: This is a pass of a search whose time is over.
        ProblemError: The returned value is no such tensor.
    """
    experiment.limit.check()
    with experiment.autocasting():
        value = experiment.problem.loss(experiment.problem.model, batch)
    if isinstance(value, Mapping) and "loss" in value:
        value = value["loss"]
    elif not isinstance(value, torch.Tensor) and hasattr(value, "loss"):
        value = value.loss
    if not isinstance(value, torch.Tensor):
        raise ProblemError(
            f"the loss on {where} is {kind_of_value(value)}; return a scalar tensor, or an object with `.loss`"
            + (" (without `.item()`)" if isinstance(value, float) else "")
        )
    if value.numel() != 1:
        raise ProblemError(
            f"the loss on {where} has shape {list(value.shape)}; reduce it to a scalar, for example with `.mean()`"
        )
    if value.is_complex():
        raise ProblemError(f"the loss on {where} is complex; return a real scalar, for example `.abs().mean()`")
    if not value.requires_grad:
        raise ProblemError(
            f"the loss on {where} has no graph: it depends on no trainable parameter "
            "(look for `.detach()`, `.item()`, `torch.no_grad()`, or parameters that are all frozen)"
        )
    return value.reshape(())
