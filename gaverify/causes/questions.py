"""Finds the cause of a divergence: questions in an explicit order, each with control runs, until nothing is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from gaverify.causes import again, backward, counts, coupling, operations, state, weights
from gaverify.causes.bench import Bench
from gaverify.causes.confirming import confirmed
from gaverify.causes.listening import Heard
from gaverify.causes.sketches import kept
from gaverify.passes.limiting import TimeUp
from gaverify.passes.task import Task
from gaverify.records.experiment import ControlKind
from gaverify.records.facts import Facts
from gaverify.verdict.control import in_float64
from gaverify.verdict.judging import Judgement


def _ask_draws(bench: Bench, facts: Facts) -> Facts:
    """Holds every random draw at one typical value in both runs, where some could not be dealt out."""
    if not facts.draws.unaligned:
        return facts
    what = "every random draw held constant"
    control = bench.attempt("random draws", lambda: _held(bench).run(what, kind=ControlKind.DRAWS_HELD))
    if control is None or math.isinf(control.left):
        return facts
    draws = replace(facts.draws, control=control)
    return replace(facts, draws=draws, left=control.left, cleared=control.rounding)


def _given(bench: Bench, facts: Facts) -> Bench:
    """The bench for the questions after this one: the draws stay held where they had to be."""
    return _held(bench) if facts.draws.control is not None else bench


def _held(bench: Bench) -> Bench:
    return replace(bench, record=replace(bench.record, constant=True, unaligned={}), earlier=None, live=bench)


QUESTIONS: tuple[Callable[[Bench, Facts], Facts], ...] = (
    _ask_draws,
    weights.ask,
    state.ask,
    counts.ask,
    coupling.ask,
    weights.ask_at_moved_parameters,
    operations.ask,
    state.ask_unnamed,
    backward.ask,
)
"""In this order: what is cheap to ask, and what the later questions have to know, comes first."""


def asked(task: Task, judgement: Judgement, facts: Facts, heard: Heard, found: Facts | None = None) -> Facts:
    """Returns the facts with what the questions found; a question that could not be asked is noted.

    What a part of the batch showed is confirmed instead, where the float64 control decided and that goes.

    Args:
        task: What was run.
        judgement: With the passes.
        facts: What they showed.
        heard: What was heard of the float64 control.
        found: What the search showed in a part of the batch.
    """
    with ExitStack() as stack:
        state_, control = judgement.state, judgement.control
        if control is not None:
            task, state_ = stack.enter_context(in_float64(task, state_))
        earlier = heard.added_to(kept(control.full), control.accumulated) if control is not None else None
        facts = replace(facts, left=facts.compared.total)
        bench = Bench(task, state_, judgement.record, control is not None, earlier=earlier, total=facts.left)
        known = confirmed(bench, facts, found) if found is not None and control is not None else None
        if known is not None and found is not None:
            judgement.part = found.weights.sizes
            return known
        try:
            for ask in QUESTIONS:
                if _settled(facts):
                    break
                facts = ask(_given(bench, facts), facts)
            facts = again.ask(bench, facts)
            facts = weights.ask_place(_given(bench, facts), state.ask_lines(bench, facts))
        except TimeUp:
            facts = replace(facts, stopped_after=task.limit.seconds)
    return replace(facts, cleared=facts.left <= bench.rounding, failures=bench.failures)


def _settled(facts: Facts) -> bool:
    """Whether nothing is left to ask: all is explained, or a batch that differs from itself explains nothing."""
    return facts.cleared or facts.weights.blamed or not facts.repeats_itself
