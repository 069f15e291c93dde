"""Trains a small classifier with Lightning Fabric, which leaves accumulation to the loop."""

import lightning
import torch
from points import loader_for, network, options
from torch import nn

parser = options(__doc__)
parser.add_argument("--forget", action="store_true", help="forget to divide the loss")
args = parser.parse_args()

fabric = lightning.Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(args.seed)
model = network(dropout=0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader_for(args))
for _ in range(args.epochs):
    for i, (features, labels) in enumerate(loader):
        accumulating = (i + 1) % args.accum != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = nn.functional.cross_entropy(model(features), labels)
            fabric.backward(loss if args.forget else loss / args.accum)  # here: forget
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=10.0)
            optimizer.step()
            optimizer.zero_grad()
