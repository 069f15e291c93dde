"""GAV201 wrong-loss-scale: the accumulated gradient is the full-batch gradient times one constant.

What it finds

One factor c for all parameters and micro-batches: accumulated = c · full, with nothing left over. A forgotten or
doubled division by K, a division by the wrong count, a loss scaled after `backward()`.

Why gradients diverge

`backward()` adds to `.grad`. For a loss that is a mean over the samples of its (micro-)batch, and K equal
micro-batches,

    full = (1/K) Σ_k g_k,     without the division: Σ_k g_k = K · full

so that every micro-batch's loss has to be multiplied by 1/K. For a loss that is a sum over samples, or that is
divided by the samples or valid targets of the whole window, the factor is 1, and a division by K makes the gradient
K times too small. Frameworks often divide already (`accelerator.backward`, Lightning, the Hugging Face Trainer):
dividing again is the other way to get 1/K.

Signature in the numbers

- The fitted micro-batch weights are the used ones divided by one constant; the residual is at rounding (2e-15).
- The constant is named where it is known: K, 1/K, B, 1/B, B/K, K/B.
- The relative difference is |c − 1| for every parameter: 3.0 where a division by K = 4 was forgotten.

Example

    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    options = {"weighting": "none"}  # the loop calls loss.backward() as it is

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

Use instead

`(loss / K).backward()` for a mean over samples; no division for a sum. `reduction` of the loss decides which.

    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    options = {"weighting": "uniform"}  # the loop calls (loss / K).backward()

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

When it is harmless

Adam and its relatives divide by the gradient's own size: a constant factor changes the update only through ε. It is
not harmless to clipping by norm (the threshold meets a gradient K times larger), to weight decay inside the
gradient, to SGD (the learning rate is c times what was set), and to anyone who compares runs with different K.

References

- karpathy/nanoGPT#168, https://github.com/karpathy/nanoGPT/issues/168
- roboflow/rf-detr#1503 (divided twice), https://github.com/roboflow/rf-detr/issues/1503
- PyTorch, Automatic Mixed Precision examples, gradient accumulation,
  https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation
- Hugging Face Accelerate, Performing gradient accumulation,
  https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.diagnosis.wording import tested
from gaverify.measurements import Measurements, is_constant
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV201", "wrong-loss-scale"
_RESIDUAL = {True: 1e-6, False: 1e-3}  # of a fit in float64, and where no float64 control was possible


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where one factor for all parameters and micro-batches makes the gradients agree."""
    factor, left = factor_of(measured)
    if factor is None or abs(factor - 1) < max(1e-7, left):
        return
    steps = measured.steps
    known = (
        (float(steps), "K: the loss was not divided by K"),
        (1.0 / steps, "1/K: the loss was divided by K although it needs no division, or twice"),
        (steps / measured.batch_size, "K/B"), (measured.batch_size / steps, "B/K"),
        (1.0 / measured.batch_size, "1/B"), (float(measured.batch_size), "B"),
    )  # fmt: skip
    meaning = next((f" = {text}" for value, text in known if math.isclose(factor, value, rel_tol=1e-5)), "")
    right = ", ".join(f"{weight / factor:.4g}" for weight in measured.weights)
    run = measured.weight_remedy
    yield Finding(
        CODE, NAME, "fault", f"the accumulated gradient is {factor:.6g} times the full-batch gradient{meaning}",
        evidence=(
            Evidence("micro-batch-weights", "measured",
                     f"{measured.largest}; one factor for all parameters leaves {left:.0e} of the gradient over",
                     {"factor": factor, "residual": left}),
            *((Evidence("micro-batch-weights", "control",
                        f"with weights {right} the difference is {run.left:.0e}: proven" if run.rounding
                        else f"with weights {right} a difference of {run.left:.0e} is left", {"left": run.left}),)
              if run is not None else ()),
        ),
        remedy=f"multiply each micro-batch's loss by {1 / factor:.6g} (weights {right})"
        + (f": {tested(run)}" if run is not None and run.rounding else ""),
        proven=run is None or run.rounding,
    )  # fmt: skip


def factor_of(measured: Measurements) -> tuple[float | None, float]:
    """Returns the factor in accumulated = factor · full and what it leaves over; None where there is no such factor."""
    if not (measured.divergent and measured.comparable):
        return None, math.inf
    accurate = _RESIDUAL[measured.method in ("float64-control", "tolerance")]
    fit = measured.fit
    if fit is not None and (measured.weight_remedy is not None):
        ratios = [w / c for w, c in zip(measured.weights, fit.weights, strict=True) if c]
        if len(ratios) == len(fit.weights) and is_constant(ratios, fit.residual):
            return ratios[0], fit.residual
        return None, math.inf
    factor, left = measured.scale
    return (factor, left) if not measured.diagnosed and left < accurate else (None, math.inf)
