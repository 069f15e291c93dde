"""Repairs in the words of the framework that runs the loop: three of them, whose sentences stand in `words.toml`."""

from __future__ import annotations

import math
from itertools import pairwise

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.events import Backward
from gaverify.records.frameworks import Framework, FrameworkLoop
from gaverify.rules.wording import fill_sentence, words

_BY_TARGETS = ("targets", "counted")  # kinds of GAV202 whose right weights are shares of targets


def framework_of(loop: Record, update: UpdateComparison) -> FrameworkLoop | None:
    """Returns the framework whose loop made an update; None where it is the script's own."""
    window = loop.window_of(update.number)
    passes = window.of(Backward) if window is not None else ()
    return passes[-1].framework if passes else None


def repair_scale(loop: Record, update: UpdateComparison, factor: float) -> str:
    """Returns how to repair a gradient that is `factor` times the full batch's; empty where no framework is behind it.

    A loss that the framework divides, and the script as well, shows two divisions by K in its graph.
    """
    framework = framework_of(loop, update)
    if framework is None:
        return ""
    steps, sentences = framework.steps, words("frameworks")[framework.framework.name.lower()]
    if math.isclose(factor, 1 / steps, rel_tol=loop.tolerance) and framework.divides:
        scales = update.window.scales
        twice = bool(scales) and all(_divisions(of_pass, steps, loop.tolerance) > 1 for of_pass in scales)
        # Where the Trainer has no number of targets to hand on, it divides whatever the loss accepts.
        if not twice and framework.framework is Framework.TRANSFORMERS and not framework.counts_items:
            return ""
        return fill_sentence(sentences["divides_twice" if twice else "divides"], steps=steps)
    if math.isclose(factor, steps, rel_tol=loop.tolerance):
        return fill_sentence(_repair_counts(framework), steps=steps)
    return ""


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
    return fill_sentence(_repair_counts(framework), steps=framework.steps)


def _repair_counts(framework: FrameworkLoop) -> str:
    """The sentence of the Trainer for a loss that ignores the number of the window's targets; empty where none is."""
    sentences = words("frameworks")[Framework.TRANSFORMERS.name.lower()]
    if framework.counts_items is None:
        return str(sentences["old"])
    if not framework.counts_items:
        return ""
    return str(sentences["ignores"] + (sentences["divides_still"] if framework.divides else ""))
