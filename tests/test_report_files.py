"""Reports in files: JUnit, pictures, endings, and files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
import samples

from gaverify.errors import SpecError
from gaverify.report import check_writable, format_for, render, write_reports
from gaverify.schema import validate_document


@pytest.mark.parametrize(
    ("path", "format"),
    [("a.txt", "text"), ("b/c.json", "json"), ("d.XML", "junit"), ("e.svg", "svg"), ("f.g.html", "html")],
)
def test_the_ending_decides(path: str, format: str) -> None:
    assert format_for(path) == format


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


def test_junit_has_a_case_for_each_parameter_and_the_verdict(snapshot) -> None:
    text = render([samples.divergent(), samples.inconclusive()], "junit", errors=[("broken.toml", "no `model`")])
    assert text == snapshot
    divergent, inconclusive, failed = ElementTree.fromstring(text)
    assert divergent.attrib["tests"] == "7"
    assert divergent.attrib["failures"] == "4"
    assert (inconclusive.attrib["errors"], inconclusive.attrib["skipped"]) == ("1", "1")
    assert failed.attrib["errors"] == "1"


def test_junit_of_an_equivalent_verdict_is_green() -> None:
    root = ElementTree.fromstring(render([samples.equivalent()], "junit"))
    assert (root.attrib["tests"], root.attrib["failures"], root.attrib["errors"]) == ("5", "0", "0")
    assert root.attrib["skipped"] == "0"


@pytest.mark.parametrize("format", ["svg", "html"])
def test_pictures_load_nothing_and_repeat(format: str) -> None:
    text = render([samples.divergent()], format)
    assert "GAV101" in text
    assert "cdnjs" not in text
    assert "url(http" not in text
    assert text == render([samples.divergent()], format)


def test_svg_is_xml() -> None:
    ElementTree.fromstring(render([samples.divergent()], "svg"))
