"""Trains a small classifier; `--loop` picks a way in which people get the scale of the loss wrong, or right."""

import torch
from points import begun, loops_of, parsed
from torch import nn

criterion = nn.CrossEntropyLoss()


# those of `tests/support/mutated_loops.py`
#: loops


def ragged_batches(args, model, optimizer, loader):
    """16 samples in micro-batches of 6, 6 and 4, whose means are averaged as if they were equally many."""
    for features, labels in loader:
        parts = list(zip(features.split(args.micro), labels.split(args.micro), strict=True))
        for part, answers in parts:
            loss = criterion(model(part), answers) / len(parts)
            loss.backward()  # here: ragged_batches
        optimizer.step()
        optimizer.zero_grad()


def marked_means(args, model, optimizer, loader):
    """Means over the marked samples of micro-batches of 6, 6 and 4, weighted by what `--by` says."""
    average = torch.ones(())
    for features, labels in loader:
        marked = (torch.arange(len(features)) * 7 % 5 < torch.arange(len(features)) // 4 + 1).float()
        for at in torch.arange(len(features)).split(args.micro):
            log_p = model(features[at]).log_softmax(-1).gather(-1, labels[at, None])[:, 0]
            total, count = -(log_p * marked[at]).sum(), marked[at].sum()
            share = len(at) / len(features)
            if args.by == "columns":  # a weight that only the graph shows: the shares of the first feature's size
                share = float(features[at, 0].abs().sum() / features[:, 0].abs().sum())
            loss = total / marked.sum() if args.by == "marked" else total / count * share
            if args.by == "average":  # a divisor that every forward moves, beside the right shares of samples
                average = 0.9 * average + 0.1 * log_p.detach().square().mean()
                loss = -log_p.mean() / average * share
            loss.backward()  # here: marked_means
        optimizer.step()
        optimizer.zero_grad()


def losses_summed(args, model, optimizer, loader):
    """One backward over the summed losses of the window."""
    total = 0.0
    for i, (features, labels) in enumerate(loader):
        total = total + criterion(model(features), labels) / args.accum
        if (i + 1) % args.accum == 0:
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            total = 0.0


def other_order(args, model, optimizer, loader):
    """The micro-batches of a window come in another order."""
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == args.accum:
            for features, labels in reversed(window):
                (criterion(model(features), labels) / args.accum).backward()
            optimizer.step()
            optimizer.zero_grad()
            window = []


def weighted_by_samples(args, model, optimizer, loader):
    """Micro-batches of 6, 6 and 4 samples, each weighted by its share."""
    for features, labels in loader:
        for part, answers in zip(features.split(args.micro), labels.split(args.micro), strict=True):
            (criterion(model(part), answers) * len(part) / len(features)).backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    loops = loops_of(globals())
    args = parsed(loops, __doc__, micro=16, by="samples", optimizer="SGD", dropout=0.0, batchnorm=False)
    begin = begun(args, args.dropout, args.batchnorm, args.optimizer)
    for _ in range(args.epochs):
        loops[args.loop](*begin)


if __name__ == "__main__":
    main()
