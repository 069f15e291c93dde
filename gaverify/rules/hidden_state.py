"""GAV403 hidden-state: state outside of parameters and buffers decides the result.

What it finds

Values that a forward changes and reads again, and that live in Python: attributes of a module or of the loss
function (counters, warm-ups, caches, queues, hidden states carried over), variables of a closure, global objects.
Also a model that gives another loss for the same batch although all known state was restored.

Why gradients diverge

As with GAV401: the full batch reads the state once, the k-th micro-batch reads what the k − 1 before it left.

    full  L(batch; s_0)          accumulated  Σ_k w_k L(micro-batch k; s_{k−1})

A warm-up that counts forwards runs K times as fast; a hidden state carried from batch to batch is carried into the
next micro-batch, which holds other samples. Such state is in no `state_dict`, so that a resumed run loses it as
well.

Signature in the numbers

- An attribute or closure variable has another value after a forward; the finding gives its name and the line that
  wrote it.
- With the state restored before each micro-batch the difference falls to rounding.
- Where the state is out of reach (a file, a clock, a generator of its own), two identical runs give two losses.

Example

    import torch
    from torch import nn

    class Warmed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = nn.Linear(6, 3), 0

        def forward(self, x):
            self.calls += 1
            return self.inner(x) * min(1.0, self.calls / 100)

    model = Warmed()
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

Use instead

Let the training loop own what counts updates, and set it once per window. State that belongs to samples has to come
with the batch.

    import torch
    from torch import nn

    class Warmed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.updates = nn.Linear(6, 3), 1

        def forward(self, x):
            return self.inner(x) * min(1.0, self.updates / 100)

    model = Warmed()  # the loop: model.updates += 1 after optimizer.step()
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

When it is harmless

Where the value is only logged or timed: then no gradient depends on it, and nothing is reported. A warm-up that has
ended reads the same in every forward.

References

- PyTorch, Module.register_buffer,
  https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.register_buffer
- K. He et al., Momentum Contrast (a queue of keys), 2020, section 3.2, https://arxiv.org/abs/1911.05722
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.rule import Rule, measured
from gaverify.rules.state_changed_by_forward import evidence_for, is_proven, location_of, primed, remedy_for
from gaverify.rules.wording import listed

RULE = Rule("GAV403", "hidden-state")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where state outside parameters and buffers decides the difference."""
    state, twice = facts.state, facts.repeatability
    hidden = ("attribute", "closure", "unnamed")
    blamed = [change for change in state.blamed if change.place in hidden] if state else []
    if state is not None and blamed and not primed(state):  # what the first forward sets once is GAV401
        names = listed([f"`{change.name}`" for change in blamed if change.place != "unnamed"]) or "state"
        summary = f"the forward changes {names}, outside of parameters and buffers, and reads it again"
        yield RULE.finding(
            summary,
            *evidence_for(facts, state, blamed),
            location=location_of(blamed[0]),
            remedy=remedy_for(state),
            proven=is_proven(facts, state),
        )
    elif twice is not None and twice.forward > facts.repeats:
        yield RULE.finding(
            "the same batch gives another loss when it is run again with all known state restored",
            measured(
                "repeatability",
                f"the loss differs by {twice.forward:.1e}",
                forward=twice.forward,
                backward=twice.backward,
            ),
            remedy="look for state that lives outside the model (files, global objects, generators of its own, clocks)",
            proven=False,
        )
