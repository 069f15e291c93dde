"""A profile as text, picture and exit code: records written by hand, no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest
from profiles import failing, profile, row, setting
from syrupy.assertion import SnapshotAssertion

from gaverify.cli import main
from gaverify.records.numbers import bytes_text, seconds_text
from gaverify.records.profile import Plan, Profile, Row, Seconds, plans
from gaverify.report import render
from gaverify.report.documents import schema_text
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


def test_the_schema_of_a_profile_is_printed_as_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "profile"]) == 0
    assert capsys.readouterr().out == schema_text("profile") + "\n"


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


RAN_OUT, DIVERGES, UNDECIDED, RAISED, UNFIT, _ = failing().rows
AGREES = row("accumulate", 2)


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ((AGREES, AGREES), 0),
        ((AGREES, DIVERGES), 1),
        ((AGREES, UNDECIDED), 3),
        ((row("full-batch", 1), row("summed-loss", 2, outcome=None)), 3),
        (failing().rows, 1),
        ((UNDECIDED, RAISED), 2),
        ((AGREES, RAN_OUT, UNFIT), 0),
    ],
)
def test_a_divergence_decides_the_exit_code_before_what_a_row_ran_into(rows: tuple[Row, ...], code: int) -> None:
    assert profile(rows=rows).exit_code == code
