"""Finds the cause of a divergence: probes, then suspects, each tried in a control run, until nothing is left."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from gaverify.comparison import measure
from gaverify.control import in_float64
from gaverify.gradients import Task
from gaverify.judging import Judgement
from gaverify.measurements import Measurements
from gaverify.precision import unit_roundoff
from gaverify.probes.batch_quality import identical_samples
from gaverify.probes.controls import Bench
from gaverify.probes.search import Search
from gaverify.results import Outcome

_DRIFT_UNITS = 64.0  # of roundoff that K updates of a running average may differ by


def collected(task: Task, judgement: Judgement) -> Measurements:
    """Returns what the two strategies showed already, without another pass."""
    accumulated, record = judgement.accumulated, judgement.record
    counts = [max(seen.target_counts, key=lambda c: c[1]) for seen in accumulated.observed if seen.target_counts]
    valid = tuple(float(total) for total, _, _ in counts) if len(counts) == task.steps else ()
    ignored = bool(valid) and sum(valid) != sum(count for _, count, _ in counts)
    weighting = task.weighting if isinstance(task.weighting, str) else "explicit"
    return Measurements(
        rows=tuple(judgement.rows), steps=task.steps, batch_size=task.batch_size, sizes=task.sizes,
        weights=accumulated.weights, weighting=weighting, micro_losses=accumulated.micro_losses,
        method=judgement.method, valid_targets=valid, ignored_targets=ignored, draws=record.count,
        draws_sliced=record.sliced, draws_unaligned=dict(record.unaligned),
        draw_places=dict(record.places), foreign_draws_differ=accumulated.foreign_draws_differ,
        identical=identical_samples(task.problem.batch, task.batch_size), control_failure=judgement.control_failure,
        precision=judgement.precision, drift=_drift(judgement),
        hooked=tuple(name for name, p in task.parameters.items() if p._backward_hooks or _post_hooks(p)),
    )  # fmt: skip


def _post_hooks(parameter: torch.Tensor) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def _drift(judgement: Judgement) -> dict[str, float]:
    """The buffers that K micro-batches leave otherwise than the full batch, with their relative difference."""
    full, accumulated = judgement.full.buffers, judgement.accumulated.buffers
    common = {name: value for name, value in full.items() if name in accumulated}
    if not common:
        return {}
    least = _DRIFT_UNITS * unit_roundoff(judgement.dtype)
    rows = measure({name: accumulated[name] for name in common}, common)
    return {row.name: row.difference / row.scale for row in rows if row.difference > least * row.scale}


def investigate(task: Task, judgement: Judgement, *, diagnose: bool) -> Measurements:
    """Returns everything that was measured; probes run only after a divergence, and one that fails says so."""
    measured = collected(task, judgement)
    if not diagnose or not any(row.outcome is Outcome.DIVERGENT for row in judgement.rows) or task.steps < 2:
        return measured
    measured.diagnosed = True
    with ExitStack() as stack:
        state, lift = judgement.state, judgement.control is not None
        before = judgement.control.full if judgement.control is not None else None
        if lift:
            task, state = stack.enter_context(in_float64(task, state))
        search = Search(Bench(task, state, judgement.record, lift), measured)
        if measured.comparable:
            search.run(before)
            search.locate_writers()
    return measured
