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
from gaverify.cli.choosing import read_expression
from gaverify.errors import SpecError
from gaverify.records.outcomes import Outcome
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
    err = capsys.readouterr().err
    assert "-k: no spec matches; write a part of" in err and "There are all/a.toml (first), all/b.toml (second)" in err
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


def test_what_failed_last_runs_alone_until_it_succeeds(
    verified: list[Spec], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, model in (("a", "equivalent"), ("b", "divergent"), ("c", "inconclusive")):
        write(f"all/{name}.toml", model, f'name = "{name}"')
    Path("all/d.toml").write_text("model = 3")
    assert main(["run", "all", "--lf", "-q"]) == 2 and names(verified) == ["a", "b", "c"]
    assert capsys.readouterr().err == "gaverify: --lf: no spec failed last time: all are run\n"
    assert main(["run", "all", "--lf", "-q"]) == 2 and names(verified) == ["b", "c"]
    out, err = capsys.readouterr()
    assert err == "gaverify: --lf: 3 of 4 specs failed last time, the others are left out\n" and "ERROR" in out
    write("all/b.toml", "equivalent", 'name = "b"')
    write("all/d.toml", "equivalent", 'name = "d"')
    assert main(["run", "equivalent"]) == main(["run", "divergent", "--expect", "divergent"]) == 0
    assert main(["run", "all", "-q", "-x"]) == 3, "what is not reached is not forgotten"
    verified.clear()
    assert main(["run", "all", "--lf", "-k", "c or d"]) == 3 and names(verified) == ["c", "d"]
    assert main(["run", str(Path("all/c.toml").resolve()), "--expect", "inconclusive"]) == 0, "as another path"
    assert main(["run", "all", "--lf"]) == 3 and len(verified) == 5


def test_a_cache_that_cannot_be_written_is_no_error(
    verified: list[Spec], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("all/a.toml", "divergent")
    Path("file").write_text("")
    monkeypatch.setenv("GAVERIFY_CACHE", "file/cache")
    assert main(["run", "all"]) == main(["run", "all", "--lf"]) == 1
    assert "no spec failed last time" in capsys.readouterr().err
    monkeypatch.delenv("GAVERIFY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("home").resolve()))
    assert main(["run", "all"]) == 1
    (marker,) = Path("home/gaverify/failed").iterdir()
    assert marker.read_text() == f"{Path('all/a.toml').resolve()}\n"


@pytest.mark.smoke
def test_a_list_runs_nothing(verified: list[Spec], capsys: pytest.CaptureFixture[str]) -> None:
    write("all/a.toml", "equivalent", 'name = "first"\nsteps = 2')
    write("all/b-longer.toml", "divergent")
    assert main(["run", "all", "--list"]) == 0 and not verified
    listed = ["all/a.toml (first)  equivalent, K = 2", "all/b-longer.toml   divergent, K = 4"]
    assert capsys.readouterr() == ("\n".join(listed) + "\n", "")
    assert main(["run", "all", "-k", "first", "--list"]) == 0
    assert capsys.readouterr().out == listed[0] + "\n"
    write("all/c.toml", "equivalent", "steps = 0")
    assert main(["run", "all", "--list"]) == 2 and "error: $.steps: must be" in capsys.readouterr().out
    Path("old.json").write_text("yesterday's")
    assert main(["run", "all", "--list", "-o", "old.json"]) == 2 and Path("old.json").read_text() == "yesterday's"
    assert "--list: runs nothing and writes no report; leave out -o" in capsys.readouterr().err


@pytest.mark.parametrize("quiet", [[], ["-q"]])
@pytest.mark.smoke
def test_the_slowest_are_listed(verified: list[Spec], quiet: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    write("all/a.toml")
    write("all/b.toml", "divergent")
    write("all/c.toml")
    assert main(["run", "all", "--durations", "2", *quiet]) == 1
    end = capsys.readouterr().out.partition("\nslowest ")[2]
    assert end == "2 of 3 runs\n  500 ms  all/b.toml\n  125 ms  all/a.toml\n"
    assert main(["run", "all", "--durations", "0"]) == 2
    assert "--durations: must be a whole number of at least 1" in capsys.readouterr().err


def test_a_choice_of_nothing_lists_the_first_names(verified: list[Spec], capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(25):
        write(f"all/{number:02}.toml")
    assert main(["run", "all", "-k", "cnn"]) == 2 and not verified
    err = capsys.readouterr().err
    assert "all/19.toml and 5 more, which `--list` shows\n" in err and "all/20.toml" not in err


def test_the_summary_has_the_time_of_each_and_of_all(verified: list[Spec], capsys: pytest.CaptureFixture[str]) -> None:
    write("all/a.toml")
    write("all/b.toml", "divergent")
    main(["run", "all"])
    text = " ".join(capsys.readouterr().out.split())
    assert "4 of 4 parameters agree to rounding (125 ms)" in text
    assert "2 runs in 625 ms: 1 equivalent, 1 divergent" in text
