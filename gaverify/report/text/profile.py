"""A profile as lines of text for people: what was run, the table, bars, lines through the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gaverify.amounts import bytes_text, count_text, seconds_text
from gaverify.records.comparison import Outcome
from gaverify.records.profile import Line as Fit
from gaverify.records.profile import (
    Memory,
    Profile,
    Row,
    activation_line,
    peak_line,
)
from gaverify.report.text.layout import Layout, Line, cells, columns, pad
from gaverify.report.text.table import STYLES
from gaverify.report.text.wording import PROFILE, join_title, percent, profile_cells

_LABEL = 13


def profile_blocks(profile: Profile, layout: Layout) -> list[list[Line]]:
    """Returns the table of the rows, their bars and the straight lines through them."""
    bars = (_bars(block, profile.rows, layout) for block in _BLOCKS)
    return [_table(profile.rows, layout), *bars, _fitted_lines(profile, layout)]


def profile_facts(profile: Profile) -> list[tuple[str, str]]:
    """Returns what was profiled and where, as (label, text); nothing where no row got so far."""
    setting = profile.setting
    if setting is None:
        return []
    trainable = "all" if setting.trainable == setting.parameters else f"{setting.trainable:,}"
    memory = f" with {bytes_text(setting.device_memory)}" if setting.device_memory else ""
    threads = f", {count_text(setting.threads, 'thread')}" if setting.device == "cpu" else ""
    step = f"step of {setting.optimizer}" if setting.optimizer else "no optimizer step (`--optimizer` adds one)"
    rows = [
        ("spec", join_title(profile.source, profile.name)),
        ("model", f"{setting.model}: {count_text(setting.parameters, 'parameter')}, {trainable} trainable"),
        ("batch", f"B = {setting.batch_size}, in K micro-batches of at most n samples"),
        ("update", f"forward and backward of every micro-batch, {step}; {setting.mode} mode, seed {setting.seed}"),
        (
            "where",
            f"{setting.device} ({setting.device_name}{memory}{threads}), {setting.dtype}, "
            f"autocast {setting.autocast or 'off'}, torch {setting.torch}",
        ),
    ]
    return [(label, text) for label, text in rows if text]


def _table(rows: Sequence[Row], layout: Layout) -> list[Line]:
    body = [[layout.text(cell) for cell in cells_] for cells_ in (PROFILE, *map(profile_cells, rows))]
    table = columns(body, right=(1, 2, 3, 4, 6))
    lines: list[Line] = []
    for at, row in enumerate(table):
        style = "bold" if at == 0 else _style(rows[at - 1])
        lines.append(
            [
                ("  " + "  ".join(row[:5]) + "  ", "bold" if at == 0 else ""),
                (row[5], style),
                ("  " + row[6], "bold" if at == 0 else ""),
            ]
        )
        if at and rows[at - 1].message:
            lines += layout.wrap(rows[at - 1].message, indent=6, style="dim")
    return lines


def _style(row: Row) -> str:
    if row.status in ("out-of-memory", "failed"):
        return STYLES[Outcome.DIVERGENT]
    return "" if row.outcome is None else STYLES[row.outcome]


@dataclass(frozen=True)
class _Block:
    """One set of bars: what is drawn, and what is written behind each."""

    title: Callable[[Sequence[Row]], str]
    value: Callable[[Row], float | None]
    text: Callable[[Row], str]


def _bars(block: _Block, rows: Sequence[Row], layout: Layout) -> list[Line]:
    row_values = [(row, value) for row in rows if (value := block.value(row)) is not None]
    if not row_values:
        return []
    names = columns([[layout.text(cell) for cell in profile_cells(row)[:2]] for row, _ in row_values], right=(1,))
    texts = columns([[layout.text(cell) for cell in block.text(row).split("|")] for row, _ in row_values], right=(0, 1))
    heads, tails = ["  " + "  ".join(name) + "  " for name in names], ["  " + "  ".join(text) for text in texts]
    room = max(layout.width - cells(heads[0]) - max(map(cells, tails)), 8)
    largest = max(value for _, value in row_values)
    lines: list[Line] = [*layout.wrap(block.title([row for row, _ in row_values]), indent=2, style="bold")]
    for (_, value), head, tail in zip(row_values, heads, tails, strict=True):
        length = round(room * value / largest) if largest > 0 else 0
        bar = ("#" if layout.ascii_only else "█") * max(length, 1 if value > 0 else 0)
        lines.append([(head, ""), (pad(bar, room), "cyan"), (tail, "")])
    return lines


def _peak_title(rows: Sequence[Row]) -> str:
    memories = [row.memory for row in rows if row.memory is not None]
    low, high = min(memory.baseline for memory in memories), max(memory.baseline for memory in memories)
    base = bytes_text(low) if bytes_text(low) == bytes_text(high) else f"{bytes_text(low)} to {bytes_text(high)}"
    kind = "allocated on the GPU" if memories[0].kind == "cuda-allocated" else "resident memory of the process"
    return f"peak memory above the {base} that model, batch and libraries take ({kind})"


def _increment(memory: Memory | None) -> float | None:
    return None if memory is None else float(memory.increment)


def _time_text(row: Row) -> str:
    if row.seconds is None:
        return ""
    rate = row.samples_per_second
    spread = f"{seconds_text(row.seconds.low)} to {seconds_text(row.seconds.high)}"
    return f"{seconds_text(row.seconds.median)}|({spread})" + (f"|{rate:,.0f}/s" if rate else "|")


_BLOCKS = (
    _Block(
        lambda _: "saved activations: what autograd keeps for the backward, parameters left out",
        lambda row: row.activation_bytes,
        lambda row: bytes_text(row.activation_bytes or 0),
    ),
    _Block(_peak_title, lambda row: _increment(row.memory), lambda row: f"+{bytes_text(_increment(row.memory) or 0)}"),
    _Block(
        lambda rows: (
            f"time per update: median of {max(r.seconds.repeats for r in rows if r.seconds)} after "
            "warm-up (quartiles), samples per second"
        ),
        lambda row: row.seconds.median if row.seconds else None,
        _time_text,
    ),
)


def _fitted_lines(profile: Profile, layout: Layout) -> list[Line]:
    lines: list[Line] = []
    for label, fit in (("activations", activation_line(profile.rows)), ("peak", peak_line(profile.rows))):
        if fit is not None and len(set(profile.steps)) > 1:
            lines += layout.wrap(line_text(fit), first=f"  {label}", indent=_LABEL + 2)
    return lines


def line_text(fit: Fit) -> str:
    """Returns a line through rows in words, with how far the rows lie from it."""
    sign = "+" if fit.slope >= 0 else "−"
    text = f"{bytes_text(fit.intercept)} {sign} {bytes_text(abs(fit.slope))} × n"
    if fit.residual is None:
        text += "; a line through two rows has no residual"
    else:
        # below half a byte it is the rounding of the fit itself
        share = percent(fit.relative_residual or 0.0 if fit.residual >= 0.5 else 0.0)
        text += f"; straight line through {len(fit.points)} rows, residual at most {bytes_text(fit.residual)} ({share})"
    return text if fit.usable else f"{text}: memory does not grow along it"


def profile_sentence(profile: Profile) -> str:
    """Returns what the profile came to, in words."""
    compared = profile.compared
    if not compared:
        text = "nothing was compared with the full batch"
    else:
        agree = sum(row.outcome is profile.outcome for row in compared)
        text = f"{agree} of {len(compared)} compared rows {profile.outcome.value} to the full batch's gradient"
        if profile.outcome is Outcome.DIVERGENT:
            text = f"{agree} of {len(compared)} compared rows diverge; `gaverify run` names the cause"
        elif profile.outcome is Outcome.INCONCLUSIVE:
            text = f"{agree} of {len(compared)} compared rows could not be decided"
    failed = sum(row.status == "failed" for row in profile.rows)
    return text + (f"; {count_text(failed, 'row')} failed" if failed else "")
