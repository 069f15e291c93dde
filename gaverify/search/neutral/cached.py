"""The control of a coupled loss: the loss once over all outputs of the full batch, the model backward per micro-batch.

A loss may cache gradients itself: it runs the model without a graph, computes its gradient with respect to the outputs,
and sends that through the model in small parts, in a hook of the backward. Nothing of that can be cut from outside. But
where the model never gets more samples than a micro-batch has, and the result is the full batch's gradient, samples
interact in the loss and nowhere else.

Shapes: B samples, micro-batches of samples `start` to `stop - 1`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gaverify.passes.calls import Call, listening
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import Gradients, PassProbe, PassResult
from gaverify.passes.layouts import SampleLayout
from gaverify.passes.nesting import map_leaves
from gaverify.records.experiment import ControlKind, ControlRun
from gaverify.search.bench import Bench
from gaverify.search.rows import ControlFailed, take_rows
from gaverify.search.trace.state import find_owners
from gaverify.thresholds import COMPUTED_FLOAT32
from gaverify.torch_internals import is_in_functorch_transform, tree_leaves
from gaverify.tracebacks import hands_over


class _Cut(PassProbe):
    """Cuts the forward at the outputs of module calls: leaves in the full batch, cotangents in the micro-batches."""

    def __init__(self, experiment: Experiment, inside: frozenset[int]) -> None:
        self._experiment, self._inside = experiment, inside
        self._bounds = list(experiment.bounds())
        self._k: int | None = None
        self.leaves: list[torch.Tensor] = []
        self._closed = False  # a recomputation during the backward calls modules again
        self._outputs: list[torch.Tensor] = []
        self._given: dict[int, int] = {}  # rows of each leaf that earlier micro-batches took

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Watches the module calls of one forward."""
        self._k, self._outputs, self._closed = k, [], False
        with listening({}, ends=self._leave):
            yield

    @hands_over
    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Runs the loss's backward in the full batch, and that of the full batch's cotangents in a micro-batch."""
        self._closed = True
        if k is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return
        if len(self._outputs) != len(self.leaves):
            raise ControlFailed("the micro-batches call other modules than the full batch")
        pairs = [
            (output, cotangent)
            for place, (output, leaf) in enumerate(zip(self._outputs, self.leaves, strict=True))
            if leaf.grad is not None and (cotangent := self._take_cotangent(k, place, leaf, output)) is not None
        ]
        if pairs:
            torch.autograd.backward([_contract(output, cotangent) for output, cotangent in pairs])

    def _take_cotangent(self, k: int, place: int, leaf: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
        """The gradient's rows for a micro-batch; None where they have been used."""
        assert leaf.grad is not None
        # An output without rows (a temperature) is one value of the window: its gradient counts once.
        if leaf.shape == output.shape and len(self._bounds) > 1:
            return leaf.grad if k == 0 else None
        layout = SampleLayout.find(leaf.shape, output.shape)
        if layout is not None and len(layout.dimensions) == 1:  # samples may have different numbers of rows there
            following = self._take_next_rows(k, place, layout.first.at, leaf, output)
            if following is not None:
                return following
        start, stop = self._bounds[k]
        return take_rows(leaf, output, start, stop, self._experiment.batch_size, leaf.grad)

    def _take_next_rows(
        self, k: int, place: int, dim: int, leaf: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor | None:
        """The rows behind those of earlier micro-batches, for samples with different numbers of rows: nodes, tokens.

        None where the values there differ from the micro-batch's, so that they are other rows.
        """
        assert leaf.grad is not None
        count = output.shape[dim]
        start = self._given.get(place, 0) if k else 0
        self._given[place] = start + count
        if start + count > leaf.shape[dim]:
            return None
        with torch.no_grad():
            difference = torch.linalg.vector_norm(leaf.narrow(dim, start, count) - output)
            is_same = bool(difference <= COMPUTED_FLOAT32 * torch.linalg.vector_norm(output))
        return leaf.grad.narrow(dim, start, count) if is_same else None

    def _leave(self, call: Call, output: Any) -> Any:
        around = [parent.position for parent in call.parents]
        # only the outermost calls are cut: what lies inside one of them is behind the cut already
        if self._closed or call.position in self._inside or not self._inside.issuperset(around):
            return None
        try:
            return map_leaves(output, self._cut)
        except TypeError as error:
            raise ControlFailed(f"a module returns a {type(output).__name__}, which cannot be made anew") from error

    def _cut(self, _: str, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.requires_grad):
            return value
        cut_outputs = self._outputs
        if self._k is None:
            cut_outputs, value = self.leaves, value.detach().requires_grad_()
        cut_outputs.append(value)
        return value


def _contract(output: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    """A number whose gradient at the output is the cotangent."""
    # `backward` with cotangents of its own makes torch import sympy, which takes half a second
    return torch.vdot(cotangent.reshape(-1), output.reshape(-1)).real


def cached_gradients(bench: Bench, inside: frozenset[int]) -> ControlRun:
    """Runs the two-pass cached gradient: the loss once on all outputs, the model backward per micro-batch.

        1. forward of the full batch, cut at module outputs y; v = ∂ loss / ∂ y; the loss's own parameters directly
        2. per micro-batch: forward, backward of y_k with cotangent v_k

    Args:
        bench: Where to run.
        inside: The module calls that are not cut, because their outputs have no row per sample or depend on the batch
            already. They contain the loss or a part of it.

    Source: L. Gao, Y. Zhang, J. Han, J. Callan, Scaling Deep Contrastive Learning Batch Size under Memory Limited
    Setup, 2021, section 3.
    """
    # One backward over the summed losses would have no place for the cotangents of each micro-batch.
    experiment = bench.experiment.with_backwards_apart()
    experiment.progress("control: cached gradients")
    cut = _Cut(experiment, inside)
    direct = experiment.full_batch(cut)
    if not cut.leaves:
        return run_own_cache(bench)

    def add_gradients(full: PassResult) -> Gradients:
        parts = experiment.micro_batches(full, cut)
        total: dict[str, torch.Tensor | None] = {}
        for name, gradient in parts.gradients.items():
            direct_gradient = direct.gradients[name]
            total[name] = (
                direct_gradient
                if gradient is None
                else gradient
                if direct_gradient is None
                else gradient + direct_gradient
            )
        return total

    difference_left = bench.against_full_batch(add_gradients)
    return ControlRun(
        "cached gradients", difference_left, difference_left <= bench.rounding, kind=ControlKind.CACHED_GRADIENTS
    )


def run_own_cache(bench: Bench) -> ControlRun:
    """Gives the full batch to a loss that caches gradients, with parts of the size of a micro-batch.

    Raises:
        ControlFailed: The model is run on more samples than a micro-batch has, whatever sizes the loss is given.
    """
    full, largest_call = _run_full_batch(bench)
    most = max(bench.experiment.sizes)
    if largest_call <= most:
        return _make_control_run(bench, full, full, "")
    for owner, name in _list_sizes(bench, most):
        with _set_attribute(owner, name, most):
            gradients, largest_call = _run_full_batch(bench)
        if largest_call <= most:
            return _make_control_run(bench, gradients, full, f", `{name}` = {most}")
    raise ControlFailed("the loss runs the model without a graph, and on more samples than a micro-batch holds")


def _make_control_run(bench: Bench, gradients: Gradients, full: Gradients, how: str) -> ControlRun:
    difference_left = bench.relative_difference(gradients, full)
    what = f"the full batch handed to the loss, which runs the model part by part{how},"
    return ControlRun(what, difference_left, difference_left <= bench.rounding, kind=ControlKind.OWN_CACHE)


def _run_full_batch(bench: Bench) -> tuple[Gradients, int]:
    """The full batch's gradients, and the most samples that one call of the model gets, in the backward as well."""
    rows: list[int] = []
    runs_with_graph = False  # such a call is one in the backward, because no output of the forward had a graph

    def enter(_: Call, args: Any, kwargs: Any) -> None:
        nonlocal runs_with_graph
        if is_in_functorch_transform():  # one call may compute any number of samples
            raise ControlFailed("the loss runs the model inside a transform of torch.func")
        runs_with_graph = runs_with_graph or torch.is_grad_enabled()
        rows.extend(len(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim() > 0)

    with listening({bench.experiment.problem.model: ""}, enter, outside=""):
        full = bench.experiment.full_batch()
    if not (rows and runs_with_graph):
        raise ControlFailed("no module output takes part in the loss")
    return full.gradients, max(rows)


def _list_sizes(bench: Bench, most: int) -> Iterator[tuple[nn.Module, str]]:
    """The attributes of the loss's modules that may be the size of its parts."""
    model = set(bench.experiment.problem.model.modules())
    for owner in find_owners(bench.experiment).values():
        if owner not in model:
            yield from ((owner, name) for name, value in vars(owner).items() if type(value) is int and value > most)


@contextmanager
def _set_attribute(owner: nn.Module, name: str, value: int) -> Iterator[None]:
    before = vars(owner)[name]
    vars(owner)[name] = value
    try:
        yield
    finally:
        vars(owner)[name] = before
