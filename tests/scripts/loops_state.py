"""Trains with state that each forward moves: a criterion's centre or count, a codebook, a number in an attribute."""

import torch
from points import loader_for, network, options
from torch import nn
from torch.nn.functional import cross_entropy, one_hot


class Centred(nn.Module):
    """Takes a moving centre off the outputs, or is weighted by how often it was called; or only notes both."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))
        self.rounds = 0

    def forward(self, outputs, labels):
        loss = cross_entropy(outputs - self.centre if self.kind in ("centre", "once") else outputs, labels)
        loss = loss / (1 + self.rounds) if self.kind == "rounds" else loss
        if self.kind != "once":
            self.move(outputs)
        return loss

    @torch.no_grad()
    def move(self, outputs):
        self.calls += 1
        self.centre.mul_(0.9).add_(outputs.mean(0), alpha=0.1)  # here: centre
        self.rounds += 1  # here: rounds


class Codebook(nn.Module):
    """Replaces each row by the nearest code; each forward moves the codes towards the rows that took them."""

    def __init__(self, width, codes=8):
        super().__init__()
        self.register_buffer("codes", torch.randn(codes, width, generator=torch.Generator().manual_seed(2)) / 4)
        self.register_buffer("sizes", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, rows):
        taken = one_hot(torch.cdist(rows, self.codes).argmin(1), len(self.codes)).to(rows)
        nearest = taken @ self.codes
        with torch.no_grad():
            self.sizes.mul_(0.9).add_(taken.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(taken.T @ rows, alpha=0.1)
            self.codes.copy_(self.sums / self.sizes.clamp_min(1e-3)[:, None])  # here: codebook
        return rows + (nearest - rows).detach()


def main():
    parser = options(__doc__)
    parser.add_argument("--kind", choices=("centre", "once", "unread", "rounds", "codebook"), required=True)
    parser.add_argument("--undivided", action="store_true")
    parser.add_argument("--batchnorm", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = network(batchnorm=args.batchnorm)
    if args.kind == "codebook":
        middle = nn.BatchNorm1d(6) if args.batchnorm else nn.Identity()
        model = nn.Sequential(nn.Linear(16, 6), middle, Codebook(6), nn.Linear(6, 4))
    criterion = Centred(args.kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    fed = []
    for i, (features, labels) in enumerate(loader_for(args)):
        outputs = model(features)
        (criterion(outputs, labels) / (1 if args.undivided else args.accum)).backward()
        fed.append(outputs.detach())
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
            if args.kind == "once":
                criterion.move(torch.cat(fed))
            fed = []


if __name__ == "__main__":
    main()
