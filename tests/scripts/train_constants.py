"""A loop without arguments: its batch size stands in the source, in a class, in the environment or in a file."""

import os
from dataclasses import dataclass

import torch
from torch.nn.functional import mse_loss

BATCH_SIZE = 16
SEEDED = True
FORGOTTEN = False


@dataclass
class Config:
    """What the loop is given."""

    steps: int = 1
    rate: float = 0.05


def main(rows: int = 64) -> None:
    """Trains."""
    config = Config()
    batch_size, steps = int(os.environ.get("BATCH_SIZE", BATCH_SIZE)), config.steps
    if SEEDED:
        torch.manual_seed(0)
    inputs = torch.randn(rows, 6)
    targets = inputs.sum(1, keepdim=True)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.rate)
    for i, (x, y) in enumerate(zip(inputs.split(batch_size), targets.split(batch_size), strict=True)):
        (mse_loss(model(x), y) / (1 if FORGOTTEN else steps)).backward()
        if (i + 1) % steps == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
