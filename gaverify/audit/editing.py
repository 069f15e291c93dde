"""Values that a run is given in place of those written in the source: a constant, a default, an entry of a dictionary.

A name is read from the outside in: `BATCH_SIZE` of the script, `Config.batch_size` of a class, `main.batch_size` of a
function (a variable or a parameter's default), `config.batch_size` of a dictionary or of the keywords of a call that is
assigned to `config`, `DataLoader.batch_size` of a keyword wherever `DataLoader` is called; with a module's name in
front, of a module that the script imports. The source is changed as it is compiled, so that every line keeps its number
and no file is written. A name that nothing takes is told from the texts, before anything starts. No torch.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from gaverify.errors import ProblemError, nearest
from gaverify.loading.texts import parsed

PLACED = "placed.txt"
"""Name of the file in a run's folder that holds the names of values that found their place."""

Values = Sequence[tuple[str, str]]
_SHOWN = 4
"""Names that a sentence proposes."""
_Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Edits:
    """The values of one run, and which of them have found their place.

    Args:
        values: Names and the words to put there.
        main: The name of the module that is run as the script; empty for a file.
        noted: A file that gets the names that have found their place, one a line.
    """

    def __init__(self, values: Values, main: str = "", noted: Path | None = None) -> None:
        self._values, self._main, self._noted = tuple(values), main, noted
        self.placed: set[str] = set()

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names that have found no place yet."""
        return tuple(name for name, _ in self._values if name not in self.placed)

    def install(self) -> None:
        """Compiles modules with their values from now on; modules without any are left to Python."""
        original = SourceFileLoader.get_code
        edits = self

        def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
            wanted = edits._inside(fullname)
            if not wanted:
                return original(self, fullname)
            path = self.get_filename(fullname)
            return edits.compiled(self.get_data(path), path, wanted)

        SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]

    def script(self, source: bytes, path: str) -> CodeType:
        """Returns the code of the script with its values."""
        return self.compiled(source, path, [(name, name, word) for name, word in self._values])

    def compiled(self, source: bytes, path: str, wanted: Sequence[tuple[str, str, str]]) -> CodeType:
        """Compiles a source with values: full names, names within it, and words."""
        tree = ast.parse(source, path)
        for name, inner, word in wanted:
            if placed(tree, inner, word, f"`{name}={word}`"):
                self._note(name)
        return compile(tree, path, "exec", dont_inherit=True)

    def _note(self, name: str) -> None:
        self.placed.add(name)
        if self._noted is not None:
            with self._noted.open("a", encoding="utf-8") as stream:
                stream.write(f"{name}\n")

    def _inside(self, module: str) -> list[tuple[str, str, str]]:
        inside = [(n, n.removeprefix(f"{module}."), w) for n, w in self._values if n.startswith(f"{module}.")]
        if module in (self._main, f"{self._main}.__main__") and self._main:
            inside += [(name, name, word) for name, word in self._values]
        return inside


@dataclass(frozen=True)
class _Place:
    """Where a value stands in a tree: its name from the outside in, and the fields or list that hold it."""

    name: str
    line: int
    holder: Any
    key: str | int


def placed(tree: ast.Module, name: str, word: str, what: str = "") -> int:
    """Puts a value into a module's tree and returns at how many places.

    Args:
        tree: The module.
        name: The name within it.
        word: A Python literal; anything else is taken as text.
        what: The option, for messages.

    Raises:
        ProblemError: A number would become text.
    """
    places = [place for place in _places(tree) if place.name == name]
    for place in places:
        place.holder[place.key] = _literal(place.holder[place.key], word, what)
    return len(places)


def check_values(script: str, module: bool, values: Values) -> None:
    """Raises for values that nothing in the texts of a script and of the user's modules can take.

    What may be in a module that only the running script finds is let pass: the run says it.

    Raises:
        ProblemError: Such a value, or a number that would become text.
    """
    texts, unread = _texts(script, module) if values else ({}, set())
    if not texts:
        return
    hidden = any(top not in sys.modules and importlib.util.find_spec(top) is None for top in unread)
    lost = []
    for name, word in values:
        count = 0
        for place, tree in texts.items():
            if name.startswith(place):
                count += placed(tree, name.removeprefix(place), word, f"`{name}={word}`")
        if not count and not ("." in name and (hidden or name.partition(".")[0] in unread)):
            lost.append(not_placed(name, script, module))
    if lost:
        raise ProblemError("\n".join(lost))


def not_placed(name: str, script: str, module: bool) -> str:
    """Returns the sentence for a value that nothing took, with the names that would take it."""
    texts, _ = _texts(script, module)
    texts.pop(f"{script}.", None)  # the script's own, once more
    names: dict[str, list[str]] = {}
    for prefix, tree in texts.items():
        shortest: dict[tuple[int, str | int], _Place] = {}  # `DataLoader.batch_size`, not `main.DataLoader.batch_size`
        for place in sorted(_places(tree), key=lambda place: place.name.count(".")):
            shortest.setdefault((id(place.holder), place.key), place)
        for place in shortest.values():
            names.setdefault(f"{prefix}{place.name}", []).append(str(place.line))
    last = name.rpartition(".")[2]
    lasts = {taker.rpartition(".")[2] for taker in names}
    word = last if last in lasts else ("" if nearest(name, names) else nearest(last, lasts))
    near = [taker for taker in names if taker.rpartition(".")[2] == word] or [nearest(name, names)]
    shown = " or ".join(f"`{taker}` (line {' and '.join(names[taker])})" for taker in near[:_SHOWN] if taker)
    advice = f"did you mean {shown}?" if shown else "write the name as `function.name` where it stands in a function"
    return f"`{script}` assigns no `{name}`, nor does a module of that name that it imports; {advice}"


def _texts(script: str, module: bool) -> tuple[dict[str, ast.Module], set[str]]:
    """Returns the texts of a script and of the modules beside it that it imports, and the tops of all others.

    Each text stands under what comes before the names in it: "" for the script, `package.module.` for a module. There
    is none where the script's cannot be read.
    """
    folders = [os.getcwd()] if module else [os.path.dirname(os.path.realpath(script)), os.getcwd()]
    first = (_file(folders, f"{script}.__main__") or _file(folders, script)) if module else Path(script)
    files = {"": first} | ({f"{script}.": first} if module else {})
    texts: dict[str, ast.Module] = {}
    unread: set[str] = set()
    while waiting := [prefix for prefix in files if prefix not in texts]:
        prefix = waiting[0]
        file = files[prefix]
        texts[prefix] = parsed(file) if file else ast.Module([], [])
        if not texts[prefix].body:
            if file == first:
                return {}, set()
            unread.add(prefix.partition(".")[0])
        package = prefix if file and file.name == "__init__.py" else prefix.rstrip(".").rpartition(".")[0] + "."
        for name, certain in _imported(texts[prefix], package):
            if found := _file(folders, name):
                files.setdefault(f"{name}.", found)
            elif certain:
                unread.add(name.partition(".")[0])
    return texts, unread


def _imported(tree: ast.Module, package: str) -> Iterator[tuple[str, bool]]:
    """Yields the modules that a text imports, and whether each is one, not perhaps a name in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.rstrip(".").split(".")
            start = above[: len(above) + 1 - node.level] if node.level else []
            base = ".".join(filter(None, [*start, node.module]))
            yield base, True
            yield from ((f"{base}.{alias.name}", False) for alias in node.names)


def _file(folders: Iterable[str], module: str) -> Path | None:
    """The file of a module below one of the folders."""
    for folder in folders:
        place = Path(folder, *module.split("."))
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def _places(scope: _Scope, prefix: str = "") -> Iterator[_Place]:
    """Yields every place in a scope that a value can be put to."""
    for node in _statements(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _places(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    name = f"{prefix}{target.id}"
                    entries = list(_entries(name, node.value))
                    default = [entry for entry in entries if entry.name == f"{name}.default"]  # `field(default=…)`
                    in_call = bool(default) and isinstance(node.value, ast.Call)
                    held = (default[0].holder, default[0].key) if in_call else (vars(node), "value")
                    yield _Place(name, node.lineno, *held)
                    yield from entries
    for call in ast.walk(scope):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name | ast.Attribute):
            called = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
            yield from _entries(f"{prefix}{called}", call)
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _parameters(scope.args, prefix)


def _parameters(args: ast.arguments, prefix: str) -> Iterator[_Place]:
    """Yields the parameters that have a default."""
    positional = [*args.posonlyargs, *args.args]
    named = [*positional[len(positional) - len(args.defaults) :], *args.kwonlyargs]
    slots = [(values, at) for values in (args.defaults, args.kw_defaults) for at in range(len(values))]
    for argument, (values, at) in zip(named, slots, strict=True):
        if values[at] is not None:
            yield _Place(f"{prefix}{argument.arg}", argument.lineno, values, at)


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a scope, also those in its ifs and loops, but not in the functions and classes it defines."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.stmt):
            yield node
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _statements(node)


def _entries(name: str, value: ast.expr | None) -> Iterator[_Place]:
    """Yields the entries of a dictionary and the keywords of a call, and theirs."""
    if isinstance(value, ast.Dict):
        for at, key in enumerate(value.keys):
            if isinstance(key, ast.Constant) and isinstance(key.value, str | int):
                yield _Place(f"{name}.{key.value}", key.lineno, value.values, at)
                yield from _entries(f"{name}.{key.value}", value.values[at])
    elif isinstance(value, ast.Call):
        for keyword in value.keywords:
            if keyword.arg is not None:
                yield _Place(f"{name}.{keyword.arg}", keyword.lineno, vars(keyword), "value")
                yield from _entries(f"{name}.{keyword.arg}", keyword.value)


def _literal(old: ast.expr | None, word: str, what: str) -> ast.expr:
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError):
        value = word
    number = isinstance(old, ast.Constant) and isinstance(old.value, int | float)
    if number and isinstance(value, str):
        assert isinstance(old, ast.Constant)
        raise ProblemError(f"{what}: it is {old.value!r} in line {old.lineno}; write a number, not text")
    new = ast.parse(repr(value), mode="eval").body
    for node in ast.walk(new):
        if isinstance(node, ast.expr) and old is not None:
            ast.copy_location(node, old)
    return ast.fix_missing_locations(new)
