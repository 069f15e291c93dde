"""Inline SVG for the page: markers and bars on logarithmic axes. Colours are the page's, by class."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.report.text.wording import number

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
    dots = Markup("").join(
        Markup('<circle cx="{}" cy="{}" r="4"><title>{}: {}, allowed {}</title></circle>').format(
            f"{x:.1f}", y, row.name, number(row.relative_difference), number(row.relative_allowed)
        )
        for x, y, row in places
    )
    return Markup('<g class="{}">{}</g>').format(kind, dots)


def bars_chart(bars: Sequence[tuple[str, float, str]], label: str) -> Markup:
    """Returns horizontal bars on a logarithmic axis; each is (text, value, class)."""
    left = min(16 + 7 * max((len(text) for text, _, _ in bars), default=0), _WIDE // 2)  # the labels' widest
    scale = scale_of((value for _, value, _ in bars), _WIDE - left - 120)
    parts = []
    for at, (text, value, kind) in enumerate(bars):
        y = 8 + 34 * at
        parts.append(
            Markup(
                '<text x="0" y="{}">{}</text><rect class="bar {}" x="{}" y="{}" width="{}" height="22" rx="3"/>'
                '<text x="{}" y="{}">{}</text>'
            ).format(
                y + 16,
                text,
                kind,
                left,
                y,
                f"{max(scale.at(value), 2):.1f}",
                f"{left + 10 + max(scale.at(value), 2):.1f}",
                y + 16,
                number(value),
            )
        )
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
            parts.append(
                Markup(
                    '<rect class="bar {}" x="{}" y="{}" width="{}" height="{}"><title>{} {}: {}</title></rect>'
                ).format(
                    kind,
                    f"{x + side * width:.1f}",
                    f"{high - tall + 10:.1f}",
                    f"{width:.1f}",
                    f"{tall:.1f}",
                    "micro-batch",
                    at + 1,
                    f"{value:.4g}",
                )
            )
        if count <= 24:
            parts.append(Markup('<text x="{}" y="{}" class="soft">{}</text>').format(f"{x:.1f}", high + 28, at + 1))
    parts.append(
        Markup('<text x="0" y="20" class="soft">{}</text><text x="0" y="{}" class="soft">0</text>').format(
            f"{largest:.3g}", high + 10
        )
    )
    return _svg(high + 36, f"Weights of {count} micro-batches: used, and those that fit", parts)


def _axis(scale: Scale) -> Markup:
    lines = [
        Markup(
            '<path class="grid" d="M{} {}H{}"/><text class="soft" x="{}" y="{}" text-anchor="end">10{}</text>'
        ).format(
            _LEFT,
            _y(scale, 10.0**power),
            _WIDE,
            _LEFT - 8,
            f"{float(_y(scale, 10.0**power)) + 4:.1f}",
            _superscript(power),
        )
        for power in scale.ticks
    ]
    return Markup("").join(lines)


def _superscript(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _y(scale: Scale, value: float) -> str:
    return f"{_HIGH - _FOOT - scale.at(value):.1f}"


def _path(kind: str, drawn: str) -> Markup:
    return Markup('<path class="{}" d="{}"/>').format(kind, drawn) if drawn else Markup("")


def _svg(high: float, label: str, parts: Iterable[Markup]) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" class="chart">{}</svg>').format(
        _WIDE, high, escape(label), Markup("").join(parts)
    )
