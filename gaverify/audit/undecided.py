"""Why an update leaves the question open, and what to do about it, in words."""

from __future__ import annotations

import math
from pathlib import Path

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.comparison import Outcome
from gaverify.records.stages import Stage
from gaverify.records.totals import hidden_share


def undecided(record: Record, update: UpdateComparison) -> str:
    """Returns why an update leaves the question open; empty where it does not."""
    before = update.number - 1
    if not before and record.same_pieces:
        return "nothing was compared: both runs fed update 1 in the same pieces; do the arguments cut the batch?"
    why = _why(record, update)
    earlier = f"update {before} agrees, and `--updates {before}` would settle for that; " if before else ""
    return f"{earlier}update {update.number}: {why}" if why else ""


def _why(record: Record, update: UpdateComparison) -> str:
    if update.unrepeatable:
        return f"the full-batch run does not repeat itself: {update.unrepeatable}; {_start_advice(record)}"
    if not update.data.same:
        return _other_data(record, update)
    if not update.judged:
        return (
            f"the runs start from different weights (relative difference {update.started_apart:.1e}); "
            f"{_advice(record, update)}"
        )
    if update.unclear and update.decided is Stage.CHANGE:
        return (
            "the script keeps no `.grad` where its weights move, and they change "
            "alike with losses half as large: their change shows nothing of the gradient's size; keep the sums in "
            "`.grad`, or use SGD for the audit"
        )
    if update.unclear:
        return (
            "the script changes its summed gradients by hand before the step, and "
            "the sums differ. Clipping by hand would hide a wrong scale, and a control with losses too small to be "
            "clipped decided nothing: use `torch.nn.utils.clip_grad_norm_`, or switch it off for the audit"
        )
    if update.outcome is Outcome.INCONCLUSIVE:
        reason = next((row.reason for row in update.parameters if row.reason), "")
        count = sum(row.outcome is Outcome.INCONCLUSIVE for row in update.parameters)
        noun = f"{count} of {len(update.parameters)} parameters could not be decided"
        if not count:
            hidden = hidden_share(update.parameters)
            noun = (
                f"rounding may hide up to {hidden:.0%} of the whole gradient; float32, or fewer samples, would tell"
                if 0 < hidden < math.inf
                else "every gradient is zero"
            )
        return noun + (f": {reason}" if reason else "")
    return ""


def _advice(record: Record, update: UpdateComparison) -> str:
    before = record.update_of(update.number - 1)
    if before is None:
        return _start_advice(record)
    if before.learning_rates != before.learning_rates_full:
        rates = ", ".join(f"{rate:.4g}" for rate in before.learning_rates)
        full = ", ".join(f"{rate:.4g}" for rate in before.learning_rates_full)
        return f"the learning rates of update {before.number} differ: {full} in the full-batch run, {rates} here"
    return f"the steps of update {before.number} differ although their gradients agree"


def _start_advice(record: Record) -> str:
    """What to do about weights that start elsewhere: a run that read a checkpoint resumes, any other lacks a seed."""
    loads = [
        {(event.values["path"], event.place) for window in windows for event in window.of("loaded")}
        for windows in (record.full_windows, record.windows)
    ]
    alone = sorted(
        (path, place, run)
        for run, ours, others in (("full-batch", loads[0], loads[1]), ("accumulated", loads[1], loads[0]))
        for path, place in ours - others
    )
    if alone:
        path, (file, line), run = alone[0]
        where = f" ({file}:{line})" if file else ""
        return f"does it resume? the {run} run alone loaded `{path}`{where}; let both start anew"
    return "seed every generator before the model is built: `--seed 0` does"


def _other_data(record: Record, update: UpdateComparison) -> str:
    data = update.data
    if data.full != data.accumulated:
        rows = f"{data.full} rows in the full-batch run, {data.accumulated} in the accumulated one"
        advice = "do batch size × accumulation make the same batch?"
    else:
        rows = f"{data.full} rows in both"
        advice = f"shuffling, seeds, a dropped batch or packing make such differences{_fed_at(record, update)}"
        if record.unaligned:
            drawn = "; ".join(f"{name}: {why}" for name, why in record.unaligned.items())
            advice = f"what the loop drew could not be dealt out per sample: {drawn}"
    if record.together is not None and 0 < data.accumulated - data.full < record.ranks:
        advice = (
            "a `DistributedSampler` repeats samples where the data does not divide by the ranks: `drop_last=True` "
            "leaves them out"
        )
    if record.together is not None and record.together.fed_alike:
        advice = (
            "ranks of tensor parallelism share their rows: does `--full` name the batch that one of them is fed?"
            if record.together.tensor_parallel
            else "ranks were fed the same rows: is a `DistributedSampler` missing, or the rank not asked for?"
        )
    padded = " (after padding was taken off)" if data.padded else ""
    return (
        f"the runs did not see the same samples: {data.differing} "
        f"{'row' if data.differing == 1 else 'rows'} of `{data.path}` {'differs' if data.differing == 1 else 'differ'}"
        f"{padded}; {rows}; {advice}"
    )


def _fed_at(record: Record, update: UpdateComparison) -> str:
    """Where the rows went in, and how a script lets the audit give both runs the same."""
    window = record.window_of(update.number)
    forwards = window.of("forward") if window is not None else ()
    file, line = forwards[0].place if forwards else (None, None)
    where = f" in what the forward at {Path(file).name}:{line} is given" if file else ""
    return (
        f"{where}; `--seed 0` seeds what the script leaves open, and batches of a `DataLoader`, or a model that is "
        "given its targets and returns its loss, are made the same for both runs"
    )
