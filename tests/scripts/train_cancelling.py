"""Trains a two-class head whose bias has gradients that cancel over the batch: what is left of them is rounding."""

import torch
from points import options
from torch import nn
from torch.nn.functional import cross_entropy


def main():
    parser = options(__doc__)
    parser.add_argument("--undivided", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    body, head = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.05)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)  # every class is as likely: with as many rows of each the bias has no gradient
    features = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(64) // 2 % 2
    batches = zip(features.split(args.batch_size), labels.split(args.batch_size), strict=True)
    for i, (x, y) in enumerate(batches):
        loss = cross_entropy(head(body(x)) * (1 + 0.1 * x[:, :1]), y)
        if not args.undivided:
            loss = loss / args.accum
        loss.backward()  # here: loss
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
