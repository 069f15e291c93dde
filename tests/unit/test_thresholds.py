"""Every number that decides something stands in one table: no other module of the deciding rooms has any."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gaverify
from gaverify import thresholds

PACKAGE = Path(gaverify.__file__).parent
ROOMS = ("verdict", "search", "rules", "records", "collective", "audit")
DECIDE_NOTHING = {
    "verdict/comparison.py": "the norms at which float32 can sum squares",
    "verdict/control.py": "what `frexp` gives for a power of two",
    "search/trace/traces.py": "what values are folded at, and what stands for infinity",
    "search/trace/suspects.py": "what stands for NaN",
    "records/numbers.py": "where a unit of memory or time ends",
    "collective/window.py": "seconds",
    "collective/launching.py": "seconds",
    "collective/membership.py": "seconds",
    "audit/code_controls.py": "what losses are multiplied by in a control",
    "audit/controls.py": "what losses are multiplied by in a control",
    "audit/launchers.py": "seconds",
    "audit/processes.py": "seconds",
    "audit/request.py": "seconds",
    "audit/recording/outputs.py": "what values are moved by",
    "audit/recording/script_calls.py": "what stands for NaN",
    "audit/recording/storage.py": "seconds",
    "audit/recording/listeners/updates.py": "seconds",
    "audit/recording/values.py": "what stands for NaN",
}


def floats(source: str) -> Iterator[tuple[int, float]]:
    """Yields line and value of what is a number with a point, but for 0 and 1."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value not in (0.0, 1.0):
            yield node.lineno, node.value


def found(room: str) -> dict[str, list[tuple[int, float]]]:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in (PACKAGE / room).rglob("*.py")}
    numbers = {name: list(floats(path.read_text(encoding="utf-8"))) for name, path in files.items()}
    return {name: values for name, values in numbers.items() if values}


@pytest.mark.parametrize("room", ROOMS)
def test_no_number_decides_outside_the_table(room: str) -> None:
    assert found(room).keys() - DECIDE_NOTHING.keys() == set(), "move it to `gaverify/thresholds.py`, with its source"


def test_what_is_excused_is_there() -> None:
    assert DECIDE_NOTHING.keys() <= {name for room in ROOMS for name in found(room)}


def test_a_literal_would_be_seen() -> None:
    assert list(floats("def differ(a, b):\n    return abs(a - b) > 1e-4 * abs(b) or a == 0.0")) == [(2, 1e-4)]


def test_every_row_of_the_table_says_where_it_comes_from() -> None:
    body = ast.parse(Path(thresholds.__file__).read_text(encoding="utf-8")).body
    rows = [at for at, node in enumerate(body) if isinstance(node, ast.Assign)]
    assert len(rows) > 20
    for at in rows:
        said = body[at + 1] if at + 1 < len(body) else None
        assert isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant), ast.unparse(body[at])
