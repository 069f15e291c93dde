"""GAV104 batch-dependent-backward: all forwards agree, and a gradient depends on the batch all the same.

What it finds

A backward that is not linear in the gradient that it receives, or that looks at the whole micro-batch: a tensor
hook that normalises or clips, a hand-written `autograd.Function` with a norm, rank or quantisation in its
`backward` (or with state that its `backward` moves), a gradient reversal whose strength depends on the batch.

Why gradients diverge

Accumulation relies on two properties of the backward pass: it is linear in the incoming gradient, and it treats
samples independently.

    Σ_k w_k backward(g_k) = backward(Σ_k w_k g_k)

Autograd's own formulas have both. A hook such as g → g / ‖g‖ has neither: each micro-batch's gradient gets norm 1,
and their mean is no unit vector. Clipping inside a hook is the same: K small gradients are cut differently from one
large one, since clip(a) + clip(b) is not clip(a + b).

Signature in the numbers

- All operations of the forward agree, and so do the losses, to about 1e-16 in float64.
- The gradients of some parameters differ: of one alone where a hook sits on it, of everything before the function
  where it is an `autograd.Function`.
- The full batch agrees with itself (otherwise it is GAV303).

Example

    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

Use instead

Backward passes that are linear and per sample; whatever normalises or clips, once per window, after the last
`backward()` and before `optimizer.step()`:

    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.randn(16, 6), torch.randint(3, (16,))

    def loss(model, batch):
        inputs, classes = batch
        return nn.functional.cross_entropy(model(inputs), classes)

    def before_step(model):  # called by the training loop, once per window
        weight = model[0].weight
        weight.grad /= weight.grad.norm()

When it is harmless

A hook that only watches, or scales by a constant, is linear and not reported. A clip that never becomes active on
this batch does not show either: gaverify reports what these numbers did.

References

- PyTorch, Tensor.register_hook, https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_hook.html
- PyTorch, Extending torch.autograd, https://docs.pytorch.org/docs/stable/notes/extending.html
- PyTorch, clip_grad_norm_, https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.facts import BackwardPlace, Facts
from gaverify.records.findings import Finding, Location
from gaverify.records.operations import Operation
from gaverify.rules.controls import left_by
from gaverify.rules.rule import Rule, controlled, measured
from gaverify.rules.wording import listed

RULE = Rule("GAV104", "batch-dependent-backward")
_GAP = 1e-6
_LOOK = "look at custom `backward` functions and hooks: they see the micro-batch's gradient, not the window's"
_HOOKS = "do in one place, after the window's last backward, what the hooks do per micro-batch"
_REMEDIES: dict[BackwardPlace | None, str] = {
    BackwardPlace.PARAMETER_HOOK: _HOOKS,
    BackwardPlace.MODULE_HOOK: _HOOKS,
    BackwardPlace.TENSOR_HOOK: "let the hook treat each sample on its own; it sees the micro-batch's gradient",
    BackwardPlace.CONSTANT: "compute the constant once over the window and use it in every micro-batch (a constant per "
    "sample would be another loss)",
}


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where all forwards and the losses agree, and gradients do not."""
    repeats = facts.repeatability is None or facts.repeatability.backward <= _GAP
    if facts.forward.causes or not facts.forward.agree or not facts.forward.loss_gap <= _GAP or not repeats:
        return
    if facts.left <= _GAP and facts.backward.control is None:
        return
    rows = [row for row in facts.compared.divergent if row.relative_difference > row.relative_allowed]
    names = listed([f"`{row.name}`" for row in rows])
    hooked = ", ".join(f"`{name}`" for name in facts.backward.hooked)
    hooks = f"; hooks are registered on {hooked}" if hooked else ""
    place, culprit, gap = facts.backward.place, facts.backward.culprit, facts.forward.loss_gap
    location = culprit.location if culprit is not None else Location(rows[0].name.rpartition(".")[0] if rows else None)
    run = facts.backward.control
    where = f"; gradients part in {_where(place, culprit)}" if culprit is not None else ""
    yield RULE.finding(
        f"the backward of {names} depends on the batch, although all forwards agree",
        measured(
            "operations",
            f"{facts.compared.largest}; every operation of the forward agrees, the losses to {gap:.0e}{where}{hooks}",
            loss_gap=gap,
        ),
        *([] if run is None else [controlled("backward", left_by(run), left=run.left)]),
        location=location,
        remedy=_REMEDIES.get(place, _LOOK),
        proven=run is not None and run.rounding,
    )


def _where(place: BackwardPlace | None, culprit: Operation) -> str:
    module = f"`{culprit.module or '(root)'}`"
    fixed = {
        BackwardPlace.PARAMETER_HOOK: f"the gradient hooks of the parameters of {module}",
        BackwardPlace.MODULE_HOOK: f"the backward hooks on {module}",
        BackwardPlace.TENSOR_HOOK: "a gradient hook that the forward puts on a tensor",
        BackwardPlace.CONSTANT: "what was computed from the batch and is a constant to the backward",
        BackwardPlace.LOSS: "the backward of the loss",
    }
    if place in fixed:
        return fixed[place] + (f": `{culprit.source}`" if culprit.source else "")
    return f"the backward of {module}" + (f" ({culprit.kind})" if culprit.kind else "")
