"""Trains a small classifier whose learning rate, momentum or decay follows a counter."""

import math

import torch
from points import loader_for, network, options
from torch import nn

criterion = nn.CrossEntropyLoss()


def rate_at(at):
    return 0.1 * (0.1 + 0.9 * math.cos(0.02 * at))


def main():
    parser = options(__doc__)
    parser.add_argument("--counter", choices=["micro_batches", "updates"], default="updates")
    parser.add_argument("--what", choices=["lr", "momentum", "weight_decay"], default="lr")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=0.01)
    count = 0
    for i, (features, labels) in enumerate(loader_for(args)):
        for group in optimizer.param_groups:
            group[args.what] = rate_at(count)  # here: setting
        (criterion(model(features), labels) / args.accum).backward()
        if args.counter == "micro_batches":
            count += 1
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
            if args.counter == "updates":
                count += 1


if __name__ == "__main__":
    main()
