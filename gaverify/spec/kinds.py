"""The kinds of values that options take: what each must be, and what the words of a command line spell."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_DEVICE = re.compile(r"cpu|(cuda|xpu)(:\d+)?|mps|auto")


class Kind(NamedTuple):
    """What a value has to be.

    Args:
        must: Completes "must be …".
        metavar: How the help page shows it.
        fits: Whether a value is one; `"4"` and `true` are no numbers, although Python could read them so.
        read: Returns what a word of the command line spells; the word where it spells nothing.
        words: Those that completion offers.
    """

    must: str
    metavar: str
    fits: Callable[[Any], bool]
    read: Callable[[str], Any] = str
    words: tuple[str, ...] = ()


def read_number(word: str) -> int | float | str:
    """Returns the number that the word spells, or the word."""
    if not _NUMBER.fullmatch(word):
        return word
    try:
        return int(word)
    except ValueError:  # it has a point or an exponent
        return float(word)


def read_value(word: str) -> str | int | float | bool:
    """Returns the value of a model argument: true or false, a number, or text; quotes make anything text."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if len(word) >= 2 and word[0] == word[-1] and word[0] in "'\"":
        return word[1:-1]
    return read_number(word)


def _read_numbers(word: str) -> tuple[int | float | str, ...] | str:
    """`3,32,32` as numbers; a word without digits (`uniform`) as it is."""
    parts = [part.strip() for part in word.strip().strip("()[]").split(",")]
    if parts and not parts[-1]:
        parts.pop()  # `16,`, as Python writes a tuple of one
    numbers = tuple(read_number(part) for part in parts)
    return word if not numbers or any(isinstance(number, str) for number in numbers) else numbers


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold."""
    return isinstance(value, float | int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def whole(least: int, metavar: str) -> Kind:
    """Whole numbers from `least` on."""
    must = f"a whole number of at least {least}"
    return Kind(must, metavar, lambda value: _is_whole(value) and value >= least, read_number)


def above_zero(what: str, metavar: str) -> Kind:
    """Numbers above 0."""
    return Kind(f"{what} above 0", metavar, lambda value: _is_number(value) and value > 0, read_number)


def text(must: str, metavar: str) -> Kind:
    """Text that is not empty."""
    return Kind(must, metavar, lambda value: isinstance(value, str) and bool(value))


def tolerance(metavar: str) -> Kind:
    """Numbers from 0 on."""
    return Kind("a number of at least 0", metavar, lambda value: _is_number(value) and value >= 0, read_number)


def one_of(*words: str) -> Kind:
    """Some words."""
    *most, last = map(json.dumps, words)
    return Kind(f"{', '.join(most)} or {last}", "|".join(words), lambda value: value in words, words=words)


INTEGER = Kind("a whole number", "N", _is_whole, read_number)
SEED = Kind(
    "a whole number from 0 to 2^63 − 1", "N", lambda value: _is_whole(value) and 0 <= value < 2**63, read_number
)
SECONDS = above_zero("a number of seconds", "SECONDS")
FLAG = Kind("true or false", "", lambda value: isinstance(value, bool))
SHAPE = Kind(
    "the sizes of one sample, whole numbers of at least 1",
    "N,N,…",
    lambda value: isinstance(value, tuple) and bool(value) and all(_is_whole(size) and size >= 1 for size in value),
    _read_numbers,
)
DEVICE = Kind(
    '"cpu", "cuda", "cuda:N", "xpu", "mps" or "auto"',
    "cpu|cuda|cuda:N|xpu|mps|auto",
    lambda value: isinstance(value, str) and _DEVICE.fullmatch(value) is not None,
    words=("cpu", "cuda", "xpu", "mps", "auto"),
)
ARGUMENT = Kind("text, a number or true/false", "NAME=VALUE", lambda value: isinstance(value, str | int | float))
_RECIPES = one_of("uniform", "samples", "tokens", "none")
WEIGHTING = Kind(
    f"{_RECIPES.must}, or one number per micro-batch",
    f"{_RECIPES.metavar}|W,W,…",
    lambda value: all(map(_is_number, value)) if isinstance(value, tuple) else _RECIPES.fits(value),
    _read_numbers,
    _RECIPES.words,
)
