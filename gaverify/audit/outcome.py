"""Decides the outcome of an audit from its record and findings, and says why; if it stays open, what to do about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from gaverify.audit.request import Request
from gaverify.records.answers import Environment
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.audit_report import (
    Arithmetic,
    Audit,
    RecordedCalls,
    RunSummary,
    TrainedModels,
    counts_of,
    timeline_of,
)
from gaverify.records.comparison import comparison_of
from gaverify.records.events import ClosingRecord, FileLoaded, Forward
from gaverify.records.findings import Finding
from gaverify.records.numbers import count_text
from gaverify.records.outcomes import Method, Outcome, hidden_share
from gaverify.rules import findings_for
from gaverify.rules.lost_passes import is_skipping
from gaverify.rules.scale import unexplained_term
from gaverify.tracebacks import display_path


def explain_undecided(record: Record, update: UpdateComparison) -> str:
    """Returns why an update leaves the question open; empty where it does not."""
    before = update.number - 1
    # Both runs cut the batch alike, so even a faulty loop would agree: nothing was compared.
    if not before and record.same_pieces:
        return (
            "nothing was compared: both runs cut update 1 into the same micro-batches; check that their arguments "
            "give different micro-batch sizes"
        )
    why = _why(record, update)
    earlier = f"update {before} agrees, and `--updates {before}` compares no further; " if before else ""
    return f"{earlier}update {update.number}: {why}" if why else ""


def _why(record: Record, update: UpdateComparison) -> str:
    # Asked first: a run that does not repeat itself makes all comparisons below meaningless.
    if update.unrepeatable:
        return f"the full-batch run is not reproducible: {update.unrepeatable}; {_start_advice(record)}"
    if not update.data.is_comparable:
        return _other_data(record, update)
    # Weights that differ before the update make its gradients differ whatever the loop does.
    if not update.judged:
        return (
            f"the runs start from different weights (relative difference {update.started_apart:.1e}); "
            f"{_advice(record, update)}"
        )
    if update.unclear:
        return (
            "the script changes its accumulated gradients by hand before the step, and they differ. Clipping by hand "
            "can hide a wrong loss scale, and a control run with losses too small to be clipped decided nothing. Use "
            "`torch.nn.utils.clip_grad_norm_`, or turn the clipping off for the audit"
        )
    if update.outcome is Outcome.INCONCLUSIVE:
        reason = next((row.reason for row in update.parameters if row.reason), "")
        count = sum(row.outcome is Outcome.INCONCLUSIVE for row in update.parameters)
        answer = f"{count} of {count_text(len(update.parameters), 'parameter')} undecided"
        # Every parameter agrees, but the noise is so large, or the gradient so small, that a fault would agree as well.
        if not count:
            hidden = hidden_share(update.parameters)
            answer = "every gradient is zero"
            if 0 < hidden < math.inf:
                answer = (
                    f"rounding could hide an error of up to {hidden:.0%} of the gradient; try float32 or fewer samples"
                )
        return answer + (f": {reason}" if reason else "")
    return ""


def _advice(record: Record, update: UpdateComparison) -> str:
    before = record.update_of(update.number - 1)
    if before is None:
        return _start_advice(record)
    # Other rates make other steps of the same gradient: the advice can then name the scheduler.
    if before.step.learning_rates != before.step.learning_rates_full:
        rates = ", ".join(f"{rate:.4g}" for rate in before.step.learning_rates)
        full = ", ".join(f"{rate:.4g}" for rate in before.step.learning_rates_full)
        return (
            f"the learning rates of update {before.number} differ: {full} in the full-batch run, "
            f"{rates} in the accumulated run"
        )
    return f"the optimizer steps of update {before.number} differ although their gradients agree"


def _start_advice(record: Record) -> str:
    """The advice for initial weights that differ: one run resumed from a checkpoint, or a seed is missing."""
    loads = [
        {(event.path, event.place) for window in windows for event in window.of(FileLoaded)}
        for windows in (record.calls.full_windows, record.calls.windows)
    ]
    alone = sorted(
        (path, place, run)
        for run, ours, theirs in (("full-batch", loads[0], loads[1]), ("accumulated", loads[1], loads[0]))
        # A file that both runs read makes no difference: only one that a single run read explains other weights.
        for path, place in ours - theirs
    )
    if alone:
        path, (file, line), run = alone[0]
        where = f" ({display_path(file)}:{line})" if file else ""
        return f"only the {run} run loaded `{path}`{where}: does it resume from a checkpoint? start both runs afresh"
    return "seed all random generators before the model is built, for example with `--seed 0`"


def _other_data(record: Record, update: UpdateComparison) -> str:
    data = update.data
    rows = f"{data.full} rows in both runs"
    if data.full != data.accumulated:
        rows = f"{data.full} rows in the full-batch run, {data.accumulated} in the accumulated run"
        advice = "is batch size × accumulation steps the same in both runs?"
    elif record.unaligned:
        drawn = ", ".join(f"{name}: {why}" for name, why in record.unaligned.items())
        advice = f"the accumulated run could not be given the full-batch run's random numbers: {drawn}"
    else:
        advice = _explain_shuffled(record, update)
    # From here on, more special advice replaces the general one: the last that applies is shown.
    if is_skipping(record, update):
        advice = "the loop skips a micro-batch, which shifts the accumulation window or leaves samples out"
    ranks = record.together
    # A sampler that fills up the last batch repeats less than one row per rank.
    if ranks is not None and 0 < data.accumulated - data.full < record.ranks:
        advice = (
            "a `DistributedSampler` repeats samples if their number does not divide by the number of ranks: "
            "`drop_last=True` leaves them out"
        )
    if ranks is not None and ranks.replicas.fed_alike:
        advice = _SAME_ROWS
        if ranks.tensor_parallel:
            advice = "ranks of tensor parallelism share their rows: does `--full` give the batch size of one rank?"
    padded = " (after padding was removed)" if data.padded else ""
    noun, differ = ("row", "differs") if data.differing == 1 else ("rows", "differ")
    return (
        f"the runs did not see the same samples: {data.differing} {noun} of `{data.path}` {differ}{padded}, {rows}; "
        f"{advice}"
    )


_SAME_ROWS = "all ranks were fed the same rows: use a `DistributedSampler`, or select the rows by rank"


def _explain_shuffled(record: Record, update: UpdateComparison) -> str:
    """The advice for shuffled samples, with the line of the forward that is given them."""
    window = record.calls.window_of(update.number)
    forwards = window.of(Forward) if window is not None else ()
    file, line = forwards[0].place if forwards else (None, None)
    where = f" (see the inputs of the forward pass at {Path(file).name}:{line})" if file else ""
    return (
        f"shuffling, a missing seed, a dropped batch or packing can be the cause{where}. Try `--seed 0`. gaverify "
        "gives both runs the same batches if they come from a `DataLoader`"
    )


def report_of(
    request: Request,
    record: Record,
    findings: tuple[Finding, ...],
    summaries: Sequence[RunSummary],
    closing: ClosingRecord,
    timings: Mapping[str, float],
) -> Audit:
    """Returns the report of an audit: its outcome, the reason, and everything that is shown beside them.

    Args:
        request: The options of the audit.
        record: The facts that the rules read.
        findings: The findings of the rules.
        summaries: The runs.
        closing: The closing record of the accumulated run, or of the only one.
        timings: Seconds of each part.
    """
    outcome, reason = _decide(request, record, findings)
    shapes = [parameter.shape for group in closing.groups if not group.is_part for parameter in group.parameters]
    return Audit(
        script=request.target,
        outcome=outcome,
        reason=reason,
        findings=findings,
        updates=record.updates,
        calls=RecordedCalls(
            counts_of(record.calls.windows),
            timeline_of((record.calls.windows, *record.calls.rank_windows)),
            dict(closing.unseen.left_out),
        ),
        runs=tuple(summaries),
        trained=TrainedModels(closing.models.classes, closing.optimizers, sum(map(math.prod, shapes))),
        arithmetic=Arithmetic(closing.arithmetic.device, closing.arithmetic.dtype, closing.arithmetic.autocast),
        environment=Environment(closing.torch),
        method=Method.EVENTS if request.events_only else _method(record),
        events_only=request.events_only,
        calls_in_order=outcome is Outcome.INCONCLUSIVE and _calls_are_in_order(request, record),
        timings=dict(timings),
        ranks=record.together,
    )


def is_explained(record: Record) -> bool:
    """Whether a rule finds a fault in what is known so far, and no term of the loss is left for another one."""
    # A fault in one term of the loss explains nothing about another term: the search for causes has to go on.
    if unexplained_term(record):
        return False
    return any(finding.severity == "fault" for finding in findings_for(comparison_of(record)))


def is_proven(record: Record) -> bool:
    """Whether a rule proves a fault in what is known so far."""
    return any(finding.severity == "fault" and finding.proven for finding in findings_for(comparison_of(record)))


def _method(record: Record) -> Method:
    """The method that decided the updates; fitted weights only if they decided every parameter of all updates."""
    # The report names one method: as soon as one parameter needed the noise floor, the whole answer rests on it.
    methods = {row.method for update in record.updates for row in update.parameters}
    if record.float32:
        return Method.FLOAT32_RUNS
    return Method.WEIGHTS if methods == {Method.WEIGHTS} else Method.NOISE_FLOOR


def same_arguments(request: Request) -> Audit:
    """Returns the report of an audit whose two runs would have had the same arguments: nothing was run."""
    return report_without_comparison(
        request,
        "`--full` and `--accumulated` are the same, so both runs would be equal. Give the arguments for a large batch "
        'and for its micro-batches, such as --full "--batch-size 8 --accum 1" --accumulated "--batch-size 2 --accum 4"',
    )


def report_without_comparison(request: Request, why: str) -> Audit:
    """Returns the report of an audit that compared nothing."""
    return Audit(script=request.target, outcome=Outcome.INCONCLUSIVE, reason=f"nothing was compared: {why}")


def _decide(request: Request, record: Record, findings: tuple[Finding, ...]) -> tuple[Outcome, str]:
    faults = [finding for finding in findings if finding.severity == "fault"]
    differing = record.divergent
    # The gradient of one rank is only its part of the batch's, so that even faults of this process may be none.
    if _is_one_of_several(record):
        return Outcome.INCONCLUSIVE, (
            f"the script trains in {record.ranks} processes, and gaverify recorded only one of them. What the others "
            f"add to the gradient is unknown. Write `--ranks {record.ranks}` to let gaverify start all of them, or "
            "`--launcher` with your own command (`--launcher python` if the script starts them itself)"
        )
    open_ = _open(record, differing, faults)
    if open_:
        return Outcome.INCONCLUSIVE, open_
    if differing is not None:
        beyond = _describe_other_updates(record)
        return Outcome.DIVERGENT, (
            f"update {differing.number}: {_differing(differing)}{beyond}{record.left_out}{_describe_blind_spot(record)}"
        )
    # No update differs here, so a suspicion is not enough; without gradients, calls alone have to decide.
    decisive = [finding for finding in faults if finding.proven or request.events_only]
    if decisive:
        codes = ", ".join(dict.fromkeys(finding.code for finding in decisive))
        blind_spot = _describe_blind_spot(record)
        return Outcome.DIVERGENT, f"the loop is at fault ({codes}){_describe_right_passes(record)}{blind_spot}"
    if request.events_only:
        complete_count = len(record.calls.complete)
        calls = f"the calls of {count_text(complete_count, 'update')} are in the right order{_short(record)}"
        return Outcome.INCONCLUSIVE, f"{calls}; gradients were not compared (--events-only)"
    # an update that both runs skip by zero gradients agrees, but it cannot be all that was compared
    compared = [update for update in record.updates if not update.is_zero_in_both] or record.updates
    for update in compared:
        why = explain_undecided(record, update)
        if why:
            return Outcome.INCONCLUSIVE, why + _launched_alone(request, record)
    # A fault that is not proven forbids the answer EQUIVALENT, but is not enough for DIVERGENT.
    if faults:
        return Outcome.INCONCLUSIVE, (
            f"{_describe_agreement(record)}suspected, but no control run confirmed it: {_list_findings(faults)}"
        )
    if not record.updates:
        return Outcome.INCONCLUSIVE, "nothing was compared: no update was recorded in both runs"
    # A later update may differ where the first agree: a script that ended early is told how little was compared.
    update_count, wanted = len(record.updates), request.updates
    fewer = f"; only {update_count} of {wanted} updates were recorded in both runs" if update_count < wanted else ""
    remarks = (
        (record.left_out or fewer)
        + _describe_blind_spot(record)
        + _in_both_runs(record)
        + record.epochs
        + _launched_alone(request, record)
    )
    return Outcome.EQUIVALENT, _describe_agreement(record).rstrip("; ") + remarks


def _is_one_of_several(record: Record) -> bool:
    """Whether the script trains in several processes of which one was seen."""
    return record.ranks > 1 and record.together is None


def _calls_are_in_order(request: Request, record: Record) -> bool:
    """Whether calls alone were checked and enough of them were seen; asked where no rule finds a fault in them."""
    return request.events_only and bool(record.calls.complete) and not _is_one_of_several(record)


def _list_findings(findings: Sequence[Finding]) -> str:
    return ", ".join(dict.fromkeys(f"{finding.code} {finding.name}" for finding in findings))


def _open(record: Record, differing: UpdateComparison | None, faults: Sequence[Finding]) -> str:
    """Why a difference for which no rule found a fault stays undecided; empty if it decides."""
    # A rule has found the cause: other samples or draws are then no better explanation of the difference.
    if differing is None or faults:
        return ""
    # A communication hook that compresses gradients changes them on purpose, by more than rounding.
    if record.together is not None and record.together.is_altered:
        return (
            f"update {differing.number} differs, but {record.together.reduction.altered:.2g} of the gradient is not "
            "the sum of the ranks' backward passes. A gradient hook changes it, such as one that compresses "
            "(`register_comm_hook`), and does so differently for each micro-batch size. Remove it for the audit"
        )
    if not differing.data.checked:
        return (
            f"update {differing.number} differs, but gaverify cannot check that both runs saw the same samples. No "
            "forward input has the same name in both runs: use the same argument names, and the samples in the same "
            "order"
        )
    if record.unaligned:
        return (
            f"update {differing.number} differs, perhaps because the runs drew different random numbers "
            f"({', '.join(record.unaligned)}); turn these random operations off for the audit"
        )
    return ""


def _describe_blind_spot(record: Record) -> str:
    """The remark on faults that do not show if both runs have ranks; empty if the full-batch run has none."""
    if record.full_ranks < 2:
        return ""
    return f"; both runs trained in {record.full_ranks} ranks, so errors between ranks cannot show"


def _launched_alone(request: Request, record: Record) -> str:
    """The remark that a launcher started no ranks; empty if it did, or there is none."""
    if not request.launcher or record.ranks > 1:
        return ""
    return "; the `--launcher` command trained in one process: no ranks were compared"


def _in_both_runs(record: Record) -> str:
    """The remarks on what agreeing ranks leave open: gradients altered in both runs, and rows that ranks share."""
    ranks, remarks = record.together, ""
    if ranks is not None and ranks.is_altered:
        remarks += (
            f"; {ranks.reduction.altered:.2g} of that gradient is not the sum of the backward passes (a compressing "
            "hook?): this error is in both runs and cannot show"
        )
    if ranks is not None and ranks.replicas.fed_alike:
        shared_rows = "ranks of tensor parallelism share their rows, which are counted once"
        remarks += f"; {shared_rows if ranks.tensor_parallel else _SAME_ROWS}"
    return remarks


def _short(record: Record) -> str:
    """The remark that calls alone do not show how a shorter window is weighted; empty if no window is shorter."""
    calls = record.calls
    short = next((window for window in calls.complete if 0 < window.backwards < calls.usual(window)), None)
    if short is None:
        return ""
    return (
        f", but update {short.number} has {short.backwards} backward passes where others have {calls.usual(short)}: "
        "only gradients can show whether its losses are divided by as many (`--tail`)"
    )


def _differing(update: UpdateComparison) -> str:
    rows = [row for row in update.parameters if row.outcome is Outcome.DIVERGENT]
    total = len(update.parameters)
    text = f"{len(rows)} of {total} parameter{'s' if total > 1 else ''} differ{'s' if len(rows) == 1 else ''}"
    difference = update.relative_difference
    ratio = f", norm ratio {update.norm_ratio:.3g}" if math.isfinite(update.norm_ratio) else ""
    # Relative to a zero gradient every difference is infinite: no number would tell the reader anything.
    if math.isinf(difference):
        return f"{text}; every gradient of the full-batch run is zero"
    if not math.isfinite(difference):
        return f"{text}; some gradients are missing or not finite in one of the runs"
    return f"{text}; relative difference of the whole gradient {difference:.1e}{ratio}"


def _describe_other_updates(record: Record) -> str:
    """How many of the updates differ, and whether they start alike; empty if only one is judged."""
    judged = [update for update in record.updates if update.judged]
    if len(judged) < 2:
        return ""
    # An unknown distance of the weights is NaN.
    alike = all(math.isfinite(update.started_apart) for update in judged)
    weights = ", each compared from the same weights" if alike else ""
    return f"; {sum(update.differs for update in judged)} of {len(judged)} updates differ{weights}"


def _describe_right_passes(record: Record) -> str:
    """The remark that gradients agree where the loop is at fault; empty if not all of them were found to agree."""
    judged = [update for update in record.updates if update.judged]
    if not judged or any(update.outcome is not Outcome.EQUIVALENT for update in judged):
        return ""
    # a factor that the step undoes: there the gradients themselves differ
    if any(update.step.takes_factor and update.window.fit is not None for update in judged):
        return f"; {_describe_agreement(record).rstrip('; ')}"
    return "; the backward passes themselves agree"


def _describe_agreement(record: Record) -> str:
    """The beginning of a sentence that says how far the gradients agree; empty if no update was judged."""
    judged = [update for update in record.updates if update.judged and update.outcome is Outcome.EQUIVALENT]
    if not judged:
        return ""
    names = f"update {judged[0].number}" if len(judged) == 1 else f"updates {judged[0].number} to {judged[-1].number}"
    rows = judged[0].parameters
    fits = [update.window.fit for update in judged if update.step.takes_factor]
    factors = [f"{fit.factor:.4g}" for fit in fits if fit is not None]
    # The gradients themselves differ in this case: "agree to rounding" would be false, only the weights agree.
    if len(factors) == len(judged):
        return (
            f"{names}: the gradient is {factors[0]} times the full batch's, but the step undoes this factor (by a "
            "division or a lower rate). The weights change equally, up to rounding; "
        )
    return f"{names}: {len(rows)} of {len(rows)} gradients agree to rounding; "
