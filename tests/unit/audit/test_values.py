"""`--set`: values in place of those in the source, for one run."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from gaverify.audit.editing import Edits, assigned, not_placed, placed
from gaverify.errors import ProblemError

SOURCE = """
from dataclasses import dataclass, field
BATCH: int = 8
if True:
    RATE = 0.1
@dataclass
class Config:
    batch_size: int = 8
    steps: int = field(default=4, metadata={"help": "K"})
    required: int
config = {"batch": 8, "inner": {"lr": 0.1}}
options = dict(batch=8)
def train(batch_size=8, *, steps=4):
    size = batch_size
    local = {"batch": 1}
    def inner():
        deep = 1
        return deep
    return batch_size, steps, size, local["batch"], inner()
"""


def run(**values: str) -> dict[str, Any]:
    names = [(name.replace("__", "."), word) for name, word in values.items()]
    edits = Edits(names)
    code = edits.script(SOURCE.replace("    required: int\n", "").encode(), "train.py")
    assert edits.placed == {name for name, _ in names}
    space: dict[str, Any] = {"__name__": "edited"}
    import sys
    import types

    sys.modules["edited"] = types.ModuleType("edited")
    exec(code, space)
    return space


class TestSource:
    def test_a_constant(self) -> None:
        assert run(BATCH="2")["BATCH"] == 2
        assert run(RATE="1e-3")["RATE"] == 1e-3

    def test_a_default_of_a_dataclass(self) -> None:
        config = run(Config__batch_size="2", Config__steps="1")["Config"]
        assert (config().batch_size, config().steps) == (2, 1)
        assert config.__dataclass_fields__["steps"].metadata == {"help": "K"}

    def test_an_entry(self) -> None:
        space = run(config__batch="2", config__inner__lr="1", options__batch="3")
        assert (space["config"], space["options"]) == ({"batch": 2, "inner": {"lr": 1}}, {"batch": 3})

    def test_inside_a_function(self) -> None:
        values = {"batch_size": "2", "steps": "1", "size": "'text'", "local.batch": "5", "inner.deep": "6"}
        space = run(**{f"train__{name.replace('.', '__')}": word for name, word in values.items()})
        assert space["train"]() == (2, 1, "text", 5, 6)

    def test_lines_keep_their_numbers(self) -> None:
        tree = ast.parse(SOURCE)
        before = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        assert placed(tree, ["config", "batch"], "[1,\n2]") == 1
        assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)] == before

    @pytest.mark.parametrize("name", ["ABSENT", "Config.absent", "config.absent", "train.absent", "deep", "batch_size"])
    def test_what_is_not_there_is_not_placed(self, name: str) -> None:
        assert placed(ast.parse(SOURCE), name.split("."), "1") == 0

    def test_a_number_does_not_become_text(self) -> None:
        with pytest.raises(ProblemError, match="it is 8 in line 3"):
            placed(ast.parse(SOURCE), ["BATCH"], "4x", "`--set BATCH=4x`")

    def test_the_nearest_name_is_told(self) -> None:
        assert "BATCH" in assigned(SOURCE.encode())
        assert "did you mean `BATCH`?" in not_placed("BTACH", "train.py", assigned(SOURCE.encode()))
