"""Breaks guards one at a time, in a copy of the tree, and tells which broken ones the tests do not see.

A guard is a comparison, a condition that returns early, a `not`, a number that something is compared with, or a member
of a tuple of questions, rules or controls. `python tests/benchmarks/mutants.py --count 20` breaks 20 of the 200 that a
fixed seed draws. The copy holds each of them behind a switch, so that one run of the tests tells which test reaches
which guard: only those run where it is broken. A mutant that no test kills is printed with its line; what it would do
to a user is for a reader to judge.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from multiprocessing import get_context
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
_IMPORTED = ("torch", "torch._dynamo", "pytest", "hypothesis", "syrupy", "click", "rich", "pydantic", "jinja2")
_FUTURE = b"from __future__ import annotations"
_SWITCH = '''
"""Says which guard is broken, and notes which test reaches which guard."""

import os
import sys

BROKEN = int(os.environ.get("MUTANT", "-1"))
_log = os.environ.get("MUTANT_LOG")
_reached = set()


def is_broken(number):
    if _log:
        # a guard of a module or of a class is reached when that is imported, by whichever test comes first
        in_function = sys._getframe(1).f_code.co_flags & 1
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0] if in_function else ""
        if (number, test) not in _reached:
            _reached.add((number, test))
            with open(_log, "a") as file:
                file.write(f"{number}\\t{test}\\n")
    return number == BROKEN
'''


_REPORT = '''
"""Writes down every test that passes, and how many seconds it takes."""

import os


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open("passed.txt", "a") as file:
            file.write(f"{report.nodeid}\\t{report.duration}\\n")
'''


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


def find_mutants(rooms: Sequence[str]) -> list[Mutant]:
    """Returns every guard of the rooms, in the order of files and lines."""
    files = sorted(path for room in rooms for path in (ROOT / "gaverify" / room).rglob("*.py"))
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
            found = mutant(broken, text, kind)
            if _is(source[found.start : found.stop], broken):  # Python 3.11 does not say where a part of an f-string is
                yield found


def _is(source: bytes, node: ast.expr) -> bool:
    try:
        return ast.dump(ast.parse(b"(%s)" % source, mode="eval").body) == ast.dump(node)
    except SyntaxError:
        return False


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


def draw(seed: int, rooms: Sequence[str]) -> list[Mutant]:
    """Returns the mutants in the seed's order; of each line one at most."""
    by_line = {(mutant.file, mutant.line): mutant for mutant in find_mutants(rooms)}
    mutants = sorted(by_line.values())
    random.Random(seed).shuffle(mutants)
    return mutants


def plant(mutants: Sequence[Mutant], copy: Path) -> None:
    """Puts each guard of the copy behind its switch, on the line where it stands."""
    (copy / "mutant_switch.py").write_text(_SWITCH, encoding="utf-8")
    (copy / "mutant_report.py").write_text(_REPORT, encoding="utf-8")
    for file in {mutant.file for mutant in mutants}:
        source = (copy / file).read_bytes()
        here = [(number, mutant) for number, mutant in enumerate(mutants) if mutant.file == file]
        end = len(source)  # two guards may lie one in the other: that which begins first is left as it is
        for number, mutant in sorted(here, key=lambda each: each[1].start, reverse=True):
            if mutant.stop <= end:
                right = source[mutant.start : mutant.stop]
                switched = b"(%s if _is_broken(%d) else (%s))" % (mutant.text.encode(), number, right)
                source = source[: mutant.start] + switched + source[mutant.stop :]
                end = mutant.start
        assert _FUTURE in source, f"{file} does not begin with {_FUTURE.decode()}"
        source = source.replace(_FUTURE, _FUTURE + b"; from mutant_switch import is_broken as _is_broken", 1)
        compile(source, file, "exec")
        (copy / file).write_bytes(source)


def environment(copy: Path, **more: str) -> dict[str, str]:
    """Returns what the tests of the copy need to find it."""
    return {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", **more}


def reach(copy: Path, tests: Sequence[str], workers: int) -> tuple[dict[int, set[str]], dict[str, float]]:
    """Runs the tests once; returns which reach each guard ("" for an import), and the seconds of those that pass."""
    log = copy / "reached.txt"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutant_report"]
    words += ["-n", str(workers), *tests]
    subprocess.run(words, cwd=copy, env=environment(copy, MUTANT_LOG=str(log)), stdout=subprocess.DEVNULL)
    rows = (line.rsplit("\t", 1) for line in (copy / "passed.txt").read_text(encoding="utf-8").splitlines())
    seconds = {test: float(took) for test, took in rows}
    reached: dict[int, set[str]] = defaultdict(set)
    for line in log.read_text(encoding="utf-8").splitlines():
        number, _, test = line.partition("\t")
        reached[int(number)].add(test)
    return reached, seconds


def rounds_of(reached: set[str], seconds: dict[str, float]) -> Iterator[list[str]]:
    """Yields what has to pass for a guard to survive: the quickest tests that reach it, and the others.

    Those are all tests where an import reaches the guard. Tests that fail with nothing broken, such as those of the
    sources' texts, are left out.
    """
    ordered = sorted(set(seconds) if "" in reached else reached & set(seconds), key=lambda test: (seconds[test], test))
    yield ordered[:30]
    yield ordered[30:]


def survives(number: int, copy: Path, reached: set[str], seconds: dict[str, float]) -> tuple[bool, float]:
    """Whether every round of tests passes with a guard broken, and the seconds that this took."""
    started = time.monotonic()
    survived = all(
        _pass(number, copy, tests, 60 + 4 * sum(seconds[test] for test in tests))
        for tests in rounds_of(reached, seconds)
        if tests
    )
    return survived, time.monotonic() - started


def _pass(number: int, copy: Path, tests: list[str], limit: float) -> bool:
    """Runs tests in a fork of this process, which has imported torch and pytest, and nothing of the copy.

    A mutant may loop for ever: one whose tests take longer than `limit` seconds dies.
    """
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.setsid()
            os.chdir(copy)
            os.environ.update(environment(copy, MUTANT=str(number)))
            sys.path.insert(0, str(copy))
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            pytest = import_module("pytest")
            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
        finally:
            os._exit(status)
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main() -> None:
    """Breaks the guards one by one and prints who survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=NUMBER, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="how many to leave out before them")
    parser.add_argument("--seed", type=int, default=SEED, help="of the order in which they are drawn")
    parser.add_argument("--room", action="append", help=f"a folder of gaverify (default: {', '.join(ROOMS)})")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    parser.add_argument("tests", nargs="*", default=["tests"], help="the tests that have to see them (default: all)")
    options = parser.parse_args()
    mutants = draw(options.seed, options.room or ROOMS)[options.first :][: options.count]
    for name in _IMPORTED:
        import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "*.egg-info", ".*_cache"))
        plant(mutants, copy)
        reached, seconds = reach(copy, options.tests, options.workers)
        print(f"{len(seconds)} tests pass; {len(reached)} of {len(mutants)} guards are reached", flush=True)
        with ProcessPoolExecutor(options.workers, mp_context=get_context("fork")) as pool:
            fates = {pool.submit(survives, at, copy, reached[at], seconds): at for at in range(len(mutants))}
            for fate in as_completed(fates):
                survived, took = fate.result()
                print(f"{'SURVIVES' if survived else 'dies'} after {took:.0f} s: {mutants[fates[fate]]}", flush=True)
    survivors = sum(fate.result()[0] for fate in fates)
    print(f"{len(mutants) - survivors} of {len(mutants)} die")


if __name__ == "__main__":
    main()
