"""Reports in files: endings, whole files, JUnit, SARIF, Markdown and annotations."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import profiles
import pytest
import samples

from gaverify.acceptance import with_excerpts
from gaverify.cli.showing import show
from gaverify.errors import SpecError
from gaverify.records.audit_report import RecordedCalls, WindowCount
from gaverify.records.findings import Finding, Location
from gaverify.records.outcomes import Outcome
from gaverify.report import (
    FORMATS,
    NoAnswer,
    Report,
    check_writable,
    format_for,
    format_named,
    print_summary,
    render,
    write_all,
)
from gaverify.report.documents.reading import read_report
from gaverify.report.markdown import text
from gaverify.report.pages import page_of

# --- Reports in files: JUnit, pictures, endings, and files that are whole or not there -------------------------------


@pytest.mark.parametrize(
    ("path", "format"),
    [("a.txt", "text"), ("b/c.json", "json"), ("d.XML", "junit"), ("e.svg", "svg"), ("f.g.html", "html")],
)
def test_the_ending_decides(path: str, format: str) -> None:
    assert format_for(path).name == format


@pytest.mark.parametrize("path", ["report", "report.pdf", "", ".json"])
def test_an_unknown_ending_names_the_known(path: str) -> None:
    with pytest.raises(SpecError, match=r"\.txt, \.json, \.xml, \.svg, \.html"):
        format_for(path)


def test_every_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    wrong = [tmp_path / "folder.json", tmp_path / "missing" / "a.json", tmp_path / "a.pdf"]
    with pytest.raises(SpecError) as caught:
        check_writable(wrong)
    assert len(caught.value.problems) == 3
    check_writable([tmp_path / "a.json", tmp_path / "b.xml"])
    assert os.listdir(tmp_path) == ["folder.json"]


def test_every_format_is_written(tmp_path: Path) -> None:
    paths = [tmp_path / f"report{ending}" for ending in (".txt", ".json", ".xml", ".svg", ".html")]
    write_all(Report((samples.divergent(),)), paths)
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in paths)
    read_report(paths[1])
    assert "DIVERGENT" in paths[0].read_text()
    assert all("GAV101" in path.read_text() for path in paths)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interruption_leaves_the_old_file_whole(
    fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def interrupted(*_: object) -> None:
        raise fault

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises((KeyboardInterrupt, SpecError)):
        write_all(Report((samples.equivalent(),)), [path])
    assert os.listdir(tmp_path) == ["report.json"]
    assert path.read_text() == "old"


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "real.txt")
    write_all(Report((samples.equivalent(),)), [tmp_path / "link.txt"])
    assert (tmp_path / "link.txt").is_symlink()
    assert "EQUIVALENT" in (tmp_path / "real.txt").read_text()


def test_links_that_lead_to_each_other_are_a_problem_and_no_fault(tmp_path: Path) -> None:
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    with pytest.raises(SpecError, match=r"`.*loop.json` cannot be written: Too many levels of symbolic links"):
        check_writable([tmp_path / "loop.json"])
    with pytest.raises(SpecError, match="could not be written"):
        write_all(Report((samples.equivalent(),)), [tmp_path / "gone" / "loop.json"])


@pytest.mark.parametrize("kind", ["pipe", "device", "second name"])
def test_what_a_new_file_would_take_the_place_of_is_written_into(tmp_path: Path, kind: str) -> None:
    place, link = tmp_path / "place", tmp_path / "link.txt"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        controller, terminal = os.openpty()
        place = Path(os.ttyname(terminal))
    else:
        (tmp_path / "other").write_text("old, and longer than any report is" * 1000)
        os.link(tmp_path / "other", place)
    link.symlink_to(place)
    before = os.lstat(place)
    reader = controller if kind == "device" else os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    check_writable([link])
    write_all(Report((samples.equivalent(),)), [link])
    assert "EQUIVALENT" in os.read(reader, 1 << 16).decode()
    assert (os.lstat(place).st_ino, os.lstat(place).st_mode) == (before.st_ino, before.st_mode)
    assert "old" not in place.read_text() if kind == "second name" else link.is_symlink()
    os.close(reader)


def test_a_pipe_that_nobody_reads_and_a_socket_are_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(SpecError, match=r"pipe.json` could not be written: nobody reads this pipe"):
        write_all(Report((samples.equivalent(),)), [tmp_path / "pipe.json"])
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.json"))
        with pytest.raises(SpecError, match=r"socket.json` is a disk or a socket"):
            check_writable([tmp_path / "socket.json"])


def test_a_name_that_is_too_long_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"\.json` cannot be written: File name too long"):
        check_writable([tmp_path / f"{'x' * 300}.json"])


@pytest.mark.parametrize("may_give_away", [True, False])
def test_the_owner_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_give_away: bool) -> None:
    path, given = tmp_path / "report.txt", []

    def give(name: str, user: int, group: int) -> None:
        if not may_give_away:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        given.append((user, group))

    path.write_text("old")
    before = path.stat()
    monkeypatch.setattr("os.chown", give)
    write_all(Report((samples.equivalent(),)), [path])
    assert "EQUIVALENT" in path.read_text() and os.listdir(tmp_path) == ["report.txt"]
    assert given == ([(before.st_uid, before.st_gid)] if may_give_away else [])
    assert may_give_away or path.stat().st_ino == before.st_ino


def test_a_report_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    paths = [tmp_path / "gone" / "a.json", tmp_path / "b.md", tmp_path / "gone" / "c.xml"]
    with pytest.raises(SpecError) as caught:
        write_all(Report((samples.equivalent(),)), paths)
    assert len(caught.value.problems) == 2 and "equivalent" in paths[1].read_text()


def test_sentences_of_one_spec_are_one_run() -> None:
    errors = [("a.toml", "no `model`"), ("a.toml", "no `steps`"), ("b.toml", "not TOML")]
    stream = io.StringIO()
    print_summary(Report((samples.equivalent(),), tuple(NoAnswer(*error) for error in errors)), stream)
    assert "3 runs in 125 ms: 1 equivalent, 2 errors" in stream.getvalue()
    root = ElementTree.fromstring(render([samples.equivalent()], "junit", errors=errors))
    assert root.attrib["errors"] == "2" and [test.attrib["name"] for test in root[0]][1:] == ["a.toml", "b.toml"]
    error = root[0][1].find("error")
    assert error is not None and error.attrib["message"] == "no `model`; no `steps`"
    assert "3 runs" in render([samples.equivalent()], "html", errors=errors)


@pytest.mark.parametrize("twice", ["a.json", "../{}/a.json"])
def test_a_file_that_is_named_twice_is_refused(tmp_path: Path, twice: str) -> None:
    with pytest.raises(SpecError, match="named twice"):
        check_writable([tmp_path / "a.json", tmp_path / twice.format(tmp_path.name)])


def test_the_mode_is_kept_and_a_new_file_gets_the_umask(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("old")
    old.chmod(0o640)
    mask = os.umask(0o027)
    try:
        write_all(Report((samples.equivalent(),)), [old, new])
    finally:
        os.umask(mask)
    assert (old.stat().st_mode & 0o777, new.stat().st_mode & 0o777) == (0o640, 0o640)
    old.chmod(0o604)
    write_all(Report((samples.equivalent(),)), [old])
    assert old.stat().st_mode & 0o777 == 0o604


def test_a_link_planted_where_the_report_is_written_first_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    names = iter(["planted", "free"])
    monkeypatch.setattr("tempfile._get_candidate_names", lambda: names)
    (tmp_path / ".gaverify-planted.tmp").symlink_to(victim)
    (tmp_path / f".gaverify-{os.getpid()}.tmp").symlink_to(victim)
    write_all(Report((samples.equivalent(),)), [tmp_path / "report.txt"])
    assert victim.read_text() == "precious"
    assert "EQUIVALENT" in (tmp_path / "report.txt").read_text()
    assert next(names, None) is None  # the planted name was tried and refused


NAMED = {"source": "configs/nightly.toml", "spec": {"name": "the nightly run", "model": "mlp"}}


@pytest.mark.parametrize("form", [form.name for form in FORMATS])
def test_every_report_says_which_spec_it_belongs_to(form: str) -> None:
    named = render([samples.divergent(**NAMED)], form).replace("&#160;", " ").replace("&nbsp;", " ")
    for words in ("configs/nightly.toml", "the nightly run"):
        assert words in named
        assert words not in render([samples.divergent()], form)
    several = render([samples.equivalent(**NAMED), samples.equivalent()], form)
    assert form == "github" or "configs/nightly.toml" in several


def test_every_format_lists_what_was_skipped_and_keeps_the_order_of_the_specs() -> None:
    answers = (samples.equivalent(source="b.toml"), samples.divergent(source="d.toml"))
    lacking = NoAnswer("c.toml", "`gpt2` needs `transformers`", 2)
    made = Report(answers, (NoAnswer("a.toml", "no `model`", 0), NoAnswer("a.toml", "no `steps`", 0)), (lacking,))
    texts = {form.name: form.render(made) for form in FORMATS}
    for name in ("text", "html", "markdown", "junit", "svg"):
        listed = texts[name].partition("### ")[0].rpartition("summary\n")[2]
        places = [listed.index(f"{letter}.toml") for letter in "abcd"]
        assert places == sorted(places), name
        assert re.search("skipped", listed, re.IGNORECASE) and "needs" in listed, name
    assert "4 runs in 625 ms: 1 equivalent, 1 divergent, 1 error, 1 skipped\n" in texts["text"]
    (suite,) = ElementTree.fromstring(texts["junit"])
    assert (suite.attrib["errors"], suite.attrib["failures"], suite.attrib["skipped"]) == ("1", "1", "1")
    skipped = suite[2].find("skipped")
    assert skipped is not None and skipped.attrib["message"] == "`gpt2` needs `transformers`"
    row = {"source": "c.toml", "message": "`gpt2` needs `transformers`", "position": 2}
    assert json.loads(texts["json"])["skipped"] == [row]
    (notification,) = json.loads(texts["sarif"])["runs"][0]["invocations"][0]["toolExecutionNotifications"][2:]
    assert notification["level"] == "note" and "c.toml" in notification["message"]["text"]
    assert "::notice title=gaverify%3A skipped%3A c.toml::`gpt2` needs `transformers`\n" in texts["github"]
    assert ">1 run</h1>" in format_named("html").render(Report((), (), (lacking,)))


def test_the_summary_and_the_tests_are_told_apart_by_their_specs() -> None:
    two = [samples.equivalent(source=f"configs/{name}.toml") for name in "ab"]
    stream = io.StringIO()
    print_summary(Report(tuple(two)), stream)
    assert "configs/a.toml" in stream.getvalue() and "configs/b.toml" in stream.getvalue()
    (suite,) = ElementTree.fromstring(render(two, "junit"))
    assert [test.attrib["name"] for test in suite] == ["configs/a.toml", "configs/b.toml"]


def test_junit_has_a_test_for_each_spec_and_its_modules_in_the_text(snapshot) -> None:
    text = render([samples.divergent(), samples.inconclusive()], "junit", errors=[("broken.toml", "no `model`")])
    assert text == snapshot
    (suite,) = ElementTree.fromstring(text)
    assert [len(suite.findall(f"testcase/{tag}")) for tag in ("failure", "error", "skipped")] == [1, 2, 0]
    told = suite.findtext("testcase/failure") or ""
    assert all(words in told for words in ("\n1: 1 of 1 parameter: `1.weight` differs by", "GAV101 batch-statistics"))


def test_junit_of_an_equivalent_verdict_is_green() -> None:
    root = ElementTree.fromstring(render([samples.equivalent(source="a.toml")], "junit"))
    assert (root.attrib["tests"], root.attrib["failures"], root.attrib["errors"]) == ("1", "0", "0")
    assert "skipped" not in root.attrib  # of a suite alone, in Jenkins' schema
    (test,) = root[0]
    assert (test.attrib["time"], root[0].attrib["time"], test.attrib["file"]) == ("0.125", "0.125", "a.toml")


def test_the_report_of_a_command_says_when_it_was_called() -> None:
    made = Report((samples.divergent(),), started="2026-01-31T12:00:00+00:00", exit_code=0)
    suite = ElementTree.fromstring(format_named("junit").render(made))[0]
    assert suite.attrib["timestamp"] == "2026-01-31T12:00:00"
    document = json.loads(format_named("json").render(made))
    assert (document["started"], document["exit_code"]) == (made.started, 0)


@pytest.mark.parametrize("format", ["svg", "html"])
def test_pictures_load_nothing_and_repeat(format: str) -> None:
    text = render([samples.divergent()], format)
    assert "GAV101" in text
    assert "cdnjs" not in text
    assert "url(http" not in text
    assert text == render([samples.divergent()], format)


def test_the_picture_is_a_card_with_a_chart() -> None:
    made = render(
        [samples.divergent(), samples.large(2, 5000)], "svg", errors=[("a<b>.toml", "no `model` & no `spec`")]
    )
    root = ElementTree.fromstring(made)
    words = " ".join(root.itertext())
    for shown in ("DIVERGENT", "GAV101", "0.weight", "more in the text report", "a<b>.toml"):
        assert shown in words
    assert "worst element" not in words and len(made) < 40_000


# --- What verdicts, audits and profiles have in common, and what JUnit makes of it -----------------------------------


@pytest.mark.parametrize(
    ("answer", "kind", "title", "tables"),
    [
        (samples.divergent(), "run", "mlp-batchnorm", 1),
        (samples.audited(), "audit", "train.py", 2),
        (profiles.profile(), "profile", "mnist-mlp", 0),
    ],
)
def test_every_answer_has_a_page(answer, kind: str, title: str, tables: int) -> None:
    page = page_of(answer)
    assert (page.kind, page.headline.title, len(page.comparisons)) == (kind, title, tables)
    assert page.headline.outcome is answer.outcome and page.headline.sentence


@pytest.mark.parametrize("form", ["text", "markdown", "html"])
def test_formats_show_the_same_blocks(form: str) -> None:
    counted = replace(samples.audited(), calls=RecordedCalls(counts=(WindowCount(1, 4, 1, 2, True),)))
    audit = render([counted], form)
    assert "4 : 1 : 2" in audit and "0 backward passes, same samples" in audit
    assert "step" in render([samples.traced()], form) and "lr 0.01: weight 1.0" in render([samples.traced()], form)
    profile = render([profiles.failing()], form)
    assert "interrupted: the rows that were not run are missing" in profile


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((4, 4), "2 backward passes, 2 × 4 rows"),
        ((4, 4, 4), "2 backward passes, 3 forward passes (3 × 4 rows)"),
        ((4, 2, 4), "2 backward passes, 3 forward passes (4 + 2 + 4 rows)"),
    ],
)
def test_a_forward_pass_without_a_backward_pass_is_counted(sizes: tuple[int, ...], words: str) -> None:
    audit = samples.audited()
    update = replace(audit.updates[0], window=replace(audit.updates[0].window, steps=2, sizes=sizes))
    assert words in " ".join(render([replace(audit, updates=(update,))], "text").split())


def told_of(answer) -> ElementTree.Element:
    ((test,),) = ElementTree.fromstring(render([answer], "junit"))
    return test[0]


def test_an_audit_is_one_test_with_its_updates() -> None:
    failure = told_of(samples.audited())
    assert failure.tag == "failure" and "update 2: 0: " in (failure.text or "")
    assert "update 1" not in (failure.text or "") and "seed" not in render([samples.audited()], "junit")


def test_an_update_that_means_nothing_is_no_failure() -> None:
    error = told_of(samples.audited(Outcome.INCONCLUSIVE, judged=False))
    assert error.tag == "error" and "update 2: 0" not in (error.text or "")


def test_a_profile_is_a_test_with_its_rows() -> None:
    assert not list(ElementTree.fromstring(render([profiles.profile()], "junit"))[0][0])
    told = told_of(profiles.failing()).text or ""
    assert all(f"accumulate, K = {steps}: " in told for steps in (2, 8, 64))


# --- Markdown and GitHub's annotations: what they show, and that names stay text -------------------------------------


def test_the_verdict_and_its_cause_come_first(snapshot) -> None:
    made = render([samples.divergent()], "markdown")
    assert made == snapshot
    assert made.index("divergent") < made.index("GAV101") < made.index("<details>")


def test_a_profile_has_its_rows_and_several_answers_an_overview() -> None:
    made = render([samples.equivalent(), samples.inconclusive(), profiles.profile()], "markdown", errors=[("b", "no")])
    assert made.startswith("## gaverify")
    for words in ("✅ equivalent", "⚠️ inconclusive", "⛔ error", "| accumulate | 4 × 8 | 8.00 kB |"):
        assert words in made
    assert "❌" not in made
    assert "❌ divergent" in render([samples.divergent()], "markdown")


def test_an_accepted_divergence_looks_like_neither() -> None:
    finding = replace(samples.batchnorm(), accepted="on purpose")
    made = render([samples.divergent(findings=(finding,))], "markdown")
    assert "☑️ divergent, accepted" in made and "- accepted: on purpose" in made and "❌" not in made


def test_a_name_mentions_nobody() -> None:
    assert text("@everyone") == "&#64;everyone"


def test_long_tables_are_cut_and_say_so() -> None:
    cut, whole = render([samples.large()], "markdown"), render([samples.large()], "markdown", show_all=True)
    assert "10 more are left out; `--all` shows them." in cut and "left out" not in whole
    assert whole.count("equivalent |") == 58


def test_annotations_are_commands_at_lines() -> None:
    lines = render([samples.divergent()], "github", errors=[("b.toml", "100% wrong\nhere")]).splitlines()
    assert lines[0].startswith("::error file=")
    title = "title=GAV101 batch-statistics (mlp-batchnorm)"
    assert f"train.py,line=12,{title}::normalises with the statistics of the micro-batch%0Aremedy" in lines[0]
    assert lines[1].startswith("::notice title=GAV402")
    replayed = Finding("GAV301", "aligned-randomness", "note", "draws were replayed", Location(None, None, "a.py", 1))
    assert "GAV301" not in render([samples.divergent(findings=(replayed,))], "github")
    assert lines[2] == "::error title=gaverify%3A b.toml::100%25 wrong%0Ahere"
    assert render([samples.equivalent()], "github") == ""
    assert "::warning title=gaverify%3A inconclusive" in render([samples.inconclusive(findings=())], "github")


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


# --- SARIF: valid against the official schema, at the culprit's line, with fingerprints that survive moved lines -----


def log(*answers: Any, errors: Any = ()) -> dict[str, Any]:
    (run,) = json.loads(render(answers, "sarif", errors=errors))["runs"]
    return run  # type: ignore[no-any-return]


def test_levels_rules_and_notifications() -> None:
    run = log(samples.divergent(), errors=[("broken.toml", "no `model`")])
    assert [(result["ruleId"], result["level"]) for result in run["results"]] == [
        ("GAV101", "error"),
        ("GAV402", "note"),
    ]
    for result in run["results"]:
        rule = run["tool"]["driver"]["rules"][result["ruleIndex"]]
        assert rule["helpUri"].startswith("https://") and rule["helpUri"].endswith(f"/{result['ruleId']}.md")
        assert rule["id"] == result["ruleId"] and "Why gradients diverge" in rule["help"]["text"]
    assert run["tool"]["driver"]["informationUri"].startswith("https://")
    assert run["invocations"][0]["executionSuccessful"] is False
    assert "no `model`" in run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"]
    suspected = replace(samples.batchnorm(), proven=False)
    assert log(samples.divergent(findings=(suspected,)))["results"][0]["level"] == "warning"


def test_only_an_equivalent_answer_has_no_result() -> None:
    assert log(samples.equivalent())["results"] == []
    assert log(samples.equivalent())["invocations"][0]["executionSuccessful"] is True
    replayed = Finding("GAV301", "aligned-randomness", "note", "draws were replayed", proven=True)
    assert log(samples.equivalent(findings=(replayed,)))["results"] == []
    for findings in ((), (replayed,)):
        assert [r["ruleId"] for r in log(samples.divergent(findings=findings))["results"]] == ["GAV000"]
    assert [r["ruleId"] for r in log(samples.inconclusive(findings=()))["results"]] == ["inconclusive"]


def test_an_accepted_finding_is_suppressed_with_its_reason() -> None:
    accepted = replace(samples.batchnorm(), accepted="ghost batch norm on purpose")
    (result,) = log(samples.divergent(findings=(accepted,)))["results"]
    assert result["suppressions"] == [{"kind": "external", "justification": "ghost batch norm on purpose"}]
    assert all("suppressions" not in result for result in log(samples.divergent())["results"])


def found_in(file: Path, line: int, code: str = "GAV102") -> Finding:
    finding = Finding(code, "cross-sample-operation", "fault", "mixes samples", Location("net", None, str(file), line))
    return with_excerpts([finding])[0]


def placed(finding: Finding) -> dict[str, Any]:
    return log(samples.divergent(findings=(finding,)))["results"][0]  # type: ignore[no-any-return]


def test_paths_are_relative_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "repo" / "src with space"
    folder.mkdir(parents=True)
    (tmp_path / "repo" / ".git").mkdir()
    (folder / "net.py").write_text("a = 1\nb = a.mean(0)\n")
    monkeypatch.chdir(folder)
    place = placed(found_in(Path("net.py"), 2))["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "src%20with%20space/net.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 2, "snippet": {"text": "b = a.mean(0)"}}
    (tmp_path / "else.py").write_text("x = 1\n")
    outside = placed(found_in(tmp_path / "else.py", 1))["locations"][0]["physicalLocation"]["artifactLocation"]
    assert outside["uri"].startswith("file:///") and "uriBaseId" not in outside


def test_a_finding_without_a_file_lies_in_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("")
    finding = replace(samples.batchnorm(), location=Location("1", "BatchNorm1d"))
    result = log(samples.divergent(findings=(finding,), source="a.toml"))["results"][0]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a.toml"
    assert result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "1"
    assert "physicalLocation" not in log(samples.divergent(findings=(finding,)))["results"][0]["locations"][0]


def test_fingerprints_survive_moved_lines_and_tell_findings_apart(tmp_path: Path) -> None:
    file = tmp_path / "net.py"

    def fingerprint(text: str, line: int, code: str = "GAV102") -> str:
        file.write_text(text)
        return str(placed(found_in(file, line, code))["partialFingerprints"]["gaverify/v1"])

    first = fingerprint("a = 1\nb = a.mean(0)\n", 2)
    assert fingerprint("# new\n\na = 1\nif a:\n    b = a.mean(0)\n", 5) == first
    assert fingerprint("a = 1\nb = a.mean(1)\n", 2) != first
    assert fingerprint("a = 1\nb = a.mean(0)\n", 2, "GAV103") != first
    twice = log(samples.divergent(findings=(found_in(file, 2), found_in(file, 2))))["results"]
    assert len({result["partialFingerprints"]["gaverify/v1"] for result in twice}) == 2


def test_a_library_s_line_has_one_fingerprint_on_every_machine(tmp_path: Path) -> None:
    made = set()
    for machine in ("desk", "ci"):
        file = tmp_path / machine / "site-packages" / "zoo" / "net.py"
        file.parent.mkdir(parents=True)
        file.write_text("a = 1\nb = a.mean(0)\n")
        made.add(placed(found_in(file, 2))["partialFingerprints"]["gaverify/v1"])
    assert len(made) == 1


def test_a_result_of_a_profile_says_what_diverged() -> None:
    (result,) = log(profiles.failing())["results"]
    assert profiles.failing().outcome is Outcome.DIVERGENT and "rows diverge" in result["message"]["text"]
