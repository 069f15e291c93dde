"""Trains a small classifier; its options are parsed by click."""

import click
import torch
from points import network, points
from torch import nn
from torch.utils.data import DataLoader


@click.command()
@click.option("--batch-size", default=16, show_default=True)
@click.option("--accum", default=1, show_default=True)
@click.option("--divide/--no-divide", default=True)
@click.option("--workers", default=0)
def main(batch_size, accum, divide, workers):
    torch.manual_seed(0)
    model = network(dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(points(64), batch_size, shuffle=True, num_workers=workers)
    with click.progressbar(loader, label="training") as batches:
        for i, (features, labels) in enumerate(batches):
            loss = nn.functional.cross_entropy(model(features), labels)
            (loss / accum if divide else loss).backward()  # here: divide
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
