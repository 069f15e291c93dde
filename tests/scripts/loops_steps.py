"""Trains a small classifier; `--loop` picks one of the ways in which people step or clear at the wrong place."""

import torch
from points import begun, loops_of, parsed
from torch import nn

criterion = nn.CrossEntropyLoss()


# those of `tests/support/mutated_loops.py`
#: loops


def too_early(args, model, optimizer, loader):
    """The published loop: `i` counts from 0, and the loss is not divided."""
    for _ in range(args.epochs):
        for i, (features, labels) in enumerate(loader):
            loss = criterion(model(features), labels)
            loss.backward()  # here: too_early, the scale
            if i % args.accum == 0:
                optimizer.step()  # here: too_early
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
