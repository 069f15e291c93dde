"""Finds the cause of a divergence: questions in an explicit order, each with control runs, until nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from gaverify.causes import again, backward, counts, coupling, draws, operations, state, weights
from gaverify.causes.bench import Bench
from gaverify.causes.confirming import confirmed
from gaverify.causes.listening import Heard
from gaverify.causes.sketches import kept
from gaverify.passes.limiting import TimeUp
from gaverify.passes.task import Task
from gaverify.records.facts import Facts
from gaverify.verdict.control import in_float64
from gaverify.verdict.judging import Judgement

QUESTIONS: tuple[Callable[[Bench, Facts], Facts], ...] = (
    draws.ask,
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
                facts = ask(draws.given(bench, facts), facts)
            facts = again.ask(bench, facts)
            facts = weights.ask_place(draws.given(bench, facts), state.ask_lines(bench, facts))
        except TimeUp:
            facts = replace(facts, stopped_after=task.limit.seconds)
    return replace(facts, cleared=facts.left <= bench.rounding, failures=bench.failures)


def _settled(facts: Facts) -> bool:
    """Whether nothing is left to ask: all is explained, or a batch that differs from itself explains nothing."""
    return facts.cleared or facts.weights.blamed or not facts.repeats_itself
