"""A small transformer with dropout whose blocks are recomputed in the backward pass."""

import torch
from points import loader_for, options
from torch import nn
from torch.utils.checkpoint import checkpoint


class Encoder(nn.Module):
    def __init__(self, width=16, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, dropout=0.2, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, tokens):
        for block in self.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False)
        return self.head(tokens.mean(1))


parser = options(__doc__)
parser.add_argument("--divide-by", type=float)
args = parser.parse_args()
torch.manual_seed(args.seed)
torch.set_num_threads(1)
lift = torch.randn(16, 6, 16)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(args.epochs):
    for i, (features, labels) in enumerate(loader_for(args)):
        tokens = torch.einsum("bf,ftw->btw", features, lift)
        loss = nn.functional.cross_entropy(model(tokens), labels) / (args.divide_by or args.accum)
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
