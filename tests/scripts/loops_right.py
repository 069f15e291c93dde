"""Trains a small classifier; `--loop` picks one of the right ways to accumulate that look unusual."""

import torch
from points import loader_for, network, options
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


LOOPS = {
    loop.__name__: loop
    for loop in (
        usual,
        gradients_divided,
        losses_summed,
        cleared_at_start,
        cleared_by_hand,
        logged_loss_off,
        constant_divisor,
        other_order,
        short_window_divided,
        weighted_by_samples,
    )
}


def main():
    parser = options(__doc__)
    parser.add_argument("--loop", choices=sorted(LOOPS), required=True)
    parser.add_argument("--micro", type=int, default=16, help="rows of a micro-batch cut from the batch")
    parser.add_argument("--optimizer", choices=["SGD", "Adam", "AdamW"], default="SGD")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--batchnorm", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = network(args.dropout, args.batchnorm)
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=args.lr)
    loader = loader_for(args)
    for _ in range(args.epochs):
        LOOPS[args.loop](args, model, optimizer, loader)


if __name__ == "__main__":
    main()
