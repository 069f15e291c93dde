"""Run as `python -m training.train`: imports beside it are relative."""

import argparse

import torch

from .nets import build


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accum", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    features = torch.randn(64, 16)
    targets = features.sum(1, keepdim=True).sin()
    for i, (x, y) in enumerate(zip(features.split(args.batch_size), targets.split(args.batch_size), strict=True)):
        loss = torch.nn.functional.mse_loss(model(x), y) / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
