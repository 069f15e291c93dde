"""Plots of memory and time against K, as one SVG that needs nothing else: no script, no font, no library."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from gaverify.amounts import bytes_text, seconds_text
from gaverify.records.profile import LABELS, STRATEGIES, Row, peak_line
from gaverify.report.blocks import Plot
from gaverify.report.layout import clean

_FOOT, _WIDE, _HIGH = 346, 320, 240  # where the plots stand, and their size
_SHAPES = {
    "full-batch": "m0-6l6 6-6 6-6-6z",
    "summed-loss": "m-4-4h8v8h-8z",
    "accumulate": "m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
}
_SHIFT = {"full-batch": 0, "summed-loss": -3, "accumulate": 3}  # side by side: equal values would hide each other

Spread = tuple[float, float, float]  # quartiles and between them the median; three times a value that does not vary
Curve = Callable[[Row], Spread | None]


def plot_svg(plot: Plot) -> str:
    """Returns the picture; it follows the reader's choice of light or dark."""
    # a row that failed early has no K to stand at
    rows = [row for row in plot.rows if row.micro_batches]
    name = clean(plot.title)
    fit = peak_line(rows)
    peaks = fit is not None and fit.usable  # peaks that do not follow the micro-batch would only flatten the rest
    title = "Saved activations" + ("; dashed: peak above the baseline" if peaks else "")
    memory: list[Curve] = [lambda row: _flat(row.activation_bytes)]
    memory += [lambda row: _flat(row.memory.increment if row.memory else None)] if peaks else []
    time: Curve = lambda row: (row.seconds.low, row.seconds.median, row.seconds.high) if row.seconds else None  # noqa: E731
    width = 860
    drawn_strategies = [strategy for strategy in STRATEGIES if any(row.strategy == strategy for row in rows)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 410" role="img" class="gv">',
            f"<title>Memory and time against K: {escape(name)}</title><style>{_style()}</style>",
            f'<rect class="back" width="{width}" height="410"/>',
            _text(24, 30, name, "title"),
            *(
                _mark(s, 32 + 120 * at, 52) + _text(44 + 120 * at, 56, LABELS[s], "")
                for at, s in enumerate(drawn_strategies)
            ),
            _panel(24, title, rows, bytes_text, memory),
            _panel(454, "Time per update, median and quartiles", rows, seconds_text, [time]),
            "</svg>\n",
        ]
    )


def _style() -> str:
    """Rules that all stand below `.gv`: the picture also stands inside a page that has rules of its own."""
    return "\n" + Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


def _flat(value: float | None) -> Spread | None:
    return None if value is None else (value, value, value)


def _panel(left: float, title: str, rows: Sequence[Row], unit: Callable[[float], str], curves: Sequence[Curve]) -> str:
    """One plot; the first of the curves has marks and whiskers, the others are dashed."""
    steps, start = sorted({row.steps for row in rows}) or [1], left + 60
    largest = max((spread[2] for row in rows for curve in curves if (spread := curve(row))), default=0.0) or 1.0
    power = 10.0 ** math.floor(math.log10(largest / 5))
    tick = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 5 >= largest * (1 - 1e-9))
    count = math.ceil(largest / tick * (1 - 1e-9))
    xs = {k: start + _WIDE * (at + 0.5) / len(steps) for at, k in enumerate(steps)}
    parts = [_text(left, 88, title, "title"), _text(start + _WIDE / 2, _FOOT + 42, "K", "soft", "middle")]
    parts += [_text(x, _FOOT + 20, str(k), "soft", "middle") for k, x in xs.items()]
    for at in range(count + 1):
        y, label = _FOOT - _HIGH * at / count, re.sub(r"\.0+(?= )", "", unit(at * tick)) if at else "0"
        parts += [f'<path class="grid" d="M{start} {y:.1f}h{_WIDE}"/>', _text(start - 8, y + 4, label, "soft", "end")]
    for curve in reversed(curves):
        drawn = [(row, spread) for row in rows if (spread := curve(row))]
        ys = [[_FOOT - _HIGH * value / count / tick for value in spread] for _, spread in drawn]
        places = [
            (row.strategy, xs[row.steps] + _SHIFT[row.strategy], y) for (row, _), y in zip(drawn, ys, strict=True)
        ]
        parts += [_line(name, places, start, marked=curve is curves[0]) for name in STRATEGIES]
    return "\n".join(parts)


def _line(name: str, places: Sequence[tuple[str, float, list[float]]], start: float, *, marked: bool) -> str:
    """Draws one strategy's line. It starts at the full batch, which is K = 1; the full batch's own line is level."""
    line_points = [(x, ys) for strategy, x, ys in places if strategy == name]
    path = "M" + " ".join(f"{x:.1f} {ys[1]:.1f}" for strategy, x, ys in places if strategy in (name, "full-batch"))
    if name == "full-batch":
        path = "".join(f"M{start} {ys[1]:.1f}h{_WIDE}" for _, ys in line_points)
    whiskers = "".join(f"M{x:.1f} {low:.1f}V{high:.1f}" for x, (low, _, high) in line_points) if marked else ""
    line = f'<path class="line {name}{"" if marked else " dashed"}" d="{path}{whiskers}"/>' if line_points else ""
    return line + "".join(_mark(name, x, y) for x, (_, y, _) in line_points if marked)


def _mark(strategy: str, x: float, y: float) -> str:
    return f'<path class="mark {strategy}" d="M{x:.1f} {y:.1f}{_SHAPES[strategy]}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
