"""Reads the user's source: the statement that decides whether a line runs, and the line that assigns a variable."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from gaverify.tracebacks import Place

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)


@cache
def _tree_of(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_bytes())  # in the encoding that it declares
    except (OSError, SyntaxError, ValueError):
        return None


def _span(node: ast.AST) -> range:
    return range(getattr(node, "lineno", 0), (getattr(node, "end_lineno", None) or 0) + 1)


def _function_around(file: str, line: int) -> ast.AST | None:
    """Returns the innermost function around a line, else the whole file; None where it cannot be read."""
    tree = _tree_of(file)
    functions = (
        [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS) and line in _span(node)] if tree else []
    )
    return min(functions, key=lambda node: len(_span(node)), default=tree)


def _nodes_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what is inside a node, from the outside inwards, without what functions in it do when they are called."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _FUNCTIONS):
            yield child
            yield from _nodes_of(child)


def deciding_line(place: Place, lines_of_runs: Collection[frozenset[Place]]) -> Place | None:
    """Returns the line that decides whether a call is made: the outermost that the runs take differently.

    Args:
        place: The line of the call that some runs do not make.
        lines_of_runs: The lines that each run, or each micro-batch of a run, has come to.
    """
    file, line = place
    function = _function_around(file, line)
    if function is None:
        return None
    around, before = list[ast.stmt | ast.expr](), list[ast.stmt | ast.expr]()
    for node in _nodes_of(function):
        if isinstance(node, ast.If | ast.While | ast.IfExp) and line in _span(node):
            around.append(node)
        elif isinstance(node, ast.If) and node.lineno < line and any(isinstance(at, _LEAVES) for at in _nodes_of(node)):
            before.append(node)  # who takes it does not come to the line
    differing = [node for node in around if _is_taken_differently(node, file, lines_of_runs)]
    # Without calls inside, nothing shows which run has taken it: the nearest is the likeliest.
    chosen = differing[:1] or [node for node in before if _is_taken_differently(node, file, lines_of_runs)][:1]
    chosen = chosen or around[-1:] or before[-1:]
    return (file, chosen[0].lineno) if chosen else None


def _is_taken_differently(node: ast.AST, file: str, lines_of_runs: Collection[frozenset[Place]]) -> bool:
    body = getattr(node, "body", [])
    bodies = body if isinstance(body, list) else [body]
    lines = {(file, line) for statement in bodies for line in _span(statement)} - {(file, getattr(node, "lineno", 0))}
    return len({bool(lines & each) for each in lines_of_runs}) > 1


def test_lines(place: Place) -> range:
    """Returns the lines of the condition that begins at a line."""
    function = _function_around(*place)
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.If | ast.While | ast.IfExp) and node.lineno == place[1]:
            return _span(node.test)
    return range(place[1], place[1] + 1)


def assignments_of(name: str, place: Place, files: Collection[str] = ()) -> list[Place]:
    """Returns the lines that assign a variable, an attribute or an entry after its first value.

    Those that compute it from itself, as a counter or an average is, if there are any.

    Args:
        name: As it is written: `scale`, `self.average`, `running[0]`.
        place: The line that reads it.
        files: More files of the user's, in which the attribute may be assigned by another name of its object.
    """
    file, line = place
    function, tree = _function_around(file, line), _tree_of(file)
    if function is None or tree is None:
        return []
    inside = [(file, *assignment) for assignment in _assignments(function, name)]
    # A variable belongs to its function, unless an outer one has it; an attribute may be assigned anywhere.
    if not inside:
        suffix = name[name.rindex(".") :] if "." in name and not name.endswith("]") else None
        if _is_argument(function, name):  # what the function is given may be an attribute of that name
            suffix = f".{name}"
        trees = {each: parsed for each in dict.fromkeys((file, *files)) if (parsed := _tree_of(each)) is not None}
        inside = [
            (each, *assignment)
            for each, scope in trees.items()
            for assignment in _assignments(scope, name if each == file or suffix else "", suffix)
            if not _is_first(scope, assignment[0])
        ]
    from_itself = [assignment for assignment in inside if assignment[2]]
    return list(dict.fromkeys((each, at) for each, at, _ in from_itself or inside))


def assignment_of(name: str, place: Place) -> Place | None:
    """Returns the only line that assigns something, as `assignments_of` finds it; None where there are several."""
    lines_found = assignments_of(name, place)
    return lines_found[0] if len(lines_found) == 1 else None


def _is_argument(function: ast.AST, name: str) -> bool:
    arguments = getattr(function, "args", None)
    return isinstance(arguments, ast.arguments) and any(
        each.arg == name for each in ast.walk(arguments) if isinstance(each, ast.arg)
    )


def is_kept(name: str, place: Place) -> bool:
    """Whether what a variable holds outlives the call of the function that reads it."""
    function = _function_around(*place)
    if not name.isidentifier() or not isinstance(function, _FUNCTIONS):
        return not name.isidentifier()
    shared = {each for node in ast.walk(function) if isinstance(node, ast.Nonlocal | ast.Global) for each in node.names}
    arguments = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    return name in shared or (name not in arguments and not any(_assignments(function, name)))


def _assignments(scope: ast.AST, name: str, suffix: str | None = None) -> Iterator[tuple[int, bool]]:
    """Yields the lines that assign a name, or one that ends alike; and whether they compute it from itself."""
    for node in ast.walk(scope):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
            targets = [node.target]
        for text in (ast.unparse(part) for target in targets for part in _parts(target)):
            if text == name or (suffix is not None and text.endswith(suffix)):
                value = getattr(node, "value", None)
                reads = {ast.unparse(each) for each in ast.walk(value)} if value is not None else set()
                yield node.lineno, isinstance(node, ast.AugAssign) or text in reads  # type: ignore[attr-defined]


def _parts(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]


def _is_first(tree: ast.AST, line: int) -> bool:
    """Whether a line gives something its first value: in `__init__`, in a class or at the top of a file."""
    function = min(
        (node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS) and line in _span(node)),
        key=lambda node: len(_span(node)),
        default=None,
    )
    return function is None or function.name == "__init__"
