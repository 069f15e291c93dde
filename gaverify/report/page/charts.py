"""Inline SVG for the page: markers and bars on logarithmic axes, and modules. Colours are the page's, by class."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.records.experiment import ModuleDifference
from gaverify.report.junit import modules_of
from gaverify.report.text.layout import clean
from gaverify.report.text.wording import number, ordered

_WIDE, _HIGH, _LEFT, _FOOT = 960, 320, 64, 28
_TITLED = 300
"""Markers with a tooltip each; of more the page would grow by hundreds of kilobytes, and the table names them all."""


@dataclass(frozen=True)
class Scale:
    """A logarithmic axis between two powers of ten, `low` < `high`, over `length` units of the picture."""

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
        """The powers of ten to write, a dozen at most."""
        return range(self.low, self.high + 1, max(1, math.ceil((self.high - self.low) / 10)))


def scale_of(values: Iterable[float], length: float) -> Scale:
    """Returns an axis that holds all values that are finite and above zero."""
    powers = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
    low = math.floor(min(powers, default=-1.0))
    high = math.ceil(max(powers, default=0.0))
    return Scale(low, max(high, low + 1), length)


def parameters_chart(rows: Sequence[ParameterComparison]) -> Markup:
    """Returns the differences of all parameters against what was allowed, in the model's order; "" without any.

    A parameter whose gradient is zero or rounding has no relative difference and is left out.
    """
    shown = [row for row in rows if not row.vanishing and not math.isnan(row.difference_norm)]
    if not shown:
        return Markup("")
    working = [row.working_difference_norm / row.reference_norm for row in shown]
    sizes = [*(r.relative_difference for r in shown), *(r.relative_allowed for r in shown), *working]
    scale = scale_of(sizes, _HIGH - _FOOT - 12)
    step = (_WIDE - _LEFT - 12) / len(shown)
    xs = [_LEFT + step * (at + 0.5) for at in range(len(shown))]
    body = [_axis(scale)]
    ticks = [
        f"M{x - step * 0.4:.1f} {_y(scale, row.relative_allowed)}h{max(step * 0.8, 1):.1f}"
        for x, row in zip(xs, shown, strict=True)
    ]
    body.append(_path("allowed", "".join(ticks)))
    apart = [(x, w) for x, row, w in zip(xs, shown, working, strict=True) if w != row.relative_difference]
    body.append(_path("working", "".join(f"M{x:.1f} {_y(scale, w)}m-2.5 0h5" for x, w in apart)))
    for outcome in Outcome:
        mine = [(x, row) for x, row in zip(xs, shown, strict=True) if row.outcome is outcome]
        body.append(
            _marks(
                outcome.value,
                [(x, _y(scale, row.relative_difference), row) for x, row in mine],
                titled=len(shown) <= _TITLED,
            )
        )
    divergent = sum(row.outcome is Outcome.DIVERGENT for row in shown)
    label = f"Relative difference of {len(shown)} parameters on a logarithmic axis, {divergent} of them divergent"
    return _svg(_HIGH, label, body)


def _marks(kind: str, places: Sequence[tuple[float, str, ParameterComparison]], *, titled: bool) -> Markup:
    if not places:
        return Markup("")
    if not titled:  # one path of round dots: a line of no length with round caps
        return _path(f"dots {kind}", "".join(f"M{x:.1f} {y}h0" for x, y, _ in places))
    dots = []
    for x, y, row in places:
        told = f"{row.name}: {number(row.relative_difference)}, allowed {number(row.relative_allowed)}"
        dots.append(_tag("circle", _tag("title", told), cx=f"{x:.1f}", cy=y, r=4))
    return _tag("g", Markup("").join(dots), class_=kind)


def bars_chart(bars: Sequence[tuple[str, float, str]], label: str) -> Markup:
    """Returns horizontal bars on a logarithmic axis; each is (text, value, class)."""
    left = min(16 + 7 * max((len(text) for text, _, _ in bars), default=0), _WIDE // 2)  # the labels' widest
    scale = scale_of((value for _, value, _ in bars), _WIDE - left - 120)
    parts = []
    for at, (text, value, kind) in enumerate(bars):
        y, wide = 8 + 34 * at, max(scale.at(value), 2)
        parts.append(_tag("text", text, x=0, y=y + 16))
        parts.append(_tag("rect", class_=f"bar {kind}", x=left, y=y, width=f"{wide:.1f}", height=22, rx=3))
        parts.append(_tag("text", number(value), x=f"{left + 10 + wide:.1f}", y=y + 16))
    return _svg(16 + 34 * len(bars), label, parts)


def weights_chart(used: Sequence[float], right: Sequence[float]) -> Markup:
    """Returns a pair of bars per micro-batch, the weight that was used and the one that fits, on a linear axis."""
    count = len(right)
    largest = max([abs(value) for value in (*used, *right) if math.isfinite(value)], default=0.0) or 1.0
    step = (_WIDE - _LEFT - 12) / max(count, 1)
    high = 200
    parts: list[Markup] = []
    for at in range(count):
        x = _LEFT + step * at
        pairs = (("used", used[at] if at < len(used) else 0.0), ("right", right[at]))
        for side, (kind, value) in enumerate(pairs):
            tall = high * abs(value) / largest if math.isfinite(value) else 0.0
            width = max(min(step * 0.38, 60), 0.6)
            place = {"x": f"{x + side * width:.1f}", "y": f"{high - tall + 10:.1f}"}
            told = _tag("title", f"micro-batch {at + 1}: {value:.4g}")
            parts.append(_tag("rect", told, class_=f"bar {kind}", **place, width=f"{width:.1f}", height=f"{tall:.1f}"))
        if count <= 24:
            parts.append(_tag("text", at + 1, x=f"{x:.1f}", y=high + 28, class_="soft"))
    parts.append(_tag("text", f"{largest:.3g}", x=0, y=20, class_="soft"))
    parts.append(_tag("text", 0, x=0, y=high + 10, class_="soft"))
    return _svg(high + 36, f"Weights of {count} micro-batches: used, and those that fit", parts)


def _axis(scale: Scale) -> Markup:
    lines = []
    for power in scale.ticks:
        y, raised = _y(scale, 10.0**power), str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        lines.append(_path("grid", f"M{_LEFT} {y}H{_WIDE}"))
        place = {"x": _LEFT - 8, "y": f"{float(y) + 4:.1f}", "text-anchor": "end"}
        lines.append(_tag("text", f"10{raised}", class_="soft", **place))
    return Markup("").join(lines)


def _y(scale: Scale, value: float) -> str:
    return f"{_HIGH - _FOOT - scale.at(value):.1f}"


def _path(kind: str, drawn: str) -> Markup:
    return _tag("path", class_=kind, d=drawn) if drawn else Markup("")


def _tag(name: str, inside: object = None, **attributes: object) -> Markup:
    """An element of a picture, all of it escaped; `class_` is its class."""
    listed = Markup("").join(Markup(' {}="{}"').format(key.rstrip("_"), value) for key, value in attributes.items())
    end = Markup("/>") if inside is None else Markup(">{}</{}>").format(inside, name)
    return Markup("<{}{}{}").format(name, listed, end)


def _svg(high: float, label: str, parts: Iterable[Markup]) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" class="chart">{}</svg>').format(
        _WIDE, high, escape(label), Markup("").join(parts)
    )


_MODULES = 400
"""Modules that the strip of the forward order shows; the worst of neighbouring ones stand for a deeper model."""


@dataclass(frozen=True)
class ModuleView:
    """A module in the model's order: how far its worst parameter is off, as a share of the strip, and its outcome."""

    name: str
    outcome: str
    difference: str
    percent: float
    culprit: bool


def by_parameters(rows: Sequence[ParameterComparison], culprits: set[str]) -> Iterator[ModuleView]:
    """Yields each module by the worst of its parameters, in the model's order.

    Args:
        rows: All parameters.
        culprits: The names of the modules that a finding blames.
    """
    groups = modules_of(rows)
    worst_of = [(name, ordered(members)[0]) for name, members in groups]
    scale = scale_of((row.relative_difference for _, row in worst_of if not row.vanishing), 100)
    size = math.ceil(len(worst_of) / _MODULES)
    for at in range(0, len(worst_of), max(size, 1)):
        piece = worst_of[at : at + size]
        first = ordered(row for _, row in piece)[0]
        name = next(name for name, row in piece if row is first)
        yield _module(name, first, scale, any(module in culprits for module, _ in piece))


def _module(name: str, row: ParameterComparison, scale: Scale, culprit: bool) -> ModuleView:
    share = 0.0 if row.vanishing or math.isnan(row.relative_difference) else scale.at(row.relative_difference)
    difference = "rounding of a zero" if row.vanishing else number(row.relative_difference)
    return ModuleView(clean(name or "(root)"), row.outcome.value, difference, round(share, 1), culprit)


def by_outputs(modules: Sequence[ModuleDifference], culprits: set[str]) -> Iterator[ModuleView]:
    """Yields how the difference travels through the forward: each module's outputs; nothing where all of them agree."""
    if all(module.difference == 0 for module in modules):
        return
    scale = scale_of((module.difference for module in modules), 100)
    size = math.ceil(len(modules) / _MODULES)
    for at in range(0, len(modules), size):
        piece = modules[at : at + size]
        most = max(piece, key=lambda module: module.difference)
        outcome = Outcome.DIVERGENT if most.difference > 0 else Outcome.EQUIVALENT
        yield ModuleView(
            clean(most.module),
            outcome.value,
            number(most.difference) if most.difference > 0 else "the same values",
            round(scale.at(most.difference), 1),
            any(module.module in culprits for module in piece),
        )


def first_to_differ(modules: Sequence[ModuleDifference]) -> str:
    """The first module whose outputs differ, and not one that only holds it: a block differs as its layers do."""
    names = [module.module for module in modules if module.difference > 0]
    holders = {name[:at] for name in names for at, character in enumerate(name) if character == "."} | {""}
    first = next((name for name in names if name not in holders), next(iter(names), ""))
    return clean(first or "(root)")
