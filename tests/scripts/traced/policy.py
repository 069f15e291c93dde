"""Improves a policy on stored rollouts (PPO), in minibatches of which each may be cut for memory."""

import argparse
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Rollout:
    states: torch.Tensor
    actions: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    old_values: torch.Tensor
    priorities: torch.Tensor

    def split(self, size):
        return [Rollout(*part) for part in zip(*(each.split(size) for each in vars(self).values()), strict=True)]


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.Tanh())
        self.actor, self.critic = nn.Linear(24, 3), nn.Linear(24, 1)

    def forward(self, states):
        hidden = self.body(states)
        return torch.distributions.Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(1)


def value_loss(values, part):
    clipped = part.old_values + (values - part.old_values).clamp(-0.2, 0.2)
    return torch.maximum((values - part.returns).square(), (clipped - part.returns).square()).mean()


def divergence(policy, part):
    return (part.old_log_probs - policy.log_prob(part.actions)).mean()


@torch.no_grad()
def has_moved_far(args, model, batch):
    return divergence(model(batch.states)[0], batch) > args.target


def weights_of(args, batch):
    """How much each row counts for having been drawn by its priority, and the rank of its advantage."""
    weights, gained = batch.priorities.reciprocal(), batch.advantages
    if args.fault == "priorities":
        weights = weights / weights.max()  # fault: priorities
    if args.fault == "ranked_rewards":
        gained = gained.argsort().argsort() / (len(gained) - 1) - 0.5  # fault: ranked_rewards
    return weights, gained


def improve(args, model, optimizer, batch):
    parts = batch.split(args.batch_size)
    weighted = list(zip(*(each.split(args.batch_size) for each in weights_of(args, batch)), strict=True))
    stopped = args.fault == "early_stop" and args.right and has_moved_far(args, model, batch)
    for at, part in enumerate(parts):
        weights, gained = weighted[at] if args.right else weights_of(args, part)
        policy, values = model(part.states)
        ratio = (policy.log_prob(part.actions) - part.old_log_probs).exp()
        least = torch.minimum(ratio * gained, ratio.clamp(0.8, 1.2) * gained)  # uses: ranked_rewards
        surrogate = -(weights * least).mean()  # uses: priorities ranked_rewards
        of_values = value_loss(values, part)
        loss = surrogate + of_values - 0.5 * policy.entropy().mean()  # uses: priorities ranked_rewards
        if args.fault == "early_stop" and not args.right:
            stopped = divergence(policy, part) > args.target  # fault: early_stop
        if stopped:  # fault: early_stop
            loss = of_values  # reads: early_stop
        (loss / args.accum).backward()
    optimizer.step()
    optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--target", type=float, default=0.3)
    parser.add_argument("--fault", default="priorities")
    parser.add_argument("--right", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = 64
    states = torch.randn(rows, 6)
    stored = Rollout(
        states,
        torch.randint(3, (rows,)),
        -torch.rand(rows) - 0.6,
        states[:, 0] + torch.randn(rows),
        states.sum(1),
        torch.randn(rows),
        torch.rand(rows) + 0.1,
    )
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for batch in stored.split(args.batch_size * args.accum):
        improve(args, model, optimizer, batch)


if __name__ == "__main__":
    main()
