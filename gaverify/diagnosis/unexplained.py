"""GAV000 unexplained (note): a divergence that no rule names, and what was ruled out."""

from __future__ import annotations

from collections.abc import Iterator

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
        changed = ", ".join(f"`{change.name}`" for change in measured.state.changes)
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
