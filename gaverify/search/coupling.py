"""Does one sample's output depend on the other samples' inputs? If not, its gradient to these is exactly zero.

Shapes: B samples; gradients of one sample's outputs with respect to float inputs, or embeddings of others, of B rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from gaverify.passes.calls import Call, listening
from gaverify.passes.gradients import PassProbe
from gaverify.passes.layouts import SampleLayout
from gaverify.passes.precision import widest
from gaverify.records.facts import Facts, SampleCoupling
from gaverify.search.bench import Bench
from gaverify.torch_internals import is_in_functorch_transform, tree_leaves, tree_map_only
from gaverify.tracebacks import hands_over


def ask(bench: Bench, facts: Facts) -> Facts:
    """Measures how many other samples one sample's output depends on, as evidence beside a cause."""
    coupling = bench.attempt("coupling of samples", lambda: measure_coupling(bench))
    return replace(facts, forward=replace(facts.forward, coupling=coupling))


def measure_coupling(bench: Bench) -> SampleCoupling | None:
    """Returns how many other samples one sample's output depends on; None if no tensor has rows of samples.

    In a normalisation the gradient runs through the statistics too. A gradient of exactly zero for all other samples
    means that samples interact in no differentiable operation of the model.
    """
    listener = _CouplingProbe(bench)
    bench.experiment.full_batch(listener)
    return listener.coupling


class _CouplingProbe(PassProbe):
    """Makes leaves of the model's inputs, and differentiates one sample's outputs instead of the loss."""

    def __init__(self, bench: Bench) -> None:
        self._root = bench.experiment.problem.model
        self._modules = set(self._root.modules())
        self._size = bench.experiment.batch_size
        self._sample = self._size // 2
        self._leaves: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self.coupling: SampleCoupling | None = None

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Listens for the length of a forward."""
        # Integers have no gradient: for token ids the outputs of the embeddings are the inputs that are differentiated.
        root = listening({self._root: ""}, self._enter, self._leave, outside="")
        with root, listening({}, ends=self._make_embedding_leaf):
            yield

    @hands_over
    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Differentiates the outputs of one sample with respect to all leaves."""
        outputs = [output.select(self._dimension(output), self._sample) for output in self._outputs]
        if not outputs or not self._leaves:
            return
        total = torch.stack([_mix_outputs(output) for output in outputs]).sum()
        gradients = torch.autograd.grad(total, self._leaves, allow_unused=True)
        totals: dict[torch.device, torch.Tensor] = {}  # one transfer from each device, not one per leaf
        for leaf, gradient in zip(self._leaves, gradients, strict=True):
            if gradient is not None:
                rows = gradient.movedim(self._dimension(leaf), 0).reshape(self._size, -1)
                norms = torch.linalg.vector_norm(rows, dim=1).to(widest(rows.device))
                totals[rows.device] = totals[rows.device] + norms if rows.device in totals else norms
        reached = torch.zeros(self._size, dtype=torch.float64, device="cpu")
        for total in totals.values():
            reached += total.to("cpu", torch.float64)
        norm = float(reached[self._sample])
        reached[self._sample] = 0.0
        # outputs that do not depend on the sample's own inputs either show nothing about the others
        if norm > 0 and bool(torch.isfinite(reached).all()):
            other_samples, strength = int((reached > 0).sum()), float(reached.max()) / norm
            self.coupling = SampleCoupling(self._sample, other_samples, strength, self._size)

    def _dimension(self, tensor: torch.Tensor) -> int:
        layout = SampleLayout.locate(tensor.shape, self._size)
        assert layout is not None  # only tensors with rows are kept
        return layout.first.at

    def _has_rows(self, tensor: Any) -> bool:
        is_float = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        return is_float and SampleLayout.locate(tensor.shape, self._size) is not None

    def _enter(self, _: Call, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, self._leaf, (args, kwargs))

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._has_rows(tensor) or is_in_functorch_transform():
            return tensor
        self._leaves.append(tensor.detach().requires_grad_())
        return self._leaves[-1]

    def _make_embedding_leaf(self, call: Call, output: Any) -> Any:
        """Makes a leaf of an output that was computed from integers: an embedding."""
        floats = any(t.is_floating_point() for t in tree_leaves(call.args) if isinstance(t, torch.Tensor))
        inside = call.module in self._modules and call.module is not self._root
        if not inside or floats or not tree_leaves(call.args) or not self._has_rows(output):
            return None
        return self._leaf(output)

    def _leave(self, _: Call, output: Any) -> None:
        values = tree_leaves(output) if not hasattr(output, "to_tuple") else tree_leaves(output.to_tuple())
        self._outputs += [t for t in values if self._has_rows(t) and t.requires_grad]


def _mix_outputs(values: torch.Tensor) -> torch.Tensor:
    """A weighted sum of one sample's outputs, with irregular weights: a plain sum is constant after a LayerNorm."""
    weights = torch.cos(torch.arange(1, values.numel() + 1, dtype=values.dtype, device=values.device).square())
    return values.reshape(-1) @ weights
