"""TOML files and the command line's overrides become specs; every problem is reported, not the first."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gaverify.errors import SpecError, nearest
from gaverify.launched import launched
from gaverify.spec.accepting import entry_problems
from gaverify.spec.fields import Spec, conflicts, joined, option_name, sentence
from gaverify.text_files import text_of_file

_OTHER_COMMANDS = {
    ".py": "is Python, not a spec; verify a model with `--model {file}:factory`, a script with `gaverify audit {file}`",
    ".json": "is JSON, not a spec; `gaverify report {file}` shows a saved report",
}
"""What people name in place of a spec, by its ending, and the command that takes it."""

_ONLY_WITH = (
    ("trace", ("optimizer", "lr"), "belongs to the step that a trace shows; add `--trace`, or leave it out"),
    ("ranks", ("engine", "timeout"), "belongs to a run on several ranks; add `--ranks 2`, or leave it out"),
)
"""Options that nothing reads unless a field is set; who types one expects that it counts."""


def parse_spec(table: Mapping[str, Any], source: str, overrides: Mapping[str, Any] | None = None) -> Spec:
    """Returns the spec that a TOML table and the command line's overrides describe.

    Args:
        table: Keys as in `Spec`, with hyphens or underscores.
        source: The file that the table stands in, for messages.
        overrides: Fields of `Spec` that win over the table; `None` values are left out, `model_args` are merged.

    Raises:
        SpecError: Anything is wrong; all problems at once, `$.steps` for the table and `--steps` for overrides.
    """
    in_file, on_line, spec = _check(table, overrides or {})
    if spec is None:
        raise joined([(source, in_file), ("command line", on_line)])
    return spec


def load_specs(
    paths: Iterable[str | Path], overrides: Mapping[str, Any] | None = None
) -> tuple[tuple[Path, Spec], ...]:
    """Returns the specs of TOML files and of folders of TOML files (sorted by name), each file once.

    Raises:
        SpecError: All problems of all files at once: missing, unreadable, not TOML, or wrong as in `parse_spec`.
    """
    entries = read_specs(paths, overrides)
    broken = [(str(file), list(entry.problems)) for file, entry in entries if isinstance(entry, SpecError)]
    if broken:
        raise joined(broken)
    return tuple((file, entry) for file, entry in entries if isinstance(entry, Spec))


def read_specs(
    paths: Iterable[str | Path], overrides: Mapping[str, Any] | None = None
) -> tuple[tuple[Path, Spec | SpecError], ...]:
    """Returns, for each TOML file and each file of a folder (sorted by name, each once), its spec or what is wrong.

    A `model = "file.py:factory"`, `data` or `pretrained` that exists beside its spec is resolved against the spec's
    folder.

    Raises:
        SpecError: An override is wrong, so no spec can run; with all problems of all files.
    """
    entries: list[tuple[Path, Spec | SpecError]] = []
    problems: list[tuple[str, list[str]]] = []
    on_line: dict[str, None] = {}  # an override is wrong in every file, but is reported once
    for file, missing in _files(paths):
        table, unreadable = ({}, missing) if missing else _read(file)
        in_file, from_options, spec = ([unreadable], [], None) if unreadable else _check(table, overrides or {})
        entries.append((file, spec or SpecError(in_file, str(file))))
        problems.append((str(file), in_file))
        on_line.update(dict.fromkeys(from_options))
    if on_line:
        raise joined([*problems, ("command line", list(on_line))])
    return tuple(entries)


def _files(paths: Iterable[str | Path]) -> Iterator[tuple[Path, str]]:
    seen = set()
    for path in map(Path, paths):
        found = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        if not found:
            yield path, "the folder holds no *.toml file; `gaverify init` writes one"
        for file in found:
            real = os.path.realpath(file)  # Path.resolve raises on links that lead to each other
            if real in seen:
                continue
            seen.add(real)
            yield file, "" if os.path.exists(file) else "there is no such file or folder"


def _read(file: Path) -> tuple[dict[str, Any], str]:
    """Returns the table, with paths resolved, and "" or the reason why there is none."""
    if file.suffix in _OTHER_COMMANDS:
        return {}, _OTHER_COMMANDS[file.suffix].format(file=file)
    try:
        table = tomllib.loads(text_of_file(file, "spec; `gaverify init` writes one"))
    except tomllib.TOMLDecodeError as error:
        place = re.search(r" \(at (.*)\)$", str(error))
        where = place[1] if place else "somewhere"
        return {}, f"{where}: not TOML: {str(error).removesuffix(place[0]) if place else error}"
    except SpecError as error:
        return {}, error.problems[0]
    except RecursionError:
        return {}, "lists or tables stand too deep in each other; a spec needs one level"
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


def _check(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[list[str], list[str], Spec | None]:
    """Returns the problems of the table, those of the overrides, and the spec if there are none."""
    options = {field: value for field, value in overrides.items() if value is not None}
    arguments = options.pop("model_args", {})
    values, written, in_file = _normalise(table)
    values.update(options)
    if arguments:
        stated = values.get("model_args", {})
        values["model_args"] = {**stated, **arguments} if isinstance(stated, Mapping) else arguments
    for place, text in entry_problems(values.get("accept", ())):
        in_file.append(f"$.accept{place}: {text}")
        values["accept"] = ()  # its own sentences say more than pydantic's
    on_line: list[str] = []
    spec: Spec | None = None
    try:
        spec = Spec.model_validate(values)
    except ValidationError as error:
        for (field, key), kind in _wrong(error, values).items():
            option = key in arguments if key else field in options
            place = option_name(field) if option else f"$.{written.get(field, field.replace('_', '-'))}"
            place += f" {key}" if option and key else f".{key}" if key else ""
            value = values[field][key] if key else values.get(field)
            (on_line if option else in_file).append(f"{place}: {sentence(field, key, kind, value, option=option)}")
    for needed, fields, told in _ONLY_WITH:
        started = needed == "ranks" and launched() is not None
        if not (table.get(needed) or options.get(needed) or started):  # `--no-trace` over a spec that traces is meant
            on_line += [f"--{field}: {told}" for field in fields if field in options]
    return in_file, on_line, None if in_file or on_line else spec


def _wrong(error: ValidationError, values: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Returns what is wrong with each (field, model argument or ""): pydantic's kind, or a conflict's sentence.

    A union reports each of its members, one entry per field is enough. The model's own check of fields against each
    other does not run while any field is wrong, so it is made up for here, with the fields that are right.
    """
    wrong: dict[tuple[str, str], str] = {}
    for detail in error.errors(include_url=False, include_context=False):
        field, *inner = map(str, detail["loc"]) if detail["loc"] else ("",)
        if field:
            wrong.setdefault((field, inner[0] if field == "model_args" and inner else ""), detail["type"])
    facts = {
        name: values.get(name, info.default) for name, info in Spec.model_fields.items() if (name, "") not in wrong
    }
    if not {"rtol", "atol"} <= facts.keys():
        facts.update(rtol=None, atol=None)  # one of them is wrong: no second sentence about the pair
    steps, ranks = facts.get("steps"), facts.get("ranks") or 1
    total = steps * ranks if isinstance(steps, int) and isinstance(ranks, int) else None
    for field, conflict in conflicts(total, facts.get("weighting"), facts["rtol"], facts["atol"]):
        wrong[field, ""] = conflict
    return wrong


def _normalise(table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Returns the known fields' values, the keys as they were written, and sentences about unknown keys."""
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    problems = []
    for key, value in table.items():
        field = key.replace("-", "_")
        if field not in Spec.model_fields:
            missing = ["model"] if "model" not in table else []  # what lacks is likelier than what is there
            near = nearest(field.lower(), missing, 0.8) or nearest(field.lower(), Spec.model_fields)
            known = ", ".join(name.replace("_", "-") for name in Spec.model_fields)
            advice = f"did you mean `{near.replace('_', '-')}`?" if near else f"the keys are {known}"
            problems.append(f"$.{key}: unknown key; {advice}")
        elif field in values:
            problems.append(f"$.{key}: stands here twice, also as `{written[field]}`; keep one")
        else:
            values[field] = tuple(value) if isinstance(value, list) else value
            written[field] = key
    return values, written, problems
