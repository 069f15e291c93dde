"""A training script with the arguments that `audit.toml` names: what an audit runs, unchanged."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    """Trains for one epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accum", type=int, default=4, help="micro-batches per update")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    dataset = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for i, (inputs, targets) in enumerate(DataLoader(dataset, args.batch_size)):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        (loss / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
