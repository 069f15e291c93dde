"""The two-pass cached gradient: the full-batch gradient of a coupled loss at a micro-batch's memory (GAV103).

Shapes: B samples in K micro-batches; a representation is any tensor of an encoder's output.

    1. r_k = embed(micro-batch k), without a graph                 for every k
    2. L = loss(r_1 … r_K), v = ∂L/∂r, and the direct gradients of the loss's own parameters
    3. r_k again, now with a graph and with the same random draws; backward with cotangent v_k

By the chain rule ∂L/∂θ = Σ_k (∂r_k/∂θ)ᵀ v_k, exactly, for every loss: only ∂r_k/∂θ needs the encoder's activations, and
it needs them for one micro-batch at a time. The price is a second forward.

Source: L. Gao, Y. Zhang, J. Han, J. Callan, Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup,
2021, section 3, https://arxiv.org/abs/2101.06983
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from gaverify.errors import ProblemError
from gaverify.passes.batching import Split, batch_size_of, micro_batch_sizes, take
from gaverify.passes.isolation import generator_states
from gaverify.torch_internals import TreeSpec, tree_flatten, tree_unflatten

Embed = Callable[[Any, Any], Any]
Loss = Callable[[Any, Any], torch.Tensor]
_PLAIN = (int, float, str, type(None))


class CachedGradients:
    """Computes the gradient of the full batch at a micro-batch's memory, for losses with in-batch negatives.

        cached = CachedGradients(model, embed, loss, steps=8)
        for batch in loader:
            value = cached.step(batch)  # in place of loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    The model has to treat samples independently: a BatchNorm inside it still sees micro-batches. Buffers are put back
    between the two forwards, so that they move once and both forwards read the same.

    Args:
        model: The module, or modules in a `ModuleDict`, whose buffers and random draws belong to the forward.
        embed: `embed(model, micro_batch)` returns the representations: a tensor, or tuples, lists and dictionaries of
            tensors (several encoders). Those with a leading dimension are concatenated along it; a scalar (a
            temperature) must be the same for every micro-batch.
        loss: `loss(representations, batch)` returns the scalar loss of the full batch. It may use parameters of its own
            or of the model (a logit scale), which get their gradients directly.
        steps: K, how many micro-batches.
        split: `split(batch, start, stop)` where a slice of the leading dimension is wrong.
        batch_size: B, where the batch does not tell it.
    """

    def __init__(
        self,
        model: nn.Module,
        embed: Embed,
        loss: Loss,
        steps: int,
        *,
        split: Split | None = None,
        batch_size: int | None = None,
    ) -> None:
        self._model, self._embed, self._loss = model, embed, loss
        self._steps, self._split, self._batch_size = steps, split, batch_size
        self._checked = False

    def step(self, batch: Any, scale: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """Adds the full-batch gradient to `.grad`, as `backward()` does, and returns the loss without a graph.

        Inside `torch.autocast` the forwards run as there and the backwards outside of it.

        Args:
            batch: The full batch of B samples.
            scale: Changes the loss before its backward: a `GradScaler`'s `scale`, or a division where a window holds
                several such batches. The returned loss is not scaled.

        Raises:
            ProblemError: The batch cannot be cut, the outputs cannot be put together, or the second forward gives other
                representations than the first.
        """
        micro_batches = self._cut(batch)
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        first_passes = [self._embed_without_graph(micro_batch) for micro_batch in micro_batches]
        torch.clear_autocast_cache()  # older versions of torch would use casts made without a graph again
        joined = _Joined([leaves for leaves, _, _ in first_passes], [spec for _, spec, _ in first_passes])
        with torch.enable_grad():
            loss = self._loss(joined.representations, batch)
        _check_loss(loss)
        with _outside_autocast(loss):
            (scale(loss) if scale is not None else loss).backward()
        restore_generators = generator_states()
        # The second forwards start from the same buffers and draws as the first: else their gradients would belong to
        # other representations than those that the loss has seen.
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for k, micro_batch in enumerate(micro_batches):
            restore_draws = first_passes[k][2]
            restore_draws()
            self._backward(k, micro_batch, joined)
        restore_generators()  # the training goes on with the numbers that follow the first forwards and the loss
        self._checked = True
        return loss.detach()

    def _cut(self, batch: Any) -> list[Any]:
        size = batch_size_of(batch, self._steps, self._batch_size, self._split)
        parts, start = [], 0
        for length in micro_batch_sizes(size, self._steps):
            parts.append(take(batch, start, start + length, size, self._split))
            start += length
        return parts

    def _embed_without_graph(self, micro_batch: Any) -> tuple[list[Any], TreeSpec, Callable[[], None]]:
        """Returns the representations, their structure, and a function that restores the generators to before them."""
        restore = generator_states()
        with torch.no_grad():
            leaves, spec = tree_flatten(self._embed(self._model, micro_batch))
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise ProblemError("CachedGradients: `embed` returned no tensor; return the representations of the samples")
        return leaves, spec, restore

    def _backward(self, k: int, micro_batch: Any, joined: _Joined) -> None:
        with torch.enable_grad():
            outputs, _ = tree_flatten(self._embed(self._model, micro_batch))
        # once is enough, and the comparison would wait for the device in every step
        pairs = joined.cotangents(k, outputs, check=not self._checked)
        if pairs:
            with _outside_autocast(pairs[0][0]):
                torch.autograd.backward([output for output, _ in pairs], [cotangent for _, cotangent in pairs])


class _Joined:
    """The representations of all micro-batches, concatenated as leaves of the loss's graph.

    Args:
        outputs: Per micro-batch the entries of its output.
        specs: Their structures.
    """

    def __init__(self, outputs: list[list[Any]], specs: list[TreeSpec]) -> None:
        if any(spec != specs[0] for spec in specs):
            raise ProblemError("CachedGradients: `embed` returned another structure for another micro-batch")
        self._outputs = outputs
        self._leaves = [self._join([entries[at] for entries in outputs]) for at in range(len(outputs[0]))]
        self.representations = tree_unflatten(self._leaves, specs[0])

    def cotangents(self, k: int, outputs: list[Any], *, check: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns micro-batch k's outputs that have a graph, each with the loss's gradient for it."""
        pairs = []
        for at, (leaf, output) in enumerate(zip(self._leaves, outputs, strict=True)):
            if not isinstance(output, torch.Tensor) or not output.requires_grad:
                continue
            if check:
                _check_repeated(k, self._outputs[k][at], output.detach())
            gradient = leaf.grad
            # A scalar is one value of the loss and not one per micro-batch: its gradient counts once, with the first.
            if gradient is None or (output.dim() == 0 and k > 0):
                continue
            if output.dim():
                start = sum(len(entries[at]) for entries in self._outputs[:k])
                gradient = gradient[start : start + len(output)]
            pairs.append((output, gradient))
        return pairs

    @staticmethod
    def _join(entries: list[Any]) -> Any:
        first = entries[0]
        if not isinstance(first, torch.Tensor):
            if not isinstance(first, _PLAIN) or any(entry != first for entry in entries):
                raise ProblemError(
                    f"CachedGradients: `embed` returned a {type(first).__name__} that cannot be put together; "
                    "return tensors, or tuples, lists and dictionaries of tensors"
                )
            return first
        if first.dim() == 0:
            if not all(torch.equal(first, entry) for entry in entries):
                raise ProblemError(
                    "CachedGradients: a scalar that `embed` returns differs between micro-batches; "
                    "compute it in `loss`, from representations"
                )
            joined = first
        else:
            joined = torch.cat(entries)
        return joined.detach().requires_grad_(joined.is_floating_point() or joined.is_complex())


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f"of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise ProblemError(f"CachedGradients: the loss is {shape}; return a scalar tensor")
    if not loss.requires_grad:
        raise ProblemError("CachedGradients: the loss has no graph; compute it from the representations it is given")


def _check_repeated(k: int, before: torch.Tensor, repeated: torch.Tensor) -> None:
    """Raises unless two forwards of a micro-batch agree to half of the digits."""
    if before.shape == repeated.shape:
        scale = float(before.abs().max()) if before.numel() else 0.0
        difference = float((before - repeated).abs().max()) if before.numel() else 0.0
        # not to the last digit: torch may choose other kernels without a graph
        if difference <= torch.finfo(before.dtype).eps ** 0.5 * scale:
            return
    raise ProblemError(
        f"CachedGradients: the second forward of micro-batch {k + 1} gave other representations than the first; "
        "look for draws from generators of its own, or state that a forward changes"
    )


def _outside_autocast(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Switches autocast off: backward operations use the dtypes of their forward, as torch advises."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
