"""Trains a small classifier; `--loop` picks one of the ways in which people get the scale of the loss wrong."""

import torch
from points import begun, loops_of, parsed
from torch import nn

criterion = nn.CrossEntropyLoss()


def division_forgotten(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels)
        loss.backward()  # here: division_forgotten
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def divided_twice(args, model, optimizer, loader):
    def compute_loss(features, labels):
        return criterion(model(features), labels) / args.accum

    for i, (features, labels) in enumerate(loader):
        loss = compute_loss(features, labels) / args.accum
        loss.backward()  # here: divided_twice
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def scaled_after_backward(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels)
        loss.backward()  # here: scaled_after_backward
        loss = loss / args.accum
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def penalty_undivided(args, model, optimizer, loader):
    """The mean over the samples is divided; the penalty on the weights is added once per micro-batch."""
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss = loss + 0.01 * sum(weight.square().sum() for weight in model.parameters())  # here: penalty_undivided
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def penalty_later(args, model, optimizer, loader):
    """The same behind a warm-up of one update."""
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        strength = 0.01 if i >= args.accum else 0.0
        loss = loss + strength * sum(weight.square().sum() for weight in model.parameters())  # here: penalty_later
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def penalty_divided(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels)
        loss = loss + 0.01 * sum(weight.square().sum() for weight in model.parameters())
        (loss / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def short_window(args, model, optimizer, loader):
    """The last window of an epoch is short, and divided by the configured number all the same."""
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss.backward()  # here: short_window
        if (i + 1) % args.accum == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def ragged_batches(args, model, optimizer, loader):
    """16 samples in micro-batches of 6, 6 and 4, whose means are averaged as if they were equally many."""
    for features, labels in loader:
        parts = list(zip(features.split(args.micro), labels.split(args.micro), strict=True))
        for part, answers in parts:
            loss = criterion(model(part), answers) / len(parts)
            loss.backward()  # here: ragged_batches
        optimizer.step()
        optimizer.zero_grad()


def matched_targets(args, model, optimizer, loader):
    """The mean over the matched samples times the batch size, as detectors do it; nothing is divided."""
    for i, (features, labels) in enumerate(loader):
        matched = features[:, 0] > -0.5
        loss = criterion(model(features)[matched], labels[matched]) * len(labels)
        loss.backward()  # here: matched_targets
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def empty_micro_batch(args, model, optimizer, loader):
    """Samples without a label count for nothing; one micro-batch has no other."""
    for i, (features, labels) in enumerate(loader):
        unlabelled = args.batch_size * (i % args.accum) + torch.arange(len(labels)) < 4
        loss = criterion(model(features), labels.masked_fill(unlabelled, -100)) / args.accum
        loss.backward()  # here: empty_micro_batch
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def main():
    loops = loops_of(globals())
    args = parsed(loops, __doc__, micro=16, optimizer="SGD")
    begin = begun(args, optimizer=args.optimizer)
    for _ in range(args.epochs):
        loops[args.loop](*begin)


if __name__ == "__main__":
    main()
