"""Markdown and GitHub's annotations: what they show, and that names stay text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import profiles
import pytest
import samples

from gaverify.cli.showing import show
from gaverify.records.comparison import Outcome
from gaverify.records.findings import Finding, Location
from gaverify.report import render
from gaverify.report.markdown import text


def test_the_verdict_and_its_cause_come_first(snapshot) -> None:
    made = render([samples.divergent()], "markdown")
    assert made == snapshot
    assert made.index("divergent") < made.index("GAV101") < made.index("<details>")


def test_a_profile_has_its_rows_and_several_answers_an_overview() -> None:
    made = render([samples.equivalent(), samples.inconclusive(), profiles.profile()], "markdown", errors=[("b", "no")])
    assert made.startswith("## gaverify")
    for words in ("✅ equivalent", "⚠️ inconclusive", "⛔ error", "| accumulate | 4 | 8.00 kB |"):
        assert words in made
    assert "❌" not in made
    assert "❌ divergent" in render([samples.divergent()], "markdown")


def test_an_accepted_divergence_looks_like_neither() -> None:
    finding = replace(samples.batchnorm(), accepted="on purpose")
    made = render([samples.divergent(findings=(finding,))], "markdown")
    assert "☑️ divergent, accepted" in made and "- accepted: on purpose" in made and "❌" not in made


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("<script>alert(1)</script>", "&lt;script>alert(1)&lt;/script>"),
        ("__init__", r"\_\_init\_\_"),
        ("a|b", r"a\|b"),
        ("`a|b` and | and `", r"`a\|b` and \| and \`"),
        ("@everyone", "&#64;everyone"),
        ("[x](http://y)", r"\[x\](http://y)"),
        ("a\nb\x1b[31m", r"a b\\x1b\[31m"),
        ("`<b>`", "`<b>`"),
    ],
)
def test_names_are_text(name: str, shown: str) -> None:
    assert text(name) == shown


def test_a_code_from_outside_is_text() -> None:
    finding = replace(samples.batchnorm(), code="x`<b>y")
    made = render([samples.divergent(findings=(finding,))], "markdown")
    assert made.count("x`&lt;b>y") + made.count(r"x\`&lt;b>y") == 2 and "<b>" not in made


def test_long_tables_are_cut_and_say_so() -> None:
    cut, whole = render([samples.large()], "markdown"), render([samples.large()], "markdown", show_all=True)
    assert "10 more are left out; `--all` shows them." in cut and "left out" not in whole
    assert whole.count("equivalent |") == 58


def test_annotations_are_commands_at_lines() -> None:
    lines = render([samples.divergent()], "github", errors=[("b.toml", "100% wrong\nhere")]).splitlines()
    assert lines[0].startswith("::error file=")
    assert (
        "train.py,line=12,title=GAV101 batch-statistics (mlp-batchnorm)::normalises over the micro-batch%0Aremedy"
        in lines[0]
    )
    assert lines[1].startswith("::notice title=GAV402")
    assert lines[2] == "::error title=gaverify%3A b.toml::100%25 wrong%0Ahere"
    assert render([samples.equivalent()], "github") == ""
    assert "::warning title=gaverify%3A inconclusive" in render([samples.inconclusive(findings=())], "github")


def test_a_message_cannot_become_a_command() -> None:
    finding = Finding("GAV102", "x", "fault", "a\n::stop-commands::b", Location("m", None, "f,line=1::x.py", 3))
    (line,) = render([samples.divergent(findings=(finding,))], "github").splitlines()
    assert line.startswith("::warning file=f%2C")
    assert "f%2Cline=1%3A%3Ax.py,line=3" in line


def test_github_gets_annotations_and_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    show([samples.divergent()], "text", ())
    assert "::error" not in capsys.readouterr().out and not summary.exists()
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    show([samples.divergent()], "text", ())
    assert "::error" in capsys.readouterr().out
    show([samples.divergent()], "json", ())
    assert "::error" not in capsys.readouterr().out
    assert summary.read_text(encoding="utf-8").count("❌ divergent") == 2  # appended, as other steps write there too
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "gone" / "x"))
    show([samples.equivalent()], "text", ())
    assert "summary was not written" in capsys.readouterr().err


def test_outcome_signs_differ() -> None:
    made = {render([samples.equivalent(outcome=outcome)], "markdown").split()[1] for outcome in Outcome}
    assert len(made) == 3
