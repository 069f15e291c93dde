"""Controls of an audit: further runs that decide what the comparison alone leaves open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gaverify.audit.job import Role
from gaverify.audit.running import Runner
from gaverify.errors import ProblemError
from gaverify.records.audit import Overwritten, Record
from gaverify.records.comparison import Outcome
from gaverify.records.stages import Stage
from gaverify.records.weights import LossTerm, WeightFit
from gaverify.records.windows import rounds_of
from gaverify.thresholds import SMALLEST_FAULT, U32

if TYPE_CHECKING:
    from torch import Tensor

    from gaverify.audit.reading import Run

_SMALL = U32  # no gradient of a loss this much smaller meets a limit; a power of two rounds nothing
_OTHERWISE = ((1, 1.3), (2, 1.7), (3, 2.9))  # directions of weights, and what losses are multiplied by
_MOST_HELD = 64  # micro-batches that the control with undone steps runs at most


def on_its_own(runner: Runner, full: Run, perturbed: Run, record: Record, options: dict[str, Any]) -> Record:
    """The control for a step that makes something else of the same gradient: with the script's own gradients."""
    from gaverify.audit.settling import settled_by_weights

    try:
        (own,) = runner.runs([replace(job, lead=False) for job in runner.jobs("accumulated", **options)])
    except ProblemError:
        return record
    return replace(record, updates=settled_by_weights(record.updates, full, perturbed, own))


def floored(runner: Runner, runs: tuple[Run, Run, Run], record: Record, options: dict[str, Any]) -> Record:
    """The control for differences near the noise floor: a floor that one run measured may be small by chance.

    A gradient whose terms cancel is made of the rounding of each of them, which moved weights hardly change where they
    are small. So the losses are multiplied by odd factors, which rounds every term otherwise, and the weights are moved
    in more directions; the largest floor counts.
    """
    from gaverify.audit.judgement import compare_updates

    full, perturbed, accumulated = runs
    try:
        again = [(runner.moved(full, options, *other), other[1]) for other in _OTHERWISE]
    except ProblemError:
        return record
    return replace(record, updates=compare_updates(full, perturbed, accumulated, runner.updates, again=again))


def near_the_floor(record: Record) -> bool:
    """Whether all that differs differs by so little that a floor which is small by chance may be behind it."""
    rows = [row for update in record.updates if update.differs for row in update.parameters]
    apart = [row.relative_difference for row in rows if row.outcome is Outcome.DIVERGENT]
    return bool(apart) and all(difference < SMALLEST_FAULT for difference in apart)


def unclipped(runner: Runner, record: Record, options: dict[str, Any]) -> Record:
    """The control for clipping inside windows, and for gradients that a script changes by hand.

    All runs again, with losses too small to be clipped.

    Dividing, centralising or summing elsewhere treats a gradient alike whatever its size; clipping lets a small one
    pass. So what the optimizers see of small gradients is what the script makes of them before it clips.
    """
    from gaverify.audit.judgement import compare_updates
    from gaverify.audit.settling import decided_without_clips

    options = {**options, "shrink": _SMALL}
    try:
        full = runner.full(**options)
        perturbed, accumulated = runner.beside(full, options)
        control = compare_updates(full, perturbed, accumulated, runner.updates, unclipped=True)
    except ProblemError:
        return record
    small = tuple(replace(update, decided=Stage.UNCLIPPED) for update in control)
    return replace(record, updates=decided_without_clips(record.updates, control), unclipped=small)


def by_change(runner: Runner, runs: tuple[Run, Run], record: Record, options: dict[str, Any]) -> Record:
    """The control for a script that moves its weights itself: the full batch again, with losses half as large.

    Weights that change otherwise for half the gradient (SGD) show what the script makes of `.grad` in its step, and of
    sums that it keeps elsewhere. Those that do not (Adam, a sign, a norm) show nothing of its size.

    Args:
        runner: Makes the run.
        runs: The full-batch and the accumulated run.
        record: Their comparison.
        options: Fields of `Job` that they had.
    """
    from gaverify.audit.settling import decided_by_change, open_to_change

    if not open_to_change(record.updates, *runs):
        return record
    try:
        half = runner.full(**options, shrink=0.5)
    except ProblemError:
        return record
    return replace(record, updates=decided_by_change(record.updates, *runs, half))


def by_terms(runner: Runner, runs: tuple[Run, Run], record: Record, options: dict[str, Any]) -> tuple[LossTerm, ...]:
    """The control for a loss that is a sum: both runs up to the update that differs, with each term alone.

    Nothing is returned unless the terms' gradients add up to those of the whole, in both runs. Behind the first update
    the full batch's steps are led as well: its term alone would train other weights.

    Args:
        runner: Makes the runs.
        runs: The full-batch and the accumulated run.
        record: Their comparison.
        options: Fields of `Job` that the accumulated run had, with its `source`.
    """
    from gaverify.audit.fitting import fitted_terms

    update = record.divergent
    count = _terms_of(record, update.number) if update is not None else 0
    if update is None or count < 2:
        return ()
    own = {name: value for name, value in options.items() if name not in ("source", "parts")}
    role: Role = "full"
    if update.number > 1:
        role, own = "perturbed", {**options, **({"parts": 1} if "parts" in options else {})}
    alone = []
    try:
        for term in range(1, count + 1):
            jobs = runner.jobs(role, **own, term=term), runner.jobs("accumulated", **options, term=term)
            alone.append(runner.runs(*[[replace(job, updates=update.number) for job in group] for group in jobs]))
    except ProblemError:
        return ()
    return fitted_terms(runs, [(whole, part) for whole, part in alone], record.tolerance, update.number)


def overwritten(runner: Runner, accumulated: Run, record: Record, options: dict[str, Any]) -> Overwritten | None:
    """The control for gradients that each backward pass may set: the accumulated run, cleared before each of them.

    Where the same gradient reaches the step, those before the last pass never did. What such passes add is that of the
    next one less their own, so that weights which fall from pass to pass give the full batch's gradient.
    """
    from gaverify.audit.rank_facts import left_by
    from gaverify.rules.scale import weights_of

    found = weights_of(record)
    if found is None or len(found[1].multipliers) < 2 or any(a <= b for a, b in pairwise((*found[1].multipliers, 0.0))):
        return None
    number = found[0].number
    try:
        jobs = runner.jobs("accumulated", **options, cleared=True)
        (cleared,) = runner.runs([replace(job, updates=number) for job in jobs])
    except ProblemError:
        return None
    left = left_by(accumulated, cleared, update=number)
    return Overwritten(left, *(cleared.meta["setter"] or (None, None))) if left <= record.tolerance else None


def _terms_of(record: Record, update: int) -> int:
    """How many terms the loss of an update has in both runs; 0 where it has other numbers of them."""
    windows = [
        found for windows in (record.full_windows, record.windows) for found in windows if found.number == update
    ]
    counts = {event.values.get("terms", 0) for window in windows for event in window.of("backward")}
    return counts.pop() if len(windows) == 2 and len(counts) == 1 else 0


def with_steps_undone(runner: Runner, full: Run, record: Record, options: dict[str, Any]) -> WeightFit | None:
    """The control for a step inside the window: once more with every step undone, then fit all micro-batches."""
    from torch import Tensor

    from gaverify.audit.fitting import fit_gradients

    first = record.first
    steps = record.expected(first) if first is not None else None
    if first is None or steps is None or not 1 < steps <= _MOST_HELD:
        return None
    try:
        (held,) = runner.runs([replace(runner.job("frozen", **options), updates=steps)])
    except ProblemError:
        return None
    samples = [held.samples(round_) for round_ in rounds_of(held.events)[:steps]]
    # of a step inside the backward pass, which may clear what it has used, only what it was given was seen
    given = [sample.increments if _any(sample.increments) else [sample.of("final")] for sample in samples]
    increments = [increment for members in given for increment in members][:steps]
    whole = full.samples(rounds_of(full.events)[0])
    used = {at: sum(step[at] for step in increments if at in step) for at in whole.summed}
    totals = {at: total for at, total in used.items() if isinstance(total, Tensor)}
    if len(totals) < len(used):
        return None  # a step inside the backward left no gradient to be seen
    target, stretches = whole.summed, whole.of("stretches")
    fit = fit_gradients(target, stretches, totals, increments)
    if fit is None or not whole.by_change:
        return fit
    # What the script takes away from its weights is the gradient times a rate that is not known.
    return fit_gradients({at: part * fit.factor for at, part in target.items()}, stretches, totals, increments)


def _any(increments: Sequence[Mapping[int, Tensor]]) -> bool:
    """Whether backward passes added anything."""
    return any(bool(change.any()) for increment in increments for change in increment.values())
