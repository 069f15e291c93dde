"""Predicts what people click on from bags of what they have seen."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

KINDS = 3


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = nn.EmbeddingBag(40, 12, mode="sum")
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(12, KINDS))

    def forward(self, ids, lengths):
        starts = lengths.cumsum(0) - lengths
        return self.head(self.seen(ids, starts) / lengths.sqrt()[:, None])


def make_balancer(rate):
    """Returns two functions: one divides a loss by a running mean of it, the other moves that mean."""
    mean = 1.0

    def balance(loss):
        return loss / mean  # reads: balancer

    def observe(loss):
        nonlocal mean
        mean += rate * (loss.item() - mean)  # fault: balancer

    return balance, observe


def keep_largest(gradient):
    """A tenth of the entries: as for a slow connection."""
    least = gradient.abs().flatten().quantile(0.9)
    return gradient * (gradient.abs() >= least)  # fault: sparsified


def train(opt, model, bags, labels, balancer):
    """Adds up the gradients of all micro-batches of an update."""
    balance, observe = balancer
    losses = []
    for at in range(0, len(bags), opt.b):
        own, wanted = bags[at : at + opt.b], labels[at : at + opt.b]
        logits = model(torch.cat(own), torch.tensor([len(bag) for bag in own]))
        loss = F.cross_entropy(logits, wanted)
        losses.append(loss.detach())
        if opt.fault == "balancer":
            loss = balance(loss)  # uses: balancer
            if not opt.right:
                observe(losses[-1])  # fault: balancer
        (loss / opt.k).backward()
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-b", type=int, default=16)
    parser.add_argument("-k", type=int, default=1)
    parser.add_argument("--fault", default="balancer")
    parser.add_argument("--right", action="store_true")
    opt = parser.parse_args()
    torch.manual_seed(0)
    model, balancer = Clicks(), make_balancer(0.3)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    bags = [torch.randint(40, (2 + i % 4,)) for i in range(64)]
    labels = torch.stack([bag.sum() % 7 for bag in bags]).clamp(max=KINDS - 1)
    if opt.fault == "sparsified" and not opt.right:
        model.seen.weight.register_hook(keep_largest)  # uses: sparsified
    for start in range(0, 64, opt.b * opt.k):
        whole = slice(start, start + opt.b * opt.k)
        losses = train(opt, model, bags[whole], labels[whole], balancer)
        if opt.fault == "sparsified" and opt.right:
            model.seen.weight.grad = keep_largest(model.seen.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        if opt.right:
            balancer[1](torch.stack(losses).mean())


if __name__ == "__main__":
    main()
