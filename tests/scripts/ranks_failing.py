"""Ranks that fail in the ways that ranks do, started as torchrun starts them.

--fault raise, die, hang, leave, other_parameters, other_code or static_graph
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accum", type=int, default=1)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(32, 4)
width = 1 + (args.fault == "other_parameters" and ranks > 1 and rank)
net = (
    nn.Sequential(nn.Linear(4, 1), nn.Linear(1, width)) if args.fault == "other_code" and rank else nn.Linear(4, width)
)
model = nn.parallel.DistributedDataParallel(net, static_graph=args.fault == "static_graph")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
size, window = args.batch_size, args.batch_size * args.accum * ranks
for start in range(0, 32, window):
    if rank == 1 and start == window:  # in the second update
        if args.fault == "raise":
            raise ValueError("a file is missing")  # here: raised
        if args.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if args.fault == "hang":
            time.sleep(600)
        if args.fault == "leave":
            sys.exit(0)
    for k in range(args.accum):
        at = start + (k * ranks + rank) * size
        model.require_backward_grad_sync = k == args.accum - 1
        (model(inputs[at : at + size]).square().mean() / args.accum).backward()
    optimizer.step()
    optimizer.zero_grad()
