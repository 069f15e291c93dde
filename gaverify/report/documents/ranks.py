"""The part of a JSON document that says what several ranks did."""

from __future__ import annotations

import math
from typing import Any

from gaverify.records.ranks import RankFacts, Traffic


def ranks_item(facts: RankFacts) -> dict[str, Any]:
    """Returns what was measured on R ranks; null where a number does not apply."""
    fit = facts.weights
    return {
        "ranks": facts.ranks,
        "engine": facts.engine.value if facts.engine is not None else None,
        "replicas_apart": None if math.isnan(facts.apart) else facts.apart,
        "window": _traffic(facts.window),
        "own": _traffic(facts.own),
        "difference": facts.difference,
        "from_one_process": facts.from_one_process,
        "right_weights": fit.weights if fit is not None else None,
        "used_weights": fit.used if fit is not None else None,
        "residual": fit.residual if fit is not None else None,
        "buffers_apart": facts.buffers_apart,
    }


def _traffic(traffic: Traffic) -> dict[str, Any]:
    return {"collectives": {kind.value: count for kind, count in traffic.counts.items()}, "bytes": traffic.bytes_moved}
