"""GAV000 unexplained (note): the divergence is real, and no rule explains it.

What it finds

Gradients that differ beyond rounding where every probe that could run found nothing, or where neutralising what it
found did not help. A wrong name would be worse than none: gaverify prints what it ruled out instead.

In a training loop: a difference at the optimizer that is neither a factor, nor other weights of the micro-batches,
nor a wrong order of calls.

Why gradients diverge

Unknown. The float64 control (or the noise floor) says that it is no rounding; the list of what was ruled out says
where not to look: weights that do not repair it, a forward that agrees operation by operation, state that does not
change, a full batch that repeats.

Signature in the numbers

- A divergent verdict without a finding of severity fault.
- The line `ruled out`: each probe with its number, and each probe that could not run with the reason (an operation
  without float64, a custom kernel, a model that other threads or processes work on).
- In a training loop: The best weights leave a large residual.

Example

There is no example that stays unexplained on purpose: one that is known becomes a rule. Typical candidates are
kernels written by hand, code that hides its operations from the dispatcher, and causes that neutralise each other's
controls.

A training loop:

    for i, (x, y) in enumerate(loader):
        penalty = sum(p.square().sum() for p in model.parameters())
        (criterion(model(x), y) / K + penalty).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

Bisect: verify a part of the model on detached inputs, then halve the part that diverges.

A model:

    import gaverify

    def verify_block(block, inputs):
        def loss(block, batch):
            return block(batch).square().mean()
        return gaverify.verify(block, loss, inputs.detach(), steps=4)

A training loop:

    for i, (x, y) in enumerate(loader):
        penalty = sum(p.square().sum() for p in model.parameters())
        ((criterion(model(x), y) + penalty) / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Nobody knows until it is explained; the line `harm` says how large it is against the gradient's sampling noise.

References

- gaverify's other rules: `gaverify rules`
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence, Finding
from gaverify.rules.rule import Rule, measured
from gaverify.rules.wording import difference, listed

RULE = Rule("GAV000", "unexplained")


def judge(facts: Facts, found: tuple[Finding, ...]) -> Iterator[Finding]:
    """Yields a note where a divergence was looked into and nothing of severity fault came out, or something is left."""
    if not facts.compared.divergent or any(finding.severity == "fault" for finding in found):
        return
    if facts.loop is not None:
        yield from _in_loop(facts, facts.loop)
    elif facts.diagnosed:
        yield _in_run(facts)


def _in_run(facts: Facts) -> Finding:
    ruled_out = []
    if facts.weights.fit is not None:
        ruled_out.append(f"weights: the best ones leave {facts.weights.fit.residual:.1e} over")
    if facts.repeatability is not None and facts.repeatability.backward < 1e-9:
        ruled_out.append("repeatability: the full batch agrees with itself")
    if facts.state is not None:
        changed = listed([f"`{change.name}`" for change in facts.state.changes])
        held = f"holding {changed} does not help" if facts.state.control else "none is changed and read"
        ruled_out.append(f"state: {held}")
    if facts.forward.agree:
        ruled_out.append("operations: all forwards agree")
    ruled_out += [f"{suspect}: neutralised, the difference stays" for suspect in dict.fromkeys(facts.forward.ruled_out)]
    ruled_out += _not_asked(facts)
    return RULE.finding(
        "the divergence is real; no rule explains it",
        Evidence("all", "ruled out", "; ".join(ruled_out) or "nothing", {}),
        severity="note",
        remedy=f"{_advice(facts)}; please report a small example",
        proven=False,
    )


def _not_asked(facts: Facts) -> Iterator[str]:
    """What could not run, each reason once."""
    reasons: dict[str, list[str]] = {}
    for name, why in facts.failures.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        yield f"{listed(names)} could not run: {why}"


def _advice(facts: Facts) -> str:
    """Where to look, by what is known."""
    halves = "bisect: run with half of the layers frozen or bypassed"
    if facts.failures:
        return f"make possible what could not run (a smaller batch, kernels with float64), or {halves}"
    if facts.forward.agree:
        return f"look at custom `backward` functions and hooks, since all forwards agree; else {halves}"
    seen = facts.forward.coupling
    if seen is None:
        return halves
    if seen.others == 0:
        return "look at the loss: the model keeps its samples apart; compute its terms one by one for both runs"
    return f"samples meet inside the model: {halves}, until the outputs of a sample depend on no other"


def _in_loop(facts: Facts, loop: Record) -> Iterator[Finding]:
    update = loop.divergent
    if update is None or facts.draws.unaligned or (facts.ranks is not None and facts.ranks.is_altered):
        return
    ruled_out = ["no call stands in the wrong place"]
    if update.fit is not None:
        ruled_out.insert(0, f"the best weights of the micro-batches leave {update.fit.residual:.1e} over")
    terms = max((event.values.get("terms", 0) for window in loop.windows for event in window.of("backward")), default=0)
    if loop.ranks > 1 and terms > 1:
        ruled_out.append(f"the {terms} terms of the loss were not tried one by one: of several ranks they cannot be")
    remedy = "samples that act on each other in the model or the loss look like this: "
    remedy += "`gaverify run --model FILE:FACTORY` on the same model names the operation"
    alone = _without_backward(loop, update)
    if alone:
        ruled_out.append(f"{alone} of {len(update.sizes)} forwards have no backward pass of their own")
        remedy = "call `backward()` for every micro-batch, or sum their losses before the one call"
    yield RULE.finding(
        f"the difference in update {update.number} is real; no rule of the audit explains it",
        measured("comparison", difference(update), update=update.number),
        Evidence("all", "ruled out", "; ".join(ruled_out), {}),
        severity="note",
        remedy=remedy,
        proven=False,
    )


def _without_backward(loop: Record, update: UpdateComparison) -> int:
    """How many forwards of the window have no backward pass, where the full batch's run has one for each."""
    whole = next((window for window in loop.full_windows if window.number == update.number), None)
    if whole is None or len(whole.of("forward")) != len(whole.of("backward")):
        return 0
    return max(len(update.sizes) - update.backwards, 0)
