"""GAV000 unexplained (note): the divergence is real, and no rule explains it.

What it finds

Gradients that differ beyond rounding where every probe that could run found nothing, or where neutralising what it
found did not help. A wrong name would be worse than none: gaverify prints what it ruled out instead.

Why gradients diverge

Unknown. The float64 control (or the noise floor) says that it is no rounding; the list of what was ruled out says
where not to look: weights that do not repair it, a forward that agrees operation by operation, state that does not
change, a full batch that repeats.

Signature in the numbers

- A divergent verdict without a finding of severity fault.
- The line `ruled out`: each probe with its number, and each probe that could not run with the reason (an operation
  without float64, a custom kernel, a model that other threads or processes work on).

Example

There is no example that stays unexplained on purpose: one that is known becomes a rule. Typical candidates are
kernels written by hand, code that hides its operations from the dispatcher, and causes that neutralise each other's
controls.

Use instead

Bisect: verify a part of the model on detached inputs, then halve the part that diverges.

    import gaverify

    def verify_block(block, inputs):
        def loss(block, batch):
            return block(batch).square().mean()
        return gaverify.verify(block, loss, inputs.detach(), steps=4)

When it is harmless

Nobody knows until it is explained; the line `harm` says how large it is against the gradient's sampling noise.

References

- gaverify's other rules: `gaverify rules`
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.diagnosis.wording import listed
from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV000", "unexplained"


def judge(measured: Measurements, found: tuple[Finding, ...]) -> Iterator[Finding]:
    """Yields a note where a divergence was looked into and nothing of severity fault came out, or something is left."""
    if not (measured.diagnosed and measured.divergent):
        return
    if any(finding.severity == "fault" for finding in found):
        return
    ruled_out = []
    if measured.fit is not None:
        ruled_out.append(f"weights: the best ones leave {measured.fit.residual:.1e} over")
    if measured.repeatability is not None and measured.repeatability.backward < 1e-9:
        ruled_out.append("repeatability: the full batch agrees with itself")
    if measured.state is not None:
        changed = listed([f"`{change.name}`" for change in measured.state.changes])
        held = f"holding {changed} does not help" if measured.state.control else "none is changed and read"
        ruled_out.append(f"state: {held}")
    if measured.forwards_agree:
        ruled_out.append("operations: all forwards agree")
    ruled_out += [f"{suspect}: neutralised, the difference stays" for suspect in measured.ruled_out]
    ruled_out += [f"{name} could not run: {why}" for name, why in measured.failures.items()]
    yield Finding(
        CODE, NAME, "note", "the divergence is real; no rule explains it",
        evidence=(Evidence("all", "ruled out", "; ".join(ruled_out) or "nothing", {}),),
        remedy="bisect: run with half of the layers frozen or bypassed; please report a small example",
    )  # fmt: skip
