"""TOML files and the command line's overrides become specs; every problem is reported, not the first."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gaverify.errors import SpecError, nearest
from gaverify.launched import read_launcher
from gaverify.spec.entries import read_entries
from gaverify.spec.fields import OPTIONS, Spec, explain_spec, join_problems
from gaverify.spec.options import read_table
from gaverify.spec.project import Project
from gaverify.text_files import table_of_file

_OTHER_COMMANDS = {
    ".py": "is Python, not a spec; verify a model with `--model {file}:factory`, a script with `gaverify audit {file}`",
    ".json": "is JSON, not a spec; `gaverify report {file}` shows a saved report",
}
"""Files that people name in place of a spec, by their endings, and the command that takes each."""

_ONLY_WITH = (
    ("trace", ("lr",), "has an effect only with a trace; add `--trace`, or leave it out"),
    ("ranks", ("engine",), "has an effect only on several ranks; add `--ranks 2`, or leave it out"),
)
"""Options that nothing reads unless a field is set; who types one expects that it counts."""


def parse_spec(
    table: Mapping[str, Any],
    source: str,
    overrides: Mapping[str, Any] | None = None,
    project: Project | None = None,
) -> Spec:
    """Returns the spec that a TOML table and the command line's overrides describe.

    Args:
        table: Keys as in `Spec`, with hyphens or underscores.
        source: The file that the table stands in, for messages.
        overrides: Fields of `Spec` that win over the table; `None` values are left out, `model_args` are merged.
        project: Its defaults stand for fields that neither names.

    Raises:
        SpecError: Anything is wrong; all problems at once, `$.steps` for the table and `--steps` for overrides.
    """
    in_file, on_line, spec = _check(table, overrides or {}, project or Project())
    if spec is None:
        raise join_problems([(source, in_file), ("command line", on_line)])
    return spec


def load_specs(
    paths: Iterable[str | Path], overrides: Mapping[str, Any] | None = None
) -> tuple[tuple[Path, Spec], ...]:
    """Returns the specs of TOML files and of folders of TOML files (sorted by name), each file once.

    Raises:
        SpecError: All problems of all files at once: missing, unreadable, not TOML, or wrong as in `parse_spec`.
    """
    entries = read_specs(paths, overrides)
    if broken := _list_problems(entries):
        raise join_problems(broken)
    return tuple((file, entry) for file, entry in entries if isinstance(entry, Spec))


def read_specs(
    paths: Iterable[str | Path],
    overrides: Mapping[str, Any] | None = None,
    project: Project | None = None,
    exclude: Sequence[str] = (),
) -> tuple[tuple[Path, Spec | SpecError], ...]:
    """Returns, for each TOML file and each of a folder (sorted by name, each once), its spec or what is wrong with it.

    Of the folders in a folder, TOML files that are meant as specs are taken; those that a pattern of `exclude` fits are
    passed over. A `model = "file.py:factory"`, `data` or `pretrained` that exists beside its spec is resolved against
    the spec's folder.

    Raises:
        SpecError: An override is wrong, so no spec can run; with all problems of all files.
    """
    entries: list[tuple[Path, Spec | SpecError]] = []
    # In the order of their arrival, which a set would not keep.
    on_line: dict[str, None] = {}  # an override is wrong in every file, but is reported once
    nothing = "the folder holds no *.toml file; `gaverify init` writes one"
    for file, missing in toml_files(paths, nothing, exclude, deep=True):
        table, unreadable = ({}, missing) if missing else _read(file)
        in_file, from_options, spec = (
            ([unreadable], [], None) if unreadable else _check(table, overrides or {}, project or Project())
        )
        entries.append((file, spec or SpecError(in_file, str(file))))
        on_line.update(dict.fromkeys(from_options))
    if on_line:
        raise join_problems([*_list_problems(entries), ("command line", list(on_line))])
    return tuple(entries)


def _list_problems(entries: Iterable[tuple[Path, Spec | SpecError]]) -> list[tuple[str, list[str]]]:
    """The files whose specs are wrong, each with its problems."""
    return [(str(file), list(entry.problems)) for file, entry in entries if isinstance(entry, SpecError)]


def toml_files(
    paths: Iterable[str | Path], nothing: str, exclude: Sequence[str] = (), *, deep: bool = False
) -> Iterator[tuple[Path, str]]:
    """Yields the files that are named and the TOML files of folders that are, each once, with "" or why there is none.

    Args:
        paths: Files and folders.
        nothing: The reason that is given for a folder that holds none.
        exclude: Patterns of paths, or of names of files and folders, that are passed over in folders.
        deep: Take specs of folders in folders, too.
    """
    visited = set()
    for path in map(Path, paths):
        files = [path]
        if path.is_dir():
            # Nobody means a project's settings when naming its folder.
            exclude = [*exclude, "pyproject.toml"]
            files = [file for file in sorted(path.glob("*.toml")) if not _is_excluded(file, path, exclude)]
            files += _deeper(path, path, exclude) if deep else []
        if not files:
            yield path, nothing
        for file in files:
            real = os.path.realpath(file)  # Path.resolve raises on links that lead to each other
            if real not in visited:
                visited.add(real)
                yield file, "" if os.path.exists(file) else "there is no such file or folder"


def _deeper(folder: Path, top: Path, exclude: Sequence[str]) -> list[Path]:
    """Returns the specs in the folders of a folder; those that are hidden, or environments of Python, hold none."""
    specs: list[Path] = []
    for inner in sorted(folder.iterdir()):
        skips = inner.name.startswith((".", "__")) or inner.name == "node_modules" or (inner / "pyvenv.cfg").exists()
        if inner.is_symlink() or not inner.is_dir() or skips or _is_excluded(inner, top, exclude):
            continue
        files = [file for file in sorted(inner.glob("*.toml")) if not _is_excluded(file, top, exclude)]
        specs += [*filter(is_meant_as_spec, files), *_deeper(inner, top, exclude)]
    return specs


def _is_excluded(path: Path, top: Path, exclude: Sequence[str]) -> bool:
    within = path.relative_to(top).as_posix()
    names = (path.name, within, path.as_posix())
    return any(fnmatchcase(name, pattern.rstrip("/")) for pattern in exclude for name in names)


def is_meant_as_spec(file: Path) -> bool:
    """Whether a file of a folder is meant as a spec: a broken one is, and tells so; another tool's settings are not.

    The options of `gaverify audit` share keys with specs (`steps`, `seed`) and name a script or module in place of a
    model. A table whose only known key is a misspelt `model` is a spec: dropped in silence it would look as if it had
    passed.
    """
    if file.name == "pyproject.toml":
        return False
    try:
        keys = {key.replace("-", "_") for key in table_of_file(file, "spec")}
    except SpecError:
        return True
    # The options of an audit beside the specs are meant for another command.
    if keys & {"script", "module"} and "model" not in keys:
        return False
    return not keys or not keys.isdisjoint(OPTIONS) or bool(nearest("model", keys))


def _read(file: Path) -> tuple[dict[str, Any], str]:
    """Returns the table, with paths resolved, and "" or the reason why there is none."""
    if file.suffix in _OTHER_COMMANDS:
        return {}, _OTHER_COMMANDS[file.suffix].format(file=file)
    try:
        table = table_of_file(file, "spec; `gaverify init` writes one")
    except SpecError as error:
        return {}, error.problems[0]
    if "model" not in table and not table.keys().isdisjoint(("script", "module")):
        return {}, "holds the options of an audit, not a spec; run it with `gaverify audit`"
    return _resolve(table, file.parent), ""


def _resolve(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the table with the paths that exist beside the spec; `os.path` as it takes any string for a path."""
    resolved = dict(table)
    for key in ("data", "pretrained"):
        value = table.get(key)
        if isinstance(value, str) and value and os.path.exists(folder / value):
            resolved[key] = str(folder / value)
    model = table.get("model")
    if isinstance(model, str):
        file, colon, factory = model.rpartition(":")
        if colon and file.endswith(".py") and os.path.exists(folder / file):
            resolved["model"] = f"{folder / file}:{factory}"
    return resolved


def _check(
    table: Mapping[str, Any], overrides: Mapping[str, Any], project: Project
) -> tuple[list[str], list[str], Spec | None]:
    """Returns the problems of the table, those of the overrides, and the spec if there are none."""
    in_file: list[str] = []
    on_line: list[str] = []
    options = {field: value for field, value in overrides.items() if value is not None}
    in_table, places = read_table(OPTIONS, table, in_file)
    # The nearer wins: command line, then the spec, then the project.
    values = {**project.defaults, **in_table, **options}
    stated, arguments = in_table.get("model_args"), options.get("model_args")
    if isinstance(stated, Mapping) and isinstance(arguments, Mapping):
        values["model_args"] = {**stated, **arguments}
        del options["model_args"]  # a wrong one can only be the table's: words spell right ones
    values["accept"] = read_entries(values.get("accept", ()), places["accept"], in_file)
    places |= {name: f"$.tool.gaverify.{name} of {project.source}" for name in project.defaults if name not in in_table}
    places |= {name: OPTIONS[name].flag for name in options}
    for sentence in explain_spec(values, places):
        (on_line if sentence.startswith("--") else in_file).append(sentence)
    for needed, fields, reason in _ONLY_WITH:
        # Under torchrun there are ranks without the option.
        started = needed == "ranks" and read_launcher() is not None
        if not (table.get(needed) or options.get(needed) or started):  # `--no-trace` over a spec that traces is meant
            on_line += [f"{OPTIONS[field].flag}: {reason}" for field in fields if field in options]
    return in_file, on_line, None if in_file or on_line else Spec(**values)
