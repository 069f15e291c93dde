"""Several ranks as words."""

from __future__ import annotations

import math

from gaverify.amounts import bytes_text
from gaverify.records.ranks import RankFacts


def ranks_line(facts: RankFacts, micro_batches: int) -> str:
    """Returns how many ranks there were, under which engine, and what they sent each other."""
    engine = facts.engine.value if facts.engine is not None else "no known engine"
    kinds = ", ".join(f"{count} {kind.value}" for kind, count in facts.window.counts.items()) or "no collective"
    held = "" if math.isnan(facts.apart) else f"; replicas {'identical' if facts.apart == 0.0 else 'apart'}"
    each = f", K = {micro_batches // facts.ranks} each" if micro_batches else ""
    return f"{facts.ranks} × {engine}{each}: {kinds} per window, {bytes_text(facts.window.bytes_moved)}{held}"
