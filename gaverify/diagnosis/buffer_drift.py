"""GAV402 buffer-drift (note)."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV402", "buffer-drift"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a note where buffers end up different after K micro-batches than after the full batch."""
    if not measured.drift:
        return
    worst = max(measured.drift, key=lambda name: measured.drift[name])
    names = ", ".join(f"`{name}`" for name in list(measured.drift)[:3])
    more = f" and {len(measured.drift) - 3} more" if len(measured.drift) > 3 else ""
    yield Finding(
        CODE, NAME, "note", f"buffers end up different: {names}{more} are updated {measured.steps} times per window",
        evidence=(Evidence("state", "measured", f"`{worst}` differs by {measured.drift[worst]:.1e}",
                           dict(measured.drift)),),
        remedy="scale the update rate (BatchNorm: momentum / K), if evaluation depends on these buffers", proven=True,
    )  # fmt: skip
