"""Amounts of memory, time and things, read from words and written as words."""

from __future__ import annotations

import math
import re

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(word: str) -> int:
    """Returns the number of bytes that `24GB` (powers of 1000) or `24GiB` (powers of 1024) names.

    Raises:
        ValueError: The sentence says what to write instead.
    """
    match = _AMOUNT.fullmatch(word)
    if match is None:
        raise ValueError(f"must be an amount of memory with its unit, got `{word}`; write `24GB` or `24GiB`")
    number, unit = match[1], match[2].lower()
    if unit not in _UNITS:
        lead = "has no unit" if not unit else f"has the unknown unit `{match[2]}`"
        letter = unit[0].upper() if unit and unit[0] in "kmgt" else "G"
        raise ValueError(f"{lead}, got `{word}`; write `{number}{_decimal(letter)}` or `{number}{letter.upper()}iB`")
    amount = int(float(number) * _UNITS[unit])
    if amount < 1:
        raise ValueError(f"must be more than nothing, got `{word}`; write `24GB` or `24GiB`")
    return amount


def _decimal(letter: str) -> str:
    return "kB" if letter == "K" else f"{letter}B"


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
