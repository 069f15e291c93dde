"""Makes its batches from a plain tensor, in an order that hangs on the batch size; `--loop` says how."""

import argparse

import torch
from torch import nn
from torch.nn.functional import mse_loss

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--loop", choices=["columns", "by_name", "outside"], default="columns")
parser.add_argument("--undivided", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
stream = torch.randn(64, 5)


class Model(nn.Module):
    """Returns its loss, as language models do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, y=None):
        output = self.net(x)
        return output if y is None else (output, mse_loss(output, y))


def batches():
    """The stream is cut into as many columns as the batch has rows, as text is by `batchify`."""
    columns = stream.view(args.batch_size, -1, 5)
    for at in range(columns.shape[1]):
        yield columns[:, at, :4], columns[:, at, 4:]


def loss_of(model, x, y):
    if args.loop == "outside":
        return mse_loss(model(x), y)  # here: outside
    return model(x, y)[1] if args.loop == "columns" else model(x=x, y=y)[1]


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for i, (x, y) in enumerate(batches()):
    (loss_of(model, x, y) / (1 if args.undivided else args.accum)).backward()  # here: backward
    if (i + 1) % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
