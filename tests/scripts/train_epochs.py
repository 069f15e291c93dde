"""Loops over a loader whose number of micro-batches K divides: what an epoch's short end would do shows in no epoch."""

import argparse

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--end", default="right", choices=["right", "lost", "misscaled", "coupled"])
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
inputs = torch.randn(96, 6)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), args.batch_size, shuffle=True)
for _ in range(3):
    if args.end == "lost":
        optimizer.zero_grad()  # here: cleared
    for i, (x, y) in enumerate(loader):
        first = i - i % args.accum
        size = args.accum if args.end == "misscaled" else min(args.accum, len(loader) - first)
        found = model(x)
        if args.end == "coupled" and first + args.accum >= len(loader):
            found = found - found.mean(0)  # here: coupled
        (mse_loss(found, y) / size).backward()  # here: backward
        if (i + 1) % args.accum == 0 or (args.end != "lost" and i + 1 == len(loader)):
            optimizer.step()
            optimizer.zero_grad()
