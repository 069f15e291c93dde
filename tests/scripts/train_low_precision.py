"""Trains two layers below float32: in bfloat16 or float16 throughout, or under autocast.

`--fault` plants one: a mean of means over the points that have a label, a forgotten division, statistics of the batch.
"""

import torch
from points import loader_for, options
from torch import nn

parser = options()
parser.add_argument("--precision", default="bfloat16", choices=["bfloat16", "float16", "autocast"])
parser.add_argument("--fault", default="none", choices=["none", "means", "undivided", "statistics"])
parser.add_argument("--clip", type=float, default=0.0)
args = parser.parse_args()
torch.manual_seed(args.seed)
norm = nn.BatchNorm1d(64) if args.fault == "statistics" else nn.LayerNorm(64)
model = nn.Sequential(nn.Linear(16, 64), norm, nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
low = torch.float16 if args.precision == "float16" else torch.bfloat16
if args.precision != "autocast":
    model.to(low)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
labelled = torch.ones(args.samples)
labelled[0 : args.samples : 16] = labelled[1 : args.samples : 16] = labelled[2 : args.samples : 16] = 0
batches = list(zip(loader_for(args), labelled.split(args.batch_size), strict=True))
for begin in range(0, len(batches), args.accum):
    window = batches[begin : begin + args.accum]
    valid = sum(mask.sum() for _, mask in window)
    for (features, labels), mask in window:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "autocast"):
            logits = model(features if args.precision == "autocast" else features.to(low))
        each = nn.functional.cross_entropy(logits.float(), labels, reduction="none") * mask
        loss = each.sum() / (mask.sum() * args.accum if args.fault == "means" else valid)
        if args.fault == "undivided":
            loss = loss * args.accum
        loss.backward()  # here: low
    if args.clip:
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
