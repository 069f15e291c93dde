"""The control for losses that add up although gradients do not: which code's backward depends on the batch?

Both runs are made again, and record the gradients of all modules' outputs. Up to the weights of the micro-batches they
agree behind the code at fault, which the backward pass reaches first, and differ before it. The control pins the
gradients that this code gives back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from gaverify.audit.coupling_controls import (
    CallKey,
    CouplingBench,
    Pair,
    PinnedRuns,
    Pins,
    agree,
    calls_of_pair,
    difference_allowed,
    rows_of_pair,
)
from gaverify.audit.recording.outputs import SCRIPT, ModuleCall
from gaverify.audit.running import Trial
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.events import Backward
from gaverify.records.experiment import Cause, ControlKind, Operation, Suspect
from gaverify.rules.scale import contradict_losses
from gaverify.thresholds import TINY
from gaverify.tracebacks import display_path


def control_backward(trial: Trial, record: Record) -> Record:
    """Returns the record with the code whose backward depends on the batch, if the losses contradict fitted weights."""
    update = record.divergent
    if update is None or not contradict_losses(record, update):
        return record
    # Each run may divide its losses, or the gradients after its backward passes, by another number.
    factor = full_batch_weight(record, update) / update.window.fit.used[0] if update.window.fit is not None else 1.0
    bench = CouplingBench(trial, record, update, factor)
    runs = bench.run_both(Pins())
    if not runs.pairs_by_rank or not agree(runs.pairs, record.unit):
        return record
    cause: Cause | None = None
    for operation in _candidates(runs, factor, record.unit, update.number):
        path = SCRIPT if operation.module is None else operation.module
        name = "the loss" if operation.module is None else f"`{path or '(root)'}`"
        pinned_runs = bench.run_both(Pins(modules=(path,)), runs.pairs_by_rank)
        control = bench.control(
            pinned_runs, f"the gradient from {name} replaced by the full batch's", ControlKind.FULL_BATCH
        )
        suspect = Suspect("rows", operation, None, update.relative_difference, 0, operation.module is not None, False)
        # without a control that leaves rounding the likeliest candidate is suspected
        cause = Cause(suspect, control) if cause is None or control.rounding else cause
        if control.rounding:
            break
    return replace(record, controls=replace(record.controls, backward=cause))


def full_batch_weight(record: Record, update: UpdateComparison) -> float:
    """Returns the factor between the full batch's loss and the losses that its run differentiates."""
    windows = [window for window in record.full_windows if window.number == update.number]
    losses = sum(backward.loss for window in windows for backward in window.of(Backward))
    return update.window.full_loss / losses if losses else math.nan


def _candidates(runs: PinnedRuns, factor: float, unit: float, update: int) -> Iterator[Operation]:
    """Yields the code whose backward may be at fault.

    That is the module behind the last gradient that differs, then the code around both: a module or the loss.
    """
    pairs = [pair for pair in runs.pairs if pair is not None]
    differing = {key for pair in pairs for key in _differing_calls(pair, factor, unit)}
    calls = [(key, full_call) for key, full_call, _ in calls_of_pair(pairs[0])] if pairs else []
    # in the order in which calls end: the backward pass reaches the last of them first
    for at, (key, call) in reversed([*enumerate(calls)]):
        around = call["under"]
        agrees_around = around == SCRIPT or not any(path == around for path, _ in differing)
        if key not in differing or not agrees_around:
            continue
        # Calls that end before this one differ because gradients flow back through it: none of them is a candidate.
        behind = [
            candidate for name, candidate in calls[at + 1 :] if candidate["under"] == around and name not in differing
        ]
        yield from (_operation_of(candidate) for candidate in behind[:1])
        if around == SCRIPT:
            yield _operation_of_loss(runs, update)
        else:
            yield from (_operation_of(candidate) for _, candidate in calls if candidate["path"] == around)
        return


def _differing_calls(pair: Pair, factor: float, unit: float) -> Iterator[CallKey]:
    """Yields the calls whose output gradients of a micro-batch's rows are not `factor` times the full batch's."""
    for key, full_call, micro_call in calls_of_pair(pair):
        gradients = full_call["gradients"], micro_call["gradients"]
        for path in gradients[0].keys() & gradients[1].keys():
            rows = rows_of_pair(pair, gradients[0][path], gradients[1][path])
            if rows is not None and _relative_difference(factor * rows[0], rows[1]) > difference_allowed(unit):
                yield key


def _relative_difference(full: torch.Tensor, part: torch.Tensor) -> float:
    # The third entry is a norm, which is the same for a gradient of the other sign.
    return float((full - part)[..., :2].abs().max() / full[..., :2].abs().max().clamp_min(TINY))


def _operation_of(call: ModuleCall) -> Operation:
    file, line = call["place"] or (None, None)
    return Operation("backward", call["path"], call["kind"], file=file and display_path(file), line=line)


def _operation_of_loss(runs: PinnedRuns, update: int) -> Operation:
    """Returns the loss, at the line of a function with a backward of its own if it has one, else where it is made."""
    event = next(event for event in runs.full.events if isinstance(event, Backward) and event.update == update)
    lines = [*event.origin.custom, *event.origin.met[-1:], event.place]
    file, line = next((place for place in lines if place is not None), (None, None))
    return Operation("backward", file=file and display_path(file), line=line)
