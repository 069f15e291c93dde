"""Trains with values that the loop hands to the loss beside the outputs: right and wrong."""

import numpy as np
import torch
from points import loops_of, network, parsed
from torch import nn
from torch.nn import functional as F

FEATURES = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
LABELS = (FEATURES[:, :4] + 0.3 * FEATURES[:, 4:8]).argmax(1)
REWARDS = FEATURES.square().mean(1)


class Levelled(nn.Module):
    """A loss above a level, which each of its forwards lowers."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong
        self.register_buffer("level", torch.tensor(1.0))

    def forward(self, outputs, labels):
        each = F.cross_entropy(outputs, labels, reduction="none")
        loss = F.softplus(5 * (each - self.level)).mean()
        if self.wrong:
            self.level.mul_(0.9)  # here: levelled
        return loss


def updates(args):
    """The rows of each update, and of each of its micro-batches within it."""
    torch.manual_seed(args.seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    whole = args.batch_size * args.accum
    for start in range(0, len(FEATURES), whole):
        at = slice(start, start + whole)
        yield model, FEATURES[at], LABELS[at], REWARDS[at], range(0, whole, args.batch_size)
        optimizer.step()
        optimizer.zero_grad()


def chosen(model, features, labels):
    return model(features).log_softmax(1).gather(1, labels[:, None])[:, 0]


def advantages(args, wrong=False):
    """Whitened over the whole batch, and cut in another order than the samples."""
    for model, features, labels, rewards, starts in updates(args):
        gained = (rewards - rewards.mean()) / rewards.std()
        parts = gained.split(args.batch_size)
        if wrong:
            parts = gained.reshape(args.batch_size, args.accum).T  # here: advantages
        for start, part in zip(starts, parts, strict=True):
            at = slice(start, start + args.batch_size)
            loss = -(part * chosen(model, features[at], labels[at])).mean()
            (loss / args.accum).backward()


def targets(args, wrong=False):
    """Targets of the micro-batch before."""
    for model, features, labels, _, starts in updates(args):
        for start in starts:
            at = slice(start, start + args.batch_size)
            target = labels[at]
            if wrong:
                target = labels.roll(start)[at]  # here: targets
            (F.cross_entropy(model(features[at]), target) / args.accum).backward()


def positions(args, wrong=False):
    """Weights of the rows by NumPy, by their place in the micro-batch."""
    for model, features, labels, _, starts in updates(args):
        weights = np.linspace(0.5, 1.5, args.batch_size * args.accum).astype("float32")
        for start in starts:
            at = slice(start, start + args.batch_size)
            weight = weights[: args.batch_size] if wrong else weights[at]
            given = torch.from_numpy(weight)  # here: positions
            loss = -(given * chosen(model, features[at], labels[at])).mean()
            (loss / args.accum).backward()


def temperature(args, wrong=False):
    """A tensor of one number that the loop lowers with every micro-batch."""
    for model, features, labels, _, starts in updates(args):
        warmth = torch.tensor(1.0)
        for start in starts:
            at = slice(start, start + args.batch_size)
            if wrong:
                warmth = warmth * 0.9 ** (args.accum > 1)  # here: temperature
            (F.cross_entropy(model(features[at]) / warmth, labels[at]) / args.accum).backward()


def masked(args, wrong=False):
    """A mask of rows that is cut from another tensor's beginning."""
    for model, features, labels, rewards, starts in updates(args):
        keep = rewards > rewards.median()
        for start in starts:
            at = slice(start, start + args.batch_size)
            kept = keep[: args.batch_size] if wrong else keep[at]  # here: masked
            loss = F.cross_entropy(model(features[at]), labels[at], reduction="none")
            ((loss * kept).sum() / keep.sum()).backward()


def whitened(args, wrong=False):
    """Whitened over the micro-batch: here the samples act on each other."""
    for model, features, labels, rewards, starts in updates(args):
        for start in starts:
            at = slice(start, start + args.batch_size)
            own = rewards[at] if wrong else rewards
            gained = (rewards[at] - own.mean()) / own.std()  # here: whitened
            loss = -(gained * chosen(model, features[at], labels[at])).mean()
            (loss / args.accum).backward()


def baseline(args, wrong=False):
    """A number that the loop moves with every micro-batch, read out of a tensor."""
    for model, features, labels, rewards, starts in updates(args):
        mean = 0.5
        for start in starts:
            at = slice(start, start + args.batch_size)
            gained = rewards[at] - mean  # here: baseline
            loss = -(gained * chosen(model, features[at], labels[at])).mean()
            (loss / args.accum).backward()
            if wrong:
                mean = 0.5 * mean + 0.5 * float(rewards[at].mean())


def levelled(args, wrong=False):
    """State of the loss itself: it is restored, and no value that the loop hands over."""
    criterion = Levelled(wrong)
    for model, features, labels, _, starts in updates(args):
        for start in starts:
            at = slice(start, start + args.batch_size)
            (criterion(model(features[at]), labels[at]) / args.accum).backward()


def main():
    loops = loops_of(globals())
    loops.pop("updates")
    args = parsed(loops, __doc__, wrong=False)
    loops[args.loop](args, args.wrong)


if __name__ == "__main__":
    main()
