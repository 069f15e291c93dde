"""From the record and its findings to the report: the outcome, and why; where it stays open, what to do about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gaverify.audit.request import Request
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.audit_report import AuditReport, RunSummary, counts_of, timeline_of
from gaverify.records.comparison import Method, Outcome, hidden_share
from gaverify.records.facts import facts_of_loop
from gaverify.records.findings import Finding
from gaverify.records.stages import Stage
from gaverify.rules import findings_for


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


def report_of(
    request: Request,
    record: Record,
    findings: tuple[Finding, ...],
    summaries: Sequence[RunSummary],
    meta: Mapping[str, Any],
    timings: Mapping[str, float],
) -> AuditReport:
    """Returns the answer of an audit.

    Args:
        request: What was asked for.
        record: What the rules read.
        findings: What they found.
        summaries: The runs.
        meta: The closing record of the accumulated run, or of the only one.
        timings: Seconds of each part.
    """
    outcome, reason = _decided(request, record, findings)
    working = meta["working"]
    methods = {row.method for update in record.updates for row in update.parameters}
    method = Method.WEIGHTS if methods == {Method.WEIGHTS} else Method.NOISE_FLOOR  # where they decided everything
    return AuditReport(
        script=request.script,
        outcome=outcome,
        reason=reason,
        findings=findings,
        updates=record.updates,
        counts=counts_of(record.windows),
        timeline=timeline_of((record.windows, *record.rank_windows)),
        runs=tuple(summaries),
        device=working["device"],
        dtype=working["dtype"],
        autocast=working["autocast"],
        torch=meta["torch"],
        modules=tuple(meta["modules"]),
        optimizers=tuple(meta["optimizers"]),
        trainable=sum(math.prod(shape) for members in meta["parameters"] for _, shape in members),
        method=Method.EVENTS if request.events_only else method,
        events_only=request.events_only,
        timings=dict(timings),
        left_out=dict(meta.get("left_out", {})),
        ranks=record.together,
    )


def is_explained(record: Record) -> bool:
    """Whether a rule finds a fault in what is known so far; that an average moved may be beside what matters."""
    faults = [finding for finding in findings_for(facts_of_loop(record)) if finding.severity == "fault"]
    return any(finding.proven or finding.code != "GAV402" for finding in faults)


def same_arguments(request: Request) -> AuditReport:
    """Returns the report of an audit whose two runs would have had the same arguments: nothing was run."""
    told = "the same arguments for `--full` and `--accumulated`"
    if not request.full:
        told = "no `--full` and `--accumulated`"
    return AuditReport(
        script=request.script,
        outcome=Outcome.INCONCLUSIVE,
        reason=f"nothing was compared: {told} would make two equal runs; "
        'give a large batch and its micro-batches, such as --full "--batch-size 8 --accum 1" '
        '--accumulated "--batch-size 2 --accum 4"',
    )


def _decided(request: Request, record: Record, findings: tuple[Finding, ...]) -> tuple[Outcome, str]:
    faults = [finding for finding in findings if finding.severity == "fault"]
    differing = record.divergent
    if record.ranks > 1 and record.together is None:
        return Outcome.INCONCLUSIVE, (
            f"the script trains in {record.ranks} processes and one of them was seen: what the others add to a "
            f"gradient is unknown; write `--ranks {record.ranks}`, and gaverify starts all of them, or "
            "`--launcher` with your own command (`--launcher python` where the script starts them itself)"
        )
    open_ = _open(record, differing, faults)
    if open_:
        return Outcome.INCONCLUSIVE, open_
    if differing is not None:
        return Outcome.DIVERGENT, f"update {differing.number}: {_differing(differing)}{_hidden(record)}"
    decisive = [finding for finding in faults if finding.proven or request.events_only]
    if decisive:
        return Outcome.DIVERGENT, f"{_compared(record)}the loop is at fault: {_named(decisive)}{_hidden(record)}"
    if request.events_only:
        seen = len(record.complete)
        calls = f"the calls of {seen} update{'s' if seen > 1 else ''} are in order{_short(record)}"
        return Outcome.INCONCLUSIVE, f"{calls}; gradients were not compared (--events-only)"
    for update in record.updates:
        why = undecided(record, update)
        if why:
            return Outcome.INCONCLUSIVE, why + _launched_alone(request, record)
    if faults:
        suspected = f"suspected, but not shown by any control: {_named(faults)}"
        return Outcome.INCONCLUSIVE, _compared(record) + suspected
    if not record.updates:
        return Outcome.INCONCLUSIVE, "nothing was compared: the runs have no update in common"
    made = len(record.updates)
    fewer = f"; the runs have {made} of the {request.updates} wanted updates in common" * (made < request.updates)
    told = fewer + _hidden(record) + _in_both_runs(record) + record.epochs + _launched_alone(request, record)
    return Outcome.EQUIVALENT, _compared(record).rstrip("; ") + told


def _named(findings: Sequence[Finding]) -> str:
    return ", ".join(dict.fromkeys(f"{finding.code} {finding.name}" for finding in findings))


def _open(record: Record, differing: UpdateComparison | None, faults: Sequence[Finding]) -> str:
    """Why a difference without a fault decides nothing; empty where it does."""
    if differing is None or faults:
        return ""
    if record.together is not None and record.together.is_altered:
        return (
            f"update {differing.number} differs, but {record.together.altered:.2g} of the gradient is no sum of what "
            "the ranks' backward passes computed: a hook that compresses what is reduced (`register_comm_hook`), or "
            "another one on gradients, makes something else of each cut of the batch; leave it out for the audit"
        )
    if not differing.data.checked:
        return (
            f"update {differing.number} differs, but whether both runs saw the same samples could not be compared (no "
            "input of a forward has the same name in both): hand both runs' forwards the same arguments, in the same "
            "order of samples"
        )
    if record.unaligned:
        return (
            f"update {differing.number} differs, but random draws could not be dealt out per sample "
            f"({', '.join(record.unaligned)}): nothing can be told apart from them; switch them off for the audit"
        )
    return ""


def _hidden(record: Record) -> str:
    """What cannot show where both runs trained in several processes; empty where one did."""
    if record.full_ranks < 2:
        return ""
    return f"; both runs trained in {record.full_ranks} ranks, so that faults of ranks cannot show"


def _launched_alone(request: Request, record: Record) -> str:
    """That a launcher made no ranks; empty where it did, or there is none."""
    if not request.launcher or record.ranks > 1:
        return ""
    return "; the command of `--launcher` trained in one process: no ranks were compared"


def _in_both_runs(record: Record) -> str:
    """What an equal gradient of ranks does not tell: what both runs lose, and which rows counted."""
    ranks, told = record.together, ""
    if ranks is not None and ranks.is_altered:
        told += (
            f"; {ranks.altered:.2g} of that gradient is no sum of what the backward passes computed (a hook that "
            "compresses it, say): what it loses is in both runs"
        )
    if ranks is not None and ranks.fed_alike:
        told += (
            "; ranks of tensor parallelism share their rows, which count once"
            if ranks.tensor_parallel
            else "; ranks were fed the same rows: is a `DistributedSampler` missing, or the rank not asked for?"
        )
    return told


def _short(record: Record) -> str:
    """What calls alone do not tell of a window that is shorter than the others; empty where none is."""
    short = next((window for window in record.complete if 0 < window.backwards < record.usual(window)), None)
    if short is None:
        return ""
    return (
        f", but update {short.number} has {short.backwards} backward passes where others have {record.usual(short)}: "
        "whether its losses are divided by as many, only gradients tell (`--tail`)"
    )


def _differing(update: UpdateComparison) -> str:
    rows = [row for row in update.parameters if row.outcome is Outcome.DIVERGENT]
    total = len(update.parameters)
    text = f"{len(rows)} of {total} parameter{'s' if total > 1 else ''} differ{'s' if len(rows) == 1 else ''}"
    whole, of = update.relative_difference, "gradient"
    if update.decided is Stage.CHANGE:
        text, of = f"the changes of the weights: {text}", "change"
    ratio = f", norm ratio {update.norm_ratio:.3g}" if math.isfinite(update.norm_ratio) else ""
    if math.isinf(whole):
        return f"{text}; the full-batch run has no {of} at all: every one is zero"
    return (
        f"{text}; all together by {whole:.2g} of the full batch's {of}" + ratio
        if math.isfinite(whole)
        else f"{text}; not every gradient is finite and there on both sides"
    )


def _compared(record: Record) -> str:
    """How far the gradients agree, for a sentence that goes on; empty where none were judged."""
    judged = [update for update in record.updates if update.judged and update.outcome is Outcome.EQUIVALENT]
    if not judged:
        return ""
    names = f"update {judged[0].number}" if len(judged) == 1 else f"updates {judged[0].number} to {judged[-1].number}"
    rows = judged[0].parameters
    if any(update.decided is Stage.CHANGE for update in judged):
        agree = f"the changes of {len(rows)} of {len(rows)} weights agree to rounding"
        return f"{names}: the script keeps no `.grad`; {agree}; "
    factors = [f"{update.fit.factor:.4g}" for update in judged if update.step_takes_factor and update.fit is not None]
    if len(factors) == len(judged):
        return (
            f"{names}: the gradient is {factors[0]} times the full batch's and the step takes the factor out again "
            "(it divides, or its rate is lower): the weights change alike, to rounding; "
        )
    return f"{names}: {len(rows)} of {len(rows)} gradients agree to rounding; "
