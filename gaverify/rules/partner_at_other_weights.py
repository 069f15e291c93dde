"""GAV611 partner-at-other-weights: a loss runs through another network before that one's step, or after it.

What it finds

Two networks that train against one another. With the full batch the second one's loss meets the first one after its
step; with accumulation it meets it before, or the other way round.

Why gradients diverge

The discriminator steps, then the generator's loss is computed: the usual order of a batch. In a loop over
micro-batches that does both losses for each, the discriminator's step comes only at the end of the window, and all but
the last of the generator's micro-batches have met the old discriminator. Each gradient is right for what it met.

Signature in the numbers

The first network's updates agree and the second one's do not, by as much as one step of the first changes; no weights
of the micro-batches repair it. Before the second one's forwards the first has made another number of steps than in the
full batch's run.

Example

    critic, generator = nn.Linear(16, 1), nn.Linear(16, 16)
    of_critic = torch.optim.SGD(critic.parameters(), lr=1e-2)
    of_generator = torch.optim.SGD(generator.parameters(), lr=1e-4)
    for i, (x, y) in enumerate(loader):
        (criterion(critic(x), y) / K).backward()
        if (i + 1) % K == 0:
            of_critic.step()
            of_critic.zero_grad()
        critic.requires_grad_(False)
        (-critic(generator(x)).mean() / K).backward()
        critic.requires_grad_(True)
        if (i + 1) % K == 0:
            of_generator.step()
            of_generator.zero_grad()

Use instead

    critic, generator = nn.Linear(16, 1), nn.Linear(16, 16)
    of_critic = torch.optim.SGD(critic.parameters(), lr=1e-2)
    of_generator = torch.optim.SGD(generator.parameters(), lr=1e-4)
    for window in windows(loader, K):
        for x, y in window:
            (criterion(critic(x), y) / K).backward()
        of_critic.step()
        of_critic.zero_grad()
        critic.requires_grad_(False)
        for x, y in window:
            (-critic(generator(x)).mean() / K).backward()
        critic.requires_grad_(True)
        of_generator.step()
        of_generator.zero_grad()

When it is harmless

Where the order of the two steps is a matter of taste: training against the old partner is another method, not a wrong
gradient. Compare then with a full-batch run that has the same order.

References

pytorch/examples `dcgan` (the discriminator steps first)
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence, Finding
from gaverify.rules.rule import Rule
from gaverify.rules.wording import backward_place, count, difference

RULE = Rule("GAV611", "partner-at-other-weights")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding at the first differing update whose loss met another optimizer's model at other weights."""
    loop = facts.loop
    if loop is None:
        return
    for update in loop.updates:
        if update.partners and update.differs and not _explained(loop, update):
            yield _finding(facts, update)
            return


def _explained(loop: Record, update: UpdateComparison) -> bool:
    """Whether weights of the micro-batches explain the update: then the partner made no difference."""
    return update.fit is not None and update.fit.residual < loop.tolerance


def _finding(facts: Facts, update: UpdateComparison) -> Finding:
    partner = update.partners[0]
    full, own = count(partner.full, "step"), count(partner.accumulated, "step")
    return RULE.finding(
        f"the loss of update {update.number} meets another network after {own} of that one's optimizer, with the full "
        f"batch after {full}",
        Evidence("events", "measured", difference(update), {"update": update.number, **vars(partner)}),
        location=backward_place(facts, update.number),
        remedy="finish one network's window, with its step, before the other network's forwards begin",
        proven=False,
    )
