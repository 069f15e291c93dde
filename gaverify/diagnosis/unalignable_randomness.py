"""GAV302 unalignable-randomness."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.diagnosis.wording import control, first_operation, proven
from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV302", "unalignable-randomness"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a fault where a draw that cannot be dealt out decides the result, a note where something else does."""
    decisive = next((cause for cause in measured.causes if cause.suspect.kind == "random"), None)
    reasons = dict(measured.draws_unaligned)
    if measured.foreign_draws_differ:
        reasons["Python or NumPy generator"] = "how much is drawn depends on the batch"
    if not reasons and decisive is None:
        return
    text = "; ".join(f"`{name}`: {why}" for name, why in reasons.items())
    evidence = [Evidence("random-draws", "measured", text, dict(reasons))] if reasons else []
    if decisive is not None:
        evidence += [first_operation(measured, decisive), *control(measured, decisive)]
    fault = bool(measured.divergent) and (decisive is not None or not explained(measured))
    yield Finding(
        CODE, NAME, "fault" if fault else "note", "random draws could not be dealt out per sample",
        location=decisive.suspect.operation.location if decisive is not None else None,
        evidence=tuple(evidence),
        remedy="draw per sample (one value for each row of the batch), or once per forward",
        proven=decisive is not None and proven(measured, decisive),
    )  # fmt: skip


def explained(measured: Measurements) -> bool:
    """Whether another cause was found."""
    state = measured.state is not None and bool(measured.state.blamed)
    return bool(measured.causes) or measured.weight_remedy is not None or state
