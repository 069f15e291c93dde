"""Bars on a logarithmic axis, as plain values. The page draws them in HTML: they follow the width of a screen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.records.experiment import ModuleDifference
from gaverify.report.junit import modules_of
from gaverify.report.text.layout import clean
from gaverify.report.text.wording import number, sort_rows

_MOST_PARAMETERS = 40
"""Bars of parameters in a chart; of a larger model the worst ones are shown, and the table below lists all."""

_MOST_MODULES = 400
"""Bars of modules in a chart; in a deeper model the worst of neighbouring ones stands for them."""

_MOST_WEIGHTS = 64
"""Micro-batches in a chart of weights."""

_TICKS = 5
"""Powers of ten that an axis names at most: more run into each other on a screen of 400 pixels."""


@dataclass(frozen=True)
class Scale:
    """A logarithmic axis between two powers of ten, `low` < `high`, over `length` units."""

    low: int
    high: int
    length: float

    def at(self, value: float) -> float:
        """Returns where a value lies from the low end; zero and what is smaller at it, what is larger at the other."""
        if not value > 0:
            return 0.0
        place = (math.log10(value) - self.low) / (self.high - self.low) if math.isfinite(value) else 1.0
        return min(max(place, 0.0), 1.0) * self.length

    @property
    def ticks(self) -> range:
        """The powers of ten to write."""
        return range(self.low, self.high + 1, max(1, math.ceil((self.high - self.low) / (_TICKS - 1))))


def scale_of(values: Iterable[float], length: float) -> Scale:
    """Returns an axis that holds all values that are finite and above zero."""
    powers = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
    low = math.floor(min(powers, default=-1.0))
    high = math.ceil(max(powers, default=0.0))
    return Scale(low, max(high, low + 1), length)


@dataclass(frozen=True)
class Bar:
    """One bar: its name, its length and marks in percent of the axis, and its value in words."""

    name: str
    kind: str
    """The class that gives the colour: an outcome, or "used" and "right" for weights."""
    percent: float
    size: str
    is_cause: bool = False
    """Whether a finding names it."""
    allowed: float | None = None
    """Where the allowed difference lies, in percent of the axis."""
    working: float | None = None
    """Where the difference in working precision lies, if another precision decided; in percent of the axis."""


@dataclass(frozen=True)
class BarChart:
    """Bars with their axis; empty charts are false."""

    label: str = ""
    """What the chart shows, for those who cannot see it."""
    bars: Sequence[Bar] = ()
    ticks: Sequence[tuple[float, str]] = ()
    """Marks of the axis: (percent of the axis, text)."""
    bars_left_out: int = 0

    def __bool__(self) -> bool:
        return bool(self.bars)


def _power_of_ten(power: int) -> str:
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _ticks_of(scale: Scale) -> list[tuple[float, str]]:
    return [(round(scale.at(10.0**power), 1), _power_of_ten(power)) for power in scale.ticks]


def _are_all_divergent(bars: Sequence[Bar]) -> bool:
    """Whether every bar is red: such a chart tells nothing apart."""
    return all(bar.kind == Outcome.DIVERGENT.value for bar in bars)


def parameters_chart(rows: Sequence[ParameterComparison]) -> BarChart:
    """Returns the differences of parameters against what was allowed, in the model's order; empty if all diverge.

    A parameter whose gradient is zero or rounding has no relative difference and is left out.
    """
    relative = [row for row in rows if not row.vanishing and not math.isnan(row.difference_norm)]
    worst = {id(row) for row in sort_rows(relative)[:_MOST_PARAMETERS]}
    drawn_rows = [row for row in relative if id(row) in worst]
    working = [row.working_difference_norm / row.reference_norm for row in drawn_rows]
    scale = scale_of(
        [*(r.relative_difference for r in drawn_rows), *(r.relative_allowed for r in drawn_rows), *working], 100
    )
    bars = [
        Bar(
            clean(row.name or "(unnamed)"),
            row.outcome.value,
            round(scale.at(row.relative_difference), 1),
            number(row.relative_difference),
            allowed=round(scale.at(row.relative_allowed), 1),
            working=round(scale.at(in_working), 1) if in_working != row.relative_difference else None,
        )
        for row, in_working in zip(drawn_rows, working, strict=True)
    ]
    if _are_all_divergent(bars):
        return BarChart()
    label = f"Relative difference of {len(bars)} parameters on a logarithmic axis"
    return BarChart(label, bars, _ticks_of(scale), len(relative) - len(drawn_rows))


def repairs_chart(sizes: Sequence[tuple[str, float, str]]) -> BarChart:
    """Returns a bar for each (text, relative difference, kind)."""
    scale = scale_of((value for _, value, _ in sizes), 100)
    bars = [Bar(text, kind, max(round(scale.at(value), 1), 0.5), number(value)) for text, value, kind in sizes]
    label = "Relative difference, " + ", ".join(f"{bar.name}: {bar.size}" for bar in bars)
    return BarChart(label, bars, _ticks_of(scale))


def weights_chart(used: Sequence[float], right: Sequence[float]) -> BarChart:
    """Returns two bars per micro-batch, the weight that was used and the one that fits, on a linear axis from zero."""
    drawn_weights = range(min(len(right), _MOST_WEIGHTS))
    largest = max([abs(value) for value in (*used, *right) if math.isfinite(value)], default=0.0) or 1.0
    bars = []
    for at in drawn_weights:
        pair = (("used", used[at] if at < len(used) else 0.0), ("right", right[at]))
        for kind, value in pair:
            percent = 100 * abs(value) / largest if math.isfinite(value) else 0.0
            name = f"micro-batch {at + 1}" if kind == "used" else ""
            bars.append(Bar(name, kind, round(percent, 1), f"{value:.4g}"))
    label = f"Weights of {len(right)} micro-batches: used, and those that fit"
    return BarChart(label, bars, [(0.0, "0"), (100.0, f"{largest:.3g}")], len(right) - len(drawn_weights))


def chart_by_parameters(rows: Sequence[ParameterComparison], causes: set[str]) -> BarChart:
    """Returns each module by the worst of its parameters, in the model's order; empty if all diverge.

    Args:
        rows: All parameters.
        causes: The names of the modules that a finding names.
    """
    worst_of = [(name, sort_rows(members)[0]) for name, members in modules_of(rows)]
    scale = scale_of((row.relative_difference for _, row in worst_of if not row.vanishing), 100)
    size = max(math.ceil(len(worst_of) / _MOST_MODULES), 1)
    bars = []
    for at in range(0, len(worst_of), size):
        piece = worst_of[at : at + size]
        row = sort_rows(each for _, each in piece)[0]
        name = next(name for name, each in piece if each is row)
        has_size = not row.vanishing and not math.isnan(row.relative_difference)
        bars.append(
            Bar(
                clean(name or "(root)"),
                row.outcome.value,
                round(scale.at(row.relative_difference), 1) if has_size else 0.0,
                "rounding of a zero" if row.vanishing else number(row.relative_difference),
                any(module in causes for module, _ in piece),
            )
        )
    if len(bars) < 2 or _are_all_divergent(bars):
        return BarChart()
    return BarChart("Gradients by module", bars, _ticks_of(scale))


def chart_by_outputs(modules: Sequence[ModuleDifference], causes: set[str]) -> BarChart:
    """Returns how far each module's outputs differ in the forward; empty where all of them agree, or all differ.

    A module that only holds modules that differ is left out: it repeats what they show.
    """
    holders = _holders_of_differing(modules) - causes
    drawn_modules = [module for module in modules if module.module not in holders]
    if all(module.difference == 0 for module in drawn_modules):
        return BarChart()
    scale = scale_of((module.difference for module in drawn_modules), 100)
    size = math.ceil(len(drawn_modules) / _MOST_MODULES)
    bars = []
    for at in range(0, len(drawn_modules), size):
        piece = drawn_modules[at : at + size]
        most = max(piece, key=lambda module: module.difference)
        differs = most.difference > 0
        bars.append(
            Bar(
                clean(most.module or "(root)"),
                (Outcome.DIVERGENT if differs else Outcome.EQUIVALENT).value,
                round(scale.at(most.difference), 1),
                number(most.difference) if differs else "the same values",
                any(module.module in causes for module in piece),
            )
        )
    if _are_all_divergent(bars) and not any(bar.is_cause for bar in bars):
        return BarChart()
    return BarChart("Outputs by module", bars, _ticks_of(scale))


def _holders_of_differing(modules: Sequence[ModuleDifference]) -> set[str]:
    """Modules that differ and hold another one that does: a block differs as its layers do."""
    differing = [module.module for module in modules if module.difference > 0]
    holders = {name[:at] for name in differing for at, character in enumerate(name) if character == "."}
    if any(differing):
        holders.add("")
    return holders & set(differing)


def first_to_differ(modules: Sequence[ModuleDifference], causes: set[str]) -> str:
    """Returns the first module whose outputs differ: the one that a finding names, else none that only holds it."""
    differing = [module.module for module in modules if module.difference > 0]
    holders = _holders_of_differing(modules)
    first = next((name for name in differing if name not in holders), next(iter(differing), ""))
    # a module whose own forward mixes samples holds the parts that differ after it
    blamed = next((name for name in differing if name in causes), first)
    return clean(blamed or "(root)")
