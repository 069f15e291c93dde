"""An audit as lines of text for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gaverify.amounts import count_text
from gaverify.records.audit import UpdateComparison
from gaverify.records.audit_report import TITLES, AuditReport, WindowCount
from gaverify.records.comparison import Method
from gaverify.records.stages import Clip, Stage
from gaverify.report.text.layout import Layout, Line, table_of
from gaverify.report.text.table import table_lines
from gaverify.report.text.wording import METHODS, number, percent, ranks_line

_LABEL = 14
_COUNTS = 12  # windows whose counts are shown; the last ones stand in for the rest
_MORE = 3
_STAGES = {
    Stage.SUMMED: "as the last backward pass left it",
    Stage.USED: "as the optimizer saw it",
    Stage.UNCLIPPED: "with losses too small to be clipped",
    Stage.CHANGE: "what the optimizer makes of the same gradient",
}
_CONTROLS = ("perturbed", "frozen", "unclipped", "terms", "weights", "ranks", "float32", "coupling", "state")
_ROLES = {"full": "full batch", "accumulated": "accumulated", "events": "run"}


def audit_blocks(report: AuditReport, layout: Layout, show_all: bool) -> list[list[Line]]:
    """Returns the counts and a table per update."""
    return [_counts(report.calls.counts, layout), *(_update(update, layout, show_all) for update in report.updates)]


def audit_facts(report: AuditReport) -> list[tuple[str, str]]:
    """Returns what was run, as (label, text)."""
    rows = [("options", report.source)] if report.source else []
    rows.append(("script", report.script))
    rows += [("name", report.name)] if report.name else []
    last = {run.role: run for run in report.runs}  # a run that is made again to show its draws replaces the first
    for role, run in last.items():
        if role in _ROLES:
            updates_and_time = f"{count_text(run.updates, 'update')} in {run.seconds:.1f} s"
            how = f", {run.how}, so that what it does can be seen" if run.how else ""
            rows.append((_ROLES[role], f"{run.command} ({updates_and_time}{how})"))
    seconds: dict[str, float] = {}
    for run in report.runs:
        if run.role in _CONTROLS:
            seconds[run.role] = seconds.get(run.role, 0.0) + run.seconds
    if seconds:
        rows.append(("controls", "; ".join(f"{TITLES[role]} ({spent:.1f} s)" for role, spent in seconds.items())))
    if report.runs:
        trained, where = report.trained, report.arithmetic
        models = ", ".join(trained.modules) or "no module"
        rows.append(("model", f"{models}: {trained.trainable:,} trained parameters; {', '.join(trained.optimizers)}"))
        autocast = f"autocast {where.autocast or 'off'}"
        rows.append(("where", f"{where.device}, {where.dtype}, {autocast}, torch {report.environment.torch}"))
    if report.ranks is not None:
        rows.append(("ranks", ranks_line(report.ranks, 0)))
    if report.calls.left_out:
        parts = [f"{count} × {why}" for why, count in sorted(report.calls.left_out.items())]
        rows.append(("left out", "calls that have no values to record: " + ", ".join(parts)))
    return rows


def _counts(counts: Sequence[WindowCount], layout: Layout) -> list[Line]:
    if not counts:
        return []
    listed_counts = [*counts[:_COUNTS], *counts[max(_COUNTS, len(counts) - _MORE) :]]
    body = [
        [
            f"{count.update}" if count.complete else f"({count.update})",
            f"{count.backward} : {count.step} : {count.zero_grad}",
        ]
        for count in listed_counts
    ]
    lines = table_of([["update", "backward : step : zero_grad"], *body], right=(0,))
    hidden = len(counts) - len(listed_counts)
    if hidden > 0:
        lines.insert(1 + _COUNTS, [(f"  … {hidden} more", "dim")])
    if not counts[-1].complete:
        text = f"({counts[-1].update}) has no step: the script ended or was stopped inside it"
        lines += layout.wrap(text, indent=2, style="dim")
    return lines


def _update(update: UpdateComparison, layout: Layout, show_all: bool) -> list[Line]:
    lines = layout.wrap(", ".join(_describe_update(update)), first=f"update {update.number}", indent=_LABEL)
    lines[0][0] = (lines[0][0][0], "bold")
    folded = not update.judged and not show_all
    if not folded:
        lines += table_lines(update.parameters, layout, show_all)
    facts = [("gradient", _stages(update)), ("clipping", _clipping(update)), ("after it", _after(update))]
    return lines + [
        line for label, text in facts if text for line in layout.wrap(text, first=f"  {label}", indent=_LABEL)
    ]


def _describe_update(update: UpdateComparison) -> Iterable[str]:
    sizes = update.window.sizes
    yield count_text(update.window.steps, "backward pass")
    if sizes:
        is_equal_size = len(set(sizes)) == 1
        yield f"{len(sizes)} × {sizes[0]} rows" if is_equal_size else f"{' + '.join(map(str, sizes[:12]))} rows"
    if update.window.valid_targets and update.window.ignored_targets:
        yield f"valid targets {' + '.join(map(str, update.window.valid_targets[:12]))}"
    data = update.data
    if not data.checked:
        yield "samples could not be compared"
    elif update.missed is not None:
        yield f"{update.missed.accumulated} of {update.missed.full} samples"
    elif data.same:
        yield "same samples" + (", padded differently" if data.padded else "")
    elif data.adds_nothing:
        yield f"{data.accumulated} of {data.full} samples, the others have no gradient"
    else:
        yield f"{data.differing} rows of `{data.path}` differ"
    if not update.judged:
        yield "not judged"


def _stages(update: UpdateComparison) -> str:
    """How far the runs are apart at each stage, where there is more than one to tell apart."""
    if len({stage.outcome for stage in update.stages}) < 2 and Stage.SUMMED not in {s.stage for s in update.stages}:
        return ""
    parts = []
    for stage in update.stages:
        far = f"{percent(stage.relative_difference)} apart"
        text = (
            f"{_STAGES[stage.stage]} {'zero in the full-batch run' if math.isinf(stage.relative_difference) else far}"
        )
        parts.append(text + (f" (norm ratio {stage.norm_ratio:.4g})" if math.isfinite(stage.norm_ratio) else ""))
    return "; ".join(parts)


def _clipping(update: UpdateComparison) -> str:
    """Which clip was active in which run, with its norm."""
    if not update.step.clips and not update.step.clips_full:
        return ""
    sides = (("full batch", update.step.clips_full), ("accumulated", update.step.clips))
    return "; ".join(f"{name}: {', '.join(map(_clip, clips)) or 'none'}" for name, clips in sides)


def _clip(clip: Clip) -> str:
    sizes = [
        f"{label} {value:.4g}" for label, value in (("norm", clip.norm), ("limit", clip.limit)) if math.isfinite(value)
    ]
    return f"{clip.call} {'active' if clip.active else 'inactive'}" + (f" ({', '.join(sizes)})" if sizes else "")


def _after(update: UpdateComparison) -> str:
    facts = []
    if math.isfinite(update.step.weights_difference):
        facts.append(f"weights differ by {percent(update.step.weights_difference)}")
    rates, full = (
        ", ".join(f"{rate:.4g}" for rate in dict.fromkeys(side))
        for side in (update.step.learning_rates, update.step.learning_rates_full)
    )
    if any(setting.name == "lr" for setting in update.step.settings) and rates != full:
        facts.append(f"learning rate {rates}, full batch {full}")
    elif rates:
        facts.append(f"learning rate {rates}")
    if update.step.drifted:
        more = f" and {len(update.step.drifted) - 3} more" if len(update.step.drifted) > 3 else ""
        facts.append(f"buffers differ: {', '.join(update.step.drifted[:3])}{more}")
    return "; ".join(facts)


def audit_method(report: AuditReport) -> str:
    """Returns how the audit was decided and what it could have seen; empty where nothing was judged."""
    decisive = report.decisive
    if decisive is not None and decisive.judged:
        how = "by the noise floor of the full-batch run"
        how = METHODS[report.method] if report.method in (Method.WEIGHTS, Method.FLOAT32_RUNS) else how
        text = f"compared at every optimizer step, decided {how}"
        if math.isfinite(decisive.resolution):
            text += f"; smallest relative difference it could have seen: {number(decisive.resolution)}"
        return text
    return "judged by the order of the script's calls" if report.events_only else ""
