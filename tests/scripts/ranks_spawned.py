"""A script that starts its own ranks with `mp.spawn`: it is run as `python ranks_spawned.py --ranks 2`."""

from __future__ import annotations

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy


def train(rank: int, args: argparse.Namespace, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    assert not any("gaverify" in value for name, value in os.environ.items() if name != "PWD" and "PATH" in name)
    assert "GAVERIFY_AUDIT_JOB" not in os.environ
    torch.manual_seed(0)
    inputs, classes = torch.randn(32, 6), torch.randint(3, (32,))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = args.batch_size * args.accum * args.ranks
    for start in range(0, len(inputs) - window + 1, window):
        for k in range(args.accum):
            model.require_backward_grad_sync = k == args.accum - 1 and not args.never
            at = start + (k * args.ranks + rank) * args.batch_size
            part = slice(at, at + args.batch_size)
            if args.raises and rank == 1:
                raise ValueError("a file is missing")
            (cross_entropy(model(inputs[part]), classes[part]) / args.accum).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--never", action="store_true")
    parser.add_argument("--raises", action="store_true")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(train, (args, port), nprocs=args.ranks)
    print("all ranks are back")
