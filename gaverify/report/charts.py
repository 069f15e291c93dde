"""Charts as plain values: bars on a logarithmic axis, and plots of memory and time against K as one SVG."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.sax.saxutils import escape

from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.records.experiment import ModuleDifference
from gaverify.records.numbers import bytes_text, count_text, seconds_text
from gaverify.records.profile import LABELS, STRATEGIES, Row, peak_line
from gaverify.report.blocks import Bar, Chart, Plot
from gaverify.report.layout import clean, modules_of, number, sort_rows

# Plots of memory and time against K, as one SVG that needs nothing else: no script, no font, no library.


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
    # all its rules stand below `.gv`: the picture also stands inside a page that has rules of its own
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    drawn_strategies = [strategy for strategy in STRATEGIES if any(row.strategy == strategy for row in rows)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 410" role="img" class="gv">',
            f"<title>Memory and time against K: {escape(name)}</title><style>\n{style}</style>",
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


# Bars on a logarithmic axis, as plain values. The page draws them in HTML: they follow the width of a screen.


_MOST_PARAMETERS = 40
"""Bars of parameters in a chart; of a larger model the worst ones are shown, and the table below lists all."""

_MOST_MODULES = 400
"""Bars of modules in a chart; in a deeper model the worst of neighbouring ones stands for them."""

_MOST_WEIGHTS = 64
"""Micro-batches in a chart of weights."""

_TICKS = 5
"""Powers of ten that an axis names at most: more run into each other on a screen of 400 pixels."""

_OUTCOMES = tuple(
    (outcome.value, outcome.value) for outcome in (Outcome.DIVERGENT, Outcome.INCONCLUSIVE, Outcome.EQUIVALENT)
)


@dataclass(frozen=True)
class Scale:
    """A logarithmic axis between two powers of ten, `low` < `high`."""

    low: int
    high: int

    def at(self, value: float) -> float:
        """Returns where a value lies, in percent of the axis; what is smaller or larger lies at an end."""
        if not value > 0:  # zero has no logarithm, and NaN no place
            return 0.0
        place = (math.log10(value) - self.low) / (self.high - self.low) if math.isfinite(value) else 1.0
        return round(min(max(place, 0.0), 1.0) * 100, 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The powers of ten to write, as (percent of the axis, text)."""
        powers = range(self.low, self.high + 1, max(1, math.ceil((self.high - self.low) / (_TICKS - 1))))
        return [(self.at(10.0**power), "10" + str(power).translate(_RAISED)) for power in powers]


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def scale_of(values: Iterable[float]) -> Scale:
    """Returns an axis that holds all values that are finite and above zero."""
    powers = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
    low = math.floor(min(powers, default=-1.0))
    high = math.ceil(max(powers, default=0.0))
    # one value alone would give an axis without a length
    return Scale(low, max(high, low + 1))


def _are_all_divergent(bars: Sequence[Bar]) -> bool:
    """Whether every bar is red: such a chart tells nothing apart."""
    return all(bar.kind == Outcome.DIVERGENT.value for bar in bars)


def parameters_chart(rows: Sequence[ParameterComparison]) -> Chart:
    """Returns the differences of parameters against what was allowed, in the model's order; empty if all diverge.

    A parameter whose gradient is zero or rounding has no relative difference and is left out.
    """
    relative = [row for row in rows if not row.vanishing and not math.isnan(row.difference_norm)]
    # names may repeat where parameters are unnamed: a row is known by its identity
    worst = {id(row) for row in sort_rows(relative)[:_MOST_PARAMETERS]}
    drawn_rows = [row for row in relative if id(row) in worst]
    working = [row.working_difference_norm / row.reference_norm for row in drawn_rows]
    scale = scale_of(
        [*(r.relative_difference for r in drawn_rows), *(r.relative_allowed for r in drawn_rows), *working]
    )
    bars = [
        Bar(
            clean(row.name or "(unnamed)"),
            row.outcome.value,
            scale.at(row.relative_difference),
            number(row.relative_difference),
            allowed=scale.at(row.relative_allowed),
            working=scale.at(in_working) if in_working != row.relative_difference else None,
        )
        for row, in_working in zip(drawn_rows, working, strict=True)
    ]
    if _are_all_divergent(bars):
        return Chart()
    return Chart(
        f"Relative difference of {count_text(len(bars), 'parameter')} on a logarithmic axis",
        bars,
        scale.ticks,
        len(relative) - len(drawn_rows),
        "Relative difference of each parameter, in the model's order (logarithmic)",
        legend=(*_OUTCOMES, ("allowed", "allowed"), ("working", "in the training precision, if float64 decided")),
    )


def repairs_chart(sizes: Sequence[tuple[str, float, str]]) -> Chart:
    """Returns a bar for each (text, relative difference, kind)."""
    scale = scale_of(value for _, value, _ in sizes)
    # a difference at the low end of the axis is still one: half a percent can be seen
    bars = [Bar(text, kind, max(scale.at(value), 0.5), number(value)) for text, value, kind in sizes]
    return Chart(
        "Relative difference, " + ", ".join(f"{bar.name}: {bar.size}" for bar in bars),
        bars,
        scale.ticks,
        caption="Relative difference as it is, with the cause neutralised in both runs, and with each repair that was "
        "tried (logarithmic)",
    )


def weights_charts(fits: Iterable[tuple[str, Sequence[float], Sequence[float]]]) -> tuple[Chart, ...]:
    """Returns a chart for each (caption, weights that were used, weights that fit), on linear axes from zero."""
    charts = [_weights_chart(*fit) for fit in fits]
    # one legend explains all charts of the section
    legend = (("used", "used"), ("right", "fits the full batch"))
    return tuple(replace(chart, legend=() if at else legend) for at, chart in enumerate(charts))


def _weights_chart(caption: str, used: Sequence[float], right: Sequence[float]) -> Chart:
    drawn_weights = range(min(len(right), _MOST_WEIGHTS))
    largest = max([abs(value) for value in (*used, *right) if math.isfinite(value)], default=0.0) or 1.0
    bars = []
    for at in drawn_weights:
        pair = (("used", used[at] if at < len(used) else 0.0), ("right", right[at]))
        for kind, value in pair:
            # an axis from zero has no place for a sign; the number beside the bar shows it
            percent = 100 * abs(value) / largest if math.isfinite(value) else 0.0
            # the second bar of a pair stands below the first, under the same name
            name = f"micro-batch {at + 1}" if kind == "used" else ""
            bars.append(Bar(name, kind, round(percent, 1), f"{value:.4g}"))
    label = f"Weights of {len(right)} micro-batches: used, and those that fit"
    return Chart(label, bars, [(0.0, "0"), (100.0, f"{largest:.3g}")], len(right) - len(drawn_weights), caption)


def chart_by_parameters(rows: Sequence[ParameterComparison], causes: frozenset[str]) -> Chart:
    """Returns each module by the worst of its parameters, in the model's order; empty if all diverge.

    Args:
        rows: All parameters.
        causes: The names of the modules that a finding names.
    """
    worst_of = {name: sort_rows(members)[0] for name, members in modules_of(rows)}
    scale = scale_of(row.relative_difference for row in worst_of.values() if not row.vanishing)
    bars = _merge_neighbours(
        [
            Bar(
                clean(name or "(root)"),
                row.outcome.value,
                0.0 if row.vanishing else scale.at(row.relative_difference),
                f"{'rounding of a zero' if row.vanishing else number(row.relative_difference)} {row.outcome.value}",
                name in causes,
            )
            for name, row in worst_of.items()
        ]
    )
    # a model with one module has nothing to tell apart
    if len(bars) < 2 or _are_all_divergent(bars):
        return Chart()
    caption = ["Gradients by module, in the model's order"]
    first = next((bar.name for bar in bars if bar.kind == Outcome.DIVERGENT.value), None)
    caption += [f"the first that differs is that of `{first}`"] if first is not None else []
    caption += [f"the cause `{clean(name)}` has no parameters of its own" for name in sorted(causes - worst_of.keys())]
    return Chart("Gradients by module", bars, scale.ticks, caption="; ".join(caption), is_foldable=True)


def chart_by_outputs(modules: Sequence[ModuleDifference], causes: frozenset[str], samples: int = 0) -> Chart:
    """Returns how far each module's outputs differ in the forward; empty where all of them agree, or all differ.

    A module that only holds modules that differ is left out: it repeats what they show.

    Args:
        modules: All modules in the order of their calls.
        causes: The names of the modules that a finding names.
        samples: How many of the batch's samples the outputs are of; 0 for all of them.
    """
    holders = _holders_of_differing(modules) - causes
    drawn_modules = [module for module in modules if module.module not in holders]
    scale = scale_of(module.difference for module in drawn_modules)
    bars = _merge_neighbours(
        [
            Bar(
                clean(module.module or "(root)"),
                (Outcome.DIVERGENT if module.difference > 0 else Outcome.EQUIVALENT).value,
                scale.at(module.difference),
                number(module.difference) if module.difference > 0 else "the same values",
                module.module in causes,
            )
            for module in drawn_modules
        ]
    )
    all_agree = all(module.difference == 0 for module in drawn_modules)
    if all_agree or (_are_all_divergent(bars) and not any(bar.is_cause for bar in bars)):
        return Chart()
    part = f" (the batch's first {samples})" if samples else ""
    caption = (
        f"Each module's outputs for the same samples{part}, full batch against micro-batches, in the order of the "
        f"calls; the first that differ are those of `{_first_to_differ(modules, causes)}`"
    )
    return Chart("Outputs by module", bars, scale.ticks, caption=caption, is_foldable=True)


def _merge_neighbours(bars: Sequence[Bar]) -> list[Bar]:
    """The bars, or where there are too many the worst of neighbouring ones, which is a cause if one of them is."""
    # a chart of thousands of bars is slow to draw, and nobody reads it
    size = max(math.ceil(len(bars) / _MOST_MODULES), 1)
    groups = (bars[at : at + size] for at in range(0, len(bars), size))
    return [replace(max(group, key=_badness), is_cause=any(bar.is_cause for bar in group)) for group in groups]


def _badness(bar: Bar) -> tuple[int, float]:
    return [kind for kind, _ in reversed(_OUTCOMES)].index(bar.kind), bar.percent


def _holders_of_differing(modules: Sequence[ModuleDifference]) -> set[str]:
    """Modules that differ and hold another one that does: a block differs as its layers do."""
    differing = [module.module for module in modules if module.difference > 0]
    holders = {name[:at] for name in differing for at, character in enumerate(name) if character == "."}
    if any(differing):
        holders.add("")
    return holders & set(differing)


def _first_to_differ(modules: Sequence[ModuleDifference], causes: frozenset[str]) -> str:
    """The first module whose outputs differ: the one that a finding names, else none that only holds it."""
    differing = [module.module for module in modules if module.difference > 0]
    holders = _holders_of_differing(modules)
    first = next((name for name in differing if name not in holders), next(iter(differing), ""))
    # a module whose own forward mixes samples holds the parts that differ after it
    blamed = next((name for name in differing if name in causes), first)
    return clean(blamed or "(root)")
