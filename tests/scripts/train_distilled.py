"""Distils a frozen bfloat16 teacher into a float32 student, over the points that have a label.

`--by micro_batch` averages over each micro-batch's own points, which differ in number unless all have a label.
"""

import torch
from points import loader_for, network, options
from torch import nn

parser = options()
parser.add_argument("--by", default="micro_batch", choices=["micro_batch", "window"])
parser.add_argument("--without", type=int, nargs="*", default=[0, 16, 32, 48], help="samples that have no label")
args = parser.parse_args()
torch.manual_seed(args.seed)
student = network()
teacher = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(torch.bfloat16).requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=args.lr)
labelled = torch.ones(args.samples)
labelled[args.without] = 0
batches = list(zip(loader_for(args), labelled.split(args.batch_size), strict=True))
for begin in range(0, len(batches), args.accum):
    window = batches[begin : begin + args.accum]
    valid = sum(mask.sum() for _, mask in window)
    for (features, labels), mask in window:
        with torch.no_grad():
            wanted = teacher(features.bfloat16()).float().softmax(-1)
        logits = student(features)
        soft = nn.functional.cross_entropy(logits, wanted, reduction="none")
        total = ((soft + nn.functional.cross_entropy(logits, labels, reduction="none")) * mask).sum()
        loss = total / valid if args.by == "window" else total / mask.sum() / args.accum
        loss.backward()  # here: distilled
    optimizer.step()
    optimizer.zero_grad()
