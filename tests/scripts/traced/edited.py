"""Trains a small regression; its gradients are edited after the last backward pass, in as many ways as faults."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Batch:
    """The samples that the last forward was given, or those of the whole update."""

    def __init__(self):
        self.rows = self.wanted = None

    def remember(self, rows, wanted):
        self.rows, self.wanted = rows, wanted  # uses: hooked called


class ScaleBySpread:
    """A callback: assigns gradients that are divided by how far the targets are spread."""

    def __init__(self, parameters, batch):
        self.parameters, self.batch = list(parameters), batch

    @torch.no_grad()
    def __call__(self):
        spread = self.batch.wanted.std()  # fault: called
        for parameter in self.parameters:
            parameter.grad = parameter.grad / spread  # uses: called


def add_noise(parameters, count, source):
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=source)
        parameter.grad.add_(noise / count)  # reads: noised


def shift(parameters, count):
    """Writes by NumPy, which no call of torch tells of."""
    for parameter in parameters:
        parameter.grad.numpy()[...] += 0.5 / count  # fault: shifted


def mix_in(parameters, loss):
    """Blends the gradient with its sign, the more the larger the loss is."""
    share = loss / (1 + loss)  # reads: blended
    for parameter in parameters:
        gradient = parameter.grad
        parameter.grad = (1 - share) * gradient + share * gradient.sign() * gradient.abs().mean()  # uses: blended


def make_callbacks(fault, model, optimizer, batch):
    """Returns what is called before each step; a hook of the optimizer is none of these."""
    parameters = list(model.parameters())

    def scale(*_):
        for parameter in parameters:
            parameter.grad.mul_(batch.rows.norm(dim=1).mean() / 4)  # fault: hooked

    if fault == "hooked":
        optimizer.register_step_pre_hook(scale)  # uses: hooked
    return [ScaleBySpread(parameters, batch)] if fault == "called" else []


def edit(fault, model, rows, loss, source):
    """Changes the gradients of a model by the rows that it is given, and their loss."""
    parameters = list(model.parameters())
    if fault == "noised":
        add_noise(parameters, len(rows), source)  # fault: noised
    if fault == "shifted":
        shift(parameters, len(rows))  # fault: shifted
    if fault == "blended":
        mix_in(parameters, loss)  # fault: blended


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--fault", default="noised")
    parser.add_argument("--right", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    data = torch.randn(64, 10) * torch.linspace(0.5, 2, 10) + torch.linspace(-1, 1, 64)[:, None]
    targets = data[:, :3].prod(1, keepdim=True).tanh() + data[:, 3:4]
    batch, source = Batch(), torch.Generator().manual_seed(3)
    callbacks = make_callbacks(args.fault, model, optimizer, batch)
    seen, losses = [], []
    parts = zip(data.split(args.batch_size), targets.split(args.batch_size), strict=True)
    for at, (rows, wanted) in enumerate(parts, 1):
        loss = F.mse_loss(model(rows), wanted)
        (loss / args.accum).backward()
        losses.append(loss.detach())
        seen.append((rows, wanted))
        batch.remember(rows, wanted)
        if at % args.accum:
            continue
        if args.right:
            rows, wanted = (torch.cat(side) for side in zip(*seen, strict=True))
            batch.remember(rows, wanted)
        edit(args.fault, model, rows, torch.stack(losses).mean() if args.right else losses[-1], source)  # uses: blended
        for callback in callbacks:
            callback()  # uses: called
        optimizer.step()
        optimizer.zero_grad()
        seen, losses = [], []


if __name__ == "__main__":
    main()
