"""Decides the outcome of an audit from its record and findings, and says why; if it stays open, what to do about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from gaverify.amounts import count_text
from gaverify.audit.request import Request
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.audit_report import (
    Arithmetic,
    AuditReport,
    RecordedCalls,
    RunSummary,
    TrainedModels,
    counts_of,
    timeline_of,
)
from gaverify.records.comparison import Method, Outcome, hidden_share
from gaverify.records.environment import Environment
from gaverify.records.events import ClosingRecord, FileLoaded, Forward
from gaverify.records.facts import facts_of_loop
from gaverify.records.findings import Finding
from gaverify.records.stages import Stage
from gaverify.rules import findings_for
from gaverify.rules.scale import unexplained_term
from gaverify.rules.skipping import is_skipping
from gaverify.rules.wording import phrase


def explain_undecided(record: Record, update: UpdateComparison) -> str:
    """Returns why an update leaves the question open; empty where it does not."""
    before = update.number - 1
    # Both runs cut the batch alike, so even a faulty loop would agree: nothing was compared.
    if not before and record.same_pieces:
        return phrase("outcome.same-pieces")
    why = _why(record, update)
    earlier = phrase("outcome.earlier", before=before) if before else ""
    return f"{earlier}update {update.number}: {why}" if why else ""


def _why(record: Record, update: UpdateComparison) -> str:
    # Asked first: a run that does not repeat itself makes all comparisons below meaningless.
    if update.unrepeatable:
        return phrase("outcome.unrepeatable", update=update, advice=_start_advice(record))
    if not update.data.is_comparable:
        return _other_data(record, update)
    # Weights that differ before the update make its gradients differ whatever the loop does.
    if not update.judged:
        return phrase("outcome.started-apart", update=update, advice=_advice(record, update))
    if update.decided is Stage.CHANGE and update.outcome is Outcome.INCONCLUSIVE:
        return phrase("outcome.change-alone")
    if update.unclear:
        return phrase("outcome.unclear")
    if update.outcome is Outcome.INCONCLUSIVE:
        reason = next((row.reason for row in update.parameters if row.reason), "")
        count = sum(row.outcome is Outcome.INCONCLUSIVE for row in update.parameters)
        noun = phrase("outcome.undecided", count=count, total=len(update.parameters))
        # Every parameter agrees, but the noise is so large, or the gradient so small, that a fault would agree as well.
        if not count:
            hidden = hidden_share(update.parameters)
            noun = phrase("outcome.hidden" if 0 < hidden < math.inf else "outcome.zero", hidden=hidden)
        return noun + (f": {reason}" if reason else "")
    return ""


def _advice(record: Record, update: UpdateComparison) -> str:
    before = record.update_of(update.number - 1)
    if before is None:
        return _start_advice(record)
    # Other rates make other steps of the same gradient: the advice can then name the scheduler.
    if before.step.learning_rates != before.step.learning_rates_full:
        rates = ", ".join(f"{rate:.4g}" for rate in before.step.learning_rates)
        full = ", ".join(f"{rate:.4g}" for rate in before.step.learning_rates_full)
        return phrase("outcome.other-rates", number=before.number, full=full, rates=rates)
    return phrase("outcome.other-steps", number=before.number)


def _start_advice(record: Record) -> str:
    """The advice for initial weights that differ: one run resumed from a checkpoint, or a seed is missing."""
    loads = [
        {(event.path, event.place) for window in windows for event in window.of(FileLoaded)}
        for windows in (record.full_windows, record.windows)
    ]
    alone = sorted(
        (path, place, run)
        for run, ours, theirs in (("full-batch", loads[0], loads[1]), ("accumulated", loads[1], loads[0]))
        # A file that both runs read makes no difference: only one that a single run read explains other weights.
        for path, place in ours - theirs
    )
    if alone:
        path, (file, line), run = alone[0]
        where = f" ({file}:{line})" if file else ""
        return phrase("outcome.resumed", run=run, path=path, where=where)
    return phrase("outcome.unseeded")


def _other_data(record: Record, update: UpdateComparison) -> str:
    data = update.data
    if data.full != data.accumulated:
        rows, advice = phrase("outcome.other-rows", data=data), phrase("outcome.other-batch")
    elif record.unaligned:
        drawn = "; ".join(f"{name}: {why}" for name, why in record.unaligned.items())
        rows, advice = f"{data.full} rows in both", phrase("outcome.drawn", drawn=drawn)
    else:
        rows, advice = f"{data.full} rows in both", phrase("outcome.shuffled", fed=_fed_at(record, update))
    # From here on, more special advice replaces the general one: the last that applies is shown.
    if is_skipping(record, update):
        advice = phrase("outcome.skipping")
    ranks = record.together
    # A sampler that fills up the last batch repeats less than one row per rank.
    if ranks is not None and 0 < data.accumulated - data.full < record.ranks:
        advice = phrase("outcome.repeated")
    if ranks is not None and ranks.replicas.fed_alike:
        advice = phrase("outcome.shared-rows" if ranks.tensor_parallel else "outcome.same-rows")
    padded = " (after padding was taken off)" if data.padded else ""
    what, differ = ("row", "differs") if data.differing == 1 else ("rows", "differ")
    values = {"what": what, "differ": differ, "padded": padded, "rows": rows, "advice": advice}
    return phrase("outcome.other-data", data=data, **values)


def _fed_at(record: Record, update: UpdateComparison) -> str:
    """The advice for shuffled samples, with the line of the forward that is given them."""
    window = record.window_of(update.number)
    forwards = window.of(Forward) if window is not None else ()
    file, line = forwards[0].place if forwards else (None, None)
    where = f" in what the forward at {Path(file).name}:{line} is given" if file else ""
    return phrase("outcome.fed", where=where)


def report_of(
    request: Request,
    record: Record,
    findings: tuple[Finding, ...],
    summaries: Sequence[RunSummary],
    closing: ClosingRecord,
    timings: Mapping[str, float],
) -> AuditReport:
    """Returns the report of an audit: its outcome, the reason, and everything that is shown beside them.

    Args:
        request: What was asked for.
        record: What the rules read.
        findings: What they found.
        summaries: The runs.
        closing: The closing record of the accumulated run, or of the only one.
        timings: Seconds of each part.
    """
    outcome, reason = _decide(request, record, findings)
    shapes = [parameter.shape for group in closing.groups if not group.is_part for parameter in group.parameters]
    return AuditReport(
        script=request.target,
        outcome=outcome,
        reason=reason,
        findings=findings,
        updates=record.updates,
        calls=RecordedCalls(
            counts_of(record.windows),
            timeline_of((record.windows, *record.rank_windows)),
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
    return any(finding.severity == "fault" for finding in findings_for(facts_of_loop(record)))


def is_proven(record: Record) -> bool:
    """Whether a rule proves a fault in what is known so far."""
    return any(finding.severity == "fault" and finding.proven for finding in findings_for(facts_of_loop(record)))


def _method(record: Record) -> Method:
    """The method that decided the updates; fitted weights only if they decided every parameter of all updates."""
    # The report names one method: as soon as one parameter needed the noise floor, the whole answer rests on it.
    methods = {row.method for update in record.updates for row in update.parameters}
    if record.float32:
        return Method.FLOAT32_RUNS
    return Method.WEIGHTS if methods == {Method.WEIGHTS} else Method.NOISE_FLOOR


def same_arguments(request: Request) -> AuditReport:
    """Returns the report of an audit whose two runs would have had the same arguments: nothing was run."""
    arguments = "the same arguments for `--full` and `--accumulated`"
    if not request.full:
        arguments = "no `--full` and `--accumulated`"
    return AuditReport(
        script=request.target,
        outcome=Outcome.INCONCLUSIVE,
        reason=phrase("outcome.same-arguments", told=arguments),
    )


def _decide(request: Request, record: Record, findings: tuple[Finding, ...]) -> tuple[Outcome, str]:
    faults = [finding for finding in findings if finding.severity == "fault"]
    differing = record.divergent
    # The gradient of one rank is only its part of the batch's, so that even faults of this process may be none.
    if _is_one_of_several(record):
        return Outcome.INCONCLUSIVE, phrase("outcome.one-of-several", record=record)
    open_ = _open(record, differing, faults)
    if open_:
        return Outcome.INCONCLUSIVE, open_
    if differing is not None:
        return Outcome.DIVERGENT, f"update {differing.number}: {_differing(differing)}{_describe_blind_spot(record)}"
    # No update differs here, so a suspicion is not enough; without gradients, calls alone have to decide.
    decisive = [finding for finding in faults if finding.proven or request.events_only]
    if decisive:
        values = {
            "compared": _describe_agreement(record),
            "named": _list_findings(decisive),
            "hidden": _describe_blind_spot(record),
        }
        return Outcome.DIVERGENT, phrase("outcome.at-fault", **values)
    if request.events_only:
        complete_count = len(record.complete)
        calls = f"the calls of {count_text(complete_count, 'update')} are in order{_short(record)}"
        return Outcome.INCONCLUSIVE, phrase("outcome.events-only", calls=calls)
    # an update that both runs skip by zero gradients agrees, but it cannot be all that was compared
    compared = [update for update in record.updates if not update.is_zero_in_both] or record.updates
    for update in compared:
        why = explain_undecided(record, update)
        if why:
            return Outcome.INCONCLUSIVE, why + _launched_alone(request, record)
    # A fault that is not proven forbids the answer EQUIVALENT, but is not enough for DIVERGENT.
    if faults:
        return Outcome.INCONCLUSIVE, phrase(
            "outcome.suspected", compared=_describe_agreement(record), named=_list_findings(faults)
        )
    if not record.updates:
        return Outcome.INCONCLUSIVE, phrase("outcome.none-in-common")
    # A later update may differ where the first agree: a script that ended early is told how little was compared.
    update_count, wanted = len(record.updates), request.updates
    fewer = phrase("outcome.fewer", made=update_count, wanted=wanted) if update_count < wanted else ""
    remarks = (
        fewer + _describe_blind_spot(record) + _in_both_runs(record) + record.epochs + _launched_alone(request, record)
    )
    return Outcome.EQUIVALENT, _describe_agreement(record).rstrip("; ") + remarks


def _is_one_of_several(record: Record) -> bool:
    """Whether the script trains in several processes of which one was seen."""
    return record.ranks > 1 and record.together is None


def _calls_are_in_order(request: Request, record: Record) -> bool:
    """Whether calls alone were checked and enough of them were seen; asked where no rule finds a fault in them."""
    return request.events_only and bool(record.complete) and not _is_one_of_several(record)


def _list_findings(findings: Sequence[Finding]) -> str:
    return ", ".join(dict.fromkeys(f"{finding.code} {finding.name}" for finding in findings))


def _open(record: Record, differing: UpdateComparison | None, faults: Sequence[Finding]) -> str:
    """Why a difference for which no rule found a fault stays undecided; empty if it decides."""
    # A rule has found the cause: other samples or draws are then no better explanation of the difference.
    if differing is None or faults:
        return ""
    # A communication hook that compresses gradients changes them on purpose, by more than rounding.
    if record.together is not None and record.together.is_altered:
        return phrase("outcome.altered", number=differing.number, altered=record.together.reduction.altered)
    if not differing.data.checked:
        return phrase("outcome.unchecked", number=differing.number)
    if record.unaligned:
        return phrase("outcome.unaligned", number=differing.number, draws=", ".join(record.unaligned))
    return ""


def _describe_blind_spot(record: Record) -> str:
    """The remark on faults that do not show if both runs have ranks; empty if the full-batch run has none."""
    return phrase("outcome.ranks-in-both", record=record) if record.full_ranks > 1 else ""


def _launched_alone(request: Request, record: Record) -> str:
    """The remark that a launcher started no ranks; empty if it did, or there is none."""
    return phrase("outcome.launched-alone") if request.launcher and record.ranks < 2 else ""


def _in_both_runs(record: Record) -> str:
    """The remarks on what agreeing ranks leave open: gradients altered in both runs, and rows that ranks share."""
    ranks, remarks = record.together, ""
    if ranks is not None and ranks.is_altered:
        remarks += phrase("outcome.altered-in-both", altered=ranks.reduction.altered)
    if ranks is not None and ranks.replicas.fed_alike:
        remarks += phrase("outcome.shared-rows-count") if ranks.tensor_parallel else f"; {phrase('outcome.same-rows')}"
    return remarks


def _short(record: Record) -> str:
    """The remark that calls alone do not show how a shorter window is weighted; empty if no window is shorter."""
    short = next((window for window in record.complete if 0 < window.backwards < record.usual(window)), None)
    if short is None:
        return ""
    return phrase("outcome.short", window=short, usual=record.usual(short))


def _differing(update: UpdateComparison) -> str:
    rows = [row for row in update.parameters if row.outcome is Outcome.DIVERGENT]
    total = len(update.parameters)
    text = f"{len(rows)} of {total} parameter{'s' if total > 1 else ''} differ{'s' if len(rows) == 1 else ''}"
    difference, of = update.relative_difference, "gradient"
    if update.decided is Stage.CHANGE:
        text, of = f"the changes of the weights: {text}", "change"
    ratio = f", norm ratio {update.norm_ratio:.3g}" if math.isfinite(update.norm_ratio) else ""
    # Relative to a zero gradient every difference is infinite: no number would tell the reader anything.
    if math.isinf(difference):
        return f"{text}; the full-batch run has no {of} at all: every one is zero"
    return (
        f"{text}; all together by {difference:.2g} of the full batch's {of}" + ratio
        if math.isfinite(difference)
        else f"{text}; not every gradient is finite and there on both sides"
    )


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
            f"{names}: the gradient is {factors[0]} times the full batch's and the step takes the factor out again "
            "(it divides, or its rate is lower): the weights change alike, to rounding; "
        )
    return f"{names}: {len(rows)} of {len(rows)} gradients agree to rounding; "
