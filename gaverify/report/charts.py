"""Charts as plain values: bars on an axis. A page draws them in HTML, where they follow the width of a screen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gaverify.records.experiment import ModuleDifference
from gaverify.records.numbers import count_text
from gaverify.records.outcomes import Outcome, ParameterComparison
from gaverify.report.blocks import Bar, Chart
from gaverify.report.layout import clean, modules_of, number, sort_rows

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
