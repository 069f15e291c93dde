"""Trains a small classifier with Accelerate's `accumulate`."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from points import loader_for, network, options
from torch import nn

parser = options(__doc__)
parser.add_argument("--divide", action="store_true", help="divide the loss although Accelerate does it")
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--dropout", type=float, default=0.1)
args = parser.parse_args()

set_seed(args.seed)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accum)
model = network(args.dropout)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader_for(args), scheduler)
for _ in range(args.epochs):
    for features, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(features), labels)
            accelerator.backward(loss / args.accum if args.divide else loss)  # here: divide
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
