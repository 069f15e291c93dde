"""An audit as lines of text for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gaverify.audit.answer import AuditReport, WindowCount
from gaverify.audit.processes import TITLES
from gaverify.audit.records import UpdateComparison
from gaverify.report.layout import Layout, Line, columns
from gaverify.report.table import STYLES, table_lines
from gaverify.report.terminal import _finding
from gaverify.report.wording import number, percent
from gaverify.results import Outcome, RunInfo, Verdict

_LABEL = 14
_COUNTS = 12  # windows whose counts are shown; the last ones stand in for the rest
_MORE = 3
_ROLES = {"full": "full batch", "accumulated": "accumulated", "events": "run"}


def report_lines(report: AuditReport, layout: Layout, show_all: bool = False) -> list[Line]:
    """Returns the whole report: what was run, the counts, a table per update, findings, the outcome and its reason."""
    blocks = [
        _header(report, layout),
        _counts(report.counts, layout),
        *(_update(report, update, layout, show_all) for update in report.updates),
        *(_finding(finding, layout) for finding in report.findings),
        _conclusion(report, layout),
    ]
    lines: list[Line] = []
    for block in filter(None, blocks):
        lines += [[], *block] if lines else block
    return lines


def verdict_of(report: AuditReport, update: UpdateComparison | None) -> Verdict:
    """Returns one update in the form that the reports of `gaverify run` read; the whole audit's story with the first.

    An audit without a compared update is one verdict without parameters.
    """
    rows = update.parameters if update is not None else ()
    first = update is None or not report.updates or update is report.updates[0]
    decisive = update is None or update is report.decisive
    outcome = report.outcome if decisive else _shown_outcome(update)
    sizes = update.sizes if update is not None else ()
    name = report.script if update is None else f"{report.script}, update {update.number}"
    run = RunInfo(
        name, report.trainable, report.trainable, update.data.full if update else 0, sizes, (), "the script's own",
        "audit", report.device, report.dtype, 0, "train", report.torch, report.gaverify, report.autocast,
    )  # fmt: skip
    resolution = update.resolution if update is not None else math.nan
    return Verdict(outcome, rows, report.findings if decisive else (), run, report.method, resolution,
                   report.timings if first else {})  # fmt: skip


def _shown_outcome(update: UpdateComparison | None) -> Outcome:
    if update is None or not update.judged:
        return Outcome.INCONCLUSIVE
    return update.outcome


def _header(report: AuditReport, layout: Layout) -> list[Line]:
    rows = [("script", report.script)]
    last = {run.role: run for run in report.runs}  # a run that is made again to show its draws replaces the first
    for role, run in last.items():
        if role in _ROLES:
            made = f"{run.updates} update{'' if run.updates == 1 else 's'} in {run.seconds:.1f} s"
            how = f", {run.how}, so that its random draws can be seen" if run.how else ""
            rows.append((_ROLES[role], f"{run.command} ({made}{how})"))
    controls = [run for run in report.runs if run.role in ("perturbed", "frozen")]
    if controls:
        rows.append(("controls", "; ".join(f"{TITLES[run.role]} ({run.seconds:.1f} s)" for run in controls)))
    if report.runs:
        models = ", ".join(report.modules) or "no module"
        rows.append(("model", f"{models}: {report.trainable:,} trained parameters; {', '.join(report.optimizers)}"))
        autocast = f"autocast {report.autocast or 'off'}"
        rows.append(("where", f"{report.device}, {report.dtype}, {autocast}, torch {report.torch}"))
    lines: list[Line] = [[(layout.text(f"gaverify {report.gaverify} audit"), "bold")]]
    for label, text in rows:
        lines += layout.wrap(text, first="  " + label, indent=_LABEL)
    return lines


def _counts(counts: Sequence[WindowCount], layout: Layout) -> list[Line]:
    if not counts:
        return []
    shown = [*counts[:_COUNTS], *counts[max(_COUNTS, len(counts) - _MORE) :]]
    body = [[f"{count.update}" if count.complete else f"({count.update})",
             f"{count.backward} : {count.step} : {count.zero_grad}"] for count in shown]  # fmt: skip
    table = columns([["update", "backward : step : zero_grad"], *body], right=(0,))
    lines: list[Line] = [[("  " + "  ".join(row), "" if at else "bold")] for at, row in enumerate(table)]
    hidden = len(counts) - len(shown)
    if hidden > 0:
        lines.insert(1 + _COUNTS, [(f"  … {hidden} more", "dim")])
    if not counts[-1].complete:
        text = f"({counts[-1].update}) has no step: the script ended or was stopped inside it"
        lines += layout.wrap(text, indent=2, style="dim")
    return lines


def _update(report: AuditReport, update: UpdateComparison, layout: Layout, show_all: bool) -> list[Line]:
    lines = layout.wrap(", ".join(_described(update)), first=f"update {update.number}", indent=_LABEL)
    lines[0][0] = (lines[0][0][0], "bold")
    folded = not update.judged and not show_all
    if not folded:
        lines += table_lines(verdict_of(report, update), layout, show_all)
    return lines + [line for text in _after(update) for line in layout.wrap(text, first="  after it", indent=_LABEL)]


def _described(update: UpdateComparison) -> Iterable[str]:
    sizes = update.sizes
    yield f"{update.backwards} backward pass{'' if update.backwards == 1 else 'es'}"
    if sizes:
        same = len(set(sizes)) == 1
        yield f"{len(sizes)} × {sizes[0]} rows" if same else f"{' + '.join(map(str, sizes[:12]))} rows"
    if update.valid_targets and update.ignored_targets:
        yield f"valid targets {' + '.join(map(str, update.valid_targets[:12]))}"
    data = update.data
    if not data.checked:
        yield "samples could not be compared"
    elif data.same:
        yield "same samples" + (", padded differently" if data.padded else "")
    else:
        yield f"{data.differing} rows of `{data.path}` differ"
    if not update.judged:
        yield "not judged"


def _after(update: UpdateComparison) -> Iterable[str]:
    facts = []
    if math.isfinite(update.weights_difference):
        facts.append(f"weights differ by {percent(update.weights_difference)}")
    if update.learning_rates != update.learning_rates_full:
        rates, full = (", ".join(f"{rate:.4g}" for rate in part)
                       for part in (update.learning_rates, update.learning_rates_full))  # fmt: skip
        facts.append(f"learning rate {rates}, full batch {full}")
    elif update.learning_rates:
        facts.append(f"learning rate {', '.join(f'{rate:.4g}' for rate in dict.fromkeys(update.learning_rates))}")
    if update.drifted:
        more = f" and {len(update.drifted) - 3} more" if len(update.drifted) > 3 else ""
        facts.append(f"buffers differ: {', '.join(update.drifted[:3])}{more}")
    if facts:
        yield "; ".join(facts)


def _conclusion(report: AuditReport, layout: Layout) -> list[Line]:
    word = report.outcome.name
    lines = layout.wrap(report.reason, first=word, indent=len(word) + 2, style="bold")
    lines[0][0] = (lines[0][0][0], STYLES[report.outcome])
    decisive = report.decisive
    if decisive is not None and decisive.judged:
        text = "compared at every optimizer step, decided by the noise floor of the full-batch run"
        if math.isfinite(decisive.resolution):
            text += f"; smallest relative difference it could have seen: {number(decisive.resolution)}"
        lines += layout.wrap(text, indent=len(word) + 2)
    elif report.events_only:
        lines += layout.wrap("judged by the order of the script's calls", indent=len(word) + 2)
    return lines
