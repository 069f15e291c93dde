"""The kinds of values that options take: what each must be, and what a word or a value of a file stands for."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from typing import Any, Literal

_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
LONGEST_TIME = 2e6  # seconds: the system waits for a C int of milliseconds at most
_DEVICE = re.compile(r"cpu|(cuda|xpu)(:\d+)?|mps|auto")


def _load(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Kind:
    """A kind of values for options, and how people write them.

    Args:
        must: Completes "must be …".
        metavar: How the help page shows it; empty: a flag, which takes no word.
        fits: Whether a value is one; `"4"` and `true` are no numbers, although Python could read them so.
        read: Returns what a word of the command line spells; the word where it spells nothing.
        load: Returns what a value of a TOML file stands for.
        words: The words that completion offers.
        completes: The kind of paths or names that completion offers besides words.
        repeats: The command line has any number of words, which `read` is given together.
        entry: The kind of each value of a table; None: the value is no table.
    """

    must: str
    metavar: str
    fits: Callable[[Any], bool]
    read: Callable[[Any], Any] = str
    load: Callable[[Any], Any] = _load
    words: tuple[str, ...] = ()
    completes: Literal["", "file", "dir", "model"] = ""
    repeats: bool = False
    entry: Kind | None = None


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


def _load_day(value: Any) -> Any:
    # TOML reads an unquoted day as a date, which no JSON document could hold
    return value.isoformat() if type(value) is date else value


def _is_day(value: Any) -> bool:
    if not isinstance(value, str) or not re.fullmatch(r"\d{4}-\d\d-\d\d", value):
        return False
    try:
        date.fromisoformat(value)
    except ValueError:
        return False
    return True


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def whole(least: int, metavar: str) -> Kind:
    """Whole numbers from `least` on."""
    must = f"a whole number of at least {least}"
    return Kind(must, metavar, lambda value: _is_whole(value) and value >= least, read_number)


def seeds(bits: int) -> Kind:
    """Whole numbers that a generator of random numbers takes."""
    must = f"a whole number from 0 to 2^{bits} − 1"
    return Kind(must, "N", lambda value: _is_whole(value) and 0 <= value < 2**bits, read_number)


def sizes(must: str, metavar: str) -> Kind:
    """Several whole numbers of at least 1, separated by commas."""
    return Kind(
        must,
        metavar,
        lambda value: isinstance(value, tuple) and bool(value) and all(_is_whole(size) and size >= 1 for size in value),
        _read_numbers,
    )


def above_zero(what: str, metavar: str, most: float) -> Kind:
    """Numbers above 0, none so large that the system or a dtype overflows."""
    must = f"{what} above 0 and at most {most:g}"
    return Kind(must, metavar, lambda value: _is_number(value) and 0 < value <= most, read_number)


def text(must: str, metavar: str, completes: Literal["", "file", "dir", "model"] = "") -> Kind:
    """Text that is not empty."""
    return Kind(must, metavar, _is_text, completes=completes)


def tolerance(metavar: str) -> Kind:
    """Numbers from 0 on."""
    return Kind("a number of at least 0", metavar, lambda value: _is_number(value) and value >= 0, read_number)


def one_of(*words: str) -> Kind:
    """Some words."""
    *most, last = map(json.dumps, words)
    return Kind(f"{', '.join(most)} or {last}", "|".join(words), lambda value: value in words, words=words)


def several_of(*words: str) -> Kind:
    """Any of some words, repeatable or separated by commas."""
    return replace(
        one_of(*words),
        fits=lambda value: isinstance(value, tuple) and set(value) <= set(words),
        read=lambda given: tuple(part.strip() for word in given for part in word.split(",")),
        repeats=True,
    )


def table(metavar: str, entry: Kind, is_name: Callable[[str], object] = bool) -> Kind:
    """Names and values: `NAME=VALUE`, repeatable, or a table of a file."""

    def read(words: tuple[str, ...]) -> dict[str, Any] | str:
        pairs: dict[str, Any] = {}
        for word in words:
            name, sign, value = word.partition("=")
            # A later value would win without a word, and the run would not be the one that was meant.
            if not sign or not is_name(name) or name in pairs:
                return word
            pairs[name] = entry.read(value)
        return pairs

    return Kind(
        "a table of names and values",
        metavar,
        lambda value: isinstance(value, Mapping) and all(map(is_name, value)),
        read,
        lambda value: {name: entry.load(item) for name, item in value.items()} if isinstance(value, dict) else value,
        repeats=True,
        entry=entry,
    )


def _load_word(value: Any) -> Any:
    """The word that a text, a number or a flag of a file stands for; other values as they are."""
    if isinstance(value, bool):
        return str(value).lower()  # TOML writes `true`, Python `True`
    return str(value) if isinstance(value, int | float) else value


def _split_words(word: str) -> tuple[str, ...] | str:
    """The arguments that a word holds, as a shell would split it; the word where a quote is not closed."""
    try:
        return tuple(shlex.split(word))
    except ValueError:
        return word


def _load_words(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_load_word, value))
    word = _load_word(value)
    return _split_words(word) if isinstance(word, str) else word


def _are_words(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(word, str) for word in value)


TEXT = Kind("text that is not empty", "TEXT", lambda value: isinstance(value, str) and bool(value.strip()))
TEXTS = Kind("a list of texts", "", lambda value: isinstance(value, tuple) and all(map(_is_text, value)))
INTEGER = Kind("a whole number", "N", _is_whole, read_number)
SECONDS = above_zero("a number of seconds", "SECONDS", LONGEST_TIME)
FLAG = Kind("true or false", "", lambda value: isinstance(value, bool))
SHAPE = sizes("the sizes of one sample, whole numbers of at least 1", "N,N,…")
DATE = Kind("a day such as 2027-03-01", "DAY", _is_day, load=_load_day)
DEVICE = Kind(
    '"cpu", "cuda", "cuda:N", "xpu", "mps" or "auto"',
    "cpu|cuda|cuda:N|xpu|mps|auto",
    lambda value: isinstance(value, str) and _DEVICE.fullmatch(value) is not None,
    words=("cpu", "cuda", "xpu", "mps", "auto"),
)
MODEL_ARGUMENTS = table(
    "NAME=VALUE",
    Kind("text, a number or true/false", "", lambda value: isinstance(value, str | int | float), read_value),
    str.isidentifier,
)
WORD = Kind(
    "text, a number or true/false",
    "",
    lambda value: isinstance(value, str) and "\0" not in value,  # no variable of a process may hold a zero byte
    load=_load_word,
)
_RECIPES = one_of("uniform", "samples", "tokens", "none")
WEIGHTING = Kind(
    f"{_RECIPES.must}, or one number per micro-batch",
    f"{_RECIPES.metavar}|W,W,…",
    lambda value: all(map(_is_number, value)) if isinstance(value, tuple) else _RECIPES.fits(value),
    _read_numbers,
    words=_RECIPES.words,
)
QUOTED = Kind("arguments as in a shell, each quote closed", '"ARGS"', _are_words, _split_words, _load_words)
ARGUMENTS = replace(QUOTED, metavar="[-- ARGS]", read=tuple, repeats=True)
COMMAND = Kind(
    "a command as in a shell",
    '"WORDS"',
    lambda value: _are_words(value) and bool(value),
    lambda word: _split_words(word) or word,
    lambda value: _load_words(value) or value,
)
