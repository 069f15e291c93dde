"""`gaverify run` over many specs: which are taken, when it stops, what a project sets; the verification is replaced."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import samples

import gaverify
from gaverify.cli import main
from gaverify.cli.running import read_expression
from gaverify.errors import SpecError
from gaverify.records.comparison import Outcome
from gaverify.records.verdict import Verdict
from gaverify.spec import Spec


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Spec]:
    """The specs that were verified; a model is called as its outcome."""
    seen: list[Spec] = []

    def verify_spec(spec: Spec, progress: Callable[[str, int, int], None] | None) -> Verdict:
        seen.append(spec)
        made = {"equivalent": samples.equivalent, "divergent": samples.divergent, "inconclusive": samples.inconclusive}
        return made[Outcome(spec.model).value]()

    module = types.ModuleType("gaverify.verification")
    module.__dict__["verify_spec"] = verify_spec
    monkeypatch.setitem(sys.modules, "gaverify.verification", module)
    monkeypatch.setattr(gaverify, "verification", module, raising=False)
    monkeypatch.chdir(tmp_path)
    return seen


def write(file: str, model: str = "equivalent", more: str = "") -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(f'model = "{model}"\n{more}')


def names(seen: list[Spec]) -> list[str | None]:
    found = [spec.name for spec in seen]
    seen.clear()
    return found


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("cnn", "ab"),
        ("CNN and not slow", "a"),
        ("cnn and slow or gpt", "bc"),
        ("cnn and (slow or gpt)", "b"),
        ("not (cnn or gpt)", ""),
        ("not not cnn", "ab"),
    ],
)
def test_expressions(text: str, chosen: str) -> None:
    files = {"a": "cnn.toml", "b": "cnn_slow.toml", "c": "gpt.toml"}
    assert "".join(name for name, file in files.items() if read_expression(text)(file)) == chosen


@pytest.mark.parametrize("text", ["", "cnn and", "(cnn", "cnn)", "or cnn", "cnn gpt", "not", "()"])
def test_what_is_no_expression_is_a_sentence(text: str) -> None:
    with pytest.raises(SpecError, match=r"-k: .* cannot be read.*such as -k 'cnn and not slow'"):
        read_expression(text)


@pytest.mark.parametrize("text", ["(" * 20_000 + "cnn" + ")" * 20_000, "not " * 20_000 + "cnn"])
def test_an_expression_that_is_too_deep_is_a_sentence(text: str) -> None:
    with pytest.raises(SpecError, match=r"^command line: -k: parentheses, or `not`, stand too deep in each other"):
        read_expression(text)


def test_words_choose_specs_by_file_name_and_model(verified: list[Spec], capsys: pytest.CaptureFixture[str]) -> None:
    write("all/a.toml", "equivalent", 'name = "first"')
    write("all/b.toml", "divergent", 'name = "second"')
    for words, found in (("a.toml", ["first"]), ("SECOND", ["second"]), ("not divergent", ["first"])):
        main(["run", "all", "-k", words])
        assert names(verified) == found
    assert main(["run", "all", "-k", "nothing"]) == 2
    assert "-k: it chooses none of 2 specs" in capsys.readouterr().err
    assert main(["run", "all", "-k", "and"]) == 2 and not verified


def test_folders_in_folders_are_taken_without_what_is_no_spec(verified: list[Spec]) -> None:
    for number, file in enumerate(["b", "a/x", "a/deep/y", ".hidden/z", "venv/v", "slow/s"]):
        write(f"all/{file}.toml", more=f'name = "{file}"\nseed = {number}')
    Path("all/venv/pyvenv.cfg").write_text("")
    Path("all/a/audit.toml").write_text('script = "train.py"\n')
    Path("all/a/other.toml").write_text("[tool]\n")
    Path("all/pyproject.toml").write_text("[project]\n")
    assert main(["run", "all"]) == 0
    assert names(verified) == ["b", "a/x", "a/deep/y", "slow/s"]
    for pattern in ("slow", "slow/", "slow/*", "s.toml", "all/slow"):
        assert main(["run", "all", "--exclude", pattern]) == 0
        assert names(verified) == ["b", "a/x", "a/deep/y"], pattern
    assert main(["run", "all/slow/s.toml", "--exclude", "slow"]) == 0, "what is named is meant"


def test_it_stops_behind_failures(verified: list[Spec], capsys: pytest.CaptureFixture[str]) -> None:
    for name, model in zip("abcd", ["equivalent", "divergent", "inconclusive", "equivalent"], strict=True):
        write(f"all/{name}.toml", model, f'name = "{name}"')
    assert main(["run", "all", "-x"]) == 1
    assert names(verified) == ["a", "b"]
    assert "stopped: 1 failure; 2 specs after all/b.toml not verified" in capsys.readouterr().err
    assert main(["run", "all", "--maxfail", "2"]) == 1
    assert names(verified) == ["a", "b", "c"]
    assert main(["run", "all", "--maxfail", "3"]) == 1 and len(verified) == 4
    assert "stopped" not in capsys.readouterr().err.splitlines()[-1]
    for wrong in ("0", "two", "1.5"):
        assert main(["run", "all", "--maxfail", wrong]) == 2
        assert "--maxfail: must be a whole number of at least 1, got " in capsys.readouterr().err
    Path("all/a.toml").write_text("model = 3")
    verified.clear()
    assert main(["run", "all", "-x"]) == 2 and not verified


def test_a_project_sets_what_the_command_line_leaves_open(
    verified: list[Spec], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write("specs/a.toml", more="steps = 2")
    write("specs/b.toml")
    write("specs/slow/c.toml")
    settings = 'steps = 8\nweighting = "samples"\npaths = ["specs"]\noutputs = ["all.json"]\nexclude = ["slow"]\n'
    Path("pyproject.toml").write_text(f"[tool.gaverify]\n{settings}")
    Path("deep").mkdir()
    monkeypatch.chdir("deep")
    assert main(["run"]) == 0
    assert [(spec.steps, spec.weighting) for spec in verified] == [(2, "samples"), (8, "samples")]
    assert Path("../all.json").exists() and "gaverify: wrote ../all.json" in capsys.readouterr().err
    verified.clear()
    assert main(["run", "equivalent", "--steps", "3", "-o", "own.json"]) == 0
    assert verified[0].steps == 3 and Path("own.json").exists()
    assert "all.json" not in capsys.readouterr().err
    for wrong, sentence in {
        "steps = 0": "$.tool.gaverify.steps",
        "paths = 3": '$.tool.gaverify.paths: must be a list of texts, got 3; write `paths = ["configs/"]`',
        'ignore = ["GAV999"]': "$.tool.gaverify.ignore: no rule's code begins with `GAV999`",
        "step = 3": "$.tool.gaverify.step: unknown key; did you mean `steps`?",
    }.items():
        Path("../pyproject.toml").write_text(f"[tool.gaverify]\n{wrong}\n")
        assert main(["run", "../specs/b.toml"]) == 2
        assert sentence in capsys.readouterr().err


def test_notes_are_chosen_and_faults_are_not(verified: list[Spec], capsys: pytest.CaptureFixture[str]) -> None:
    def codes(*words: str) -> set[str]:
        assert main(["run", "divergent", *words]) == 1
        out = capsys.readouterr().out
        return {code for code in ("GAV101", "GAV402") if code in out}

    assert codes() == {"GAV101", "GAV402"}
    assert codes("--ignore", "GAV4") == codes("--ignore", "GAV402", "--ignore", "GAV101") == {"GAV101"}
    assert codes("--select", "GAV3") == {"GAV101"}
    assert codes("--select", "GAV4") == {"GAV101", "GAV402"}
    Path("pyproject.toml").write_text('[tool.gaverify]\nignore = ["GAV402"]\n')
    assert codes() == {"GAV101"}
    assert main(["run", "divergent", "--select", "E501"]) == 2
    assert "--select: no rule's code begins with `E501`" in capsys.readouterr().err


def test_what_is_wrong_with_a_spec_comes_back_from_a_process_sentence_by_sentence() -> None:
    error = pickle.loads(pickle.dumps(SpecError(["`a` takes no argument `b`", "`a` needs the argument `c`"], "model")))
    assert (len(error.problems), error.source) == (2, "model")


def test_colours(verified: list[Spec], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["run", "divergent", "--color", "always"]) == 1
    assert "\x1b[" in capsys.readouterr().out
    assert main(["run", "divergent"]) == 1 and "\x1b[" not in capsys.readouterr().out
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["run", "divergent", "--color", "never"]) == 1 and "\x1b[" not in capsys.readouterr().out
    assert main(["run", "divergent"]) == 1 and "\x1b[" in capsys.readouterr().out


def test_the_summary_has_the_time_of_each_and_of_all(verified: list[Spec], capsys: pytest.CaptureFixture[str]) -> None:
    write("all/a.toml")
    write("all/b.toml", "divergent")
    main(["run", "all"])
    text = " ".join(capsys.readouterr().out.split())
    assert "4 of 4 parameters agree to rounding (125 ms)" in text
    assert "2 runs in 625 ms: 1 equivalent, 1 divergent" in text
