"""GAV501 low-precision-accumulation (note)."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV501", "low-precision-accumulation"
# Fewer bits are what summing a few micro-batches in any order costs.
_WORTH_A_NOTE = 0.5


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a note where the accumulated gradient has fewer correct bits than the full-batch one."""
    loss = measured.precision
    if loss is None or loss.bits_lost < _WORTH_A_NOTE:
        return
    better = ""
    if loss.in_float32 is not None and loss.in_float32 < loss.accumulated:
        better = f": tested, the error is {loss.in_float32:.1e} instead of {loss.accumulated:.1e}"
    yield Finding(
        CODE, NAME, "note", f"accumulating in {loss.dtype} loses {loss.bits_lost:.1f} bits of the gradient",
        evidence=(
            Evidence("precision", "measured",
                     f"error against float64: accumulated {loss.accumulated:.1e}, full batch {loss.full:.1e}",
                     {"full": loss.full, "accumulated": loss.accumulated, "bits_lost": loss.bits_lost}),
        ),
        remedy=f"accumulate the gradients in float32{better}", proven=True,
    )  # fmt: skip
