"""Trains a small variational autoencoder: its KL term is warmed up, its features are standardised."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

PROGRESS = {"examples": 0}


class Autoencoder(nn.Module):
    def __init__(self, width=12, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 24), nn.ELU(), nn.Linear(24, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 24), nn.ELU(), nn.Linear(24, width))

    def forward(self, rows, noise):
        mean, log_variance = self.encoder(rows).chunk(2, 1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


class Standardiser:
    """Scales features by the statistics of the rows that it is fitted on: by default those that it sees first."""

    def __init__(self):
        self.mean = self.deviation = None

    def fit(self, rows):
        self.mean, self.deviation = rows.mean(0), rows.std(0)  # fault: first_rows
        return self

    def __call__(self, rows):
        if self.mean is None:
            self.fit(rows)
        return (rows - self.mean) / self.deviation  # reads: first_rows


def warmup():
    return min(1.0, PROGRESS["examples"] / 64)  # reads: warmup


def divergence(mean, log_variance):
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()


def is_penalised(args, i):
    """Whether the sparsity penalty is added: it is in every fourth iteration."""
    if args.fault == "lazy_penalty":
        return (i // args.accum if args.right else i) % 4 == 0  # fault: lazy_penalty
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--fault", default="warmup")
    parser.add_argument("--right", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data, noise = 2 * torch.randn(64, 12) + torch.linspace(-1, 1, 12), torch.randn(64, 4)
    standardise = Standardiser()
    if args.fault != "first_rows" or args.right:
        standardise.fit(data)
    for i, (rows, drawn) in enumerate(zip(data.split(args.batch_size), noise.split(args.batch_size), strict=True)):
        if args.fault == "warmup" and not args.right:
            PROGRESS["examples"] += len(rows)  # fault: warmup
        rows = standardise(rows)  # uses: first_rows
        found, mean, log_variance = model(rows, drawn)
        loss = F.mse_loss(found, rows) + warmup() * divergence(mean, log_variance)  # uses: warmup
        if is_penalised(args, i):  # fault: lazy_penalty
            loss = loss + 2 * mean.abs().mean()  # reads: lazy_penalty
        (loss / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
            if args.right:
                PROGRESS["examples"] += args.batch_size * args.accum


if __name__ == "__main__":
    main()
