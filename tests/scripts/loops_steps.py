"""Trains a small classifier; `--loop` picks one of the ways in which people step or clear at the wrong place."""

import torch
from points import begun, loops_of, parsed
from torch import nn

criterion = nn.CrossEntropyLoss()


def cleared_inside(args, model, optimizer, loader):
    for _ in range(args.epochs):
        for i, (features, labels) in enumerate(loader):
            optimizer.zero_grad()  # here: cleared_inside
            loss = criterion(model(features), labels) / args.accum
            loss.backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()


def cleared_at_epoch(args, model, optimizer, loader):
    """Micro-batches after the last full window of an epoch are thrown away."""
    for _ in range(args.epochs):
        optimizer.zero_grad()  # here: cleared_at_epoch
        for i, (features, labels) in enumerate(loader):
            loss = criterion(model(features), labels) / args.accum
            loss.backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()


def leaks_into_next_epoch(args, model, optimizer, loader):
    for _ in range(args.epochs):
        for i, (features, labels) in enumerate(loader):
            loss = criterion(model(features), labels) / args.accum
            loss.backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()  # here: leaks_into_next_epoch
                optimizer.zero_grad()


def never_cleared(args, model, optimizer, loader):
    for _ in range(args.epochs):
        for i, (features, labels) in enumerate(loader):
            loss = criterion(model(features), labels) / args.accum
            loss.backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()  # here: never_cleared


def all_but_the_boundary(args, model, optimizer, loader):
    for _ in range(args.epochs):
        for i, (features, labels) in enumerate(loader):
            loss = criterion(model(features), labels) / args.accum
            loss.backward()
            if args.accum == 1 or (i + 1) % args.accum != 0:
                optimizer.step()  # here: all_but_the_boundary
                optimizer.zero_grad()


def step_outside_the_if(args, model, optimizer, loader):
    updates = 0
    for _ in range(args.epochs):
        for i, (features, labels) in enumerate(loader):
            loss = criterion(model(features), labels) / args.accum
            loss.backward()
            if (i + 1) % args.accum == 0:
                updates += 1
                print(f"update {updates}: loss {loss.item():.3f}")
            optimizer.step()  # here: step_outside_the_if
            optimizer.zero_grad()


def too_early(args, model, optimizer, loader):
    """The published loop: `i` counts from 0, and the loss is not divided."""
    for _ in range(args.epochs):
        for i, (features, labels) in enumerate(loader):
            loss = criterion(model(features), labels)
            loss.backward()  # here: too_early, the scale
            if i % args.accum == 0:
                optimizer.step()  # here: too_early
                optimizer.zero_grad()


def decay_by_hand(args, model, optimizer, loader):
    for _ in range(args.epochs):
        for i, (features, labels) in enumerate(loader):
            loss = criterion(model(features), labels) / args.accum
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 - args.lr * 0.1)  # here: decay_by_hand
            if (i + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()


def step_in_a_hook(args, model, optimizer, loader):
    """One optimizer per parameter steps and clears while the backward pass runs, to save memory."""
    optimizers = {p: torch.optim.SGD([p], lr=args.lr) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()  # here: step_in_a_hook
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(args.epochs):
        for features, labels in loader:
            loss = criterion(model(features), labels) / args.accum
            loss.backward()


def backward_at_the_boundary(args, model, optimizer, loader):
    """Three of four micro-batches are computed for nothing."""
    for _ in range(args.epochs):
        for i, (features, labels) in enumerate(loader):
            loss = criterion(model(features), labels) / args.accum
            if (i + 1) % args.accum == 0:
                loss.backward()  # here: backward_at_the_boundary
                optimizer.step()
                optimizer.zero_grad()


def skipping(args, model, optimizer, loader):
    """A micro-batch of window `--skipped` looks bad to the script, and is left out."""
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels) / args.accum  # here: skipping
        if args.accum > 1 and i == (args.skipped - 1) * args.accum + 1:
            continue
        loss.backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def head_never_steps(args, model, optimizer, loader):
    """Two optimizers; with accumulation the head's is forgotten."""
    body = torch.optim.SGD(model[0].parameters(), lr=args.lr)
    head = torch.optim.SGD(model[-1].parameters(), lr=args.lr)
    for _ in range(args.epochs):
        for i, (features, labels) in enumerate(loader):
            loss = criterion(model(features), labels) / args.accum
            loss.backward()
            if (i + 1) % args.accum == 0:
                body.step()
                if args.accum == 1:
                    head.step()
                model.zero_grad()


def main():
    loops = loops_of(globals())
    args = parsed(loops, __doc__, skipped=0)
    loops[args.loop](*begun(args))


if __name__ == "__main__":
    main()
