"""Checks of the built-ins' own arguments, as sentences."""

from __future__ import annotations

from gaverify.errors import ProblemError, nearest


def at_least(least: int, **arguments: int) -> None:
    """Raises `ProblemError` for the first argument below `least`."""
    for name, value in arguments.items():
        if value < least:
            raise ProblemError(f"model argument `{name}` must be at least {least}, got {value}")


def a_probability(**arguments: float) -> None:
    """Raises `ProblemError` for the first argument outside 0 ≤ p < 1."""
    for name, value in arguments.items():
        if not 0 <= value < 1:
            raise ProblemError(f"model argument `{name}` must be at least 0 and below 1, got {value}")


def one_of(choices: tuple[str, ...], **arguments: str) -> None:
    """Raises `ProblemError` for the first argument that is none of the words."""
    for name, value in arguments.items():
        if value not in choices:
            near = nearest(value, choices)
            advice = f'; did you mean "{near}"?' if near else ""
            words = " or ".join(f'"{choice}"' for choice in choices)
            raise ProblemError(f'model argument `{name}` must be {words}, got "{value}"{advice}')


def divides(**arguments: int) -> None:
    """Raises `ProblemError` unless the first argument divides the second, as heads divide a width."""
    (part, count), (total, size) = arguments.items()
    if count < 1 or size % count:
        raise ProblemError(f"model argument `{part}` = {count} must divide `{total}` = {size}")
