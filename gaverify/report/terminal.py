"""A verdict as lines of text for people."""

from __future__ import annotations

from collections.abc import Sequence

from gaverify.report.layout import Layout, Line, cells, columns
from gaverify.report.table import STYLES, table_lines
from gaverify.report.wording import method, number, sentence, value
from gaverify.results import Finding, Outcome, RunInfo, Trace, TraceStep, Verdict

_LABEL = 13
"""Columns of the label in the header and of a label under a finding, indent included."""


def verdict_lines(verdict: Verdict, layout: Layout, show_all: bool = False) -> list[Line]:
    """Returns the whole report of one verdict: what was run, trace, table, findings, verdict, method."""
    blocks = [
        _header(verdict.run, layout),
        _trace(verdict.trace, layout) if verdict.trace else [],
        table_lines(verdict, layout, show_all),
        *(_finding(finding, layout) for finding in verdict.findings),
        _conclusion(verdict, layout),
    ]
    lines: list[Line] = []
    for block in filter(None, blocks):
        lines += [[], *block] if lines else block
    return lines


def _header(run: RunInfo, layout: Layout) -> list[Line]:
    count = f"{run.parameters:,} {'parameter' if run.parameters == 1 else 'parameters'}"
    trainable = "all trainable" if run.trainable == run.parameters else f"{run.trainable:,} trainable"
    rows = (
        ("model", f"{run.model}: {count}, {trainable}"),
        ("batch", _batch(run)),
        ("weights", _weights(run)),
        ("strategy", f"{run.strategy}, {run.mode} mode, seed {run.seed}"),
        ("where", f"{run.device}, {run.dtype}, autocast {run.autocast or 'off'}, torch {run.torch}"),
        ("loss", f"full batch {value(run.loss_full)}, accumulated {value(run.loss_accumulated)}"),
    )
    lines: list[Line] = [[(layout.text(f"gaverify {run.gaverify}"), "bold")]]
    for label, text in rows:
        lines += layout.wrap(text, first="  " + label, indent=_LABEL)
    return lines


def _batch(run: RunInfo) -> str:
    sizes = run.micro_batches
    if len(set(sizes)) == 1:
        return f"B = {run.batch_size} = {run.steps} × {sizes[0]} (micro-batches × samples)"
    parts = [str(size) for size in sizes]
    if len(parts) > 12:  # the first and the last ones show where it is ragged
        parts = [*parts[:4], "…", *parts[-4:]]
    return f"B = {run.batch_size} = {'+'.join(parts) or '?'} ({run.steps} micro-batches)"


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
    table = columns([[layout.text(cell) for cell in row] for row in (head, *body)], right=(1, 2))
    lines: list[Line] = [[("  " + "  ".join(row), "" if at else "bold")] for at, row in enumerate(table)]
    return lines + _step(trace.step, layout)


def _step(step: TraceStep, layout: Layout) -> list[Line]:
    weights = "weight" if step.scalar else "‖weights‖"
    text = (
        f"{step.optimizer}, lr {step.lr:g}: {weights} {value(step.before)} → full batch {value(step.after_full)}, "
        f"accumulated {value(step.after_accumulated)} (difference {number(step.weights_difference)})"
    )
    return layout.wrap(text, first="  step", indent=_LABEL)


def _finding(finding: Finding, layout: Layout) -> list[Line]:
    head = f"{finding.code} {finding.name}"
    if finding.severity == "note":
        head += " (note)"
    elif not finding.proven:
        head += " (suspected)"
    place, rows = finding.location, []
    text = finding.summary
    if place is not None and str(place):
        if place.module is not None and f"`{place.module or '(root)'}`" in finding.summary:
            if place.file is not None:
                rows.append(("where", f"{place.file}:{place.line}" if place.line is not None else place.file))
        elif str(place) not in finding.summary:
            text = f"{place}: {text}" if text else str(place)
    lines = layout.wrap(f"{head}: {text}", indent=4)
    first = STYLES[Outcome.DIVERGENT] if finding.severity == "fault" else "bold"
    lines[0] = [(lines[0][1][0], first)]  # the heading starts at the margin, what follows hangs
    rows += [(evidence.label, evidence.statement) for evidence in finding.evidence]
    rows += [("remedy", finding.remedy)] if finding.remedy else []
    rows += [("see", f"gaverify explain {finding.code}")]
    for label, statement in rows:
        lines += layout.wrap(statement, first=f"    {layout.shorten(label, 10)}", indent=4 + 11)
    return lines


def _conclusion(verdict: Verdict, layout: Layout) -> list[Line]:
    word = verdict.outcome.name
    lines = layout.wrap(sentence(verdict), first=word, indent=len(word) + 2, style="bold")
    lines[0][0] = (lines[0][0][0], STYLES[verdict.outcome])
    return lines + layout.wrap(method(verdict), indent=len(word) + 2)


def summary_lines(verdicts: Sequence[Verdict], errors: Sequence[tuple[str, str]], layout: Layout) -> list[Line]:
    """Returns one line per run and a count of the outcomes, for calls that ran several specs."""
    lines: list[Line] = [[("summary", "bold")]]
    names = columns([[layout.shorten(verdict.run.model, 28)] for verdict in verdicts])
    for verdict, (name,) in zip(verdicts, names, strict=True):
        lead = f"  {verdict.outcome.value:<14}"
        body = layout.wrap(sentence(verdict), indent=len(lead) + cells(name) + 2)
        body[0][:1] = [(lead, STYLES[verdict.outcome]), (name + "  ", "")]
        lines += body
    for source, message in errors:
        body = layout.wrap(f"{source}: {message}", indent=2 + 14)
        body[0][0] = (f"  {'error':<14}", "bold red")
        lines += body
    counts = [(sum(verdict.outcome is outcome for verdict in verdicts), outcome.value) for outcome in Outcome]
    counts.append((len(errors), "error" if len(errors) == 1 else "errors"))
    total = len(verdicts) + len(errors)
    text = ", ".join(f"{count} {word}" for count, word in counts if count) or "nothing was run"
    return lines + layout.wrap(f"{total} {'run' if total == 1 else 'runs'}: {text}", indent=2)
