"""`--trace`: what each micro-batch leaves behind, and the optimizer step after the window.

Shapes: P elements of all trainable parameters together; a one-element model is shown by value, others by norm.
"""

from __future__ import annotations

import math

import torch

from gaverify.errors import ProblemError
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import Gradients
from gaverify.records.verdict import Trace, TraceRow, TraceStep
from gaverify.verdict.measurement import Measurement

_OPTIMIZERS = {"sgd": ("SGD", 0.01), "adam": ("Adam", 0.001), "adamw": ("AdamW", 0.001)}


def trace_passes(measurement: Measurement, optimizer: str, lr: float | None) -> Trace:
    """Returns the accumulated gradient after every backward pass, and the weights after one step of both strategies.

    Raises:
        ProblemError: `optimizer` is none of sgd, adam, adamw.
    """
    if optimizer not in _OPTIMIZERS:
        raise ProblemError(f"unknown optimizer `{optimizer}`; write one of {', '.join(_OPTIMIZERS)}")
    experiment = measurement.experiment
    kind, default_lr = _OPTIMIZERS[optimizer]
    rate = default_lr if lr is None else lr
    before = [parameter.detach().clone() for parameter in experiment.parameters.values()]
    scalar = sum(value.numel() for value in before) == 1
    rows: list[TraceRow] = []

    def note(k: int) -> None:
        gradients = [parameter.grad for parameter in experiment.parameters.values()]
        moved = [
            parameter.detach() - old for parameter, old in zip(experiment.parameters.values(), before, strict=True)
        ]
        rows.append(TraceRow(k + 1, _summary(gradients, scalar), _summary(moved, False), k + 1, 0, 1))

    if experiment.strategy == "accumulate":
        experiment.micro_batches(measurement.full, after_backward=note)
    else:
        gradients = list(measurement.accumulated.gradients.values())
        rows.append(TraceRow(experiment.steps, _summary(gradients, scalar), 0.0, 1, 0, 1))
    after_full = _step_once(experiment, measurement.full.gradients, kind, rate)
    after_accumulated = _step_once(experiment, measurement.accumulated.gradients, kind, rate)
    differences = [a - b for a, b in zip(after_accumulated, after_full, strict=True)]
    step = TraceStep(
        kind,
        rate,
        _summary(before, scalar),
        _summary(after_full, scalar),
        _summary(after_accumulated, scalar),
        _summary(differences, False),
        scalar,
    )
    return Trace(tuple(rows), step)


def _step_once(experiment: Experiment, gradients: Gradients, kind: str, lr: float) -> list[torch.Tensor]:
    """Returns the weights after one step of a fresh optimizer; the model keeps its own."""
    # A copy: the step must not move the user's weights.
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in experiment.parameters.items()}
    for name, weight in weights.items():
        weight.grad = gradients[name]
    getattr(torch.optim, kind)(weights.values(), lr=lr).step()
    return [weight.detach() for weight in weights.values()]


def _summary(tensors: list[torch.Tensor | None] | list[torch.Tensor], scalar: bool) -> float:
    """The value of a one-element model, the Euclidean norm over everything otherwise."""
    present = [t.to_dense() if t.layout is not torch.strided else t for t in tensors if t is not None]
    if scalar and present:
        return float(present[0].reshape(()))
    norms = [torch.linalg.vector_norm(t if t.is_complex() else t.double()) for t in present]
    return math.sqrt(sum(float(norm) ** 2 for norm in norms))
