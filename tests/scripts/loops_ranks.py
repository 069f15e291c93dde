"""Training loops of several ranks under DDP or FSDP2, right and wrong, started as torchrun starts them.

--batch-size is that of one rank; a window holds ranks x --accum micro-batches
"""

from __future__ import annotations

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather, all_reduce
from torch.nn.functional import cross_entropy


class SynchronisedNorm(nn.BatchNorm1d):
    """Normalises by the micro-batches of all ranks together, as SyncBatchNorm does on a GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, variance = self.running_mean, self.running_var
        if self.training:
            mean = all_reduce(x.mean(0)) / ranks
            variance = all_reduce((x - mean).square().mean(0)) / ranks
            with torch.no_grad():
                self.running_mean.lerp_(mean, 0.1)  # type: ignore[union-attr]
                self.running_var.lerp_(variance, 0.1)  # type: ignore[union-attr]
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias  # type: ignore[operator]


parser = argparse.ArgumentParser()
parser.add_argument("--loop", default="right")
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--strided", action="store_true")
parser.add_argument(
    "--named", action="store_true", help="ranks hand their rows over by name, which hides what they are"
)
parser.add_argument("--period", type=int, default=8, help="rows from one stretch of padding to the next")
parser.add_argument("--skip", type=int, default=0, help="rows that ranks leave out")
parser.add_argument("--noise", type=float, default=0.0)
parser.add_argument("--clip", type=float, default=0.0)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks, K = dist.get_rank(), dist.get_world_size(), args.accum
torch.manual_seed(0)
inputs, classes = torch.randn(64, 6), torch.randint(3, (64,))
if "tokens" in args.loop:
    classes[torch.arange(64) % args.period < 3] = -100  # the first ranks have more padding
norm: nn.Module = nn.BatchNorm1d(16) if args.loop in ("statistics", "sharded_statistics") else nn.LayerNorm(16)
net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(args.dropout), nn.GELU(), nn.Linear(16, 3))
if args.loop == "synchronised_statistics":
    norm = SynchronisedNorm(16)
if "statistics" in args.loop:
    net = nn.Sequential(nn.Linear(6, 16), norm, nn.GELU(), nn.Linear(16, 3))
sharded, by_hand = args.loop.startswith("sharded"), args.loop.startswith("by_hand")
tensor = args.loop.startswith("tensor")
if sharded:
    from torch.distributed.fsdp import fully_shard

    model: nn.Module = fully_shard(net)
elif tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    model = parallelize_module(net, init_device_mesh("cpu", (ranks,)), plan)
else:
    model = net if by_hand else nn.parallel.DistributedDataParallel(net)
if args.loop == "compressed":  # by a part of the gradient, which is lost
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    state = PowerSGDState(
        None, start_powerSGD_iter=0, min_compression_rate=0.5, use_error_feedback=False, warm_start=False
    )
    model.register_comm_hook(state, powerSGD_hook)  # type: ignore[operator]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
size = args.batch_size
place, places = (0, 1) if tensor else (rank, ranks)  # ranks of tensor parallelism share their rows
window = size * K * places


def contrasted(outputs: torch.Tensor) -> torch.Tensor:
    """Each output against those of all ranks."""
    parts = [torch.zeros_like(outputs) for _ in range(ranks)]
    if args.loop == "gathers":
        dist.all_gather(parts, outputs)  # here: gathers
        parts[rank] = outputs
    else:
        parts = list(all_gather(outputs))
    if args.loop == "gathers_nothing":  # each rank's own negatives
        return cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))  # here: gathers_nothing
    own = torch.arange(len(outputs)) + rank * len(outputs)
    return cross_entropy(outputs @ torch.cat(parts).T, own)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if args.loop.startswith("gathers"):
        return contrasted(logits) / K
    if args.loop in ("sharded_tokens", "sharded_window_tokens", "sharded_parts"):
        own = [classes[start + (at * places + place) * size :][:size] for at in range(K)]
        valid = {"sharded_tokens": (targets != -100).sum() * K, "sharded_parts": window}
        count = valid.get(args.loop, (torch.cat(own) != -100).sum())  # of the rank's window
        return cross_entropy(logits, targets, reduction="sum") / count
    if args.loop == "whole_sum":  # the mean of the ranks is made a sum by hand, on top of the engine's mean
        return cross_entropy(logits, targets) * ranks / K
    if args.loop in ("tokens_of_zero", "tokens_of_all"):  # over the window; rank 0 alone counts, or all ranks
        of_window = [classes[start + (at * places + place) * size :][:size] for at in range(K)]
        count = (torch.cat(of_window) != -100).sum()
        (dist.broadcast(count, 0) if args.loop == "tokens_of_zero" else dist.all_reduce(count))
        return cross_entropy(logits, targets, reduction="sum") * ranks / count  # type: ignore[no-any-return]
    if args.loop == "all_tokens":
        count = (targets != -100).sum()
        dist.all_reduce(count)
        return cross_entropy(logits, targets, reduction="sum") * ranks / count / K
    return cross_entropy(logits, targets) / (1 if args.loop.endswith("undivided") else K)


def synchronised(last: bool) -> contextlib.AbstractContextManager[None]:
    if sharded:
        if args.loop == "sharded_first":  # the switch is set where the window begins, and not where it ends
            last = k == 0
        last = (last or args.loop == "sharded_always") and args.loop != "sharded_never"
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return contextlib.nullcontext()
    if by_hand or tensor:
        return contextlib.nullcontext()
    if args.loop == "never" or (not last and args.loop != "always"):
        return model.no_sync()  # type: ignore[operator, no-any-return]
    return contextlib.nullcontext()


for start in range(0, len(inputs) - window + 1, window):
    for k in range(K):
        at = start + (k * places + place) * size + args.skip * (ranks > 1)
        rows = slice(at, at + size)
        if args.strided:  # as a `DistributedSampler` hands them out: the ranks take turns
            rows = slice(start + k * ranks * size + rank, start + (k + 1) * ranks * size, ranks)
        forward = net if args.loop == "unwrapped" else model
        fed = inputs[rows]
        if args.noise:
            fed = fed + args.noise * torch.randn(len(fed), 6)
        with synchronised(k == K - 1):
            outputs = forward(input=fed) if args.named and ranks > 1 else forward(fed)
            loss_of(outputs, classes[rows]).backward()
    if by_hand and args.loop == "by_hand_clipped":  # each rank by the norm of its own gradient
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    if by_hand:  # one buffer for all gradients; the mean is made here
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        gradients = gradients[: -1 if args.loop == "by_hand_forgotten" else None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= 1 if args.loop == "by_hand_sum" else ranks
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
    if args.loop == "clipped_on_zero" and rank == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    if args.loop == "sharded_norm":
        shards = [parameter.grad.to_local() for parameter in model.parameters()]  # type: ignore[union-attr]
        length = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(shard) for shard in shards]))
        for shard in shards:
            shard.mul_((0.05 / length).clamp(max=1))
    elif args.clip and args.loop != "by_hand_clipped":
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    shown = torch.tensor(1.0)
    dist.all_reduce(shown)  # a log after the step: all ranks have to be there still
dist.destroy_process_group()
