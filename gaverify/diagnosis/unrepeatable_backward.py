"""GAV303 unrepeatable-backward."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV303", "unrepeatable-backward"
# Atomic additions in another order leave a few units of roundoff of float64; anything above is no rounding.
REPEATS = 1e-9


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where two runs of the full batch agree in the loss and not in the gradient."""
    twice = measured.repeatability
    if twice is None or not twice.backward > REPEATS or twice.forward > REPEATS:
        return
    yield Finding(
        CODE, NAME, "fault", "the full batch's gradient differs from itself when it is computed again",
        evidence=(
            Evidence("repeatability", "measured",
                     f"same weights, same samples, same draws: loss agrees, gradient differs by {twice.backward:.1e}",
                     {"forward": twice.forward, "backward": twice.backward}),
        ),
        remedy="look for a backward that draws anew or keeps state between calls", proven=True,
    )  # fmt: skip
