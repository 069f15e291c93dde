"""The control of a loss that caches gradients itself: it is handed the full batch, and runs the model on small parts.

Such a loss runs the model without a graph, takes its own gradient with respect to the outputs, and sends that through
the model part by part in a hook of the backward. Nothing of it can be cut from outside. But where the model never meets
more samples than a micro-batch holds, and the full batch's gradient comes out, the samples meet in the loss alone.

Shapes: B samples, micro-batches of at most n.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from gaverify.causes.bench import Bench, relative_difference
from gaverify.causes.rows import ControlFailed
from gaverify.causes.trace.state import owners
from gaverify.passes.calls import Call, listening
from gaverify.passes.gradients import Gradients
from gaverify.records.experiment import ControlKind, ControlRun


def own_cache(bench: Bench) -> ControlRun:
    """Hands the loss the full batch while its own part size is that of a micro-batch.

    Raises:
        ControlFailed: The model is run on more samples than a micro-batch holds, whatever numbers the loss keeps.
    """
    full, seen = _run(bench)
    most = max(bench.task.sizes)
    if seen <= most:
        return _judged(bench, full, full, "")
    for owner, name in _sizes(bench, most):
        with _set(owner, name, most):
            gradients, seen = _run(bench)
        if seen <= most:
            return _judged(bench, gradients, full, f", `{name}` = {most}")
    raise ControlFailed("the loss runs the model without a graph, and on more samples than a micro-batch holds")


def _judged(bench: Bench, gradients: Gradients, full: Gradients, how: str) -> ControlRun:
    left = relative_difference(gradients, full)
    what = f"the full batch handed to the loss, which runs the model part by part{how},"
    return ControlRun(what, left, left <= bench.rounding, kind=ControlKind.OWN_CACHE)


def _run(bench: Bench) -> tuple[Gradients, int]:
    """The full batch's gradients, and the most samples that one call of the model meets, the backward's included."""
    rows: list[int] = []
    again = False  # with a graph: in the backward, since no output of the forward had one

    def enter(_: Call, args: Any, kwargs: Any) -> None:
        nonlocal again
        again = again or torch.is_grad_enabled()
        rows.extend(len(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim() > 0)

    with listening({bench.task.problem.model: ""}, enter, outside=""):
        full = bench.full_batch()
    if not (rows and again):
        raise ControlFailed("no module output takes part in the loss")
    return full.gradients, max(rows)


def _sizes(bench: Bench, most: int) -> Iterator[tuple[nn.Module, str]]:
    """The numbers of the loss's own modules that may be the size of its parts."""
    model = set(bench.task.problem.model.modules())
    for owner in owners(bench.task).values():
        if owner not in model:
            yield from ((owner, name) for name, value in vars(owner).items() if type(value) is int and value > most)


@contextmanager
def _set(owner: nn.Module, name: str, value: int) -> Iterator[None]:
    before = vars(owner)[name]
    vars(owner)[name] = value
    try:
        yield
    finally:
        vars(owner)[name] = before
