"""`gaverify report`: saved documents as pages, two side by side, and every wrong input with a sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import samples

from gaverify.cli import main
from gaverify.report import FORMATS, render


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "verdict.json"
    file.write_text(render([samples.divergent()], "json"))
    return file


@pytest.mark.parametrize("form", [form.name for form in FORMATS])
def test_a_saved_document_gives_the_report_written_at_once(
    saved: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(saved), "--format", form]) == 1
    assert capsys.readouterr().out == render([samples.divergent()], form)


def test_files_too(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(saved), "--output", str(tmp_path / "page.html")]) == 1
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == render([samples.divergent()], "html")


@pytest.mark.parametrize(
    ("answers", "errors", "code"),
    [
        ([samples.equivalent()], (), 0),
        ([samples.equivalent(), samples.inconclusive()], (), 3),
        ([samples.divergent(), samples.inconclusive()], (), 1),
        ([samples.equivalent()], [("a", "b")], 2),
    ],
)
def test_the_exit_code_is_that_of_what_was_saved(answers, errors, code: int, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(render(answers, "json", errors=errors))
    assert main(["report", str(file)]) == code


def test_two_stand_side_by_side(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = tmp_path / "after.json"
    rows = tuple(row._replace(outcome=samples.Outcome.EQUIVALENT) for row in samples.divergent().parameters)
    after.write_text(render([samples.equivalent(parameters=rows)], "json"))
    page = tmp_path / "both.html"
    assert main(["report", str(saved), str(after), "--output", str(page)]) == 0
    out = capsys.readouterr().out
    assert "before: divergent" in out and "after: equivalent" in out
    assert "GAV101 batch-statistics" in out and "after: not found" in out
    assert "3 of 6 parameters have another outcome" in out
    assert "before and after" in page.read_text(encoding="utf-8")
    assert main(["report", str(after), str(saved), "--format", "markdown"]) == 1
    assert "| outcome | equivalent | divergent |" in capsys.readouterr().out
    assert main(["report", str(saved), str(saved)]) == 1
    assert "0 of 6 parameters have another outcome" in capsys.readouterr().out


def test_answers_of_one_title_are_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for at, names in enumerate(("ab", "bc")):
        files.append(str(tmp_path / f"{at}.json"))
        Path(files[-1]).write_text(render([samples.equivalent(source=f"{name}.toml") for name in names], "json"))
    assert main(["report", *files]) == 0
    out = capsys.readouterr().out
    assert out.count("not in this report") == 2 and out.index("a.toml") < out.index("b.toml") < out.index("c.toml")


def test_what_could_not_be_run_and_twin_findings_are_in_the_pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twins = [replace(samples.batchnorm(), summary=f"`{name}` normalises") for name in ("first", "second")]
    files = [str(tmp_path / name) for name in ("before.json", "after.json", "empty.json")]
    errors = [("b.toml", "no `model`"), ("b.toml", "no `steps`")]
    for file, answers, failed in (
        (files[0], [samples.equivalent(source="a.toml")], ()),
        (files[1], [samples.divergent(source="a.toml", findings=twins)], errors),
        (files[2], [], errors),
    ):
        Path(file).write_text(render(answers, "json", errors=failed))
    page = tmp_path / "page.html"
    assert main(["report", *files[:2], "--output", str(page)]) == 2
    out = capsys.readouterr().out
    assert "`first` normalises; `second` normalises" in out and "error after: b.toml: no `steps`" in out
    assert "a.toml, before" in page.read_text() and "3 runs" in page.read_text()  # both, and one that failed twice
    assert main(["report", *files[:2], "--format", "markdown"]) == 2
    assert "error after: b.toml: no `model`" in capsys.readouterr().out
    assert main(["report", files[2], files[1]]) == 2
    assert "`" + files[2] + "` holds errors alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name one JSON document to show, or two to compare"),
        (["{saved}"] * 3, "name one JSON document to show, or two to compare"),
        (["gone.json"], "`gone.json` cannot be read: No such file or directory"),
        (["{folder}"], "cannot be read"),
        (["{page}"], "is no JSON"),
        (["{old}"], "has version 7; this gaverify reads version 1"),
        (["{saved}", "--output", "{saved}"], "would overwrite the document that it is made of"),
        (["{saved}", "--output", "gone/x.html"], "there is no folder"),
        (["{saved}", "--output", "a.html", "--output", "./a.html"], "is named twice"),
        (
            ["{saved}", "{saved}", "--format", "junit"],
            "`junit` shows one run; two side by side are text, html",
        ),
        (["{saved}", "--format", "pdf"], "`pdf` is not a format"),
    ],
)
def test_wrong_input_gets_a_sentence(
    words: list[str], sentence: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, old = tmp_path / "page.html", tmp_path / "old.json"
    page.write_text(render([samples.divergent()], "html"))
    old.write_text(json.dumps({**json.loads(saved.read_text()), "version": 7}))
    before = sorted(tmp_path.iterdir())
    names = {"saved": saved, "folder": tmp_path, "page": page, "old": old}
    assert main(["report", *(word.format(**names) for word in words)]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.out == ""
    assert sorted(tmp_path.iterdir()) == before
