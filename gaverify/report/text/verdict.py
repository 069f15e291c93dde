"""A verdict as lines of text for people."""

from __future__ import annotations

from gaverify.records.comparison import Reference
from gaverify.records.verdict import RunInfo, Trace, TraceStep, Verdict
from gaverify.report.text.layout import Layout, Line, table_of
from gaverify.report.text.table import table_lines
from gaverify.report.text.wording import number, ranks_line, titled, value

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
    rows = [
        ("spec", titled(verdict.source, verdict.name)),
        ("model", f"{run.model}: {count}, {trainable}"),
        ("batch", _batch(run)),
        ("weights", _weights(run)),
        ("strategy", f"{run.strategy}, {run.mode} mode, seed {run.seed}"),
        ("reference", _reference(run)),
        ("ranks", "" if verdict.ranks is None else ranks_line(verdict.ranks, run.steps)),
        ("where", f"{run.device}, {run.dtype}{_rounded(run)}, autocast {run.autocast or 'off'}, torch {run.torch}"),
        ("loss", f"full batch {value(run.loss_full)}, accumulated {value(run.loss_accumulated)}"),
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
    Reference.RECOMPUTE: "recompute: activations made again in the backward",
}


def _reference(run: RunInfo) -> str:
    """How the full batch was made to fit; nothing where it fitted."""
    if run.reference is Reference.FULL and not run.spill:
        return ""
    failed = " and ".join(run.reference_failed)
    why = f" ({failed} did not fit)" if failed else ""
    return _WAYS[run.reference] + why + (", gradients on disk" if run.spill else "")


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


def _rounded(run: RunInfo) -> str:
    """What the switches of torch let products round float32 to: part of how the run was computed."""
    return f" ({', '.join(run.rounded)})" if run.rounded else ""
