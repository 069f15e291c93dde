"""Values that a run is given in place of its own: a constant, a default, an entry of a dictionary, a parser's default.

A name is read from the outside in: `BATCH_SIZE` of the script, `Config.batch_size` of a class, `main.batch_size` of a
function (a variable or a parameter's default), `config.batch_size` of a dictionary or of the keywords of a call that is
assigned to `config`, `DataLoader.batch_size` of a keyword wherever `DataLoader` is called; with a module's name in
front, of a module that the script imports. The source is changed as it is compiled, so that every line keeps its number
and no file is written. A name without a dot that the script's source does not assign may be an option of an `argparse`
parser, wherever that is built: its default is set when the arguments are parsed. A name of the script's that nothing
takes is told before anything starts, as far as the script's text tells. No torch.
"""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from gaverify.errors import ProblemError, nearest
from gaverify.loading.importing import compile_with, parse_file

PLACED = "placed.txt"
"""Name of the file in a run's folder that holds the names of values that found their place."""

Values = Sequence[tuple[str, str]]
_SHOWN = 4
"""Names that a sentence proposes."""
_Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Edits:
    """Replaces values in the source and the parsers of one run, and notes which of them were found.

    Args:
        values: Names and the words to put there.
        main: The name of the module that is run as the script; empty for a file.
        noted: A file that gets the names that have found their place, one a line.
    """

    def __init__(self, values: Values, main: str = "", noted: Path | None = None) -> None:
        self._values, self._main, self._noted = tuple(values), main, noted
        self.placed: set[str] = set()
        self._parsed: set[str] = set()  # of these, options of parsers: several parsers may have one

    @property
    def missing_names(self) -> tuple[str, ...]:
        """The names that have found no place yet."""
        return tuple(name for name, _ in self._values if name not in self.placed)

    def install(self) -> None:
        """Compiles modules with their values, and parses arguments with their defaults, from now on."""
        self._install_defaults()
        compile_with(self._compile_module)

    def _compile_module(self, loader: SourceFileLoader, name: str) -> CodeType | None:
        wanted = self._inside(name)
        if not wanted:
            return None
        path = loader.get_filename(name)
        return self.compile_source(loader.get_data(path), path, wanted)

    def _install_defaults(self) -> None:
        original: Any = argparse.ArgumentParser.parse_known_args
        edits = self

        def parse_known_args(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
            arguments = list(sys.argv[1:] if args is None else args)
            for name, word in edits._values:
                # A name that the source assigns is no option; several parsers may have one of the same name.
                in_source = name in edits.placed and name not in edits._parsed
                if not in_source and set_default(self, name, word, arguments):
                    edits._parsed.add(name)
                    edits._note(name)
            return original(self, arguments, namespace)

        argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]

    def script(self, source: bytes, path: str) -> CodeType:
        """Returns the code of the script with its values."""
        return self.compile_source(source, path, [(name, name, word) for name, word in self._values])

    def compile_source(self, source: bytes, path: str, wanted: Sequence[tuple[str, str, str]]) -> CodeType:
        """Compiles a source with values: full names, names within it, and words."""
        tree = ast.parse(source, path)
        for name, inner, word in wanted:
            if place_value(tree, inner, word, f"`{name}={word}`"):
                self._note(name)
        # Else the script would inherit this module's `from __future__ import annotations`, and its annotations be text.
        return compile(tree, path, "exec", dont_inherit=True)

    def _note(self, name: str) -> None:
        self.placed.add(name)
        if self._noted is not None:
            with self._noted.open("a", encoding="utf-8") as stream:
                stream.write(f"{name}\n")

    def _inside(self, module: str) -> list[tuple[str, str, str]]:
        inside = [(n, n.removeprefix(f"{module}."), w) for n, w in self._values if n.startswith(f"{module}.")]
        # `python -m package` runs the package's `__main__`, of which the names without a module are meant.
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


def place_value(tree: ast.Module, name: str, word: str, what: str = "") -> int:
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


def set_default(parser: argparse.ArgumentParser, name: str, word: str, arguments: Sequence[str]) -> bool:
    """Makes a word the default of a parser's option, and returns whether the parser has an option of that name.

    Args:
        parser: Its options that are required are not any more, once they have a default.
        name: The option's name in the parsed arguments, or on the command line without its dashes.
        word: As it would stand on the command line; for options without a value `True` or `False`.
        arguments: The arguments that will be parsed.

    Raises:
        ProblemError: The option does not take the word, or the arguments give it another one.
    """
    wanted = name.replace("-", "_")
    for action in parser._actions:
        names = {action.dest, *(option.lstrip("-").replace("-", "_") for option in action.option_strings)}
        if wanted not in names or not action.option_strings:
            continue
        # Arguments win over a default: the value would be ignored without a word.
        if any(argument.partition("=")[0] in action.option_strings for argument in arguments):
            option = max(action.option_strings, key=len)
            raise ProblemError(f"`{name}={word}`: the arguments of this run also give `{option}`; leave one out")
        parser.set_defaults(**{action.dest: _read_default(parser, action, word, f"`{name}={word}`")})
        action.required = False
        return True
    return False


def _read_default(parser: argparse.ArgumentParser, action: argparse.Action, word: str, what: str) -> Any:
    """Returns the value that the option would parse from the word on a command line."""
    if action.nargs == 0:
        if word.lower() not in ("true", "false"):
            raise ProblemError(f"{what}: the option takes no value; write `True` or `False`")
        return word.lower() == "true"
    words = [word] if action.nargs in (None, argparse.OPTIONAL) else shlex.split(word)
    try:
        values = [parser._get_value(action, each) for each in words]
        for value in values:
            # argparse checks no defaults: what the option would refuse on a command line has to be refused here.
            parser._check_value(action, value)
    except argparse.ArgumentError as error:
        raise ProblemError(f"{what}: {error.message}") from None
    return values[0] if action.nargs in (None, argparse.OPTIONAL) else values


_PARSING = ("parse_args", "parse_known_args", "parse_args_into_dataclasses")
"""Methods of parsers: a script that calls one may take its options from a module that it imports."""


def _options(tree: ast.Module) -> dict[str, int]:
    """The options that a module's own calls of `add_argument` name, with their lines."""
    lines: dict[str, int] = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            words = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "dest")]
            for word in words:
                if isinstance(word, ast.Constant):
                    lines.setdefault(str(word.value).lstrip("-").replace("-", "_"), call.lineno)
    return lines


def _may_parse_elsewhere(tree: ast.Module, folder: Path) -> bool:
    """Whether options may be added outside of the text: it parses without adding any, or imports a module beside it."""
    nodes = list(ast.walk(tree))
    if not _options(tree) and any(isinstance(node, ast.Attribute) and node.attr in _PARSING for node in nodes):
        return True
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    tops = {name.partition(".")[0] for name in names}
    return any((folder / top).is_dir() or (folder / f"{top}.py").is_file() for top in tops if top)


def check_values(script: str, module: bool, values: Values) -> None:
    """Raises for values that nothing in a script's text can take.

    A name that begins as no name of the script does may lie in a module that it imports: the run says so.

    Raises:
        ProblemError: Such a value, or a number that would become text.
    """
    # To find a module would import its parent packages, and so run code of the user's: the run tells instead.
    tree = ast.Module([], []) if module else parse_file(Path(script))
    first_words = {place.name.partition(".")[0] for place in _places(tree)}
    counts = {name: place_value(tree, name, word, f"`{name}={word}`") for name, word in values}
    unplaced = [
        name
        for name, count in counts.items()
        if not count and ("." not in name or name.partition(".")[0] in first_words)
    ]
    options, elsewhere = _options(tree), _may_parse_elsewhere(tree, Path(script).parent)
    unplaced = [name for name in unplaced if "." in name or not (elsewhere or name.replace("-", "_") in options)]
    if unplaced and tree.body:
        raise ProblemError("\n".join(explain_unplaced(name, script) for name in unplaced))


def explain_unplaced(name: str, script: str) -> str:
    """Returns the sentence for a value that nothing took, with the names of the script that would take it."""
    shortest: dict[tuple[int, str | int], _Place] = {}  # `DataLoader.batch_size`, not `main.DataLoader.batch_size`
    for place in sorted(_places(parse_file(Path(script))), key=lambda place: place.name.count(".")):
        shortest.setdefault((id(place.holder), place.key), place)
    names: dict[str, list[str]] = {}
    for place in shortest.values():
        names.setdefault(place.name, []).append(str(place.line))
    for option, line in _options(parse_file(Path(script))).items():
        names.setdefault(option, []).append(str(line))
    last = name.rpartition(".")[2]
    lasts = {taker.rpartition(".")[2] for taker in names}
    word = last if last in lasts else ("" if nearest(name, names) else nearest(last, lasts))
    near = [taker for taker in names if taker.rpartition(".")[2] == word] or [nearest(name, names)]
    proposals = " or ".join(f"`{taker}` (line {' and '.join(names[taker])})" for taker in near[:_SHOWN] if taker)
    advice = f"did you mean {proposals}?" if proposals else "for a name in a function, write `function.name`"
    return f"`{script}` assigns no `{name}`, parses no such option and imports no module of that name; {advice}"


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
                    slot = (default[0].holder, default[0].key) if in_call else (vars(node), "value")
                    yield _Place(name, node.lineno, *slot)
                    yield from entries
    # Into inner functions as well: `DataLoader.batch_size` is the keyword wherever `DataLoader` is called.
    for call in ast.walk(scope):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name | ast.Attribute):
            called = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
            yield from _entries(f"{prefix}{called}", call)
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _parameters(scope.args, prefix)


def _parameters(args: ast.arguments, prefix: str) -> Iterator[_Place]:
    """Yields the parameters that have a default."""
    positional = [*args.posonlyargs, *args.args]
    # Only the last positional parameters have defaults, as many as `defaults` holds.
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
    """The expression that stands for a word in the place of another one."""
    # TOML and shells write `true`; where a truth value stood, that is what is meant.
    is_switch = isinstance(old, ast.Constant) and isinstance(old.value, bool) and word in ("true", "false")
    try:
        value = ast.literal_eval(word.capitalize() if is_switch else word)
    except (ValueError, SyntaxError):
        value = word
    number = isinstance(old, ast.Constant) and isinstance(old.value, int | float)
    if number and isinstance(value, str):
        assert isinstance(old, ast.Constant)
        raise ProblemError(f"{what}: it is {old.value!r} in line {old.lineno}; write a number, not text")
    new = ast.parse(repr(value), mode="eval").body
    for node in ast.walk(new):
        if isinstance(node, ast.expr) and old is not None:
            # Tracebacks and findings name lines: the new value has to stand in the line of the old one.
            ast.copy_location(node, old)
    return ast.fix_missing_locations(new)
