"""A verdict as lines of text for people, and what every answer ends with: findings, and the outcome's reason."""

from __future__ import annotations

from collections.abc import Sequence

from gaverify.records.audit_report import AuditReport
from gaverify.records.comparison import Outcome, Reference
from gaverify.records.findings import Finding
from gaverify.records.verdict import RunInfo, Trace, TraceStep, Verdict
from gaverify.report.text.layout import Layout, Line, table_of
from gaverify.report.text.table import STYLES, table_lines
from gaverify.report.text.wording import join_title, number, ranks_line, value


def finding_lines(finding: Finding, layout: Layout) -> list[Line]:
    """Returns a finding: heading with place and summary, then evidence, remedy and page on lines of their own."""
    head = f"{finding.code} {finding.name}"
    if kind_of(finding) != "proven":
        head += f" ({kind_of(finding)})"
    if finding.accepted:
        head += " (accepted)"
    text, where = summary_and_place(finding)
    heads = [("where", where), ("accepted", finding.accepted)]
    lines = layout.wrap(f"{head}: {text}", indent=4)
    first = STYLES[Outcome.DIVERGENT] if finding.severity == "fault" else "bold"
    lines[0] = [(lines[0][1][0], first)]  # the heading starts at the margin, what follows hangs
    for label, statement in [*heads, *rows_of(finding), ("see", f"gaverify explain {finding.code}")]:
        if not statement:
            continue
        lines += layout.wrap(statement, first=f"    {layout.shorten(label, 10)}", indent=4 + 11)
    return lines


def rows_of(finding: Finding) -> list[tuple[str, str]]:
    """Returns what was seen, what a control showed and the remedy, as (label, text)."""
    rows = [(evidence.label, evidence.statement) for evidence in finding.evidence]
    return [*rows, ("remedy", finding.remedy)] if finding.remedy else rows


def kind_of(finding: Finding) -> str:
    """Returns how sure a finding is, in a word: a note, proven or suspected."""
    return "note" if finding.severity == "note" else "proven" if finding.proven else "suspected"


def summary_and_place(finding: Finding) -> tuple[str, str]:
    """Returns a finding's summary, and file and line where they have to be shown on a line of their own.

    The summary gets the finding's place in front unless it names the place already. Where it names the module but not
    the file and line, these are the second value; else that is "".
    """
    place, text = finding.location, finding.summary
    if place is None or not str(place):
        return text, ""
    if place.module is not None and f"`{place.module or '(root)'}`" in text:
        if place.file is None:
            return text, ""
        return text, f"{place.file}:{place.line}" if place.line is not None else place.file
    if str(place) in text:
        return text, ""
    return (f"{place}: {text}" if text else str(place)), ""


def acceptance_states(answer: Verdict | AuditReport) -> list[str]:
    """Returns what the user's entries and expectation make of the outcome, a word or two each."""
    expected = answer.acceptance.expected
    states = ["accepted"] if answer.accepted else []
    if expected is not None:
        states.append("expected" if expected is answer.outcome else f"{expected.value} was expected")
    return [*states, "stale entries"] if answer.acceptance.stale else states


def acceptance_sentences(answer: Verdict | AuditReport) -> list[str]:
    """Returns what follows from the user's entries and expectation, for the end of a report; nothing without any."""
    acceptance = answer.acceptance
    sentences = ["accepted: every cause of the divergence is one that is known and wanted"] if answer.accepted else []
    if acceptance.expected is not None:
        comparison = (
            "as expected" if acceptance.expected is answer.outcome else f"{acceptance.expected.value} was expected"
        )
        sentences.append(comparison)
    sentences += [f"stale: {sentence}" for sentence in acceptance.stale]
    return [*sentences, *(f"not accepted: {sentence}" for sentence in acceptance.refused)]


_SINGULAR = ("the config", "the loss", "the model")


def guess_sentences(run: RunInfo) -> list[str]:
    """Returns what of the factory is a guess, which the outcome then is about; nothing where all is the user's own."""
    if not run.guesses:
        return []
    *most, last = run.guesses
    named = f"{', '.join(most)} and {last}" if most else last
    are = "is a guess" if last in _SINGULAR and not most else "are guesses"
    return [f"{named} {are} by `init`; put your own into {run.model.rpartition(':')[0]}"]


def outcome_lines(outcome: Outcome, sentences: Sequence[str], layout: Layout) -> list[Line]:
    """Returns the outcome in capitals with its sentences behind it, the first of them bold."""
    word = outcome.name
    first, *more = sentences
    lines = layout.wrap(first, first=word, indent=len(word) + 2, style="bold")
    lines[0][0] = (lines[0][0][0], STYLES[outcome])
    for sentence in more:
        lines += layout.wrap(sentence, indent=len(word) + 2)
    return lines


_LABEL = 13
"""Columns of a label in the header, indent included."""


def verdict_blocks(verdict: Verdict, layout: Layout, show_all: bool) -> list[list[Line]]:
    """Returns the trace and the table of a verdict."""
    trace = _trace(verdict.trace, layout) if verdict.trace else []
    return [trace, table_lines(verdict.parameters, layout, show_all)]


def verdict_facts(verdict: Verdict) -> list[tuple[str, str]]:
    """Returns what was run, as (label, text)."""
    run = verdict.run
    count = f"{run.parameters:,} {'parameter' if run.parameters == 1 else 'parameters'}"
    trainable = "all trainable" if run.trainable == run.parameters else f"{run.trainable:,} trainable"
    autocast = f"autocast {run.autocast or 'off'}"
    rows = [
        ("spec", join_title(verdict.source, verdict.name)),
        ("model", f"{run.model}: {count}, {trainable}"),
        ("batch", _batch(run)),
        ("weights", _weights(run)),
        ("strategy", f"{run.strategy}, {run.mode} mode, seed {run.seed}"),
        ("reference", _reference(run)),
        ("ranks", "" if verdict.ranks is None else ranks_line(verdict.ranks, run.steps)),
        ("where", f"{run.device}, {run.dtype}{_describe_rounding(run)}, {autocast}, torch {run.environment.torch}"),
        ("loss", f"full batch {value(run.losses.full)}, accumulated {value(run.losses.accumulated)}"),
    ]
    return [(label, text) for label, text in rows if text]


def _batch(run: RunInfo) -> str:
    sizes = run.micro_batches
    if len(set(sizes)) == 1:
        return f"B = {run.batch_size} = {run.steps} × {sizes[0]} (micro-batches × samples)"
    parts = [str(size) for size in sizes]
    if len(parts) > 12:  # the first and the last ones show where it is ragged
        parts = [*parts[:4], "…", *parts[-4:]]
    return f"B = {run.batch_size} = {'+'.join(parts) or '?'} ({run.steps} micro-batches)"


_WAYS = {
    Reference.FULL: "full: activations on the device",
    Reference.OFFLOAD: "offload: activations on the host",
}


def _reference(run: RunInfo) -> str:
    """How the full batch was made to fit; nothing where it fitted."""
    if run.reference is Reference.FULL:
        return ""
    failed = " and ".join(run.reference_failed)
    why = f" ({failed} did not fit)" if failed else ""
    return _WAYS[run.reference] + why


def _weights(run: RunInfo) -> str:
    if not run.weights:
        return run.weighting
    if len(set(run.weights)) == 1:
        return f"{run.weighting}, {run.weights[0]:.4g} each"
    parts = [f"{weight:.4g}" for weight in run.weights]
    if len(parts) > 8:
        parts = [*parts[:3], "…", *parts[-3:]]
    return f"{run.weighting}: {', '.join(parts)}"


def _trace(trace: Trace, layout: Layout) -> list[Line]:
    scalar = trace.step.scalar
    gradient = "accumulated gradient" if scalar else "accumulated ‖gradient‖"
    head = ("micro-batch", gradient, "movement", "backward : step : zero_grad")
    body = [
        (
            str(row.micro_batch),
            value(row.gradient),
            value(row.movement),
            f"{row.backward} : {row.step} : {row.zero_grad}",
        )
        for row in trace.rows
    ]
    table = table_of([[layout.text(cell) for cell in row] for row in (head, *body)], right=(1, 2))
    return table + _step(trace.step, layout)


def _step(step: TraceStep, layout: Layout) -> list[Line]:
    weights = "weight" if step.scalar else "‖weights‖"
    text = (
        f"{step.optimizer}, lr {step.lr:g}: {weights} {value(step.before)} → full batch {value(step.after_full)}, "
        f"accumulated {value(step.after_accumulated)} (difference {number(step.weights_difference)})"
    )
    return layout.wrap(text, first="  step", indent=_LABEL)


def _describe_rounding(run: RunInfo) -> str:
    """What the switches of torch let products round float32 to: part of how the run was computed."""
    return f" ({', '.join(run.rounded)})" if run.rounded else ""
