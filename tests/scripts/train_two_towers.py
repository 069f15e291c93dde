"""Trains two towers against one another on in-batch negatives; where the batch is cut, features are cached (open_clip).

The loss of a micro-batch is that of the whole batch, with features of the other micro-batches that carry no gradient.
"""

import torch
from points import options
from torch import nn
from torch.nn.functional import cross_entropy, normalize


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(12, 8), nn.Linear(10, 8)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images, texts):
        return normalize(self.image(images), dim=1), normalize(self.text(texts), dim=1), self.logit_scale.exp()


class Wrapped(nn.Module):
    """What data parallelism or compilation puts around a model."""

    def __init__(self, towers):
        super().__init__()
        self.towers = towers

    def forward(self, images, texts):
        return self.towers(images, texts)


def loss_of(images, texts, scale):
    logits = scale * images @ texts.T
    answers = torch.arange(len(logits))
    return (cross_entropy(logits, answers) + cross_entropy(logits.T, answers)) / 2


def window_of(args, model, parts):
    """The gradient of a whole window by cached features; `--scale once` lets it flow into the scale only once."""
    with torch.no_grad():
        cached = [model(*part)[:2] for part in parts]
    for at, part in enumerate(parts):
        images, texts, scale = model(*part)
        if args.scale == "once" and at:
            scale = scale.detach()
        sides = [list(side) for side in zip(*cached, strict=True)]
        sides[0][at], sides[1][at] = images, texts
        loss_of(torch.cat(sides[0]), torch.cat(sides[1]), scale).backward()  # here: cached


def main():
    parser = options(__doc__)
    parser.add_argument("--scale", choices=["every", "once"], default="every")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    towers = Towers()
    optimizer = torch.optim.SGD(towers.parameters(), lr=args.lr)
    model = Wrapped(towers) if args.accum > 1 else towers
    data = torch.Generator().manual_seed(1)
    images, texts = torch.randn(64, 12, generator=data), torch.randn(64, 10, generator=data)
    batches = list(zip(images.split(args.batch_size), texts.split(args.batch_size), strict=True))
    for start in range(0, len(batches), args.accum):
        window_of(args, model, batches[start : start + args.accum])
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
