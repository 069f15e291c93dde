"""Facts about two ranks, made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

from gaverify.records.ranks import Collective, Engine, RankFacts, Traffic
from gaverify.records.weights import WeightFit

REDUCED = Traffic({Collective.REDUCE: 1}, 100)
GATHERED = Traffic({Collective.GATHER: 1}, 10)
HALVES = (0.5, 0.5)


def fit(
    right: tuple[float, ...] = HALVES, residual: float = 1e-7, factor: float = math.nan, left: float = 0.5
) -> WeightFit:
    return WeightFit(right, residual, True, used=HALVES, used_residual=1e-7, factor=factor, factor_residual=left)


def ranks(weights: WeightFit | None, **changes: object) -> RankFacts:
    facts = RankFacts(2, Engine.DDP, 0.0, REDUCED, Traffic(), weights, 0.5, from_one_process=0.5, divergent=True)
    return replace(facts, **changes)  # type: ignore[arg-type]
