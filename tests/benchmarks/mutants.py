"""Breaks guards one at a time, in a copy of the tree, and tells which broken ones the tests do not see.

A guard is a comparison, a condition that returns early, a `not`, a number that something is compared with, or a member
of a tuple of questions, rules or controls. `python tests/benchmarks/mutants.py --count 20` breaks 20 of the 200 that a
fixed seed draws. A mutant that no test kills is printed with its line; what it would do to a user is for a reader to
judge.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ROOMS = ("verdict", "search", "rules", "audit/recording")
NUMBER = 200
SEED = 62
_TURNED = {
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_LONGEST = 1800  # seconds of one command of pytest: a mutant may loop for ever


class Mutant(NamedTuple):
    """A span of a file, and the text that breaks it."""

    file: str
    """Below the root."""
    line: int
    start: int
    """Offset in the file's bytes."""
    stop: int
    text: str
    kind: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: `{self.text}`"


def find_mutants() -> list[Mutant]:
    """Returns every guard of the rooms, in the order of files and lines."""
    files = sorted(path for room in ROOMS for path in (ROOT / "gaverify" / room).rglob("*.py"))
    return [mutant for path in files for mutant in _mutants_of(path)]


def _mutants_of(path: Path) -> Iterator[Mutant]:
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    file = path.relative_to(ROOT).as_posix()

    def mutant(node: ast.expr, text: str, kind: str) -> Mutant:
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return Mutant(file, node.lineno, start, stop, text, kind)

    for node in ast.walk(ast.parse(source)):
        for broken, text, kind in _break(node):
            yield mutant(broken, text, kind)


def _break(node: ast.AST) -> Iterator[tuple[ast.expr, str, str]]:
    """Yields what may be broken of a node, the text in its place, and how it is broken."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _TURNED:
        yield from _break_comparison(node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({ast.unparse(node.operand)})", "without not"
    elif isinstance(node, ast.If) and not node.orelse and len(node.body) == 1:
        if isinstance(node.body[0], ast.Return | ast.Continue | ast.Raise):
            yield node.test, "False", "guard left out"
    elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
        names = [member.id for member in node.elts if isinstance(member, ast.Name)]
        # a pair is a value that is handed on; three names and more are a list of questions, rules or controls
        for at, name in enumerate(names if len(node.elts) == len(names) > 2 else ()):
            yield node, f"({', '.join([*names[:at], *names[at + 1 :]])})", f"without {name}"


def _break_comparison(node: ast.Compare) -> Iterator[tuple[ast.expr, str, str]]:
    left, limit = ast.unparse(node.left), node.comparators[0]
    yield node, f"({left} {_TURNED[type(node.ops[0])]} {ast.unparse(limit)})", "turned"
    if isinstance(limit, ast.Constant) and type(limit.value) in (int, float):
        yield limit, repr(limit.value + 1), "moved"
    elif isinstance(limit, ast.Name) and limit.id.isupper():
        yield limit, f"(100 * {limit.id})", "moved"


def draw(count: int) -> list[Mutant]:
    """Returns the first mutants of the seed's order; of each line one at most."""
    by_line = {(mutant.file, mutant.line): mutant for mutant in find_mutants()}
    mutants = sorted(by_line.values())
    random.Random(SEED).shuffle(mutants)
    return mutants[: min(count, NUMBER)]


def survives(mutant: Mutant, copy: Path, workers: int) -> bool:
    """Whether all default tests pass with a guard broken; those of its own room come first, which are the quickest."""
    path = copy / mutant.file
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.stop :])
    room = Path(mutant.file).parts[1]
    try:
        # a text that does not compile is no mutant that a test has to see
        compile(path.read_bytes(), str(path), "exec")
        unit, corpus = f"tests/unit/{room}", ["tests/corpus"]
        for tests in ([unit], corpus, ["tests", f"--ignore={unit}", "--ignore=tests/corpus"]):
            if not _pass(copy, tests, workers):
                return False
        return True
    except SyntaxError:
        return False
    finally:
        path.write_bytes(source)


def _pass(copy: Path, tests: list[str], workers: int) -> bool:
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", str(workers), *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(words, cwd=copy, env=environment, capture_output=True, timeout=_LONGEST)
    except subprocess.TimeoutExpired:
        return False
    return ended.returncode == 0


def main() -> None:
    """Breaks the guards one by one and prints who survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=NUMBER, help=f"how many of the {NUMBER} (default: all)")
    parser.add_argument("--first", type=int, default=0, help="how many to leave out before them")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest")
    options = parser.parse_args()
    mutants = draw(options.first + options.count)[options.first :]
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "*.egg-info", ".*_cache"))
        for number, mutant in enumerate(mutants, 1):
            started = time.monotonic()
            if survives(mutant, copy, options.workers):
                survivors.append(mutant)
            took = time.monotonic() - started
            fate = "SURVIVES" if survivors and survivors[-1] is mutant else "dies"
            print(f"{number}/{len(mutants)} {fate} after {took:.0f} s: {mutant}", flush=True)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} die")


if __name__ == "__main__":
    main()
