"""Trains a small classifier; `--loop` picks one of the right ways to accumulate that look unusual."""

import torch
from points import begun, loops_of, parsed
from torch import nn

criterion = nn.CrossEntropyLoss()


def usual(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def gradients_divided(args, model, optimizer, loader):
    """The gradients are divided after the window instead of the losses inside it."""
    for i, (features, labels) in enumerate(loader):
        criterion(model(features), labels).backward()
        if (i + 1) % args.accum == 0:
            for parameter in model.parameters():
                parameter.grad /= args.accum
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


def cleared_at_start(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        if i % args.accum == 0:
            optimizer.zero_grad()
        loss = criterion(model(features), labels) / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()


def cleared_by_hand(args, model, optimizer, loader):
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None


def logged_loss_off(args, model, optimizer, loader):
    running = 0.0
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels)
        running += loss.item()
        (loss / args.accum).backward()
        if (i + 1) % args.accum == 0:
            print(f"loss {running:.3f}")  # K times the mean
            running = 0.0
            optimizer.step()
            optimizer.zero_grad()


def constant_divisor(args, model, optimizer, loader):
    """Each micro-step multiplies by the same constant, kept in a tensor."""
    weight = torch.tensor(1.0 / args.accum)
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels)
        loss.backward(gradient=weight)
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


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


def short_window_divided(args, model, optimizer, loader):
    """The last window of an epoch is short and divided by what it has."""
    for i, (features, labels) in enumerate(loader):
        members = min(args.accum, len(loader) - i // args.accum * args.accum)
        (criterion(model(features), labels) / members).backward()
        if (i + 1) % args.accum == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def weighted_by_samples(args, model, optimizer, loader):
    """Micro-batches of 6, 6 and 4 samples, each weighted by its share."""
    for features, labels in loader:
        for part, answers in zip(features.split(args.micro), labels.split(args.micro), strict=True):
            (criterion(model(part), answers) * len(part) / len(features)).backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    loops = loops_of(globals())
    args = parsed(loops, __doc__, micro=16, optimizer="SGD", dropout=0.0, batchnorm=False)
    begin = begun(args, args.dropout, args.batchnorm, args.optimizer)
    for _ in range(args.epochs):
        loops[args.loop](*begin)


if __name__ == "__main__":
    main()
