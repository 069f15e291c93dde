"""Two plots, memory and time against K, as one SVG that needs nothing else: no script, no font, no library."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from gaverify.profiling.amounts import bytes_text, seconds_text
from gaverify.profiling.fitting import peak_line
from gaverify.profiling.records import LABELS, STRATEGIES, Profile, Row

_WIDTH, _HEIGHT, _TOP, _PLOT = 860, 400, 96, 240  # picture, its head, and the height of a plot
_STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.back { fill: #ffffff } .head { font-size: 15px; font-weight: 600 } .title { font-size: 13px; font-weight: 600 }
.soft { fill: #59636e } .grid { stroke: #d1d9e0; stroke-width: 1 }
.line { fill: none; stroke-width: 2 } .peak { stroke-dasharray: 5 4; stroke-width: 1.5 } .whisker { stroke-width: 1.5 }
.s-accumulate { stroke: #0969da } .f-accumulate { fill: #0969da }
.s-summed-loss { stroke: #bc4c00 } .f-summed-loss { fill: #bc4c00 }
.s-full-batch { stroke: #59636e } .f-full-batch { fill: #59636e }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .back { fill: #0d1117 } .soft { fill: #9198a1 } .grid { stroke: #30363d }
.s-accumulate { stroke: #58a6ff } .f-accumulate { fill: #58a6ff }
.s-summed-loss { stroke: #f0883e } .f-summed-loss { fill: #f0883e }
.s-full-batch { stroke: #9198a1 } .f-full-batch { fill: #9198a1 }
}"""

Value = Callable[[Row], float | None]


class _Plot(NamedTuple):
    """Where one plot lies and how it is scaled."""

    left: float
    width: float
    steps: Sequence[int]
    top: float

    def x(self, steps: int) -> float:
        return self.left + self.width * (self.steps.index(steps) + 0.5) / len(self.steps)

    def y(self, value: float) -> float:
        return _TOP + _PLOT * (1 - value / self.top)


def profile_svg(profile: Profile) -> str:
    """Returns the picture; it follows the reader's choice of light or dark."""
    rows, setting = [row for row in profile.rows if row.micro_batches], profile.setting
    steps = sorted({row.steps for row in rows}) or [1]
    name = (
        f"{setting.model} · B = {setting.batch_size} · {setting.device}, {setting.dtype}" if setting else "no row ran"
    )
    line = peak_line(rows)
    peaks = line is not None and line.usable  # peaks that do not follow the micro-batch would only flatten the rest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>Memory and time against K: {escape(name)}</title><style>{_STYLE}\n</style>",
        f'<rect class="back" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text class="head" x="24" y="30">{escape(name)}</text>', *_legend(rows, peaks),
        *_panel("Saved activations" + (" and peak above the baseline" if peaks else ""), 84, rows, steps, bytes_text,
                _activations, _increment if peaks else None),
        *_panel("Time per update, quartiles", 514, rows, steps, seconds_text,
                _median, None),
        "</svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


def _activations(row: Row) -> float | None:
    return row.activation_bytes


def _increment(row: Row) -> float | None:
    return None if row.memory is None else row.memory.increment


def _median(row: Row) -> float | None:
    return None if row.seconds is None else row.seconds.median


def _legend(rows: Sequence[Row], peaks: bool) -> list[str]:
    parts, left = [], 24.0
    for strategy in [name for name in STRATEGIES if any(row.strategy == name for row in rows)]:
        parts.append(f'<line class="line s-{strategy}" x1="{left}" x2="{left + 22}" y1="48" y2="48"/>')
        parts.append(_mark(strategy, left + 11, 48) + _text(left + 30, 52, LABELS[strategy]))
        left += 124
    if peaks:
        parts.append(f'<line class="line peak s-full-batch" x1="{left}" x2="{left + 22}" y1="48" y2="48"/>')
        parts.append(_text(left + 30, 52, "dashed: peak device memory"))
    return parts


def _panel(title: str, left: float, rows: Sequence[Row], steps: Sequence[int], unit: Callable[[float], str],
           value: Value, second: Value | None) -> list[str]:  # fmt: skip
    values = [v for row in rows for f in (value, second) if f is not None and (v := f(row)) is not None]
    values += [row.seconds.high for row in rows if row.seconds and unit is seconds_text]
    step = _tick(max(values, default=1.0) or 1.0)
    plot = _Plot(left, 320, steps, step * max(1, math.ceil(max(values, default=1.0) / step)))
    parts = [_text(left - 60, _TOP - 18, title, "title"), _text(left + 160, _TOP + _PLOT + 42, "K", "soft", "middle")]
    for tick in range(round(plot.top / step) + 1):
        y = plot.y(tick * step)
        parts.append(f'<line class="grid" x1="{left}" x2="{left + 320}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            _text(left - 8, y + 4, re.sub(r"\.0+(?= )", "", unit(tick * step)) if tick else "0", "soft", "end")
        )
    parts += [_text(plot.x(k), _TOP + _PLOT + 20, str(k), "soft", "middle") for k in steps]
    for strategy in STRATEGIES:
        parts += _series(plot, strategy, rows, second, " peak", False) if second else []
        parts += _series(plot, strategy, rows, value, "", unit is seconds_text)
    return parts


def _series(plot: _Plot, strategy: str, rows: Sequence[Row], value: Value, kind: str, whiskers: bool) -> list[str]:
    """The line of one strategy, from the full batch as K = 1 on; the full batch itself goes right across."""
    own = [(row, v) for row in rows if row.strategy == strategy and (v := value(row)) is not None]
    shift = {"summed-loss": -3, "accumulate": 3}.get(strategy, 0) if whiskers else 0  # side by side, not on each other
    marks = [(row, plot.x(row.steps) + shift, plot.y(v)) for row, v in own]
    points = [(x, y) for _, x, y in marks]
    if strategy == "full-batch":
        points = [(x, y) for _, y in points for x in (plot.left, plot.left + plot.width)]
    elif own:
        first = [(plot.x(row.steps), plot.y(v)) for row in rows
                 if row.strategy == "full-batch" and (v := value(row)) is not None]  # fmt: skip
        points = first + points
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline class="line{kind} s-{strategy}" points="{path}"/>'] if points else []
    for row, x, y in marks if not kind else []:
        if whiskers and row.seconds:
            low, high = (f"{plot.y(v):.1f}" for v in (row.seconds.low, row.seconds.high))
            parts.append(f'<path class="whisker s-{strategy}" d="M{x:.1f},{low}V{high}"/>')
        parts.append(_mark(strategy, x, y))
    return parts


def _mark(strategy: str, x: float, y: float) -> str:
    if strategy == "accumulate":
        return f'<circle class="f-{strategy}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if strategy == "full-batch" else ""
    return f'<rect class="f-{strategy}" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"{turn}/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _tick(largest: float) -> float:
    """The distance of at most five ticks: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(largest / 5))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * 5 >= largest * (1 - 1e-9))
