"""Entries that accept a known divergence: what a spec, `pyproject.toml` or an audit's options say, checked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from gaverify.errors import SpecError, nearest, unknown_key
from gaverify.spec.kinds import Kind
from gaverify.text_files import table_of_file

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


_LISTS = ("paths", "outputs", "exclude", "select", "ignore")
DEFAULTS = ("steps", "weighting", "device", "timeout", "time_limit")
"""Fields of specs that a project may set for all of them."""


def _project(table: dict[str, Any], file: Path) -> Project:
    keys = ("accept", "strict", *_LISTS, *DEFAULTS)
    values = {key.replace("-", "_"): value for key, value in table.items()}
    problems = [f"$.tool.gaverify.{key}: {unknown_key(key, keys)}" for key in values if key not in keys]
    entries = read_entries(values.get("accept", []), "$.tool.gaverify.accept", problems)
    if not isinstance(values.get("strict", False), bool):
        problems.append("$.tool.gaverify.strict: must be true or false")
    lists = {key: values.get(key, []) for key in _LISTS}
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


_LIST_EXAMPLES = {
    "paths": '"configs/"',
    "outputs": '"gaverify.html"',
    "exclude": '"configs/slow/*"',
    "select": '"GAV4"',
    "ignore": '"GAV301"',
}


def code_problems(codes: Iterable[str]) -> list[str]:
    """Returns a sentence for each word that begins no rule's code."""
    return [
        f"no rule's code begins with `{code}`; `gaverify rules` lists all, such as GAV301 or GAV4 for a group"
        for code in codes
        if not any(rule_code.startswith(code) for rule_code in rule_codes())
    ]
