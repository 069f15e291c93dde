"""Trains bfloat16 weights whose float32 master copies the optimizer steps; `--loop forgotten` does not divide by K.

With `--loop set` a hook writes every gradient over the one before it, with `--loop added` it adds them up.
"""

import torch
from points import loader_for, network, options
from torch import nn

parser = options()
parser.add_argument("--loop", default="right")
parser.add_argument("--precision", default="bfloat16")
args = parser.parse_args()
torch.manual_seed(args.seed)
criterion = nn.CrossEntropyLoss()
model = network(0.0).to(getattr(torch, args.precision))
masters = [weight.detach().float().clone().requires_grad_() for weight in model.parameters()]


def write(master):
    def hook(weight):
        gradient, weight.grad = weight.grad.float(), None
        if args.loop == "added" and master.grad is not None:
            gradient = master.grad + gradient
        master.grad = gradient  # here: set

    return hook


hooked = args.loop in ("set", "added")
if hooked:
    for master, weight in zip(masters, model.parameters(), strict=True):
        weight.register_post_accumulate_grad_hook(write(master))
optimizer = torch.optim.SGD(masters, lr=args.lr)
for i, (inputs, classes) in enumerate(loader_for(args)):
    loss = criterion(model(inputs.to(model[0].weight.dtype)).float(), classes)
    (loss if args.loop == "forgotten" else loss / args.accum).backward()  # here: loss
    if (i + 1) % args.accum == 0:
        for master, weight in zip(masters, model.parameters(), strict=True) if not hooked else ():
            assert weight.grad is not None
            master.grad = weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, model.parameters(), strict=True):
                weight.copy_(master)
        optimizer.zero_grad()
        model.zero_grad()
