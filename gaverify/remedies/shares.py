"""Weights for micro-batches that hold different numbers of valid targets (GAV202, GAV203), and a gather over ranks.

    w_k = n_k / Σ_j n_j,     n_k the targets of micro-batch k that are not `ignore_index`

A mean over the valid targets of the whole batch is the sum of the micro-batches' means with these weights. The gather
hands gradients back, also those that come transposed (GAV705).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gaverify.errors import ProblemError
from gaverify.passes.user_code import targets_of


def token_weights(
    micro_batch: Any,
    batch: Any,
    *,
    ignore_index: int = -100,
    shifted: bool = False,
    class_weights: torch.Tensor | None = None,
) -> float:
    """Returns the weight of a micro-batch: its share of the batch's valid targets.

    As a weighting of `verify`, where options go through `functools.partial`:

        gaverify.verify(model, loss, batch, weighting=token_weights)

    In a training loop, where the window is a list of K micro-batches (skip one without valid targets: its mean loss is
    0/0, and 0 · NaN is NaN):

        total = sum(valid_targets(micro_batch) for micro_batch in window)
        for micro_batch in window:
            share = valid_targets(micro_batch) / total
            if share > 0:
                (loss(model, micro_batch) * share).backward()

    Args:
        micro_batch: A part of the batch; its targets are the tensor (or the entry `labels`, `targets`, `target`,
            `label` or `y`, or the last integer tensor of a nested batch).
        batch: The full batch, or a list of the window's micro-batches.
        ignore_index: The target that does not count.
        shifted: The model predicts target t + 1 at position t and never uses the first one (causal language models that
            shift labels themselves, as those of transformers do).
        class_weights: The `weight` of the loss, one per class: a target then counts what its class weighs.

    Raises:
        ProblemError: There are no targets, or none of them is valid.
    """
    options: dict[str, Any] = {"ignore_index": ignore_index, "shifted": shifted, "class_weights": class_weights}
    window = batch if isinstance(batch, list) else [batch]
    window_targets = sum(valid_targets(each, **options) for each in window)
    if not window_targets > 0:
        raise ProblemError("token_weights: the batch has no valid target at all; there is no mean to take shares of")
    return valid_targets(micro_batch, **options) / window_targets


def valid_targets(
    batch: Any, *, ignore_index: int = -100, shifted: bool = False, class_weights: torch.Tensor | None = None
) -> float:
    """Returns how many targets of a (micro-)batch count, or the sum of their class weights.

    The arguments are those of `token_weights`.
    """
    targets = batch if isinstance(batch, torch.Tensor) else targets_of(batch)
    if targets is None:
        raise ProblemError("valid_targets found no integer targets in the batch; pass the tensor of targets itself")
    if shifted:
        targets = targets[..., 1:]  # nothing predicts the first token
    counted = targets[targets != ignore_index]
    if class_weights is None:
        return float(counted.numel())
    return float(class_weights.to(counted.device)[counted].double().sum())


def all_gather(tensor: torch.Tensor, group: Any = None) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of all ranks; the backward gives each rank the gradients of all losses for its own tensor.

    Torch's function of this kind has moved and been renamed between its versions, and under gloo some versions lose
    gradients that are not contiguous.

    Args:
        tensor: A tensor of the same shape on every rank.
        group: A process group; None: that of all ranks.
    """
    return _Gather.apply(tensor, group).unbind()  # type: ignore[no-any-return,no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        rank_tensor = tensor.detach().contiguous()
        gathered = [torch.empty_like(rank_tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, rank_tensor, group=group)
        ctx.group = group
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # every rank's loss read every rank's tensor: only the sum over ranks is the whole gradient
        total = gradients[0].contiguous()  # it may come transposed (GAV705)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
