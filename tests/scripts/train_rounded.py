"""Trains convolutions whose inputs are rounded to bfloat16, otherwise for each batch size, as a device's kernels do."""

import torch
from points import loader_for, options
from torch import nn

parser = options()
parser.add_argument("--undivided", action="store_true")
args = parser.parse_args()
torch.backends.mkldnn.conv.fp32_precision = "bf16"


class Rounded(nn.Conv2d):
    def forward(self, x):
        shift = 1 + len(x) / 4096  # another batch size, another rounding
        return super().forward(x + ((x * shift).bfloat16().float() / shift - x).detach())


torch.manual_seed(args.seed)
model = nn.Sequential(Rounded(1, 4, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for i, (features, labels) in enumerate(loader_for(args)):
    loss = nn.functional.cross_entropy(model(features.view(-1, 1, 4, 4)), labels)
    (loss if args.undivided else loss / args.accum).backward()  # here: loss
    if (i + 1) % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
