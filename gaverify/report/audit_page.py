"""An audit as a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from gaverify.records.audit import Clip, RowCheck, Stage, UpdateComparison
from gaverify.records.audit_report import TITLES, Audit, Moment, WindowCount
from gaverify.records.numbers import count_text
from gaverify.records.outcomes import Method, Outcome
from gaverify.report.blocks import Call, Facts, Page, Parameters, Repeated, Section, Table, Timeline
from gaverify.report.charts import weights_charts
from gaverify.report.common_blocks import blamed_modules, make_page
from gaverify.report.layout import METHODS, join_title, number, percent, ranks_line, word_resolution
from gaverify.tracebacks import display_path

_INDENT = 14
"""Columns in front of what was run: one more than `accumulated` needs."""
_COUNTS = 12  # windows whose counts are shown; the last ones stand in for the rest
_MORE = 3
_STAGES = {
    Stage.SUMMED: "as the last backward pass left it",
    Stage.USED: "as the optimizer saw it",
    Stage.UNCLIPPED: "with losses too small to be clipped",
    Stage.CHANGE: "weight change by the optimizers, both given the full batch's gradient",
}
_CONTROLS = ("perturbed", "frozen", "unclipped", "terms", "weights", "ranks", "float32", "coupling", "state", "trace")
_ROLES = {"full": "full batch", "accumulated": "accumulated", "events": "run"}


def audit_page(report: Audit) -> Page:
    """Returns the page of an audit."""
    return make_page(
        report,
        join_title(report.source, report.name or report.script),
        report.reason,
        Facts(tuple(_facts(report)), _INDENT),
        _sections(report),
        method=_method(report),
        states=["calls in order"] if report.calls_in_order else (),
        rows=[row for update in report.updates for row in update.parameters],
        file=report.source or report.script,
    )


def _sections(report: Audit) -> Iterator[Section]:
    fits = [(f"update {update.number}", update.window.fit) for update in report.updates]
    if charts := weights_charts((name, fit.used, fit.weights) for name, fit in fits if fit and fit.weights):
        yield Section("Micro-batch weights", charts)
    if report.calls.timeline:
        yield Section("Timeline of the script's calls", (Timeline(list(_timeline(report.calls.timeline))),))
    if report.calls.counts:
        yield Section("Calls of each update", (_counts(report.calls.counts),))
    causes = blamed_modules(report.findings)
    for update in report.updates:
        # where the runs had different data or weights, the update's own outcome means nothing
        outcome = update.outcome if update.judged else Outcome.INCONCLUSIVE
        summary = ", ".join(_describe_update(update))
        name = f"update {update.number}"
        parameters = Parameters(update.parameters, outcome, name, summary, causes, update.judged)
        facts = [("gradient", _stages(update)), ("clipping", _clipping(update)), ("step", _after(update))]
        rows = tuple((label, text) for label, text in facts if text)
        heading = f"{name}: {count_text(len(update.parameters), 'parameter')}"
        yield Section(heading, (parameters, Facts(rows, _INDENT)) if rows else (parameters,))


def _facts(report: Audit) -> list[tuple[str, str]]:
    """Returns the options and commands of the runs, as (label, text)."""
    rows = [("options", report.source)] if report.source else []
    rows.append(("script", report.script))
    rows += [("name", report.name)] if report.name else []
    last = {run.role: run for run in report.runs}  # a run that is made again to show its draws replaces the first
    for role, run in last.items():
        if role in _ROLES:
            updates_and_time = f"{count_text(run.updates, 'update')} in {run.seconds:.1f} s"
            how = f", {run.how}" if run.how else ""
            rows.append((_ROLES[role], f"{run.command} ({updates_and_time}{how})"))
    seconds: dict[str, float] = {}
    for run in report.runs:
        if run.role in _CONTROLS:
            # a control may take several runs, which are one entry
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
        # 0: how often a script accumulates is seen in each update, not set for the run
        rows.append(("ranks", ranks_line(report.ranks, 0)))
    if report.calls.left_out:
        parts = [f"{count} × {why}" for why, count in sorted(report.calls.left_out.items())]
        rows.append(("left out", "calls that have no values to record: " + ", ".join(parts)))
    return rows


def _counts(counts: Sequence[WindowCount]) -> Table:
    last_counts = counts[max(_COUNTS, len(counts) - _MORE) :]
    rows = [
        (
            f"{count.update}" if count.complete else f"({count.update})",
            f"{count.backward} : {count.step} : {count.zero_grad}",
        )
        for count in (*counts[:_COUNTS], *last_counts)
    ]
    notes = []
    if len(rows) < len(counts):
        notes.append((_COUNTS, f"… {len(counts) - len(rows)} more"))
    if not counts[-1].complete:
        text = f"({counts[-1].update}) has no step: the script ended or was stopped inside it"
        notes.append((len(rows), text))
    head = ("update", "backward : step : zero_grad")
    return Table((head, *rows), (0,), tuple(notes))


def _describe_update(update: UpdateComparison) -> Iterable[str]:
    sizes = update.window.sizes
    yield count_text(update.window.steps, "backward pass")
    if sizes:
        # a dozen sizes show the pattern, and more would fill the screen
        is_equal_size = len(set(sizes)) == 1
        rows = f"{len(sizes)} × {sizes[0]} rows" if is_equal_size else f"{' + '.join(map(str, sizes[:12]))} rows"
        # a forward pass may have no backward pass of its own: an evaluation, a micro-batch that is skipped
        yield rows if len(sizes) == update.window.steps else f"{count_text(len(sizes), 'forward pass')} ({rows})"
    if update.window.valid_targets and update.window.ignored_targets:
        what = "sums of class weights" if update.window.has_class_weights else "valid targets"
        yield f"{what} {' + '.join(map(str, update.window.valid_targets[:12]))}"
    data = update.data
    if not data.checked:
        yield "samples could not be compared"
    elif data.same:
        yield "same samples" + (", padded differently" if data.padded else "")
    elif data.adds_nothing:
        yield f"{data.accumulated} of {data.full} samples, the others have no gradient"
    else:
        yield f"not the full batch's samples ({_describe_other_rows(data)})"
    if not update.judged:
        yield "no verdict on its gradients"


def _describe_other_rows(data: RowCheck) -> str:
    """Says how many rows one run was fed and the other was not, and as which input of a forward pass."""
    which = "without a counterpart in the other run"
    if data.differing == abs(data.full - data.accumulated):
        which = f"only in the {'full-batch' if data.full > data.accumulated else 'accumulated'} run"
    # an input without a name is called by its position
    position = data.path.removeprefix("argument ")
    name = f"(argument {position} of `forward`)" if position != data.path else f"`{data.path}`"
    verb = "is" if data.differing == 1 else "are"
    return f"{count_text(data.differing, 'sample')} of the input {name} {verb} {which}"


def _stages(update: UpdateComparison) -> str:
    """How far the runs are apart at each stage, where there is more than one to tell apart."""
    # stages that agree say nothing more than the table of parameters
    if len({stage.outcome for stage in update.stages}) < 2 and Stage.SUMMED not in {s.stage for s in update.stages}:
        return ""
    parts = []
    for stage in update.stages:
        if stage.stage is Stage.CHANGE and stage.outcome is Outcome.EQUIVALENT:
            parts.append(f"{_STAGES[stage.stage]}: the same up to rounding")
            continue
        # relative to a gradient of zero there is no percentage
        far = f"relative difference {number(stage.relative_difference)}"
        text = (
            f"{_STAGES[stage.stage]}: {'zero in the full-batch run' if math.isinf(stage.relative_difference) else far}"
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
    # a clip by value measures no norm
    sizes = [
        f"{label} {value:.4g}" for label, value in (("norm", clip.norm), ("limit", clip.limit)) if math.isfinite(value)
    ]
    does = "active" if clip.active else "inactive"
    if clip.after_step:
        does = "called after `step()`: it does not change this update"
    return f"{clip.call} {does}" + (f" ({', '.join(sizes)})" if sizes else "")


def _after(update: UpdateComparison) -> str:
    facts = []
    if math.isfinite(update.step.weights_difference):
        facts.append(f"weights differ afterwards by {percent(update.step.weights_difference)}")
    # parameter groups mostly share one rate: each is named once
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
        facts.append(f"buffers differ afterwards: {', '.join(update.step.drifted[:3])}{more}")
    return "; ".join(facts)


def _method(report: Audit) -> str:
    """How the audit was decided and what it could have seen; empty where nothing was judged."""
    decisive = report.decisive
    if decisive is not None and decisive.judged:
        # every other method of an audit rests on the run with moved weights
        how = "by the rounding noise of the full-batch run"
        how = METHODS[report.method] if report.method in (Method.WEIGHTS, Method.FLOAT32_RUNS) else how
        text = f"compared at every optimizer step, decided {how}"
        if math.isfinite(decisive.resolution) and report.outcome is not Outcome.DIVERGENT:
            text += f"; {word_resolution(decisive.resolution)}"
        return text
    return "judged by the order of the script's calls" if report.events_only else ""


def _timeline(moments: Sequence[Moment]) -> Iterator[tuple[str, list[Repeated]]]:
    """Yields (updates and rank, their calls in order), calls that repeat once with their count.

    Updates that follow one another with the same calls are one entry.
    """
    several = len({moment.rank for moment in moments}) > 1
    in_order = sorted(moments, key=lambda moment: (moment.update, moment.rank))  # stable: calls keep their order
    entries: list[tuple[int, int, int, list[Repeated]]] = []  # rank, first and last update, calls
    for (update, rank), group in groupby(in_order, key=lambda moment: (moment.update, moment.rank)):
        calls = collapse_repeats([_call(moment) for moment in group])
        # the latest entry of this rank: with several ranks those of the others stand between
        place = next((at for at in reversed(range(len(entries))) if entries[at][0] == rank), None)
        if place is not None and entries[place][3] == calls and entries[place][2] == update - 1:
            entries[place] = (rank, entries[place][1], update, calls)
        else:
            entries.append((rank, update, update, calls))
    for rank, first, last, calls in entries:
        updates = f"update {first}" if first == last else f"updates {first} to {last}"
        yield f"{updates}, rank {rank}" if several else updates, calls


def _call(moment: Moment) -> Call:
    file = display_path(moment.file) if moment.file else ""
    return moment.kind, f"{file}:{moment.line}" if file and moment.line else file


_LONGEST_REPEAT = 12  # calls of one micro-batch that are recognised as a repeating group


def collapse_repeats(calls: Sequence[Call]) -> list[Repeated]:
    """Returns the calls with each group that repeats written once, with how often it follows itself."""
    collapsed: list[Repeated] = []
    at = 0
    while at < len(calls):
        best = (1, 1)  # length of the group, how often
        for length in range(1, min(_LONGEST_REPEAT, (len(calls) - at) // 2) + 1):
            group = calls[at : at + length]
            times = 1
            while calls[at + times * length : at + (times + 1) * length] == group:
                times += 1
            # the group that covers most calls; of equals the shortest
            if times > 1 and times * length > best[0] * best[1]:
                best = (length, times)
        length, times = best
        collapsed.append((tuple(calls[at : at + length]), times))
        at += length * times
    return collapsed
