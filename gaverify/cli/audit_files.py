"""Options of audits in files: `gaverify audit audit.toml`, and folders of them.

The keys are the command's own options without their dashes, so that a new option is a key, too. Options that repeat
(`set`, `full-env`) are tables of names and values; argument lists are one string as in a shell, or a list of words.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from gaverify.errors import SpecError, nearest
from gaverify.text_files import text_of_file

if TYPE_CHECKING:
    from gaverify.spec.accepting import Accept

_NOT_KEYS = frozenset({"kept", "show_all", "strict", "form", "outputs", "debug", "help"})
"""Options that say how to report: they belong to the call, not to one of its audits."""
_OWN = ("accept", "expect")
_OUTCOMES = ("equivalent", "divergent", "inconclusive")
_EXAMPLE = 'script = "train.py"'


class AuditFile(NamedTuple):
    """One file: the command's options as the command line would give them, and what it accepts and expects."""

    path: Path
    given: dict[str, Any]
    accept: tuple[Accept, ...]
    expect: str | None


def options_files(words: Iterable[str]) -> list[Path]:
    """Returns the files of options that the words name; nothing where the first of them is a script."""
    listed = list(words)
    if not listed or not _holds_options(listed[0]):
        return []
    files: list[Path] = []
    for word in listed:
        path = Path(word)
        found = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        if not found:
            raise SpecError(
                "the folder holds neither a `__main__.py`, as a script has, nor a *.toml file with an audit's options",
                word,
            )
        files += [file for file in found if file not in files]
    return files


def _holds_options(word: str) -> bool:
    if word.endswith(".toml"):
        return True
    return os.path.isdir(word) and not os.path.exists(os.path.join(word, "__main__.py"))


def read_options(file: Path, params: Sequence[click.Parameter]) -> AuditFile:
    """Returns what a file says.

    Args:
        file: A TOML file.
        params: The parameters of the command.

    Raises:
        SpecError: With every problem of the file.
    """
    from gaverify.spec.accepting import Accept, entry_problems

    table = _table(file)
    known = {_key(param): param for param in params if param.name not in _NOT_KEYS}
    if "model" in table and "script" not in table and "module" not in table:
        raise SpecError("is a spec, not the options of an audit; run it with `gaverify run`", str(file))
    problems = [_unknown(key, known) for key in table if key not in known and key not in _OWN]
    given = {str(param.name): _unset(param) for param in known.values()}
    for key, param in known.items():
        if key in table:
            given[str(param.name)] = _value(key, table[key], param, problems)
    if "script" not in table and "module" not in table:
        problems.append(f"$.script: is missing; write `{_EXAMPLE}`")
    problems += [f"$.accept{place}: {text}" for place, text in entry_problems(table.get("accept", []))]
    expect = table.get("expect")
    if expect is not None and expect not in _OUTCOMES:
        problems.append(f"$.expect: must be one of {', '.join(_OUTCOMES)}")
    if problems:
        raise SpecError(problems, str(file))
    for name in ("script", "full_script"):  # beside the file, as with a spec's model; else from where the command runs
        if given.get(name) and (file.parent / given[name]).exists():
            given[name] = str(file.parent / given[name])
    accept = tuple(Accept.model_validate(entry) for entry in table.get("accept", []))
    return AuditFile(file, given, accept, expect)


def _table(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text_of_file(file, "file of an audit"))
    except (ValueError, RecursionError) as error:
        raise SpecError(f"not TOML: {error}", str(file)) from error


def _key(param: click.Parameter) -> str:
    """The option's long flag without dashes; an argument's, and a short flag's, own name."""
    flags = [flag for flag in param.opts if flag.startswith("--")]
    return flags[0].removeprefix("--") if flags else str(param.name)


def _unknown(key: str, known: Mapping[str, click.Parameter]) -> str:
    near = nearest(key.replace("_", "-"), [*known, *_OWN])
    advice = f"did you mean `{near}`?" if near else f"the keys are {', '.join([*known, *_OWN])}"
    return f"$.{key}: unknown key; {advice}"


def _unset(param: click.Parameter) -> Any:
    if param.nargs == -1 or param.multiple:
        return ()
    return False if getattr(param, "is_flag", False) else None


def _value(key: str, value: Any, param: click.Parameter, problems: list[str]) -> Any:
    """The value as the command line would give it; a value of a wrong kind becomes a problem."""
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            problems.append(f"$.{key}: must be true or false")
        return value
    if param.multiple:
        if not isinstance(value, dict) or not all(_is_plain(item) for item in value.values()):
            problems.append(f"$.{key}: must be a table of names and values; write `{key} = {{ NAME = 4 }}`")
            return ()
        return tuple(f"{name}={_word(item)}" for name, item in value.items())
    words = value if isinstance(value, list) else None
    if words is not None and all(_is_plain(item) for item in words):
        listed = tuple(map(_word, words))
        return listed if param.nargs == -1 else shlex.join(listed)
    if not _is_plain(value):
        problems.append(f"$.{key}: must be text, a number or a list of them")
        return None
    return tuple(_split(key, _word(value), problems)) if param.nargs == -1 else _word(value)


def _split(key: str, text: str, problems: list[str]) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        problems.append(f"$.{key}: {text!r} cannot be split into arguments: {error}")
        return []


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
