"""Trains without a backward pass or an optimizer of torch's; `--style` says how, `--undivided` forgets the ÷ K."""

import argparse

import torch
from torch import nn
from torch.func import functional_call

RATE = 0.05


class Momentum:
    """An optimizer that is none of torch's."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.moments = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self):
        for parameter, moment in zip(self.parameters, self.moments, strict=True):
            moment.mul_(0.9).add_(parameter.grad)
            parameter.sub_(RATE * moment)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None


def plain(args, model, batches):
    """Moves the weights by hand, as `word_language_model` of pytorch/examples does."""
    for i, (x, y) in enumerate(batches):
        (nn.functional.mse_loss(model(x), y) / args.share).backward()  # here: plain
        if (i + 1) % args.accum == 0 or args.every:
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-RATE)
            model.zero_grad()


def gradients(args, model, batches):
    """The same without `.grad`."""
    parameters, sums = list(model.parameters()), None
    for i, (x, y) in enumerate(batches):
        loss = nn.functional.mse_loss(model(x), y) / args.share
        found = torch.autograd.grad(loss, parameters)  # here: gradients
        sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
        if (i + 1) % args.accum == 0 or args.every:
            with torch.no_grad():
                for parameter, gradient in zip(parameters, sums, strict=True):
                    parameter -= RATE * gradient
            sums = None


def own(args, model, batches):
    """An optimizer of the script's own."""
    optimizer = Momentum(model.parameters())
    for i, (x, y) in enumerate(batches):
        (nn.functional.mse_loss(model(x), y) / args.share).backward()  # here: own
        if (i + 1) % args.accum == 0 or args.every:
            optimizer.step()
            optimizer.zero_grad()


def assigned(args, model, batches):
    """Gradients of `autograd.grad` that an optimizer of torch's uses."""
    optimizer, parameters = torch.optim.SGD(model.parameters(), lr=RATE), list(model.parameters())
    for i, (x, y) in enumerate(batches):
        found = torch.autograd.grad(nn.functional.mse_loss(model(x), y) / args.share, parameters)  # here: assigned
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if (i + 1) % args.accum == 0 or args.every:
            optimizer.step()
            optimizer.zero_grad()


def functional(args, model, batches):
    """Gradients of `torch.func.grad` that an optimizer of torch's uses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def loss(weights, x, y):
        return nn.functional.mse_loss(functional_call(model, weights, (x,)), y) / args.share

    for i, (x, y) in enumerate(batches):
        found = torch.func.grad(loss)({name: weight.detach() for name, weight in model.named_parameters()}, x, y)
        for name, parameter in model.named_parameters():
            parameter.grad = found[name] if parameter.grad is None else parameter.grad + found[name]
        if (i + 1) % args.accum == 0 or args.every:
            optimizer.step()
            optimizer.zero_grad()


def compiled(args, model, batches):
    """Backward passes and steps inside a compiled function."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    @torch.compile(backend="eager")
    def train(x, y, step):
        (nn.functional.mse_loss(model(x), y) / args.share).backward()  # here: compiled
        if step:
            optimizer.step()
            optimizer.zero_grad()

    for i, (x, y) in enumerate(batches):
        train(x, y, (i + 1) % args.accum == 0 or args.every)


STYLES = {style.__name__: style for style in (plain, gradients, own, assigned, functional, compiled)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--style", choices=STYLES, required=True)
    parser.add_argument("--undivided", action="store_true")
    parser.add_argument("--every", action="store_true", help="step after every micro-batch")
    args = parser.parse_args()
    args.share = 1 if args.undivided else args.accum
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    inputs = torch.randn(32, 4)
    targets = inputs.sum(1, keepdim=True)
    batches = zip(inputs.split(args.batch_size), targets.split(args.batch_size), strict=True)
    STYLES[args.style](args, model, batches)


if __name__ == "__main__":
    main()
