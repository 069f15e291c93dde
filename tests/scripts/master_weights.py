"""Trains bfloat16 weights whose float32 master copies the optimizer steps; `--loop forgotten` does not divide by K."""

import torch
from points import loader_for, network, options
from torch import nn

parser = options()
parser.add_argument("--loop", default="right")
args = parser.parse_args()
torch.manual_seed(args.seed)
criterion = nn.CrossEntropyLoss()
model = network(0.0).to(torch.bfloat16)
masters = [weight.detach().float().clone().requires_grad_() for weight in model.parameters()]
optimizer = torch.optim.SGD(masters, lr=args.lr)
for i, (inputs, classes) in enumerate(loader_for(args)):
    loss = criterion(model(inputs.bfloat16()).float(), classes)
    (loss if args.loop == "forgotten" else loss / args.accum).backward()  # here: loss
    if (i + 1) % args.accum == 0:
        for master, weight in zip(masters, model.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, model.parameters(), strict=True):
                weight.copy_(master)
        optimizer.zero_grad()
        model.zero_grad()
