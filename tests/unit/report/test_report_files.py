"""Reports in files: JUnit, pictures, endings, and files that are whole or not there."""

from __future__ import annotations

import io
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
import samples

from gaverify.errors import SpecError
from gaverify.report import FORMATS, check_writable, format_for, print_summary, render, write_reports
from gaverify.report.documents.schema import validate_document


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
    write_reports([samples.divergent()], paths)
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in paths)
    validate_document(paths[1].read_text())
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
        write_reports([samples.equivalent()], [path])
    assert os.listdir(tmp_path) == ["report.json"]
    assert path.read_text() == "old"


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "real.txt")
    write_reports([samples.equivalent()], [tmp_path / "link.txt"])
    assert (tmp_path / "link.txt").is_symlink()
    assert "EQUIVALENT" in (tmp_path / "real.txt").read_text()


def test_links_that_lead_to_each_other_are_a_problem_and_no_fault(tmp_path: Path) -> None:
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    with pytest.raises(SpecError, match="could not be written"):
        check_writable([tmp_path / "loop.json"])
        write_reports([samples.equivalent()], [tmp_path / "gone" / "loop.json"])


def test_a_report_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    paths = [tmp_path / "gone" / "a.json", tmp_path / "b.md", tmp_path / "gone" / "c.xml"]
    with pytest.raises(SpecError) as caught:
        write_reports([samples.equivalent()], paths)
    assert len(caught.value.problems) == 2 and "equivalent" in paths[1].read_text()


def test_sentences_of_one_spec_are_one_run() -> None:
    errors = [("a.toml", "no `model`"), ("a.toml", "no `steps`"), ("b.toml", "not TOML")]
    stream = io.StringIO()
    print_summary([samples.equivalent()], errors, stream)
    assert "3 runs: 1 equivalent, 2 errors" in stream.getvalue()
    root = ElementTree.fromstring(render([samples.equivalent()], "junit", errors=errors))
    assert root.attrib["errors"] == "2" and [suite.attrib["name"] for suite in root][1:] == ["a.toml", "b.toml"]
    error = root[1].find("testcase/error")
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
        write_reports([samples.equivalent()], [old, new])
    finally:
        os.umask(mask)
    assert (old.stat().st_mode & 0o777, new.stat().st_mode & 0o777) == (0o640, 0o640)
    old.chmod(0o604)
    write_reports([samples.equivalent()], [old])
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
    write_reports([samples.equivalent()], [tmp_path / "report.txt"])
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


def test_the_summary_and_the_suites_are_told_apart_by_their_specs() -> None:
    two = [samples.equivalent(source=f"configs/{name}.toml") for name in "ab"]
    stream = io.StringIO()
    print_summary(two, (), stream)
    assert "configs/a.toml" in stream.getvalue() and "configs/b.toml" in stream.getvalue()
    suites = [suite.attrib["name"] for suite in ElementTree.fromstring(render(two, "junit"))]
    assert suites == ["configs/a.toml", "configs/b.toml"]


def test_junit_has_a_case_for_each_module_and_the_verdict(snapshot) -> None:
    text = render([samples.divergent(), samples.inconclusive()], "junit", errors=[("broken.toml", "no `model`")])
    assert text == snapshot
    divergent, inconclusive, failed = ElementTree.fromstring(text)
    assert [case.attrib["name"] for case in divergent] == ["verdict", "0", "1", "2", "spare"]
    assert divergent.attrib["failures"] == "3"
    assert (inconclusive.attrib["errors"], inconclusive.attrib["skipped"]) == ("1", "1")
    assert failed.attrib["errors"] == "1"


def test_junit_of_an_equivalent_verdict_is_green() -> None:
    root = ElementTree.fromstring(render([samples.equivalent()], "junit"))
    assert (root.attrib["tests"], root.attrib["failures"], root.attrib["errors"]) == ("3", "0", "0")
    assert "skipped" not in root.attrib  # of a suite alone, in Jenkins' schema


@pytest.mark.parametrize("format", ["svg", "html"])
def test_pictures_load_nothing_and_repeat(format: str) -> None:
    text = render([samples.divergent()], format)
    assert "GAV101" in text
    assert "cdnjs" not in text
    assert "url(http" not in text
    assert text == render([samples.divergent()], format)


def test_svg_is_xml() -> None:
    ElementTree.fromstring(render([samples.divergent()], "svg"))
