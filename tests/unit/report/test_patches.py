"""A patch in every format: as it stands where a program applies it, and shown safely where people read it."""

from __future__ import annotations

import io
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import samples

from gaverify.cli import main
from gaverify.patches import apply, render_diff
from gaverify.records.findings import Finding, Location
from gaverify.records.patch import Edit, Patch
from gaverify.report import Report, format_named, print_diffs, render
from gaverify.report.diffs import Change, changes_of
from gaverify.report.documents.reading import answer_of
from gaverify.report.markdown import suggestions_text

BEFORE = "import torch  # ``` & <é>\n\n\ndef train():\n\tfor x in data:\n\t\tloss(x).backward()   \n\n\ttail()\n"
FINDING = Finding("GAV201", "wrong-loss-scale", "fault", "too large", Location(file="train.py", line=6), proven=True)


def patch_of(file: Path, *edits: tuple[int, int, int, int, str], unsafe: str = "") -> Patch:
    made = Patch(tuple(Edit(str(file), *edit) for edit in edits), ("GAV201",), "Divides the loss by `K`.", "", unsafe)
    before = {str(file): file.read_bytes().decode()}
    return replace(made, diff=render_diff(before, apply(made, before)))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_bytes(BEFORE.encode())
    return path


@pytest.fixture
def report(file: Path) -> Report:
    patch = patch_of(file, (6, 2, 6, 9, "(loss(x) / K)"), unsafe="it is another model")
    return Report((replace(samples.audited(), findings=(FINDING,), patch=patch),))


def git_applies(file: Path, text: str) -> str:
    """Applies a text to the file and back, from a folder that is no repository; returns what it made of the file."""
    before = file.read_bytes()
    for words in (["git", "apply"], ["git", "apply", "-R"], ["patch", "-p1"]):
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(file.parent.parent)}
        subprocess.run(words, input=text.encode(), cwd=file.parent, check=True, env=environment, capture_output=True)
        if "-R" in words:
            assert file.read_bytes() == before
    return file.read_bytes().decode()


@pytest.mark.parametrize(
    "text",
    [
        BEFORE,
        BEFORE.replace("\n", "\r\n"),
        "\ufeff" + BEFORE,
        BEFORE.removesuffix("\n"),
        BEFORE.replace("\n\ttail()\n", ""),
        BEFORE.replace("tail()", "-- a/b\x0c\n\t++ b"),
    ],
)
def test_a_text_report_is_a_patch(file: Path, text: str) -> None:
    file.write_bytes(text.encode())
    patch = patch_of(file, (6, 2, 6, 9, "(loss(x) / K)"))
    written = render([replace(samples.audited(), patch=patch)], "text")
    assert written.index("Divides the loss by `K`.") < written.index("--- a/train.py")
    assert git_applies(file, written) == text.replace("loss(x).", "(loss(x) / K).")


def test_equal_diffs_are_printed_once(report: Report) -> None:
    once, twice = render(report.answers, "text"), render(report.answers * 2, "text")
    assert once.count("+++ b/train.py") == twice.count("+++ b/train.py") == 1


def test_a_document_holds_the_patch_and_makes_the_same_page(report: Report, tmp_path: Path) -> None:
    document = json.loads(render(report.answers, "json"))["answers"][0]
    assert document["patch"]["codes"] == ["GAV201"]
    assert document["patch"]["unsafe"] == "it is another model"
    assert document["patch"]["edits"][0]["first_line"] == 6
    read = answer_of(document)
    assert read.patch == report.answers[0].patch  # type: ignore[union-attr]
    assert render([read], "html") == render(report.answers, "html")
    old = {key: value for key, value in document.items() if not key.startswith("patch")}
    assert answer_of(old).patch is None  # type: ignore[union-attr]


def test_sarif_fixes_replace_the_span_at_the_finding_of_the_code(report: Report) -> None:
    other = replace(FINDING, code="GAV605")
    several = Report((replace(report.answers[0], findings=(FINDING, other)),))  # type: ignore[arg-type]
    results = json.loads(format_named("sarif").render(several))["runs"][0]["results"]
    assert ["fixes" in result for result in results] == [True, False]
    (fix,) = results[0]["fixes"]
    assert fix["description"]["text"] == "Divides the loss by `K`. (unsafe: it is another model)"
    (change,) = fix["artifactChanges"]
    assert change["artifactLocation"] == {"uri": "train.py", "uriBaseId": "%SRCROOT%"}
    region = {"startLine": 6, "startColumn": 3, "endLine": 6, "endColumn": 10}
    assert change["replacements"] == [{"deletedRegion": region, "insertedContent": {"text": "(loss(x) / K)"}}]


def test_the_page_colours_the_lines_and_keeps_tabs(report: Report) -> None:
    page = format_named("html").render(report)
    assert '<code class="added">+\t\t(loss(x) / K).backward()   \n</code>' in page
    assert '<code class="removed">-\t\tloss(x).backward()   \n</code>' in page
    assert "<dt>unsafe</dt><dd>it is another model</dd>" in page
    assert "<é>" not in page


def test_markdown_fences_hold_the_diff_whatever_it_holds(file: Path) -> None:
    patch = patch_of(file, (2, 0, 2, 0, "'''\n````\n'''\n"))
    text = render([replace(samples.audited(), patch=patch)], "markdown")
    assert f"`````diff\n{patch.diff}`````\n" in text


def test_junit_shows_the_diff(report: Report) -> None:
    failing = replace(report.answers[0], outcome=samples.divergent().outcome)  # type: ignore[arg-type]
    tree = ElementTree.fromstring(render([failing], "junit"))
    assert "+++ b/train.py" in "".join(tree.itertext())


def test_suggestions_replace_whole_lines(report: Report) -> None:
    assert suggestions_text(report) == (
        "`train.py`, line 6:\n\n```suggestion\n\t\t(loss(x) / K).backward()   \n```\n\n"
    )
    assert suggestions_text(Report((samples.audited(),))) == ""


@pytest.mark.parametrize(
    ("edits", "changes"),
    [
        ([(2, 0, 2, 0, "new\n")], [(1, 1, ("a", "new"))]),
        ([(1, 0, 1, 0, "new\n")], [(1, 1, ("new", "a"))]),
        ([(2, 0, 4, 0, "")], [(2, 3, ())]),
        ([(2, 0, 3, 1, "B")], [(2, 3, ("B",))]),
        ([(9, 0, 9, 1, "-- I")], [(9, 9, ("-- I",))]),
        ([(1, 0, 1, 1, "A"), (8, 1, 8, 1, "\nnew")], [(1, 1, ("A",)), (8, 8, ("h", "new"))]),
        ([(5, 0, 5, 1, "++ b/E")], [(5, 5, ("++ b/E",))]),
    ],
)
def test_changes_are_lines_of_the_file(
    file: Path, edits: list[tuple[int, int, int, int, str]], changes: list[tuple[int, int, tuple[str, ...]]]
) -> None:
    lines = list("abcdefghi")
    file.write_text("\n".join(lines), encoding="utf-8")
    patch = patch_of(file, *edits)
    assert list(changes_of(patch.diff)) == [Change("train.py", *change) for change in changes]
    for change in reversed(list(changes_of(patch.diff))):
        lines[change.first - 1 : change.last] = change.lines
    assert "\n".join(lines) == apply(patch, {str(file): file.read_text(encoding="utf-8")})[str(file)]


def test_an_empty_file_has_changes_too() -> None:
    assert list(changes_of(render_diff({"/f": ""}, {"/f": "a\n"}))) == [Change("f", 0, 0, ("a",))]


@pytest.mark.parametrize("form", ["text", "html", "markdown", "junit"])
def test_why_there_is_no_patch_is_said(form: str) -> None:
    refused = replace(samples.audited(), patch_refused="the shape is not known")
    assert "the shape is not known" in render([replace(refused, outcome=samples.divergent().outcome)], form)


def test_a_saved_document_prints_the_diff(report: Report, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "audit.json"
    saved.write_text(render(report.answers, "json"), encoding="utf-8")
    main(["report", str(saved)])
    assert git_applies(tmp_path / "train.py", capfd.readouterr().out) != BEFORE


def test_a_terminal_obeys_nothing_in_a_diff(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(BEFORE.replace("tail()", "'\x1b[2J'").replace("\n", "\r\n").encode())
    answer = replace(samples.audited(), patch=patch_of(file, (6, 2, 6, 9, "(loss(x) / K)")))
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", shown)
    print_diffs(Report((answer,)), alone=True)
    assert "+\t\t(loss(x) / K).backward()   \n" in shown.getvalue()
    assert "\\x1b[2J" in shown.getvalue() and "\x1b" not in shown.getvalue() and "\r" not in shown.getvalue()
    assert "\\r" not in render([answer], "markdown")


def test_the_summary_of_github_has_suggestions(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from gaverify.cli.showing import show

    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    show(report.answers, "text", ())
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "```diff\n--- a/train.py" in summary and "```suggestion\n" in summary
    assert git_applies(tmp_path / "train.py", capfd.readouterr().out) != BEFORE  # annotations follow the diff
