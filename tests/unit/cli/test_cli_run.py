"""`gaverify run` and `main`: words in, calls, exit codes; the verification itself is replaced."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import samples

import gaverify
from gaverify.__main__ import start
from gaverify.cli import main
from gaverify.errors import InternalError, MissingPackage, ProblemError
from gaverify.records.answers import Environment
from gaverify.records.findings import Location
from gaverify.records.outcomes import Outcome
from gaverify.records.verdict import RunInfo, Verdict
from gaverify.spec import OPTIONS, Spec
from gaverify.spec.options import read_words
from gaverify.spec.values import read_value


def verdict(outcome: Outcome, model: str = "m") -> Verdict:
    run = RunInfo(model, 1, 1, 8, (2,) * 4, (0.25,) * 4, "uniform", "accumulate", "cpu", "float32", 0, "train")
    return Verdict(outcome, (), run, "working-precision", 1e-7, environment=Environment("2", "0"))


class Fake:
    """Stands in for the verification and remembers what it was asked."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []
        self.verify: Callable[[Spec], Verdict] = lambda spec: verdict(Outcome(spec.model), spec.model)

    def verify_spec(self, spec: Spec, progress: Callable[[str, int, int], None] | None) -> Verdict:
        self.specs.append(spec)
        if progress is not None:
            progress("full batch", 1, 2)
        return self.verify(spec)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    module = types.ModuleType("gaverify.verification")
    module.__dict__["verify_spec"] = fake.verify_spec
    monkeypatch.setitem(sys.modules, "gaverify.verification", module)
    monkeypatch.setattr(gaverify, "verification", module, raising=False)
    return fake


@pytest.mark.parametrize(("outcome", "code"), [("equivalent", 0), ("divergent", 1), ("inconclusive", 3)])
def test_the_outcome_is_the_exit_code(fake: Fake, outcome: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--model", outcome]) == code
    assert outcome.upper() in capsys.readouterr().out


def test_options_become_a_spec(fake: Fake) -> None:
    words = ["--steps", "2", "--weighting", "0.25,0.75", "--input-shape", "3,8", "--lr", "1e-2", "--rtol", "0"]
    words += ["--atol", "1", "--trace", "--no-diagnose", "--exact", "--ignore-index", "-1"]
    words += ["--model-arg", "a=1", "--model-arg", "b=true", "--model-arg", "c=x=y"]
    assert main(["run", "--model", "equivalent", *words]) == 0
    (spec,) = fake.specs
    assert (spec.steps, spec.weighting, spec.input_shape, spec.lr) == (2, (0.25, 0.75), (3, 8), 0.01)
    assert (spec.trace, spec.diagnose, spec.exact, spec.ignore_index) == (True, False, True, -1)
    assert spec.model_args == {"a": 1, "b": True, "c": "x=y"}


def test_options_left_out_override_nothing(fake: Fake, tmp_path: Path) -> None:
    assert read_words(OPTIONS, {"steps": None, "trace": None, "model_args": (), "exact": False}) == {"exact": False}
    (tmp_path / "a.toml").write_text('model = "equivalent"\ntrace = true\nsteps = 7\ndiagnose = false')
    assert main(["run", str(tmp_path)]) == 0
    assert (fake.specs[0].trace, fake.specs[0].steps, fake.specs[0].diagnose) == (True, 7, False)
    assert main(["run", str(tmp_path), "--no-trace", "--steps", "3"]) == 0
    assert (fake.specs[1].trace, fake.specs[1].steps) == (False, 3)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("3", 3),
        ("-1e-3", -1e-3),
        ("True", True),
        ("false", False),
        ("nan", "nan"),
        ("1_000", 1000),
        ("'4'", "4"),
        ("", ""),
    ],
)
def test_values_of_model_arguments(word: str, value: object) -> None:
    assert read_value(word) == value and type(read_value(word)) is type(value)


def specs(folder: Path, *models: str) -> Path:
    for number, model in enumerate(models):
        (folder / f"{number}.toml").write_text(f'model = "{model}"')
    return folder


@pytest.mark.parametrize(
    ("models", "code"),
    [
        (("equivalent", "equivalent"), 0),
        (("equivalent", "divergent", "inconclusive"), 1),
        (("equivalent", "inconclusive"), 3),
        (("divergent", "broken", "equivalent"), 2),
        (("internal", "equivalent"), 70),
        (("fault", "broken", "equivalent"), 70),
        (("exits", "equivalent"), 2),
        (("memory", "equivalent"), 2),
    ],
)
def test_several_specs(
    fake: Fake, tmp_path: Path, models: Sequence[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    errors: dict[str, BaseException] = {
        "broken": ProblemError("the factory raised"),
        "internal": InternalError("broken inside"),
        "fault": KeyError("x"),
        "exits": SystemExit(0),
        "memory": MemoryError(),
    }

    def verify(spec: Spec) -> Verdict:
        if spec.model in errors:
            raise errors[spec.model]
        return verdict(Outcome(spec.model), spec.model)

    fake.verify = verify
    assert main(["run", str(specs(tmp_path, *models))]) == code
    assert len(fake.specs) == len(models)
    out, err = capsys.readouterr()
    sound = [model for model in models if model not in errors]
    assert out.count("summary") == 1
    assert [out.count(outcome.name) for outcome in Outcome] == [sound.count(outcome.value) for outcome in Outcome]
    assert out.count("  error  ") == len(models) - len(sound)
    assert err.count("error: " + str(tmp_path)) == len(models) - len(sound)


def test_json_has_stdout_for_itself(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def verify(spec: Spec) -> Verdict:
        print("the model talks")
        return verdict(Outcome(spec.model), spec.model)

    fake.verify = verify
    assert main(["run", str(specs(tmp_path, "equivalent", "divergent")), "--format", "json"]) == 1
    out, err = capsys.readouterr()
    assert [each["outcome"] for each in json.loads(out)["answers"]] == ["equivalent", "divergent"]
    assert err.count("the model talks") == 2


def test_json_and_files_tell_of_a_failure(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.verify = raising(ProblemError("the loss is NaN"))
    file = tmp_path / "a.json"
    assert main(["run", "--model", "m", "--format", "json", "--output", str(file)]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["errors"] == [{"source": "command line", "message": "the loss is NaN", "position": 0}]
    assert json.loads(file.read_text()) == json.loads(out)
    assert err == f"gaverify: error: the loss is NaN\ngaverify: wrote {file}\n"


def test_outputs_are_checked_before_the_run(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = ["--output", "a.xyz", "--output", str(tmp_path / "gone" / "a.json"), "--output", str(tmp_path)]
    assert main(["run", "--model", "equivalent", *bad]) == 2
    err = capsys.readouterr().err
    assert "a.xyz" in err and "there is no folder" in err and "is a folder" in err
    assert not fake.specs
    good = tmp_path / "a.json"
    assert main(["run", "--model", "equivalent", "--output", str(good)]) == 0
    assert json.loads(good.read_text())["outcome"] == "equivalent"


def test_a_broken_spec_is_a_row_and_the_others_run(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = specs(tmp_path, "equivalent", "divergent")
    (folder / "0b.toml").write_text('model = "equivalent"\nsteps = 0\nmode = "evl"')
    file = tmp_path / "report.json"
    file.write_text("yesterday's, green")
    assert main(["run", str(folder), str(folder / "gone.toml"), "--output", str(file)]) == 2
    assert [spec.model for spec in fake.specs] == ["equivalent", "divergent"]
    document = json.loads(file.read_text())
    assert [verdict["outcome"] for verdict in document["answers"]] == ["equivalent", "divergent"]
    assert [Path(error["source"]).name for error in document["errors"]] == ["0b.toml", "0b.toml", "gone.toml"]
    assert "$.steps: must be" in document["errors"][0]["message"]
    out, err = capsys.readouterr()
    assert out.count("  error  ") == 3 and "4 runs: 1 equivalent, 1 divergent, 2 errors" in out  # one spec has two
    assert err.count("0b.toml: $.steps") == 1 and err.count("gone.toml") == 1


def test_no_report_of_an_earlier_call_stands_for_one_that_failed(fake: Fake, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text("yesterday's, green")
    assert main(["run", str(specs(tmp_path, "equivalent")), "--steps", "0", "--output", str(file)]) == 2
    assert not fake.specs and "--steps" in json.loads(file.read_text())["errors"][0]["message"]


def test_ctrl_c_between_specs_is_told_in_the_reports(fake: Fake, tmp_path: Path) -> None:
    def verify(spec: Spec) -> Verdict:
        if len(fake.specs) == 2:
            raise KeyboardInterrupt
        return verdict(Outcome(spec.model), spec.model)

    fake.verify = verify
    file = tmp_path / "report.json"
    assert main(["run", str(specs(tmp_path, *["equivalent"] * 3)), "--output", str(file)]) == 130
    document = json.loads(file.read_text())
    assert len(document["answers"]) == 1 and document["outcome"] == "inconclusive"
    assert [error["message"] for error in document["errors"]] == ["interrupted before there was a verdict"] * 2
    file.write_text("yesterday's, whole")
    fake.specs.clear()
    assert main(["run", str(specs(tmp_path, *["equivalent"] * 3)), "--output", str(file)]) == 130
    assert file.read_text() == "yesterday's, whole"


def test_models_stand_where_specs_do(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text('model = "equivalent"')
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    fake.verify = lambda spec: verdict(Outcome.EQUIVALENT, spec.model)
    assert main(["run", "mlp", "net.py:factory", "a.b:Net", "saved", "mine.toml", "--steps", "2"]) == 0
    assert [spec.model for spec in fake.specs] == ["mlp", "net.py:factory", "a.b:Net", "saved", "equivalent"]
    assert {spec.steps for spec in fake.specs} == {2}
    assert main(["run", "no/such/folder"]) == main(["run", "gone.toml"]) == 2 and len(fake.specs) == 5


def test_quiet_is_a_line_for_each(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-q", str(specs(tmp_path, "equivalent", "divergent"))]) == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["EQUIVALENT", "DIVERGENT"]
    fake.verify = raising(ProblemError("a sentence that does not fit a line of eighty columns " * 3))
    assert main(["run", "-q", "mlp"]) == 2
    out, err = capsys.readouterr()
    assert (
        out.startswith("ERROR         command line  a sentence") and out.endswith("columns\n") and out.count("\n") == 1
    )
    assert not err, "the error is told once"


def test_a_quiet_row_names_code_and_line(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    fake.verify = lambda spec: samples.divergent()
    assert main(["run", "-q", "mlp"]) == 1
    why = "3 of 6 parameters differ, relative difference up to 8.8e-01"
    row = "DIVERGENT     mlp-batchnorm  "
    assert capsys.readouterr().out == f"{row}GAV101 in layer 1 at train.py:12; {why} (500 ms)\n"
    assert main(["run", "-q", "mlp", "--expect", "divergent"]) == 0
    assert capsys.readouterr().out.startswith(f"{row}as expected: GAV101 ")
    assert main(["run", "-q", "mlp", "--expect", "equivalent"]) == 1
    assert capsys.readouterr().out.startswith(f"{row}equivalent was expected: GAV101 ")
    monkeypatch.chdir(tmp_path)
    entry = '[[tool.gaverify.accept]]\ncode = "GAV101"\nlocation = "1"\nreason = "ghost batch norm"\n'
    Path("pyproject.toml").write_text(entry)
    assert main(["run", "-q", "mlp"]) == 0
    assert capsys.readouterr().out.startswith(f"{row}accepted: GAV101 in layer 1 at train.py:12; ")


def test_a_quiet_row_begins_with_what_is_new(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (known,) = (finding for finding in samples.divergent().findings if finding.severity == "fault")
    new = replace(known, code="GAV202", location=Location(file="train.py", line=7))
    fake.verify = lambda spec: samples.divergent(findings=(known, new))
    entry = '[[accept]]\ncode = "{}"\nlocation = "{}"\nreason = "wanted"\n'
    entries = entry.format("GAV101", "1") + entry.format("GAV102", "gone")
    (tmp_path / "a.toml").write_text(f'model = "divergent"\n{entries}')
    assert main(["run", "-q", str(tmp_path)]) == 1
    _, name, *words = capsys.readouterr().out.split()
    assert name == str(tmp_path / "a.toml")
    line = " ".join(words)
    assert line.startswith("not accepted: GAV202 at train.py:7 and 1 other cause; 3 of 6 parameters differ"), line
    assert "; 1 accept entry no longer occurs (500 ms)" in line


def test_quiet_rows_have_columns_and_colours(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.verify = lambda spec: verdict(Outcome(spec.model))
    folder = specs(tmp_path, "equivalent", "divergent", "inconclusive")
    (folder / "a-much-longer-name.toml").write_text('model = "equivalent"\nsteps = 0')
    monkeypatch.chdir(tmp_path)
    assert main(["run", "-q", "."]) == 2
    rows = capsys.readouterr().out.splitlines()
    widest = 14 + len("a-much-longer-name.toml")
    assert len(rows) == 4 and {(row[13], row[widest : widest + 2]) for row in rows} == {(" ", "  ")}
    assert {row[14:widest].strip() for row in rows} == {path.name for path in tmp_path.glob("*.toml")}
    assert main(["run", "-q", ".", "--color", "always"]) == 2
    coloured = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\x1b\[[\d;]+m(EQUIV|DIVER|INCON|ERROR)", row) for row in coloured)
    whole = verdict(Outcome.EQUIVALENT)
    fake.verify = lambda spec: replace(whole, run=replace(whole.run, micro_batches=(8,)))
    assert main(["run", "-q", "mlp"]) == 0
    assert "nothing accumulated (K = 1): " in capsys.readouterr().out


def test_an_outcome_that_does_not_come_as_expected_is_a_sentence(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "not as expected: divergent was expected, and the outcome is {}; change `expect` if that is right"
    for outcome, code in (("equivalent", 1), ("inconclusive", 3), ("divergent", 0)):
        assert main(["run", outcome, "--expect", "divergent", "-o", str(tmp_path / "a.md")]) == code
        out, sentence = " ".join(capsys.readouterr().out.split()), why.format(outcome)
        assert (sentence in out) is (code != 0) and ('as expected (`expect = "divergent"`)' in out) is (code == 0)
        heading = (tmp_path / "a.md").read_text().partition("\n")[0]
        sign = {0: "☑️", 1: "❌", 3: "⚠️"}[code]
        assert heading.startswith(f"### {sign} {outcome}, "), heading


@pytest.mark.smoke
def test_the_words_of_reports_have_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "words"]) == 0
    page = capsys.readouterr().out
    told = ["allowed", "float64 control", "noise floor", "last digit", "norm ratio", "rows", "harm", "aligned"]
    told += [
        "‖full‖",
        "control",
        "note",
        "strategy",
        "would have been detected",
        "movement",
        "proven",
        "backward : step : zero_grad",
        "working difference",
    ]
    assert all(word in " ".join(page.lower().split()) for word in [*told, "window"])


def test_a_spec_that_lacks_a_package_is_skipped_named_or_in_a_folder(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(spec: Spec) -> Verdict:
        if spec.model == "gpt2":
            raise MissingPackage("`gpt2` needs `transformers`")
        return verdict(Outcome(spec.model), spec.model)

    fake.verify = verify
    folder = specs(tmp_path, "gpt2", "equivalent")
    lacking, other = str(folder / "0.toml"), str(folder / "1.toml")
    assert main(["run", str(folder)]) == main(["run", lacking, other]) == 0
    out, err = capsys.readouterr()
    assert err.count(f"gaverify: skipped: {lacking}: `gpt2` needs `transformers`") == 2
    assert out.count("2 runs: 1 equivalent, 1 skipped\n") == 2
    assert main(["run", str(folder), "-q"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"SKIPPED       {lacking}  `gpt2` needs") and not err, "it is told once"
    assert main(["run", str(folder), "--strict"]) == main(["run", "gpt2", other]) == 2
    out, err = capsys.readouterr()
    assert "skipped" not in err and out.count("2 runs: 1 equivalent, 1 error\n") == 2
    (tmp_path / "pyproject.toml").write_text("[tool.gaverify]\nstrict = true\n")
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(folder)]) == 2 and "skipped" not in capsys.readouterr().err
    (tmp_path / "pyproject.toml").unlink()
    (folder / "1.toml").unlink()
    assert main(["run", str(folder)]) == main(["run", lacking]) == 2
    assert capsys.readouterr().err.count("gaverify: error: nothing was compared: every spec was skipped\n") == 2
    assert main(["run", lacking, "-o", str(tmp_path / "all.json")]) == 2
    document = json.loads((tmp_path / "all.json").read_text())
    assert (document["exit_code"], document["outcome"], len(document["skipped"])) == (2, "inconclusive", 1)


@pytest.mark.smoke
def test_a_baseline_leaves_as_a_run_with_its_entries(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        "accepted": samples.divergent(),
        "equivalent": samples.equivalent(),
        "unexplained": samples.divergent(findings=()),
        "open": samples.inconclusive(),
    }

    def verify(spec: Spec) -> Verdict:
        if spec.model == "lacking":
            raise MissingPackage("`lacking` needs `timm`")
        if spec.model == "broken":
            raise ProblemError("broken")
        return answers[spec.model]

    fake.verify = verify
    for number, models in enumerate(
        (["accepted", "equivalent"], ["accepted", "lacking"], ["unexplained", "open"], ["open"], ["broken", "open"])
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        specs(folder, *models)
        code = main(["baseline", str(folder)])
        assert code == main(["run", str(folder)]) == [0, 0, 1, 3, 2][number], capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    entry = '[[tool.gaverify.accept]]\ncode = "GAV102"\nlocation = "gone"\nreason = "fits nothing any more"\n'
    Path("pyproject.toml").write_text(f"[tool.gaverify]\nstrict = true\n{entry}")
    specs(tmp_path / "0", "equivalent", "equivalent")
    assert main(["baseline", str(tmp_path / "0")]) == 1


def test_ctrl_c_that_a_library_turned_into_its_own_error(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def verify(spec: Spec) -> Verdict:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except KeyboardInterrupt as error:
            raise RuntimeError("SchemaError: KeyboardInterrupt") from error
        raise AssertionError("unreachable")

    fake.verify = verify
    assert main(["run", str(specs(tmp_path, "equivalent", "equivalent"))]) == 130
    err = capsys.readouterr().err
    assert len(fake.specs) == 1 and "interrupted" in err and "bug in gaverify" not in err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    fake.verify = raising(RuntimeError("another call"))
    assert main(["run", "--model", "m"]) == 70


def test_ctrl_c_while_the_command_line_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(types.ModuleType):
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "gaverify.cli", Interrupted("gaverify.cli"))
    assert start() == 130
    assert capsys.readouterr().err == "gaverify: interrupted; nothing was decided\n"


def test_a_folder_that_is_gone_is_a_sentence(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["run", "--model", "m"]) == 2
    assert "has been removed; change to another one" in capsys.readouterr().err


def raising(error: BaseException) -> Callable[[Spec], Verdict]:
    def verify(spec: Spec) -> Verdict:
        raise error

    return verify


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ProblemError("the loss is NaN"), 2, "gaverify: error: the loss is NaN"),
        (ProblemError("it failed\n\nits output"), 2, "gaverify: error: it failed\ngaverify: error: its output\n"),
        (KeyError("x"), 70, "bug in gaverify"),
        (InternalError("x"), 70, "bug in gaverify"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 2, "out of memory"),
        (OutOfMemoryError("CUDA out of memory"), 2, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 2, "try a smaller `--batch-size`"),
        (RuntimeError("Storage size calculation overflowed with sizes=[9, 9]"), 2, "out of memory"),
        (RuntimeError("shapes cannot be multiplied"), 70, "bug in gaverify"),
        (Unspeakable(), 70, "its own text cannot be read"),
        (SystemExit(0), 2, "sys.exit(0)"),
        (GeneratorExit(), 2, "gaverify: error: the model's code raised GeneratorExit: no message"),
        (ValueError("x" * 10_000_000), 70, "x … (10,000,000 characters)"),
        (OSError(errno.EBADF, "Bad file descriptor"), 2, "the user's code closed a file descriptor"),
        (OSError(errno.EMFILE, "Too many open files", "a.py"), 2, "`a.py`: too many files are open; raise the limit"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), 2, "x`: the file name is too long"),
    ],
)
def test_no_exception_leaves_main(
    fake: Fake, error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.verify = raising(error)
    assert main(["run", "--model", "m"]) == code
    out, err = capsys.readouterr()
    assert text in err and "Traceback" not in err and out == ""


@pytest.mark.parametrize("switch", ["option", "variable"])
def test_debug_shows_the_traceback(
    fake: Fake, switch: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.verify = raising(ProblemError("the loss is NaN"))
    if switch == "variable":
        monkeypatch.setenv("GAVERIFY_DEBUG", "1")
    assert main(["run", "--model", "m", *(["--debug"] if switch == "option" else [])]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "Usage: gaverify"),
        (["run"], "nothing to verify"),
        (["rnu"], "did you mean `run`?"),
        (["run", "--stpes", "3"], "--steps"),
        (["run", "--model"], "requires an argument"),
        (["run", "--model", "m", "--steps", "x"], '--steps: must be a whole number of at least 1, got "x"'),
        (["run", "--model", "m", "--steps", "0", "--mode", "evl"], 'did you mean "eval"?'),
        (["run", "--model", "m", "--model-arg", "x"], "NAME=VALUE"),
        (["run", "--model", "m", "--format", "xml"], "xml"),
        (["run", "gone.toml"], "there is no such file or folder"),
    ],
)
def test_usage_errors(words: list[str], text: str, fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert text in err and "Traceback" not in err and out == ""
    assert not fake.specs


def test_without_a_terminal_each_started_run_has_a_line(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = specs(tmp_path, "equivalent", "divergent")
    assert main(["run", str(folder)]) == 1
    names = "spec 1 of 2, equivalent", "spec 2 of 2, divergent"
    lines = [f"gaverify: {verb} {name}" for name in names for verb in ("running", "decided")]
    assert capsys.readouterr().err.splitlines() == lines
    assert main(["run", str(folder), "-q"]) == 1 and capsys.readouterr().err == ""
    monkeypatch.setenv("CI", "true")
    assert main(["run", "equivalent"]) == 0
    assert capsys.readouterr().err == "gaverify: running equivalent\n"


def test_a_bar_on_a_slow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from gaverify.cli.streams import DelayedProgress

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown(delay: float, *steps: tuple[str, int, int]) -> str:
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr("gaverify.cli.streams.DELAY", delay)
        with DelayedProgress("cnn.py:factory: [x]", 2, 6) as progress:
            for step in steps:
                progress.report(*step)
            time.sleep(0.4)
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())

    text = shown(0.01, ("the full batch", 0, 5), ("micro-batch 1", 1, 5))
    assert "spec 3 of 6, pass 2 of 5, cnn.py:factory: [x]: micro-batch 1" in text, "names are no markup"
    long = shown(0.01, ("micro-batch 1 of 4 " * 9, 1, 5))
    assert re.search(r"\d:\d\d:\d\d [━╸╺ ]{21}spec 3 of 6, pass 2 of 5, cnn", long) and "…" in long
    text = shown(0.01, ("micro-batch 4", 4, 5), ("control", 5, 0))
    assert "spec 3 of 6, check 1, cnn.py:factory: [x]: control" in text
    assert shown(60.0, ("the full batch", 0, 5)) == ""


def test_one_bar_for_specs_that_run_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gaverify.cli.streams import SeveralProgress

    with SeveralProgress(["a.py:f", "b.py:g", "c"]) as several:
        several.report_of(1, "the full batch", 0, 5)
        several.report_of(0, "the full batch", 0, 5)
        several.report_of(1, "micro-batch 1", 1, 5)
        several.finish(1)
        several._shown._show()
        several.report_of(2, "the full batch", 0, 5)
        assert several._shown._bar is not None
        (task,) = several._shown._bar.tasks
        assert (task.description, task.completed, task.total) == ("spec 2 of 3, c: the full batch", 1, 3)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gaverify")]
    words = ("running spec 2 of 3, b.py:g", "running spec 1 of 3, a.py:f", "decided spec 2 of 3, b.py:g")
    assert said == [f"gaverify: {line}" for line in (*words, "running spec 3 of 3, c")]


def test_a_pipe_hears_now_and_then_what_is_being_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gaverify.cli.streams import DelayedProgress

    monkeypatch.setattr("gaverify.cli.streams.LIFE", 0.05)
    for quiet in (False, True):
        with DelayedProgress("mlp", quiet=quiet, unit="run") as progress:
            progress.report("update 1 of 2, accumulated run", 1, 3)
            time.sleep(0.4)
        lines = capsys.readouterr().err.splitlines()
        assert (lines[-1:] == ["gaverify: run 2 of 3, mlp: update 1 of 2, accumulated run (0 s)"]) is not quiet, lines


def test_a_bar_is_never_full_before_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    from gaverify.cli.streams import DelayedProgress

    progress = DelayedProgress("mlp")
    progress._show()
    assert progress._bar is not None
    (task,) = progress._bar.tasks
    for label, done, total in [("micro-batch 4", 4, 5), ("control", 5, 5), ("control", 9, 0), ("next", 1, 5)]:
        progress.report(label, done, total)
        assert task.total == (total if done < total else None) and not task.finished
    progress.__exit__(None, None, None)


def test_the_spec_is_in_the_verdict(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.toml"
    file.write_text('model = "equivalent"\nname = "mine"')
    assert main(["run", str(file), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["source"] == str(file)
    assert main(["run", "--model", "equivalent", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["source"] == ""
