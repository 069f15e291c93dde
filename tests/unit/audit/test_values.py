"""Values in place of those in the source, and what a recorded run leaves on disk."""

from __future__ import annotations

import argparse
import ast
import json
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gaverify.audit.editing import Edits, check_values, place_value
from gaverify.audit.folders import DISK_FULL, ROOM
from gaverify.audit.job import Command, Job
from gaverify.audit.reading import RecordedRun
from gaverify.audit.recording import storage
from gaverify.audit.recording.bus import Bus, Guard
from gaverify.audit.recording.calls import Recording
from gaverify.audit.recording.listeners.other_calls import LoadListener
from gaverify.audit.recording.storage import Journal, Storage
from gaverify.audit.recording.values import same
from gaverify.errors import ProblemError
from gaverify.records.events import ClosingRecord, FileLoaded, read_closing_record

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
    sys.modules["edited"] = ModuleType("edited")
    exec(code, space)
    return space


class TestSource:
    def test_constants_defaults_of_a_dataclass_and_entries(self) -> None:
        words = {"BATCH": "2", "RATE": "1e-3", "Config__batch_size": "2", "Config__steps": "1"}
        space = run(**words, config__batch="2", config__inner__lr="1", options__batch="3")
        config = space["Config"]
        assert (space["BATCH"], space["RATE"], config().batch_size, config().steps) == (2, 1e-3, 2, 1)
        assert config.__dataclass_fields__["steps"].metadata == {"help": "K"}
        assert (space["config"], space["options"]) == ({"batch": 2, "inner": {"lr": 1}}, {"batch": 3})

    def test_inside_a_function(self) -> None:
        values = {"batch_size": "2", "steps": "1", "size": "'text'", "local.batch": "5", "inner.deep": "6"}
        space = run(**{f"train__{name.replace('.', '__')}": word for name, word in values.items()})
        assert space["train"]() == (2, 1, "text", 5, 6)

    def test_lines_keep_their_numbers(self) -> None:
        tree = ast.parse(SOURCE)
        before = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        assert place_value(tree, "config.batch", "[1,\n2]") == 1
        assert [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)] == before

    @pytest.mark.parametrize("name", ["ABSENT", "Config.absent", "config.absent", "train.absent", "deep", "batch_size"])
    def test_what_is_not_there_is_not_placed(self, name: str) -> None:
        assert place_value(ast.parse(SOURCE), name, "1") == 0

    def test_a_number_does_not_become_text(self) -> None:
        with pytest.raises(ProblemError, match="it is 8 in line 3"):
            place_value(ast.parse(SOURCE), "BATCH", "4x", "`--set BATCH=4x`")

    @pytest.mark.parametrize(
        ("line", "word", "value"),
        [
            ("x = True", "true", True),
            ("x = True", "False", False),
            ("x = True", "false", False),
            ("x = ''", "true", "true"),
        ],
    )
    def test_a_switch_takes_the_words_of_toml_and_a_text_takes_them_as_text(
        self, line: str, word: str, value: object
    ) -> None:
        tree = ast.parse(line)
        assert place_value(tree, "x", word) == 1 and ast.unparse(tree) == f"x = {value!r}"

    def test_a_keyword_wherever_something_is_called(self) -> None:
        tree = ast.parse("class C:\n    n: int = 1\nx = f(C(n=2))\ndef main():\n    return data.C(n=3), C()\n")
        assert place_value(tree, "main.C.n", "7") == 1
        assert place_value(tree, "C.n", "8") == 3
        assert ast.unparse(tree).count("8") == 3


SCRIPT = """
import model, torch
settings = {"n_layer": 3}
def main(depth=3):
    loader = torch.utils.data.DataLoader([1], batch_size=4)
main()
"""


class TestBeforeAnythingStarts:
    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("train.py").write_text(SCRIPT, encoding="utf-8")

    @pytest.mark.parametrize(
        ("name", "advice"),
        [
            ("n_layer", "did you mean `settings.n_layer` (line 3)?"),
            ("batch_size", "did you mean `DataLoader.batch_size` (line 5)?"),
            ("main.deph", "did you mean `main.depth` (line 4)?"),
            ("zzz", "for a name in a function, write `function.name`"),
        ],
    )
    def test_the_names_that_would_take_it_are_told(self, name: str, advice: str) -> None:
        with pytest.raises(ProblemError) as raised:
            check_values("train.py", False, [(name, "1")])
        assert f"`train.py` assigns no `{name}`" in str(raised.value)
        assert str(raised.value).endswith(advice)

    @pytest.mark.parametrize("name", ["settings.n_layer", "model.GPT.n_layer", "DataLoader.batch_size", "torch.absent"])
    def test_what_has_a_place_or_lies_elsewhere_is_let_pass(self, name: str) -> None:
        check_values("train.py", False, [(name, "1")])

    def test_a_module_and_a_script_that_cannot_be_read_are_left_to_their_run(self) -> None:
        check_values("train", True, [("zzz", "1")])
        Path("train.py").write_text("def", encoding="utf-8")
        check_values("train.py", False, [("zzz", "1")])


class TestOptions:
    """Defaults of `argparse` parsers, wherever they are built."""

    @pytest.fixture(autouse=True)
    def _patched(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        for owner, name in ((argparse.ArgumentParser, "parse_known_args"), (SourceFileLoader, "get_code")):
            monkeypatch.setattr(owner, name, getattr(owner, name))

    def parse(self, *values: tuple[str, str], given: tuple[str, ...] = ()) -> argparse.Namespace:
        edits = Edits(values)
        edits.install()
        parser = argparse.ArgumentParser()
        parser.add_argument("-b", "--batch-size", type=int, required=True)
        parser.add_argument("--kind", dest="how", choices=["mean", "sum"], default="mean")
        parser.add_argument("--rates", type=float, nargs="+", default=[0.1])
        parser.add_argument("--fast", action="store_true")
        args = parser.parse_args(list(given))
        assert edits.placed == {name for name, _ in values}
        return args

    def test_a_default_is_what_the_word_would_be_on_the_command_line(self) -> None:
        args = self.parse(("batch_size", "8"), ("how", "sum"), ("rates", "1 2"), ("fast", "True"))
        assert vars(args) == {"batch_size": 8, "how": "sum", "rates": [1.0, 2.0], "fast": True}
        assert self.parse(("batch-size", "8")).batch_size == 8

    def test_every_parser_with_the_option_also_that_of_a_subcommand(self) -> None:
        Edits([("batch_size", "8")]).install()
        first, parser = argparse.ArgumentParser(), argparse.ArgumentParser()
        first.add_argument("--batch-size", type=int, default=4)
        assert first.parse_known_args(["train"])[0].batch_size == 8
        parser.add_subparsers(dest="command").add_parser("train").add_argument("--batch-size", type=int, default=4)
        assert parser.parse_args(["train"]).batch_size == 8

    @pytest.mark.parametrize(
        ("name", "word", "given", "sentence"),
        [
            ("batch_size", "8x", (), "`batch_size=8x`: invalid int value: '8x'"),
            ("how", "max", ("-b", "8"), "`how=max`: invalid choice: 'max'"),
            ("fast", "2", ("-b", "8"), "the option takes no value; write `True` or `False`"),
            ("batch_size", "8", ("--batch-size=4",), "the arguments of this run also give `--batch-size`"),
        ],
    )
    def test_what_an_option_does_not_take(self, name: str, word: str, given: tuple[str, ...], sentence: str) -> None:
        with pytest.raises(ProblemError) as caught:
            self.parse((name, word), given=given)
        assert sentence in str(caught.value)

    @pytest.mark.parametrize(
        ("script", "name", "known"),
        [
            ("parser.add_argument('-b', '--batch-size', default=4)", "batch_size", True),
            ("parser.add_argument('--bs', dest='batch_size')", "batch_size", True),
            ("parser.add_argument('--batch-size', default=4)", "batch_siz", False),
            ("from library import options\nargs = options().parse_args()", "batch_size", True),
            ("from beside import args", "batch_size", True),  # a module whose text nobody reads before the run
            ("import torch", "batch_size", False),
        ],
    )
    def test_what_the_text_tells_before_anything_starts(self, script: str, name: str, known: bool) -> None:
        Path("beside.py").touch()
        Path("train.py").write_text(script, encoding="utf-8")
        if known:
            check_values("train.py", False, [(name, "8")])
            return
        with pytest.raises(ProblemError, match=f"assigns no `{name}`, parses no such option") as caught:
            check_values("train.py", False, [(name, "8")])
        assert ("did you mean `batch_size` (line 1)?" in str(caught.value)) is ("batch" in script)


def test_the_closing_record_appears_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent looks for the records of ranks while they are written; half a record would be a fault of ours."""
    seen: list[bool] = []
    write_text = Path.write_text

    def watched(path: Path, *args: object, **options: object) -> int:
        written = write_text(path, *args, **options)  # type: ignore[arg-type]
        seen.append((tmp_path / "meta.json").exists())
        return written

    monkeypatch.setattr(Path, "write_text", watched)
    Storage(tmp_path).finish(ClosingRecord(rank=3))
    assert seen == [False]
    assert read_closing_record((tmp_path / "meta.json").read_text()) == ClosingRecord(rank=3)


def test_only_files_of_the_script_are_noted_as_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is given what another run of the audit kept does not resume."""
    written = Storage(tmp_path)
    recording = Recording(Job(Command(""), "full", 1, folder=str(tmp_path)), written, Guard(written), Journal(written))
    monkeypatch.setattr(torch, "load", torch.load)
    LoadListener(recording, tmp_path / "audit" / "1-accumulated").listen(Bus(recording.guard))
    own, checkpoint = tmp_path / "audit" / "0-full" / "loader-0-1-0.pt", tmp_path / "audited.pt"
    own.parent.mkdir(parents=True)
    for path in (own, checkpoint):
        torch.save([1], path)
        assert torch.load(path) == [1]
    written.finish(ClosingRecord())
    noted = RecordedRun("full", tmp_path, 0.0).events
    assert [event.path for event in noted if isinstance(event, FileLoaded)] == [str(checkpoint)]


@pytest.mark.parametrize(("times", "enough"), [(2, True), (3, False)])
def test_room_is_asked_for_before_it_is_used(
    times: int, enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(storage, "leave", left.append)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=90))
    Storage(tmp_path).reserve([torch.ones(10)], times)
    assert left == ([] if enough else [DISK_FULL])
    assert enough or json.loads((tmp_path / ROOM).read_text()) == [120, 90]


NAN, ONES = [float("nan"), 1.0], [1.0, 1.0]


@pytest.mark.parametrize(
    ("before", "now", "alike"),
    [
        (NAN, NAN, True),
        (NAN, ONES, False),
        (ONES, NAN, False),
        ([1.0], ONES, False),
        (None, NAN, False),
    ],
)
def test_values_are_the_same_where_nan_stays_nan(before: list[float] | None, now: list[float], alike: bool) -> None:
    assert same(None if before is None else torch.tensor(before), torch.tensor(now)) is alike
