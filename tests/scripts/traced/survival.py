"""Ranks people by their risk, from the times at which something happened to them."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Rounded(nn.Module):
    """Rounds to 15 levels, which lie between the largest values of both signs; the gradient passes through."""

    def __init__(self, by_row):
        super().__init__()
        self.by_row = by_row

    def forward(self, hidden):
        size = hidden.detach().abs()
        step = (size.amax(1, keepdim=True) if self.by_row else size.max()) / 7  # fault: largest_value
        return hidden + ((hidden / step).round() * step - hidden).detach()  # reads: largest_value


class Risk(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        rounded = Rounded(args.right) if args.fault == "largest_value" else nn.Identity()
        self.body, self.head = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), rounded), nn.Linear(20, 1)

    def forward(self, people):
        hidden = self.body(people)  # uses: largest_value
        if self.args.fault == "small_batches" and (self.args.right or len(people) >= 8):  # fault: small_batches
            hidden = 3 * F.normalize(hidden, dim=1)  # reads: small_batches
        return self.head(hidden).squeeze(1)


def partial_likelihood(scores, times):
    """Of all who are still there at a time, how likely it is the one to whom it happened (Cox)."""
    ordered = scores[times.argsort(descending=True)]
    return (ordered.logcumsumexp(0) - ordered).mean()  # fault: risk_set


def hardest(losses, right):
    """Learns from the half with the largest losses, or from those that are larger than a fixed loss."""
    if right:
        return (losses * (losses > 0.2)).mean()
    return losses.topk(len(losses) // 2).values.mean()  # fault: hardest_half


def train(args, model, optimizer, people, times):
    whole = args.batch_size * args.accum
    for start in range(0, len(people), whole):
        scores = []
        for at in range(start, start + whole, args.batch_size):
            own, wanted = people[at : at + args.batch_size], times[at : at + args.batch_size]
            scores.append(model(own))  # uses: largest_value small_batches
            if args.fault == "risk_set" and args.right:
                continue
            errors = F.smooth_l1_loss(scores[-1], -wanted.log(), reduction="none")
            loss = hardest(errors, args.right) if args.fault == "hardest_half" else errors.mean()  # uses: hardest_half
            if args.fault == "risk_set":
                loss = partial_likelihood(scores[-1], wanted)  # uses: risk_set
            (loss / args.accum).backward()
        if args.fault == "risk_set" and args.right:
            partial_likelihood(torch.cat(scores), times[start : start + whole]).backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--fault", default="risk_set")
    parser.add_argument("--right", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    people = torch.randn(64, 10)
    times = (people[:, 0] + 0.5 * torch.randn(64)).exp()
    model = Risk(args)
    train(args, model, torch.optim.RMSprop(model.parameters(), lr=1e-3), people, times)


if __name__ == "__main__":
    main()
