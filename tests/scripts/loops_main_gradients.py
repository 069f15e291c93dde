"""Trains with gradients that are moved out of `.grad`, by hooks or by the loop, and put back before the step."""

import torch
from points import begun, loops_of, parsed
from torch import nn

criterion = nn.CrossEntropyLoss()


def orthogonalise(gradient):
    """Presses singular values together, as Muon does."""
    gradient = gradient / gradient.norm()
    for _ in range(3):
        gradient = 2 * gradient - gradient @ gradient.T @ gradient
    return gradient


def clip(gradient):
    return gradient * min(1.0, 0.05 / float(gradient.norm()))


def centralise(gradient):
    """Linear, though no multiple of the gradient."""
    return gradient - gradient.mean(1, keepdim=True)


TRANSFORMS = {"orthogonalise": orthogonalise, "clip": clip, "centralise": centralise}


def transform(args, when, gradient):
    return TRANSFORMS[args.transform](gradient) if args.when == when and gradient.ndim == 2 else gradient


def step(args, model, optimizer, sums, divisor):
    for parameter in model.parameters():
        parameter.grad = transform(args, "window", sums[parameter] / divisor).to(parameter.dtype)
    if args.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    sums.clear()


def hooked(args):
    """As Megatron's: a hook adds each gradient to one in float32, and leaves nothing in `.grad`."""
    args, model, optimizer, loader = begun(args)
    sums = {}

    def move(parameter):
        gradient = transform(args, "pass", parameter.grad.float())
        sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
        parameter.grad = None

    def registered(parameter):
        if args.through != "node":
            return parameter.register_post_accumulate_grad_hook(move)
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: move(parameter))
        return node

    kept = [registered(parameter) for parameter in model.parameters()]
    for i, (features, labels) in enumerate(loader):
        left = args.accum - i % args.accum
        weight = (args.accum + 1) / (2 * left) if args.rising else 1  # later micro-batches weigh more
        (criterion(model(features), labels) * weight).backward()
        if (i + 1) % args.accum == 0:
            step(args, model, optimizer, sums, 1 if args.undivided else args.accum)
    return kept


def taken(args):
    """The loop takes every gradient after its backward pass."""
    args, model, optimizer, loader = begun(args)
    sums = {}
    for i, (features, labels) in enumerate(loader):
        loss = criterion(model(features), labels)
        (loss if args.undivided else loss / args.accum).backward()
        for parameter in model.parameters():
            gradient = transform(args, "pass", parameter.grad)
            sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient.clone()
            parameter.grad = None  # here: taken
        if (i + 1) % args.accum == 0:
            step(args, model, optimizer, sums, 1)


if __name__ == "__main__":
    loops = loops_of(globals())
    loops.pop("step"), loops.pop("transform")
    settings = {
        "undivided": False,
        "rising": False,
        "through": "parameter",
        "transform": "orthogonalise",
        "when": "never",
        "clip": 0.0,
    }
    arguments = parsed(loops, __doc__, **settings)
    loops[arguments.loop](arguments)
