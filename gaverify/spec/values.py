"""The kinds of values that options take, and entries that accept a known divergence, each with what it must be."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from gaverify.errors import SpecError, nearest, unknown_key
from gaverify.text_files import table_of_file

# The kinds of values that options take: what each must be, and what the words of a command line spell.


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


# Entries that accept a known divergence: what a spec, `pyproject.toml` or an audit's options say, checked.


EXAMPLE = '{ code = "GAV101", location = "backbone.*", reason = "ghost batch norm on purpose" }'
ENTRIES = Kind(
    "a list of tables with `code`, `location` and `reason`",
    "",
    lambda value: all(isinstance(entry, Accept) for entry in value),
)
_KEYS = {"code": str, "location": str, "reason": str, "suspected": bool}
_UNEXPLAINED = "GAV000"


@dataclass(frozen=True)
class Accept:
    """A divergence that is known and wanted.

    `location` is a pattern (`*`, `?`, `[…]`) for the module's path (`(root)` for the model itself), the file or
    `file:line`; `suspected` accepts a cause that no control run proved, too.
    """

    code: str
    location: str
    reason: str
    suspected: bool = False

    def __str__(self) -> str:
        """How sentences call the entry."""
        return f"{self.code} at `{self.location}`"


class Project(NamedTuple):
    """What `[tool.gaverify]` in `pyproject.toml` says; empty where there is none.

    Args:
        accept: Entries for every spec and audit.
        strict: Stale entries make the exit code 1.
        source: The file.
        paths: What `gaverify run` verifies where nothing is named, from the current folder.
        outputs: The reports that it writes where none is asked for.
        exclude: Patterns of files and folders that it passes over in folders.
        select: Beginnings of the codes of notes that are shown; empty for all.
        ignore: Beginnings of the codes of notes that are not shown.
        defaults: Fields of specs that leave them out.
    """

    accept: tuple[Accept, ...] = ()
    strict: bool = False
    source: str = ""
    paths: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = MappingProxyType({})

    def shows(self, code: str) -> bool:
        """Whether a note of this code is shown; a fault always is."""
        # An empty tuple would match no code, the empty text matches all.
        return code.startswith(self.select or "") and not (self.ignore and code.startswith(self.ignore))


@cache
def rule_codes() -> frozenset[str]:
    """Returns the codes of all rules: each has a page of its name, which need not be read for that."""
    pages = resources("gaverify") / "rules" / "pages"
    return frozenset(page.name.removesuffix(".md") for page in pages.iterdir() if page.name.endswith(".md"))


def read_entries(value: Any, place: str, problems: list[str]) -> tuple[Accept, ...]:
    """Returns the entries of a list of tables.

    Args:
        value: The list.
        place: Where it stands, for messages.
        problems: Gets a sentence for everything that is wrong; then there are no entries.
    """
    sentences = [f"{place}{where}: {text}" for where, text in _problems(value)]
    problems += sentences
    return () if sentences else tuple(Accept(**entry) for entry in value)


def _problems(value: Any) -> Iterator[tuple[str, str]]:
    """Yields (place below the list, sentence)."""
    if not isinstance(value, list | tuple):
        yield "", f"must be a list of tables; write `accept = [{EXAMPLE}]`"
        return
    for at, entry in enumerate(value):
        if not isinstance(entry, dict):
            yield f"[{at}]", f"must be a table; write `{EXAMPLE}`"
            continue
        yield from ((f"[{at}]{place}", text) for place, text in _entry_problems(entry))


def _entry_problems(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key in entry.keys() - _KEYS.keys():
        yield f".{key}", unknown_key(key, _KEYS)
    for key, kind in _KEYS.items():
        value = entry.get(key)
        if key not in entry:
            if key != "suspected":
                yield "", f"`{key}` is missing; write `{EXAMPLE}`"
        elif not isinstance(value, kind) or (isinstance(value, str) and not value.strip()):
            yield f".{key}", "must be true or false" if kind is bool else "must be text that is not empty"
    code = entry.get("code")
    if isinstance(code, str) and code.strip():
        if not re.fullmatch(r"GAV\d{3}", code):
            yield ".code", f"must be a code such as GAV101, got `{code}`; `gaverify rules` lists all"
        # A code that no rule has would never accept anything, and nobody would notice.
        elif code not in rule_codes():
            near = nearest(code, sorted(rule_codes()))
            yield ".code", f"there is no rule {code}; did you mean {near}? `gaverify rules` lists all"
        elif code == _UNEXPLAINED:
            yield ".code", f"{code} means that no cause was found, and an unexplained divergence cannot be accepted"


def project_settings(start: Path | None = None) -> Project:
    """Returns what the nearest `pyproject.toml` with a table `[tool.gaverify]` says, from a folder upwards.

    Raises:
        SpecError: The table is wrong, or a file on the way is not TOML.
    """
    # Resolved: the parents of a relative path end at `.`.
    folder = (start or Path.cwd()).resolve()
    # A `pyproject.toml` without the table does not end the search: a project may lie in another one.
    for candidate in (folder, *folder.parents):
        file = candidate / "pyproject.toml"
        if file.is_file():
            tools = table_of_file(file, "pyproject.toml").get("tool")
            table = tools.get("gaverify") if isinstance(tools, dict) else None
            if isinstance(table, dict):
                return _project(table, file)
    return Project()


_LIST_EXAMPLES = {
    "paths": '"configs/"',
    "outputs": '"gaverify.html"',
    "exclude": '"configs/slow/*"',
    "select": '"GAV4"',
    "ignore": '"GAV301"',
}
"""The keys whose values are lists of texts, each with an example."""
DEFAULTS = ("steps", "weighting", "device", "timeout", "time_limit")
"""Fields of specs that a project may set for all of them."""


def _project(table: dict[str, Any], file: Path) -> Project:
    keys = ("accept", "strict", *_LIST_EXAMPLES, *DEFAULTS)
    values = {key.replace("-", "_"): value for key, value in table.items()}
    problems = [f"$.tool.gaverify.{key}: {unknown_key(key, keys)}" for key in values if key not in keys]
    entries = read_entries(values.get("accept", []), "$.tool.gaverify.accept", problems)
    if not isinstance(values.get("strict", False), bool):
        problems.append("$.tool.gaverify.strict: must be true or false")
    lists = {key: values.get(key, []) for key in _LIST_EXAMPLES}
    for key, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            problems.append(f"$.tool.gaverify.{key}: must be a list of texts; write `{key} = [{_LIST_EXAMPLES[key]}]`")
        elif key in ("select", "ignore"):
            problems += [f"$.tool.gaverify.{key}: {text}" for text in code_problems(value)]
    if problems:
        raise SpecError(problems, str(file))
    folder = file.parent
    patterns = {key: tuple(value) for key, value in lists.items()}
    for key in ("paths", "outputs"):  # they stand in the project's file, whatever folder a call starts in
        patterns[key] = tuple(os.path.relpath(folder / path) for path in patterns[key])
    defaults = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in DEFAULTS
    }
    return Project(entries, values.get("strict", False), str(file), **patterns, defaults=defaults)


def code_problems(codes: Iterable[str]) -> list[str]:
    """Returns a sentence for each word that begins no rule's code."""
    return [
        f"no rule's code begins with `{code}`; `gaverify rules` lists all, such as GAV301 or GAV4 for a group"
        for code in codes
        if not any(rule_code.startswith(code) for rule_code in rule_codes())
    ]
