"""A profile as text, JSON and SVG; the records are written by hand."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest
from profiles import failing, on_ranks, profile, row, setting
from syrupy.assertion import SnapshotAssertion

from gaverify.cli import main
from gaverify.records.comparison import Outcome
from gaverify.records.profile import Memory, Profile
from gaverify.report import print_answer, render
from gaverify.report.documents.schema import schema_text, validate_document
from gaverify.report.plot import profile_svg
from gaverify.report.text.layout import Layout, cells, plain
from gaverify.report.text.report import answer_lines

CASES: list[Callable[[], Profile]] = [
    profile,
    failing,
    on_ranks,
    lambda: profile(steps=(4,), memory_limit=None),
    lambda: profile(rows=(), setting=None, interrupted=True),
    lambda: profile(memory_limit=1000),
    lambda: profile(setting=setting(device="cuda:0", device_name="NVIDIA H100", device_memory=80 * 10**9)),
    lambda: profile(rows=(row("accumulate", 2, memory=None), row("accumulate", 4, memory=None))),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [80, 60])
def test_lines_fit_the_width(case: Callable[[], Profile], width: int) -> None:
    lines = plain(answer_lines(case(), Layout(width=width))).splitlines()
    limit = max(width, 80)  # the table itself needs 80 columns
    assert [line for line in lines if cells(line) > limit] == []


@pytest.mark.parametrize("case", CASES)
def test_ascii_where_nothing_else_can_be_shown(case: Callable[[], Profile]) -> None:
    assert plain(answer_lines(case(), Layout(ascii_only=True))).isascii()


@pytest.mark.parametrize("case", [profile, failing], ids=lambda case: case.__name__)
def test_whole_output(case: Callable[[], Profile], snapshot: SnapshotAssertion) -> None:
    assert render([case()], "text") == snapshot


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "no_color", "coloured"), [(Terminal, "", True), (Terminal, "1", False), (io.StringIO, "", False)]
)
def test_colours_on_a_terminal_only(
    stream: type[io.StringIO], no_color: str, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NO_COLOR": no_color, "TERM": "xterm-256color", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    out = stream()
    print_answer(profile(), file=out)
    assert ("\x1b[" in out.getvalue()) is coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).split() == render([profile()], "text").split()


def test_a_bound_is_no_promise() -> None:
    same = tuple(row("accumulate", k, memory=Memory("resident", 290_000_000, 300_000_000)) for k in (2, 4, 8))
    text = " ".join(render([profile(rows=same, memory_limit=300_010_000)], "text").split())
    assert "fits into 300 MB: at most 14 samples (by the line through the activations alone" in text
    assert "smallest K for a batch of 1,024: at least 74" in text
    assert "300 MB + 0 B × n; straight line through 3 rows, residual at most 0 B (0 %): not a line" in text


def test_bars_are_as_long_as_what_they_show() -> None:
    lines = plain(answer_lines(profile(), Layout(ascii_only=True))).splitlines()
    bars = [line.count("#") for line in lines if line.strip().endswith("kB") and "#" in line]
    assert len(bars) == 7
    assert bars[0] == bars[1] == bars[2] == bars[3] == max(bars)
    assert bars[4:] == [pytest.approx(bars[0] / k, abs=1) for k in (2, 4, 8)]


def test_the_baseline_is_shown() -> None:
    assert "peak memory above the 290 MB that model, batch and libraries take" in render([profile()], "text")


@pytest.mark.parametrize("case", CASES)
def test_json_is_what_the_schema_says(case: Callable[[], Profile]) -> None:
    made = case()
    document = validate_document(render([made], "json"))
    assert (document.version, document.exit_code) == (1, made.exit_code)
    assert len(document.rows) == len(made.rows)
    assert (document.prediction is None) == (document.no_prediction is not None)


def test_the_schema_is_closed() -> None:
    schema = json.loads(schema_text("profile"))
    assert schema["additionalProperties"] is False and schema["$schema"].startswith("https://json-schema.org/")
    document = json.loads(render([profile()], "json"))
    document["rows"][0]["more"] = 1
    with pytest.raises(ValueError, match="more"):
        validate_document(json.dumps(document))


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--schema"]) == 0
    assert capsys.readouterr().out == schema_text("profile") + "\n"


def test_no_number_without_a_json_form() -> None:
    case = profile(rows=(row("accumulate", 2, outcome=Outcome.DIVERGENT, relative_difference=float("inf")),))
    assert json.loads(render([case], "json"))["rows"][0]["relative_difference"] is None


@pytest.mark.parametrize("case", CASES)
def test_the_picture_is_whole_and_alone(case: Callable[[], Profile]) -> None:
    text = profile_svg(case())
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"(?:href|src|url)\b", text) == []  # nothing from elsewhere
    assert "nan" not in text and "inf" not in text.replace("info", "")


def test_the_picture_shows_both_plots_with_every_k() -> None:
    text = profile_svg(profile())
    assert "Saved activations" in text and "Time per update" in text
    for k in (1, 2, 4, 8):
        assert text.count(f">{k}</text>") == 2
    assert text.count('class="mark accumulate"') == 2 * 3 + 1  # a mark per row and plot, one in the legend
    assert text.count('class="mark full-batch"') == 2 * 1 + 1


def test_peaks_are_drawn_where_they_follow_the_micro_batch() -> None:
    assert "dashed: peak above the baseline" in profile_svg(profile())
    flat = tuple(row("accumulate", k, memory=Memory("resident", 1, 10)) for k in (2, 4))
    assert "dashed" not in profile_svg(profile(rows=flat)).partition("</style>")[2]


def test_a_model_name_cannot_break_the_picture() -> None:
    root = ElementTree.fromstring(profile_svg(profile(setting=setting(model='a<b>&"c\x1b'))))
    assert any('a<b>&"c\\x1b' in (element.text or "") for element in root.iter())


def test_what_ranks_move_stands_in_every_format(snapshot: SnapshotAssertion) -> None:
    assert plain(answer_lines(on_ranks(), Layout(width=120))) == snapshot
    assert "| 2.00 MB in 1 | 8.00 MB in 4 | equivalent |" in render([on_ranks()], "markdown")
    assert "8.00 MB in 4" in render([on_ranks()], "html")
    document = validate_document(render([on_ranks()], "json"))
    moved = [row.moved for row in document.rows]
    assert moved[1] is None and moved[2] is not None
    assert (moved[2].every.collectives, moved[2].every.bytes) == ({"all-reduce": 4}, 8_000_000)


def test_without_ranks_nothing_is_said_of_them() -> None:
    for form in ("markdown", "html"):
        assert "no_sync" not in render([profile()], form)
    assert "no_sync" not in plain(answer_lines(profile(), Layout()))


def test_what_ranks_move_is_a_third_plot() -> None:
    assert "Moved between ranks" in profile_svg(on_ranks()) and "Moved between ranks" not in profile_svg(profile())
    ElementTree.fromstring(profile_svg(on_ranks()))
    titles = re.findall(r">([\d.]+ [kM]B|0)<", profile_svg(on_ranks()).split("Moved between ranks")[1])
    assert "8 MB" in titles
