"""GAV301 and GAV302: random draws that were, or could not be, dealt out per sample."""

from __future__ import annotations

from gaverify.diagnosis.measurements import Measurements
from gaverify.results import Evidence, Finding


def aligned_randomness(measured: Measurements) -> Finding | None:
    """GAV301 (note): draws were replayed per sample."""
    if measured.draws_sliced == 0:
        return None
    return Finding(
        "GAV301", "aligned-randomness", "note",
        f"{measured.draws} random draws of the full batch were replayed sample by sample",
        evidence=(Evidence("random-draws", "measured", f"{measured.draws_sliced} draws dealt out to micro-batches",
                           {"draws": measured.draws, "dealt": measured.draws_sliced}),),
        remedy="nothing to do: in training the draws differ and the gradients agree in expectation", proven=True,
    )  # fmt: skip


def unalignable_randomness(measured: Measurements) -> Finding | None:
    """GAV302: a draw has no rows of its own for a micro-batch; a fault only where the gradients differ."""
    reasons = dict(measured.draws_unaligned)
    if measured.foreign_draws_differ:
        reasons["Python or NumPy generator"] = "how much is drawn depends on the batch"
    if not reasons:
        return None
    text = "; ".join(f"`{name}`: {why}" for name, why in reasons.items())
    explained = measured.coupling is not None and measured.coupling.module is not None
    fault = bool(measured.divergent) and not explained
    return Finding(
        "GAV302", "unalignable-randomness", "fault" if fault else "note",
        "random draws could not be dealt out per sample",
        evidence=(Evidence("random-draws", "measured", text, reasons),),
        remedy="draw per sample (one value for each row of the batch) or once per forward",
    )  # fmt: skip
