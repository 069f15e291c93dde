"""Do random draws that could not be dealt out per sample make the difference?"""

from __future__ import annotations

import math
from dataclasses import replace

from gaverify.causes.bench import Bench
from gaverify.records.experiment import ControlKind
from gaverify.records.facts import Facts


def ask(bench: Bench, facts: Facts) -> Facts:
    """Holds every random draw at one typical value in both runs, where some could not be dealt out."""
    if not facts.draws.unaligned:
        return facts
    what = "every random draw held constant"
    control = bench.attempt("random draws", lambda: _held(bench).run(what, kind=ControlKind.DRAWS_HELD))
    if control is None or math.isinf(control.left):
        return facts
    draws = replace(facts.draws, control=control)
    return replace(facts, draws=draws, left=control.left, cleared=control.rounding)


def given(bench: Bench, facts: Facts) -> Bench:
    """The bench for the questions after this one: the draws stay held where they had to be."""
    return _held(bench) if facts.draws.control is not None else bench


def _held(bench: Bench) -> Bench:
    return replace(bench, record=replace(bench.record, constant=True, unaligned={}), earlier=None, live=bench)
