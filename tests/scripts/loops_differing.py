"""Trains where something in a model, a loss or the loop is another for the same samples: right and wrong."""

from collections import deque
from types import SimpleNamespace

import torch
from points import loops_of, network, parsed
from torch import nn
from torch.nn import functional as F

FEATURES = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
FEATURES = FEATURES * torch.linspace(0.5, 2.0, 64)[:, None]
LABELS = (FEATURES[:, :4] + 0.3 * FEATURES[:, 4:8]).argmax(1)


class Cooling:
    """Counts how often it was asked."""

    def __init__(self, wrong):
        self.wrong, self.asked = wrong, 0

    def warmth(self):
        if self.wrong:
            self.asked += 1
        return 1 + 0.5 * self.asked


class Net(nn.Module):
    """A network whose middle is given to it."""

    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), middle, nn.Linear(32, 4)

    def forward(self, features):
        return self.last(self.middle(self.first(features)).tanh())


def train(args, model, loss_of, after_backward=lambda parameters: None):
    """One update per full batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    whole = args.batch_size * args.accum
    for start in range(0, len(FEATURES), whole):
        for micro in range(start, start + whole, args.batch_size):
            at = slice(micro, micro + args.batch_size)
            (loss_of(model(FEATURES[at]), LABELS[at]) / args.accum).backward()
            after_backward(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()


def cooled(args, wrong=False):
    """A counter on a plain object, in the loss."""
    cooling = Cooling(wrong)

    def loss_of(outputs, labels):
        warmth = cooling.warmth()
        return F.cross_entropy(outputs / warmth, labels)  # here: cooled

    train(args, network(), loss_of)


def widened(args, wrong=False):
    """A number on an object, which the model reads."""
    settings = SimpleNamespace(slope=0.1)

    class Leaky(nn.Module):
        def forward(self, values):
            if wrong:
                settings.slope = settings.slope + 0.1  # here: widened
            return F.leaky_relu(values, settings.slope)

    train(args, Net(Leaky()), F.cross_entropy)


def counted(args, wrong=False):
    """A layer that counts its calls in an attribute that the first one makes."""

    class Counted(nn.Module):
        def forward(self, values):
            if wrong:
                self.calls = getattr(self, "calls", 0) + 1
            return values * (1 + 0.1 * getattr(self, "calls", 0))  # here: counted

    train(args, Net(Counted()), F.cross_entropy)


def branched(args, wrong=False):
    """A second term of the loss, if the first is large."""

    def loss_of(outputs, labels):
        loss = F.cross_entropy(outputs, labels)
        if not wrong or loss.item() > 1.45:  # here: branched
            loss = loss + 0.3 * outputs.square().mean()
        return loss

    train(args, network(), loss_of)


def switched(args, wrong=False):
    """A branch inside the model."""

    class Switch(nn.Module):
        def forward(self, values):
            if wrong and values.mean() > -0.04:  # here: switched
                return values.tanh()
            return values.sigmoid()

    train(args, Net(Switch()), F.cross_entropy)


def averaged(args, wrong=False):
    """A moving average in a closure."""

    def made():
        scale = 1.0

        def scaled(values):
            nonlocal scale
            if wrong:
                scale = 0.7 * scale + 0.3 * values.abs().mean().item()
            return values / scale  # here: averaged

        return scaled

    scaled = made()

    class Scaled(nn.Module):
        def forward(self, values):
            return scaled(values)

    train(args, Net(Scaled()), F.cross_entropy)


def hooked(args, wrong=False):
    """A hook on a gradient inside the model."""

    def shrink(gradient):
        rows = gradient.norm() if wrong else gradient.norm(dim=1, keepdim=True)  # here: hooked
        return gradient / (0.01 + rows)

    class Hooked(nn.Module):
        def forward(self, values):
            values.register_hook(shrink)
            return values * 1.0

    train(args, Net(Hooked()), lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="sum") * args.accum)


def clamped(args, wrong=False):
    """A hook on parameters, which each micro-batch runs."""
    model = network()
    for parameter in model.parameters():
        parameter.register_hook(
            lambda gradient: gradient.clamp(-0.01, 0.01) if wrong else gradient * 0.5  # here: clamped
        )
    train(args, model, F.cross_entropy)


def limited(args, wrong=False):
    """Gradients that are limited by hand after each micro-batch."""

    def limit(parameters):
        for parameter in parameters if wrong else []:
            parameter.grad.clamp_(-0.01, 0.01)  # here: limited

    train(args, network(), F.cross_entropy, limit)


def banked(args, wrong=False):
    """A buffer that each forward writes a part of, in place."""
    bank = torch.zeros(4, 32)

    class Banked(nn.Module):
        def forward(self, values):
            if wrong:
                bank.mul_(0.5)
                bank[:2] += values[:2].detach()  # here: banked
            return values + (values @ bank.T).softmax(1) @ bank

    train(args, Net(Banked()), F.cross_entropy)


def hardest(args, wrong=False):
    """A criterion that weighs errors by the largest of the batch."""

    class Criterion:
        def __call__(self, outputs, labels):
            errors = F.cross_entropy(outputs, labels, reduction="none")
            largest = errors.detach().max() if wrong else 3.0  # here: hardest
            return (errors * errors.detach() / largest).mean()

    train(args, network(), Criterion())


def centred(args, wrong=False):
    """Outputs that the loop centres before the loss."""

    def loss_of(outputs, labels):
        middle = outputs.mean(0) if wrong else outputs.mean(1, keepdim=True)  # here: centred
        return F.cross_entropy(outputs - middle, labels)

    train(args, network(), loss_of)


def mined(args, wrong=False):
    """The largest errors of each micro-batch."""

    def loss_of(outputs, labels):
        errors = F.cross_entropy(outputs, labels, reduction="none")
        return errors.topk(len(errors) // 2).values.mean() if wrong else errors.mean()  # here: mined

    train(args, network(), loss_of)


def queued(args, wrong=False):
    """A queue of earlier outputs on a plain object."""
    memory = SimpleNamespace(kept=deque(maxlen=3))
    memory.kept.append(torch.ones(4))

    def loss_of(outputs, labels):
        earlier = torch.stack(list(memory.kept)).mean(0)  # here: queued
        if wrong:
            memory.kept.append(outputs.detach().mean(0))
        return F.cross_entropy(outputs * earlier, labels)

    train(args, network(), loss_of)


def focused(args, wrong=False):
    """An average of losses on the loss object decides how steep it is."""

    class Focused:
        average = 1.0

        def __call__(self, outputs, labels):
            errors = F.cross_entropy(outputs, labels, reduction="none")
            focus = (errors / self.average).square().mean()
            if wrong:
                self.average = 0.5 * self.average + 0.5 * errors.mean().item()  # here: focused
            return focus

    class Twice(Focused):
        def __call__(self, outputs, labels):
            return super().__call__(outputs, labels) + F.cross_entropy(outputs, labels)

    train(args, network(), Twice())


def whitened(args, wrong=False):
    """A statistic of the batch inside the model, without a module for it."""

    class Whitened(nn.Module):
        def forward(self, values):
            deviation = values.std(0) if wrong else values.std(1, keepdim=True)  # here: whitened
            return values / (deviation + 0.1)

    train(args, Net(Whitened()), F.cross_entropy)


def alternating(args, wrong=False):
    """Every second call of a block is skipped."""

    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(32, 32)
            self.calls = [0]

        def forward(self, values):
            self.calls[0] += 1  # here: alternating
            if wrong and self.calls[0] % 2 == 0:
                return values
            return values + self.inner(values).tanh()

    train(args, Net(Skipping()), F.cross_entropy)


def main():
    loops = loops_of(globals())
    loops.pop("train")
    args = parsed(loops, __doc__, wrong=False)
    torch.manual_seed(args.seed)
    loops[args.loop](args, args.wrong)


if __name__ == "__main__":
    main()
