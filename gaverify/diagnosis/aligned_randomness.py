"""GAV301 aligned-randomness (note)."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV301", "aligned-randomness"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a note where random draws were dealt out per sample."""
    if measured.draws_sliced == 0:
        return
    yield Finding(
        CODE, NAME, "note", f"{measured.draws} random draws of the full batch were replayed sample by sample",
        evidence=(Evidence("random-draws", "measured", f"{measured.draws_sliced} draws dealt out to micro-batches",
                           {"draws": measured.draws, "dealt": measured.draws_sliced}),),
        remedy="nothing to do: in training the draws differ and the gradients agree in expectation", proven=True,
    )  # fmt: skip
