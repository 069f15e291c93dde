"""Numbers: amounts of memory, time and things in words, and how documents write those that may be NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

# Amounts of memory, time and things, written as words.


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


# Numbers that may be NaN or infinite, and how documents write them.


class _NullInJson:
    """Tells pydantic that null stands for a number; records load pydantic only when a document is made or read."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(
            lambda number: math.nan if number is None else number,
            handler(source),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda number: number if math.isfinite(number) else None
            ),
        )

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        description = "A finite number; null stands for NaN or an infinity."
        return {"anyOf": [{"type": "number"}, {"type": "null"}], "description": description}


Number = Annotated[float, _NullInJson()]
"""A float that may be NaN or infinite. JSON has neither: null is written for both, and read as NaN."""
