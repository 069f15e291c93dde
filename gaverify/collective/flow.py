"""The verdict of all ranks: the whole batch on every rank against the window as they train it.

    reference   every rank runs the same whole batch in one backward under the same engine: the mean of R equal
                gradients is the full batch's, and lies on the ranks as the model does
    window      K micro-batches of its own on each rank, reduced as the engine or the user's strategy does

Every number that decides something is one of all ranks (`passes.shards.summed_over`), so that all ask the same next
question. The cause is looked for where a window diverges: with the same micro-batches, all of them on every rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from gaverify.causes.investigation import collected, investigate
from gaverify.collective.facts import facts_of_ranks
from gaverify.collective.membership import is_lost
from gaverify.collective.window import Moved, OwnCollectives, Trained, bare
from gaverify.errors import Agreed, ProblemError
from gaverify.passes.gradients import PassResult, full_batch_gradients
from gaverify.passes.isolation import ModelState
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.task import Task
from gaverify.passes.wrappers import summed_over
from gaverify.records.comparison import Method, Outcome
from gaverify.records.facts import Facts
from gaverify.records.ranks import Engine
from gaverify.thresholds import U32, U64
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.comparison import measure
from gaverify.verdict.control import (
    Control,
    failure_sentence,
    in_float64,
    judge_by_floor,
    lowest_precision,
    noise_floor,
)
from gaverify.verdict.criteria import decide_at_once
from gaverify.verdict.judging import Judgement, decide_by_control, judge, working_unit

_PATIENCE = 10.0  # seconds, and as long again as the control took: others that fail in it fail by then


@dataclass(frozen=True)
class Passes:
    """The two passes in working precision, and what others start from."""

    full: PassResult
    window: PassResult
    moved: Moved
    record: DrawRecord
    state: ModelState


def judge_together(task: Task, trained: Trained, *, diagnose: bool, exact: bool) -> tuple[Judgement, Facts]:
    """Returns the verdict on the gradient that the ranks end up with, and everything that was measured.

    Args:
        task: With the batch of all ranks, cut into K · R micro-batches, and the model as the ranks hold it.
        trained: How they train.
        diagnose: Whether to look for the cause of a divergence.
        exact: In float64 whatever working precision says.

    Raises:
        ProblemError: The problem cannot be verified by ranks.
    """
    member = trained.member
    with summed_over(member.count, member.total):
        started = time.perf_counter()
        passes = _passes(task, trained)
        passed = time.perf_counter()
        judgement = _judged(task, trained, passes, exact)
        judgement.timings = {"passes": passed - started, "control": time.perf_counter() - passed}
        divergent = any(row.outcome is Outcome.DIVERGENT for row in judgement.rows)
        own = replace(task, sizes=tuple(task.sizes[k] for k in trained.own(task)))
        if not divergent:
            return judgement, replace(collected(own, judgement), ranks=facts_of_ranks(task, trained, passes, judgement))
        one, facts = _searched(task, trained, diagnose)
        ranks = facts_of_ranks(task, trained, passes, judgement, one)
    if not facts.compared.divergent:
        facts = replace(facts, compared=replace(facts.compared, rows=tuple(judgement.rows), method=judgement.method))
    return judgement, replace(facts, ranks=ranks)


def _passes(task: Task, trained: Trained) -> Passes:
    """The whole batch on every rank, and the window.

    Raises:
        ProblemError: A loss is not finite, or the user's code talks to other ranks itself.
    """
    state, listener = ModelState(task.modules, (task.problem.loss,)), OwnCollectives()
    task.progress("the whole batch on every rank")
    full, record = full_batch_gradients(task, state, probe=listener)
    if record.fused and not task.math_kernels:
        task.math_kernels = True
        full, record = full_batch_gradients(task, state, probe=listener)
    if listener.found:
        raise ProblemError(
            f"the model or the loss calls `torch.distributed` itself ({listener.found}): every rank runs the whole "
            "batch for the reference, of which such a call would see as many copies; `gaverify run --ranks`, "
            "without a launcher, verifies it"
        )
    if not math.isfinite(full.loss):
        raise ProblemError(f"the loss of the full batch is {full.loss}; a gradient of it proves nothing")
    full.gradients = {name: None if g is None else g.clone() for name, g in full.gradients.items()}
    task.progress(f"the window of {trained.member.count} ranks")
    window, moved = trained.window(task, state, record, full)
    window.loss = float(trained.member.total(torch.tensor([window.loss], dtype=torch.float64, device="cpu")))
    return Passes(full, window, moved, record, state)


def _judged(task: Task, trained: Trained, passes: Passes, exact: bool) -> Judgement:
    rows = measure(passes.window.gradients, passes.full.gradients)
    # each rank has seen its own micro-batches alone: what decides is the coarsest that any has seen
    unit = max(trained.member.everyones("unit", working_unit(task, passes.full, passes.window)))
    working = {row.name: row for row in rows}
    judgement = Judgement(
        decide_at_once(rows, unit, {}),
        Method.WORKING_PRECISION,
        passes.full,
        passes.window,
        passes.record,
        passes.state,
        lowest_precision(task),
        working,
        {},
        {},
    )
    left = any(row.outcome is Outcome.INCONCLUSIVE and row.why is None for row in judgement.rows)
    if unit <= U64 or (unit <= U32 and not left and not exact):
        if left:
            floor = noise_floor(task, passes.state, passes.record, passes.full, unit)
            judgement.rows, judgement.method = judge_by_floor(working, floor, {}, unit), Method.NOISE_FLOOR
        return judgement
    if not _controlled(task, trained, judgement, unit):
        floor = noise_floor(task, passes.state, passes.record, passes.full, unit)
        judgement.rows, judgement.method = judge_by_floor(working, floor, {}, unit), Method.NOISE_FLOOR
    return judgement


def _controlled(task: Task, trained: Trained, judgement: Judgement, unit: float) -> bool:
    """Whether both passes ran in float64, on every rank, and decided; all ranks answer alike.

    Where one could not alone, such as for its memory, the others wait for it in a collective that no word ends.
    """
    failure, control, begun = "", None, time.monotonic()
    try:
        with in_float64(task, judgement.state) as (lifted, state):
            task.progress("float64 control")
            full, _ = full_batch_gradients(lifted, state, judgement.record, lift=True)
            full.gradients = {name: None if g is None else g.clone() for name, g in full.gradients.items()}
            window, _ = trained.window(lifted, state, judgement.record, full, lift=True)
            rows = {row.name: row for row in measure(window.gradients, full.gradients)}
        control = Control(rows, full, window)
    except Agreed:
        raise
    except Exception as error:
        if is_own_fault(error) or is_lost(error):
            raise
        failure = failure_sentence(error)
    within = 2 * (time.monotonic() - begun) + _PATIENCE if failure else None
    alone = f"the float64 control failed on this rank alone: {failure}" if failure else ""
    failures = [said for said in trained.member.everyones("control", failure, within, alone) if said]
    if failures or control is None:
        judgement.control_failure = failures[0]
        return False
    decide_by_control(task, judgement, control, unit)
    return True


def _searched(task: Task, trained: Trained, diagnose: bool) -> tuple[Judgement, Facts]:
    """What the micro-batches of all ranks show where each rank runs all of them, as one process would.

    Under DDP every rank has the whole model and needs no other one for it; sharded ones run in step.
    """
    with _alone(trained.engine):
        here = task if trained.engine is Engine.FSDP2 else bare(task)
        one = judge(here, rtol=None, atol=None, keep_gradients=True, exact=True)
        return one, investigate(here, one, diagnose=diagnose)


@contextmanager
def _alone(engine: Engine | None) -> Iterator[None]:
    """Lets numbers be those of this rank where it holds the whole model."""
    if engine is Engine.FSDP2:
        yield
        return
    with summed_over(1, lambda numbers: numbers):
        yield
