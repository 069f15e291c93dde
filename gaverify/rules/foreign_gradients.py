"""GAV610 foreign-gradients: an optimizer's step uses what another network's loss left in its gradients.

What it finds

Two networks that train against one another, each with an optimizer. The loss of one reaches the parameters of the other
as well, and with accumulation nothing clears that before the other one steps.

Why gradients diverge

A generator's loss runs through the discriminator, and its backward adds to the discriminator's `.grad`. With one
micro-batch the next `zero_grad` takes that away in time. With K of them the clearing comes once per window, and what
the generator's passes leave in between is summed with the discriminator's own gradient.

Signature in the numbers

The step's gradient is a sum over more backward passes than the full batch's. The best weights of the superfluous ones
are zero: without them the gradient is the full batch's to rounding.

Example

    critic, generator = nn.Linear(16, 1), nn.Linear(16, 16)
    of_critic = torch.optim.SGD(critic.parameters(), lr=1e-4)
    of_generator = torch.optim.SGD(generator.parameters(), lr=1e-4)
    for i, (x, y) in enumerate(loader):
        (-critic(generator(x)).mean() / K).backward()  # reaches the critic too
        if i % K == 0:
            of_critic.zero_grad()
        (criterion(critic(x), y) / K).backward()
        if (i + 1) % K == 0:
            of_critic.step()
            of_generator.step()
            of_generator.zero_grad()

Use instead

    critic, generator = nn.Linear(16, 1), nn.Linear(16, 16)
    of_critic = torch.optim.SGD(critic.parameters(), lr=1e-4)
    of_generator = torch.optim.SGD(generator.parameters(), lr=1e-4)
    for i, (x, y) in enumerate(loader):
        critic.requires_grad_(False)
        (-critic(generator(x)).mean() / K).backward()
        critic.requires_grad_(True)
        (criterion(critic(x), y) / K).backward()
        if (i + 1) % K == 0:
            of_critic.step()
            of_critic.zero_grad()
            of_generator.step()
            of_generator.zero_grad()

When it is harmless

Never by accident. Losses that are meant to train both networks do so in the full batch as well; then nothing is
reported.

References

pytorch/examples `dcgan` (cleared for every batch), https://pytorch.org/docs/stable/notes/autograd.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence, Finding
from gaverify.records.partners import Foreign
from gaverify.rules.rule import Rule
from gaverify.rules.wording import difference, located, passes

RULE = Rule("GAV610", "foreign-gradients")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding at the first differing update whose step uses passes of another optimizer's loss."""
    loop = facts.loop
    if loop is None:
        return
    for update in loop.updates:
        if update.foreign is not None and update.differs:
            yield _finding(loop, update, update.foreign)
            return


def _finding(loop: Record, update: UpdateComparison, foreign: Foreign) -> Finding:
    window = loop.window_of(update.number)
    backwards = window.of("backward") if window is not None else ()
    count = len(foreign.passes)
    return RULE.finding(
        f"a step of update {update.number} uses {passes(count)} of another optimizer's loss",
        Evidence("micro-batch-weights", "measured", difference(update), {"update": update.number}),
        Evidence(
            "micro-batch-weights",
            "weights",
            f"without {'it' if count == 1 else 'them'} the gradient is the full batch's to {foreign.residual:.0e}",
            vars(foreign),
        ),
        location=located(backwards[at] for at in foreign.passes if at < len(backwards)),
        remedy="switch off `requires_grad` of the other network while this loss is differentiated, or finish one "
        "network's window, with its step, before the other's begins, and clear between them",
        proven=True,
    )
