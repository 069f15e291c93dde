"""A training loop with something beside it whose tensors have no values; `--odd` says what."""

import argparse

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode


class NoRate(torch.optim.SGD):
    """Finds its own rate, as Adafactor does: `lr` is None between the steps."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.set(None)

    def set(self, rate):
        for group in self.param_groups:
            group["lr"] = rate

    def step(self, closure=None):
        self.set(0.1)
        super().step(closure)
        self.set(None)


def loss(output):
    """A loss whose targets are counted."""
    return nn.functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.long, device=output.device))


def meta(model, x):
    with torch.device("meta"):
        loss(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))(torch.randn(2, 4))).backward()


def fake(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        loss(model(mode.from_tensor(x)))


def grad(model, x):
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    torch.func.grad(lambda changed: loss(functional_call(model, changed, (x,))))(weights)


def jvp(model, x):
    torch.func.jvp(model, (x,), (torch.ones_like(x),))


def trace(model, x):
    torch.jit.trace(model, x)


def flops(model, x):
    with FlopCounterMode(display=False):
        loss(model(x)).backward()
    model.zero_grad()


def forward_mode(model, x):
    with forward_ad.dual_level():
        model(forward_ad.make_dual(x, torch.ones_like(x)))


def functional(model, x):
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    functional_call(model, weights, (x,)).sum().backward()


def nothing(model, x):
    pass


BESIDE = {
    beside.__name__: beside for beside in (meta, fake, grad, jvp, trace, flops, forward_mode, functional, nothing)
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--odd", choices=[*BESIDE, "lazy_optimizer", "lr"], default="nothing")
    args = parser.parse_args()
    beside = BESIDE.get(args.odd, nothing)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    if args.odd == "lazy_optimizer":
        model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
    inputs = torch.randn(32, 4)
    targets = inputs.sum(1, keepdim=True)
    optimizer = NoRate(model.parameters()) if args.odd == "lr" else torch.optim.SGD(model.parameters(), lr=0.1)
    if args.odd == "lazy_optimizer":
        model(inputs[:1])
    beside(model, inputs[:2])
    batches = zip(inputs.split(args.batch_size), targets.split(args.batch_size), strict=True)
    for i, (x, y) in enumerate(batches):
        (nn.functional.mse_loss(model(x), y) / args.accum).backward()
        if beside is not flops:
            beside(model, inputs[:2])
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
