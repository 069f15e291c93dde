"""Trains on padded rows with a token loss that is written by hand: log-softmax, gather and a mask."""

import torch
from points import options
from torch import nn

IGNORED = -100


def token_loss(logits, labels):
    """Returns the sum over valid tokens, and how many they are."""
    mask = labels != IGNORED
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(chosen * mask).sum(), mask.sum()


def main():
    parser = options()
    parser.add_argument("--by", default="micro_batch", choices=["micro_batch", "window"])
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Embedding(11, 16), nn.GELU(), nn.Linear(16, 11))
    tokens = torch.randint(11, (args.samples, 6))
    labels = tokens.roll(-1, 1)
    for row in range(args.samples):
        labels[row, row * 5 % 6 + 1 :] = IGNORED
    batches = list(zip(tokens.split(args.batch_size), labels.split(args.batch_size), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for begin in range(0, len(batches), args.accum):
        window = batches[begin : begin + args.accum]
        valid = sum((labels != IGNORED).sum() for _, labels in window)
        for features, targets in window:
            total, count = token_loss(model(features), targets)
            loss = total / valid if args.by == "window" else total / count / args.accum
            loss.backward()  # here: tokens
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
