"""What the text of a Python file says of the names in it, without running it."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

from gaverify.errors import SpecError, nearest

GUESS = "guess by init: {part}; write yours, then delete this comment"
"""The comment at a line of a factory that `gaverify init` guessed; a report names the part as long as it is there."""
_GUESS = re.compile(r"#\s*guess by init: ([^;]+)")
_MAKERS = ("globals", "exec", "vars", "setattr")
"""Names whose use may define further names of a module while it runs."""


def parse_file(file: Path) -> ast.Module:
    """Returns the syntax tree of a file; an empty one where it cannot be read: importing it says why."""
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def guesses_in(text: str) -> list[tuple[str, str]]:
    """Returns each part of a factory that `gaverify init` guessed, with the code that the comment is about."""
    guesses, lines = [], text.splitlines()
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):  # importing it says why
        return []
    for token in tokens:
        guess = _GUESS.match(token.string) if token.type == tokenize.COMMENT else None
        if guess:
            row, column = token.start
            code = token.line[:column].strip() or lines[row].strip()  # alone in its line, it is about the next one
            guesses.append((guess[1].strip(), code))
    return guesses


def guessed_parts(model: str) -> tuple[str, ...]:
    """Returns what `gaverify init` guessed in the file of a factory, `file.py:factory` or `package.module:factory`."""
    place = model.rpartition(":")[0]
    file = place if place.endswith(".py") else getattr(sys.modules.get(place), "__file__", None) or ""
    if not file.endswith(".py"):
        return ()
    try:
        with tokenize.open(file) as stream:  # in the encoding that its first lines name
            text = stream.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ()
    return tuple(dict.fromkeys(part for part, _ in guesses_in(text)))


def module_classes(tree: ast.Module) -> list[str]:
    """Returns the classes of a file that are modules of torch by what the text says; else all that have a base."""
    bases = {
        node.name: [ast.unparse(base) for base in node.bases] for node in tree.body if isinstance(node, ast.ClassDef)
    }
    modules: list[str] = []
    for name, written in bases.items():  # a class stands behind those that it inherits from
        if any(base in modules or base.startswith(("nn.", "torch.nn.")) or base.endswith("Module") for base in written):
            modules.append(name)
    # No class is visibly a module: one may inherit from a base of the user's own in another file.
    return modules or [name for name, written in bases.items() if written]


def first_function(file: str) -> str:
    """Returns the name of the file's first public function, as a suggestion; "factory" if none can be read."""
    body = parse_file(Path(file)).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return names[0] if names else "factory"


def check_attribute(tree: ast.Module, place: str, dotted: str) -> None:
    """Raises `SpecError` where a module's text shows that it has no such name at its top; other texts are let pass."""
    names: dict[str, bool] = {}  # each name, and whether it is a function or class of the module's own
    for node in ast.walk(tree):
        # The text cannot show which names such a module will have.
        if isinstance(node, ast.Name) and node.id in _MAKERS:
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = True
        elif isinstance(node, ast.Name):
            names.setdefault(node.id, False)
        elif isinstance(node, ast.alias):
            names.setdefault((node.asname or node.name).partition(".")[0], False)
    name = dotted.partition(".")[0]
    if not tree.body or name in names or not names.keys().isdisjoint(("*", "__getattr__")):
        return
    public = sorted(public_name for public_name, is_own in names.items() if is_own and not public_name.startswith("_"))
    raise SpecError(no_attribute(place, name, public, public), "model")


def no_attribute(path: str, name: str, known: list[str], likely: list[str]) -> str:
    """Returns the sentence about a name that a module or class does not have."""
    near = nearest(name, known)
    advice = f"did you mean `{near}`?" if near else f"it has {_list_names(likely)}"
    return f"`{path}` has no attribute `{name}`; {advice}"


def _list_names(names: list[str]) -> str:
    if not names:
        return "nothing that could be called"
    listed = ", ".join(f"`{name}`" for name in names[:8])
    return listed if len(names) <= 8 else f"{listed} and {len(names) - 8} more"
