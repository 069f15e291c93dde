"""Values that a run is given in place of those written in the source: a constant, a default, an entry of a dictionary.

A name is read from the outside in: `BATCH_SIZE` of the script, `Config.batch_size` of a class, `main.batch_size` of a
function (a variable or a parameter's default), `config.batch_size` of a dictionary or of the keywords of a call that is
assigned to `config`; with a module's name in front, of a module that the script imports. The source is changed as it is
compiled, so that every line keeps its number and no file is written. No torch.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from gaverify.errors import ProblemError

PLACED = "placed.txt"
"""Name of the file in a run's folder that holds the names of values that found their place."""

Values = Sequence[tuple[str, str]]
_Slot = tuple[Any, Any]
"""Where a value stands in a tree: the fields of a node and the name of one, or a list of nodes and a position."""

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
            if placed(tree, inner.split("."), word, f"`{name}={word}`"):
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


def placed(tree: _Scope, parts: Sequence[str], word: str, what: str = "") -> int:
    """Puts a value into a tree and returns at how many places.

    Args:
        tree: A module, class or function.
        parts: The name, split at its dots.
        word: A Python literal; anything else is taken as text.
        what: The option, for messages.

    Raises:
        ProblemError: A number would become text.
    """
    slots = list(_slots(tree, parts))
    for owner, key in slots:
        owner[key] = _literal(owner[key], word, what)
    return len(slots)


def assigned(source: bytes) -> list[str]:
    """Returns the names that a script assigns at its top level; none where it cannot be read."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    found: dict[str, None] = {}
    for node in _statements(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            found |= dict.fromkeys(_targets(node))
    return list(found)


def not_placed(name: str, script: str, known: Sequence[str]) -> str:
    """Returns the sentence for a value that nothing took."""
    near = difflib.get_close_matches(name.split(".")[0], known, n=1)
    advice = f"did you mean `{near[0]}`?" if near else "write the name as `function.name` where it stands in a function"
    return f"`{script}` assigns no `{name}`, nor does a module of that name that it imports; {advice}"


def _statements(scope: Any) -> Iterator[ast.stmt]:
    """The statements of a scope, also those in its ifs and loops, but not in the functions and classes it defines."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.stmt):
            yield node
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _statements(node)


def _slots(scope: _Scope, parts: Sequence[str]) -> Iterator[_Slot]:
    """The places of the values that a name stands for in a scope."""
    name, *rest = parts
    for node in _statements(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name and rest:
                yield from _slots(node, rest)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            whole = vars(node), "value"
            default = _inside(whole, ["default"]) if isinstance(node.value, ast.Call) else []  # `field(default=…)`
            yield from _inside(whole, rest) if rest else default or [whole]
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) and not rest:
        args = scope.args
        positional = [*args.posonlyargs, *args.args]
        named = [*positional[len(positional) - len(args.defaults) :], *args.kwonlyargs]
        slots = [(values, at) for values in (args.defaults, args.kw_defaults) for at in range(len(values))]
        yield from (
            slot for argument, slot in zip(named, slots, strict=True) if argument.arg == name and slot[0][slot[1]]
        )


def _inside(slot: _Slot, parts: Sequence[str]) -> list[_Slot]:
    """The place of a dictionary's entry, or of a call's keyword, in what stands at another place; none without it."""
    if not parts:
        return [slot]
    node = slot[0][slot[1]]
    entries: list[tuple[Any, _Slot]] = []
    if isinstance(node, ast.Dict):
        keys = enumerate(node.keys)
        entries = [(str(key.value), (node.values, at)) for at, key in keys if isinstance(key, ast.Constant)]
    elif isinstance(node, ast.Call):
        entries = [(keyword.arg, (vars(keyword), "value")) for keyword in node.keywords]
    return next((_inside(inner, parts[1:]) for name, inner in entries if name == parts[0]), [])


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


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
