"""The published four-layer digit classifier: Adam, batches of 32, a step every `--accum` batches and after the last."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def digits(samples):
    """Blurred prototypes of ten classes: learnable, and no download."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.rand(10, 784, generator=generator)
    labels = torch.randint(10, (samples,), generator=generator)
    images = prototypes[labels] + 0.2 * torch.randn(samples, 784, generator=generator)
    return TensorDataset(images.view(-1, 1, 28, 28), labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def forward(self, images):
        return self.layers(images)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--accum", type=int, default=4)
parser.add_argument("--samples", type=int, default=192)
parser.add_argument("--divide", choices=["no", "constant", "window"], default="no")
args = parser.parse_args()

torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.CrossEntropyLoss()
loader = DataLoader(digits(args.samples), batch_size=args.batch_size, shuffle=True)

for epoch in range(2):
    for i, (images, labels) in enumerate(loader):
        loss = criterion(model(images), labels)
        if args.divide == "constant":
            loss = loss / args.accum
        elif args.divide == "window":
            loss = loss / min(args.accum, len(loader) - i // args.accum * args.accum)
        loss.backward()  # here: scale
        if (i + 1) % args.accum == 0 or i + 1 == len(loader):
            optimizer.step()  # here: step
            optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss.item():.3f}")
