"""The table `[tool.gaverify]` of `pyproject.toml`, which holds for all specs and audits of a project."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gaverify.errors import SpecError
from gaverify.spec.entries import Accept, code_problems, read_entries
from gaverify.spec.fields import ENTRIES, OPTIONS
from gaverify.spec.options import explain_values, option, options_of, read_table
from gaverify.spec.values import FLAG, TEXTS
from gaverify.text_files import table_of_file

_DEFAULTS = ("steps", "weighting", "device", "timeout", "time_limit")
"""Fields of specs that a project may set for all of them."""
_PLACE = "$.tool.gaverify"


@dataclass(frozen=True)
class Project:
    """The contents of `[tool.gaverify]` in `pyproject.toml`; empty where there is none."""

    accept: tuple[Accept, ...] = option(ENTRIES, "", ())
    """Entries for every spec and audit."""
    strict: bool = option(FLAG, "", False, True)
    """Stale entries make the exit code 1, and skipped specs 2."""
    source: str = ""
    """The file."""
    paths: tuple[str, ...] = option(TEXTS, "", (), ["configs/"])
    """Paths that `gaverify run` verifies where none is named, relative to the current folder."""
    outputs: tuple[str, ...] = option(TEXTS, "", (), ["gaverify.html"])
    """The reports that it writes where none is asked for."""
    exclude: tuple[str, ...] = option(TEXTS, "", (), ["configs/slow/*"])
    """Patterns of files and folders that it passes over in folders."""
    select: tuple[str, ...] = option(TEXTS, "", (), ["GAV4"])
    """Beginnings of the codes of notes that are shown; empty for all."""
    ignore: tuple[str, ...] = option(TEXTS, "", (), ["GAV301"])
    """Beginnings of the codes of notes that are not shown."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of specs that leave them out."""

    def shows(self, code: str) -> bool:
        """Whether a note of this code is shown; a fault always is."""
        # An empty tuple would match no code, the empty text matches all.
        return code.startswith(self.select or "") and not (self.ignore and code.startswith(self.ignore))


_OPTIONS = options_of(Project)


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


def _project(table: dict[str, Any], file: Path) -> Project:
    problems: list[str] = []
    values, places = read_table({**_OPTIONS, **{name: OPTIONS[name] for name in _DEFAULTS}}, table, problems, _PLACE)
    # Each spec that leaves them out is checked with them.
    defaults = {name: values.pop(name) for name in _DEFAULTS if name in values}
    values["accept"] = read_entries(values.get("accept", ()), places["accept"], problems)
    problems += explain_values(_OPTIONS, values, places)
    for key in ("select", "ignore"):
        if TEXTS.fits(values.get(key)):
            problems += [f"{places[key]}: {text}" for text in code_problems(values[key])]
    if problems:
        raise SpecError(problems, str(file))
    # Paths stand in the project's file, whatever folder a call starts in.
    within: dict[str, Any] = {
        key: tuple(os.path.relpath(file.parent / path) for path in values.get(key, ())) for key in ("paths", "outputs")
    }
    return Project(**{**values, **within}, source=str(file), defaults=defaults)
