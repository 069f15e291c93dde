"""Amounts of memory, time and things, written as words."""

from __future__ import annotations

import math


def bytes_text(amount: float) -> str:
    """Returns an amount with three digits in powers of 1000: `516 B`, `1.23 MB`."""
    sign = "-" if amount < 0 else ""
    size = abs(amount)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{sign}{_digits(size) if unit != 'B' else f'{size:.0f}'} {unit}"
        size /= 1000
    return f"{sign}{_digits(size)} TB"


def seconds_text(seconds: float) -> str:
    """Returns a time with three digits: `850 µs`, `1.23 ms`, `12.3 s`."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds)} s"


def count_text(count: int, noun: str) -> str:
    """Returns `1 thread`, `567,434 parameters`, `2 passes`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def _digits(value: float) -> str:
    """Three significant digits without an exponent: `1.23`, `12.3`, `123`; a fourth place at most for the tiniest."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.2e}")  # first, since 999.96 has one place less than it seems
    places = max(0, 2 - math.floor(math.log10(rounded) + 1e-12))
    return f"{rounded:.{min(places, 4)}f}"
