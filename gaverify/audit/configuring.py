"""Values in a configuration file, as one run shall read them: the file itself stays as it is. No torch.

JSON is read and written anew. YAML, TOML and INI are changed in the one line that holds the key, so that no reader of
those is needed and comments stay.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gaverify.errors import ProblemError

_LINE = re.compile(
    r"^(?P<indent>\s*)(?P<dash>-\s+)?(?P<key>[\w.\-]+|\"[^\"]+\"|'[^']+')\s*(?P<sign>[:=])(?P<value>.*)$"
)
_SECTION = re.compile(r"^\s*\[+\s*([^\]]+?)\s*\]+\s*(#.*)?$")
_COMMENT = re.compile(r"\s+#.*$")


def edited(text: str, kind: str, key: str, word: str) -> str:
    """Returns a configuration with another value.

    Args:
        text: The file.
        kind: Its ending: `.json`, or any other for keys line by line.
        key: Names from the outside in, joined by dots.
        word: The new value, as it stands in such a file.

    Raises:
        ProblemError: The key is not there, or there twice.
    """
    if kind == ".json":
        return _edited_json(text, key, word)
    path: list[tuple[int, str]] = []
    section: list[str] = []
    lines, found = text.splitlines(), []
    for at, line in enumerate(lines):
        header = _SECTION.match(line)
        if header:
            section, path = header[1].replace('"', "").split("."), []
            continue
        entry = _LINE.match(line)
        if entry is None:
            continue
        indent = len(entry["indent"]) + len(entry["dash"] or "")
        path = [*[outer for outer in path if outer[0] < indent], (indent, entry["key"].strip("\"'"))]
        if ".".join([*section, *(name for _, name in path)]) == key:
            found.append(at)
    if len(found) != 1:
        raise ProblemError(f"the key `{key}` stands there {len(found)} times; it has to stand in one line")
    lines[found[0]] = _replaced(lines[found[0]], word)
    return "\n".join(lines) + "\n"


def _replaced(line: str, word: str) -> str:
    entry = _LINE.match(line)
    assert entry is not None
    old = entry["value"]
    comment = _COMMENT.search(old)
    quote = old.strip()[:1]
    quoted = f"{quote}{word}{quote}" if quote in ("'", '"') and not word.startswith(quote) else word
    blank = " " if entry["sign"] == ":" or old.startswith(" ") else ""
    return line[: entry.start("value")] + blank + quoted + (comment[0] if comment else "")


def _edited_json(text: str, key: str, word: str) -> str:
    whole: Any = json.loads(text)
    node: Any = whole
    *outer, last = key.split(".")
    for name in outer:
        node = node.get(name) if isinstance(node, dict) else None
    if not isinstance(node, dict) or last not in node:
        raise ProblemError(f"there is no key `{key}`")
    try:
        node[last] = json.loads(word)
    except ValueError:
        try:
            node[last] = ast.literal_eval(word)
        except (ValueError, SyntaxError):
            node[last] = word
    return json.dumps(whole, indent=2)


def read_instead(files: Mapping[str, str]) -> None:
    """Makes this process read other files in place of some, whichever of Python's functions opens them.

    Args:
        files: What is read, by the full path of what is asked for.
    """
    if not files:
        return
    originals = io.open, os.open

    def other(path: Any) -> Any:
        if isinstance(path, int):
            return path
        try:
            return files.get(os.path.realpath(os.fsdecode(path)), path)
        except (TypeError, ValueError):
            return path

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return originals[0](file if set(mode) & set("wax+") else other(file), mode, *args, **kwargs)

    def low_level(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        return originals[1](path if flags & (os.O_WRONLY | os.O_RDWR) else other(path), flags, *args, **kwargs)

    io.open = builtins.open = opened
    os.open = low_level


def substitutes(values: Mapping[tuple[str, str], str], folder: Path) -> dict[str, str]:
    """Writes the changed files into the run's folder and returns them by the paths of the unchanged.

    Args:
        values: Words by file and key.
        folder: Of the run.

    Raises:
        ProblemError: A file cannot be read, or does not hold the key.
    """
    texts: dict[str, str] = {}
    for (name, key), word in values.items():
        path = os.path.realpath(name)
        try:
            text = texts.get(path) or Path(path).read_text(encoding="utf-8")
            texts[path] = edited(text, Path(path).suffix.lower(), key, word)
        except (OSError, ValueError) as error:
            raise ProblemError(f"`{name}` cannot be read: {error}") from error
        except ProblemError as error:
            raise ProblemError(f"`{name}`: {error}") from error
    written = {}
    for at, (path, text) in enumerate(texts.items()):
        new = folder / f"configuration-{at}{Path(path).suffix}"
        new.write_text(text, encoding="utf-8")
        written[path] = str(new)
    return written
