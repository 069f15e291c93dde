"""Repairs in the words of the framework that runs the loop."""

from __future__ import annotations

import math
from itertools import pairwise

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.events import Backward
from gaverify.records.frameworks import Framework, FrameworkLoop

_BY_TARGETS = ("targets", "counted")  # kinds of GAV202 whose right weights are shares of targets


def framework_of(loop: Record, update: UpdateComparison) -> FrameworkLoop | None:
    """Returns the framework whose loop made an update; None where it is the script's own."""
    window = loop.window_of(update.number)
    # the last backward pass is the one that steps: a script may run passes of its own before
    passes = window.of(Backward) if window is not None else ()
    return passes[-1].framework if passes else None


def repair_scale(loop: Record, update: UpdateComparison, factor: float) -> str:
    """Returns how to repair a gradient that is `factor` times the full batch's; empty where no framework is behind it.

    A loss that the framework divides, and the script as well, shows two divisions by K in its graph.
    """
    framework = framework_of(loop, update)
    if framework is None:
        return ""
    steps = framework.steps
    if math.isclose(factor, 1 / steps, rel_tol=loop.tolerance) and framework.divides:
        scales = update.window.scales
        # without a graph that shows the divisions, the framework's own one is what is known
        twice = bool(scales) and all(_divisions(of_pass, steps, loop.tolerance) > 1 for of_pass in scales)
        # Where the Trainer has no number of targets to hand on, it divides whatever the loss accepts.
        if not twice and framework.framework is Framework.TRANSFORMERS and not framework.counts_items:
            return ""
        return _repair_division(framework, twice=twice)
    return _repair_counts(framework) if math.isclose(factor, steps, rel_tol=loop.tolerance) else ""


def _repair_division(framework: FrameworkLoop, *, twice: bool) -> str:
    """Returns how to make up for the framework's division by K; `twice`: the script divides as well."""
    steps = framework.steps
    if framework.framework is Framework.TRANSFORMERS:
        divides = f"the Trainer divides each loss by `gradient_accumulation_steps` = {steps}"
        double = f"remove the division by {steps} from `compute_loss` or the model"
        single = "set its `model_accepts_loss_kwargs` to True, which turns this off"
    elif framework.framework is Framework.ACCELERATE:
        divides = f"Accelerate divides each loss by `gradient_accumulation_steps` = {steps}"
        double = f"remove the script's own division by {steps}"
        single = f"multiply the loss by {steps} if it is already divided by the count over all micro-batches"
    else:
        divides = f"Lightning's Trainer divides each loss by `accumulate_grad_batches` = {steps}"
        double = f"remove the division by {steps} from `training_step`"
        single = f"multiply the loss by {steps} if it is already divided by the count over all micro-batches"
    return f"{divides} already: {double}" if twice else f"{divides}: {single}"


def _divisions(scales: tuple[float, ...], steps: int, tolerance: float) -> int:
    """How many of the factors on the way from what is differentiated to the loss are 1/K."""
    return sum(math.isclose(inner * steps, outer, rel_tol=tolerance) for outer, inner in pairwise(scales))


def repair_shares(loop: Record, update: UpdateComparison, kind: str) -> str:
    """Returns how to repair losses whose means over targets are averaged; empty where no framework counts these.

    Args:
        loop: What was recorded.
        update: The update that differs.
        kind: What the right weights are shares of.
    """
    framework = framework_of(loop, update)
    if framework is None or framework.framework is not Framework.TRANSFORMERS or kind not in _BY_TARGETS:
        return ""
    return _repair_counts(framework)


def _repair_counts(framework: FrameworkLoop) -> str:
    """The sentence of the Trainer for a loss that ignores the number of the window's targets; empty where none is."""
    if framework.counts_items is None:
        return (
            "use transformers 4.46 or newer, whose Trainer passes the number of targets in all micro-batches to the "
            "loss as "
            "`num_items_in_batch`"
        )
    if not framework.counts_items:
        return ""
    remedy = (
        "sum the losses and divide by `num_items_in_batch`, which the Trainer passes to `compute_loss`, and to a model "
        "whose forward accepts it"
    )
    if not framework.divides:
        return remedy
    return (
        f"{remedy}, and set the Trainer's `model_accepts_loss_kwargs` to True, because otherwise it divides by "
        "`gradient_accumulation_steps` as well"
    )
