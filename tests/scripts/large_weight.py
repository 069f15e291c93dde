"""A weight of ten million elements beside a bias of 64, whose gradient a hook may change by a little."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--fault", type=float, default=0.0, help="relative change of the bias's gradient in a micro-batch")
parser.add_argument("--divide", type=int, default=1)
parser.add_argument("--width", type=int, default=4000)
args = parser.parse_args()
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(2500, args.width, bias=False)
        self.bias = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.wide(x)).unflatten(1, (-1, 50)).mean(2)
        return torch.tanh(hidden[:, :64] + self.bias).sum(1) + hidden.sum(1)


model = Model()
if args.accum > 1:
    model.bias.register_hook(lambda gradient: gradient * (1 + args.fault))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data, targets = torch.randn(32, 2500), torch.randn(32)
for number, rows in enumerate(torch.arange(32).split(args.batch_size), 1):
    loss = (model(data[rows]) - targets[rows]).square().mean()
    (loss / (args.accum if args.divide else 1)).backward()
    if number % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
