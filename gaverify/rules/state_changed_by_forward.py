"""GAV401 state-changed-by-forward: a forward changes a parameter or buffer that the next micro-batch reads.

What it finds

Parameters and registered buffers that a forward writes and a later forward reads: moving centres and divisors,
codebooks and queues, power iterations (`spectral_norm`), observers of fake quantisation, `Embedding(max_norm=…)`
tied to the output head. BatchNorm's running statistics are written, but not read in training: they are GAV402. What
the first forward sets once by its batch is found in plain attributes as well.

Why gradients diverge

In the full batch all samples see the state s_0. In accumulation micro-batch k sees what the ones before it left:

    g   = Σ_k w_k ∂ L(micro-batch k; θ, s_{k−1}) / ∂θ
    s_k = update(s_{k−1}, micro-batch k)

Every micro-batch but the first is computed with another state than the full batch, and the state moves K times per
optimizer step instead of once, so that momenta mean something else.

Signature in the numbers

- The value of the buffer (or parameter) differs before and after a forward.
- With the state restored before each micro-batch, or held still in both runs, the difference falls to rounding.
- The first micro-batch's gradient is right, the later ones are not. The difference can be small: 8 % in the
  example, 6e-5 for a `spectral_norm`.

Example

    import torch
    from torch import nn

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(8))

        def forward(self, x):
            centred = x - self.centre
            with torch.no_grad():
                self.centre.lerp_(x.mean(0), 0.1)
            return centred

    model = nn.Sequential(
        nn.Linear(6, 8), Centred(), nn.Tanh(), nn.Linear(8, 3)
    )
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

Use instead

Read in the forward, write once per window: collect what the update needs (here the mean over the window) and apply
it after `optimizer.step()`. State that the first forward sets from its batch (ActNorm, a codebook, a calibrated scale)
wants one full batch through the model before the first step.

    import torch
    from torch import nn

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(8))

        def forward(self, x):
            return x - self.centre

        @torch.no_grad()
        def update(self, mean):  # once per window, after optimizer.step()
            self.centre.lerp_(mean, 0.1)

    model = nn.Sequential(
        nn.Linear(6, 8), Centred(), nn.Tanh(), nn.Linear(8, 3)
    )
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

When it is harmless

Where the state moves slowly against the noise of the gradient: a centre with momentum 0.999, a power iteration that
has converged. The update rate then still counts micro-batches: m per window becomes about K · m.

References

- T. Miyato et al., Spectral Normalization for GANs, 2018, section 2.2, https://arxiv.org/abs/1802.05957
- M. Caron et al., Emerging Properties in Self-Supervised Vision Transformers (centring), 2021, section 3.1,
  https://arxiv.org/abs/2104.14294
- A. van den Oord et al., Neural Discrete Representation Learning (moving codebook), 2017, appendix A.1,
  https://arxiv.org/abs/1711.00937
- pytorch/pytorch#26596 (`max_norm` changes the weight), https://github.com/pytorch/pytorch/issues/26596
- open-mmlab/mmdetection#2780 (moving divisor), https://github.com/open-mmlab/mmdetection/pull/2780
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.experiment import ControlKind
from gaverify.records.facts import Facts, State, StateChange
from gaverify.records.findings import Evidence, Finding, Location
from gaverify.rules.rule import Rule, controlled, measured
from gaverify.rules.wording import listed

RULE = Rule("GAV401", "state-changed-by-forward")
_PLACES = {"closure": "variable"}  # what a place is called in a sentence, where it is not its own name
_PRIMED = (ControlKind.STATE_PRIMED, ControlKind.STATE_PRIMED_AND_HELD)
_SHOWN = 3  # changed values that are written out


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where parameters or buffers that a forward writes decide the difference."""
    state = facts.state
    if state is None:
        return
    places = ("parameter", "buffer", "attribute", "closure") if primed(state) else ("parameter", "buffer")
    blamed = [change for change in state.blamed if change.place in places]
    if not blamed:
        return
    names = listed([f"{_PLACES.get(change.place, change.place)} `{change.name}`" for change in blamed])
    summary = f"the forward changes {names}, which the next micro-batch reads"
    if primed(state):
        summary = f"the first forward sets {names} by the batch that it is given"
        summary += ", and every later one moves it on" if _moves_on(state) else ""
    yield RULE.finding(
        summary,
        *evidence_for(facts, state, blamed),
        location=location_of(blamed[0]),
        remedy=remedy_for(state),
        proven=is_proven(facts, state),
    )


def location_of(change: StateChange) -> Location | None:
    """Returns where a change was written."""
    return change.writer.location if change.writer is not None else None


def _writing(change: StateChange) -> str:
    """What wrote a value, and where; empty where nothing is known."""
    writer = change.writer
    if writer is None or not (writer.name or writer.file):
        return ""
    if not writer.name:
        return f"`{change.name}` changes at {writer.file}:{writer.line}"
    return f"`{change.name}` is written by {writer}"


def evidence_for(facts: Facts, state: State, blamed: list[StateChange]) -> tuple[Evidence, ...]:
    """What was seen to change, and the control run."""
    shown = blamed[:_SHOWN]
    writers = "; ".join(text for change in shown if (text := _writing(change)))
    if len(blamed) > _SHOWN:
        writers += f"; and {len(blamed) - _SHOWN} more"
    found = [
        measured(
            "state",
            f"{facts.compared.largest}" + (f"; {writers}" if writers else ""),
            changed=[change.name for change in state.changes],
        )
    ]
    if state.control is not None:
        article = "" if primed(state) else "the "
        text = f"with {article}{state.control.what} in both runs the difference is {state.control.left:.0e}"
        if state.control.rounding:
            text += ": proven"
        if state.alone > 0:
            text += f"; alone, with the other causes neutralised, it makes {state.alone:.0e}: proven"
        if state.beside > 0:
            text += f"; restored alone, it moves the accumulated gradient by {state.beside:.0e}: proven"
        found.append(controlled("state", text, left=state.control.left))
    return tuple(found)


def is_proven(facts: Facts, state: State) -> bool:
    """Whether the difference falls to rounding with the state held, or with it and the causes named beside it."""
    return state.control is not None and (state.control.rounding or facts.cleared)


def primed(state: State) -> bool:
    """Whether what the forward changes is set once, from the first batch, so that one forward before repairs it."""
    run = state.control
    return run is not None and run.kind in _PRIMED and run.rounding


def _moves_on(state: State) -> bool:
    """Whether what the first forward sets is moved by later ones as well, so that it has to be held still, too."""
    return state.control is not None and state.control.kind is ControlKind.STATE_PRIMED_AND_HELD


def remedy_for(state: State) -> str:
    """The repair that was run."""
    first = "run one full batch through the model first, without a step"
    if primed(state) and _moves_on(state):
        return f"{first}, and update the state once per window, after the optimizer step: tested with the state held"
    if primed(state):
        return f"{first}: tested, equivalent"
    if state.alone > 0 or state.beside > 0:
        return "update the state once per window, after the optimizer step: tested together with the other repairs"
    if state.remedies:
        return "restore the state before each micro-batch: tested, equivalent; or update it once per window"
    return "update the state once per window, after the optimizer step: tested with the state held, equivalent"
