"""A profile as text, JSON and SVG: records written by hand, no torch."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest
from documents import only_answer
from profiles import failing, profile, row, setting
from syrupy.assertion import SnapshotAssertion

from gaverify.cli import main
from gaverify.records.numbers import bytes_text, seconds_text
from gaverify.records.outcomes import Outcome
from gaverify.records.profile import (
    Plan,
    Profile,
    Seconds,
    plans,
)
from gaverify.report import print_answer, render
from gaverify.report.documents import schema_text
from gaverify.report.documents.reading import answer_of
from gaverify.report.layout import Layout, cells, plain
from gaverify.report.pages import profile_page
from gaverify.report.text import page_lines

CASES: list[Callable[[], Profile]] = [
    profile,
    failing,
    lambda: profile(steps=(4,)),
    lambda: profile(rows=(), setting=None, interrupted=True),
    lambda: profile(setting=setting(device="cuda:0", device_name="NVIDIA H100", device_memory=80 * 10**9)),
    lambda: profile(rows=(row("accumulate", 2, memory=None), row("accumulate", 4, memory=None))),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [80, 60])
def test_lines_fit_the_width(case: Callable[[], Profile], width: int) -> None:
    lines = plain(page_lines(profile_page(case()), Layout(width=width))).splitlines()
    limit = max(width, 80)  # the table itself needs 80 columns
    assert [line for line in lines if cells(line) > limit] == []


@pytest.mark.parametrize("case", CASES)
def test_ascii_where_nothing_else_can_be_shown(case: Callable[[], Profile]) -> None:
    assert plain(page_lines(profile_page(case()), Layout(ascii_only=True))).isascii()


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


@pytest.mark.parametrize("case", CASES)
def test_json_is_what_the_schema_says(case: Callable[[], Profile]) -> None:
    made = case()
    whole = json.loads(render([made], "json"))
    assert (whole["version"], whole["exit_code"]) == (2, made.exit_code)
    (document,) = whole["answers"]
    assert len(document["rows"]) == len(made.rows)


def test_the_schema_is_closed() -> None:
    schema = json.loads(schema_text("profile"))
    shapes = [schema["$defs"][name] for name in ("Report", "Profile", "Row")]
    assert all(shape["additionalProperties"] is False for shape in shapes) and schema["$schema"].startswith(
        "https://json-schema.org/"
    )
    document = only_answer(render([profile()], "json"))
    document["rows"][0]["more"] = 1
    with pytest.raises(ValueError, match="more"):
        answer_of(document)


def test_the_schema_of_a_profile_is_printed_as_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "profile"]) == 0
    assert capsys.readouterr().out == schema_text("profile") + "\n"


def test_no_number_without_a_json_form() -> None:
    case = profile(rows=(row("accumulate", 2, outcome=Outcome.DIVERGENT, relative_difference=float("inf")),))
    assert only_answer(render([case], "json"))["rows"][0]["relative_difference"] is None


@pytest.mark.parametrize("case", CASES)
def test_the_picture_is_whole_and_alone(case: Callable[[], Profile]) -> None:
    text = render([case()], "svg")
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"(?:href|src|url)\b", text) == []  # nothing from elsewhere
    assert "nan" not in text and "inf" not in text.replace("info", "")


def test_the_picture_and_the_page_have_a_bar_for_each_row_that_was_measured() -> None:
    drawn = profile(rows=(*profile().rows, *failing().rows[3:]))
    bars = re.findall(r'<rect class="right" .*?width="([\d.]+)"', render([drawn], "svg"))
    assert len(bars) == 7 and bars[0] == bars[1] == bars[2] == bars[3]
    assert [float(width) for width in bars[4:]] == [pytest.approx(float(bars[0]) / k, abs=0.5) for k in (2, 4, 8)]
    made = render([drawn], "html")
    assert made.count('class="fill"') == 7 and made.index('class="track"') < made.index("<table")


def test_a_model_name_cannot_break_the_picture() -> None:
    root = ElementTree.fromstring(render([profile(setting=setting(model='a<b>&"c\x1b'))], "svg"))
    assert any('a<b>&"c\\x1b' in (element.text or "") for element in root.iter())


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (516, "516 B"),
        (1234, "1.23 kB"),
        (999_999, "1.00 MB"),
        (12_345_678, "12.3 MB"),
        (-2000, "-2.00 kB"),
        (3.2e9, "3.20 GB"),
        (7e12, "7.00 TB"),
    ],
)
def test_bytes_in_words(amount: float, text: str) -> None:
    assert bytes_text(amount) == text


@pytest.mark.parametrize(("seconds", "text"), [(8.5e-4, "850 µs"), (0.00123, "1.23 ms"), (12.34, "12.3 s")])
def test_seconds_in_words(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_the_spread_is_the_quartiles_or_all_there_is() -> None:
    assert Seconds.of([3.0, 1.0, 2.0]) == Seconds(2.0, 1.0, 3.0, 1.0, 3.0, 3)
    assert Seconds.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Seconds(3.0, 2.0, 4.0, 1.0, 5.0, 5)


def test_one_micro_batch_is_the_full_batch() -> None:
    everything = plans(("full-batch", "summed-loss", "accumulate"), [4, 1, 2, 4])
    assert everything == (
        Plan("full-batch", 1),
        Plan("summed-loss", 2),
        Plan("summed-loss", 4),
        Plan("accumulate", 2),
        Plan("accumulate", 4),
    )
    assert plans(("accumulate",), [1, 2]) == (Plan("accumulate", 1), Plan("accumulate", 2))


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ((Outcome.EQUIVALENT, Outcome.EQUIVALENT), 0),
        ((Outcome.EQUIVALENT, Outcome.DIVERGENT), 1),
        ((Outcome.EQUIVALENT, Outcome.INCONCLUSIVE), 3),
        ((None, None), 3),
    ],
)
def test_exit_codes(outcomes: tuple[Outcome | None, ...], code: int) -> None:
    rows = tuple(row("accumulate", 2, outcome=outcome) for outcome in outcomes)
    assert profile(rows=rows).exit_code == code


def test_what_a_row_ran_into_is_no_divergence() -> None:
    rows = failing().rows
    assert profile(rows=rows).exit_code == 1  # one row diverges
    assert profile(rows=rows[2:]).exit_code == 2  # the user's code raised
    agree = row("accumulate", 2)
    assert profile(rows=(agree, rows[0], rows[4])).exit_code == 0  # out of memory and a K that does not fit
