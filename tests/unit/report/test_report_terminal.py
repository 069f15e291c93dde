"""The report for people: whole outputs as snapshots, and what must hold for all of them."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import samples

from gaverify.errors import SpecError
from gaverify.records.findings import Location
from gaverify.records.numbers import count_text
from gaverify.records.outcomes import NotCompared, Outcome
from gaverify.records.verdict import CountedTargets, Verdict
from gaverify.report import NoAnswer, Report, print_answer, print_report, print_summary, render


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


def printed(verdict: Verdict, show_all: bool = False) -> str:
    stream = io.StringIO()
    print_answer(verdict, show_all=show_all, file=stream)
    return stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("sample", samples.EVERY)
def test_whole_output(sample, snapshot) -> None:
    assert printed(sample()) == snapshot


def test_whole_output_of_several_runs(snapshot) -> None:
    stream = io.StringIO()
    print_report(Report((samples.equivalent(), samples.divergent())), stream)
    reason = NoAnswer("configs/broken.toml", "$.steps: must be at least 1")
    print_summary(Report((samples.inconclusive(),), (reason,)), stream)
    assert stream.getvalue() == snapshot


def test_whole_output_on_a_wide_terminal(snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert printed(samples.divergent()) == snapshot


def test_a_narrow_terminal_goes_without_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    narrow = printed(samples.divergent(), show_all=True)
    assert re.search(r"parameter +rel. diff +verdict\n", narrow) and "0.weight" in narrow and "32×16" not in narrow
    monkeypatch.setenv("COLUMNS", "72")
    assert re.search(r"parameter +shape +‖full‖ +rel. diff +allowed +verdict", printed(samples.divergent()))


def test_a_fault_is_shown_and_its_absence_is_not() -> None:
    faulty, sound = printed(samples.divergent()), printed(samples.equivalent())
    for words in (
        "DIVERGENT  3 of 6 parameters differ, relative difference up to 8.8e-01",
        "GAV101",
        "divergent",
        "remedy",
    ):
        assert words in faulty
        assert words not in sound
    assert "EQUIVALENT  4 of 4 parameters agree to rounding" in sound
    assert "EQUIVALENT" not in faulty


def test_the_trace_shows_the_numbers_of_toy_linear() -> None:
    text = printed(samples.traced())
    for number in ("-16.0", "-20.0", "1.0", "1.2", "1 : 0 : 1", "2 : 0 : 1"):
        assert number in text
    assert "zero_grad" not in printed(samples.equivalent())


def test_folding_hides_only_what_is_equivalent() -> None:
    text = printed(samples.large(faults=2))
    assert "worst element" not in text
    assert "… and 58 more parameters: equivalent (use --all)" in text
    everything = printed(samples.large(faults=2), show_all=True)
    assert len(re.findall(r" (?:equivalent|divergent)$", everything, re.MULTILINE)) == 60
    assert everything.count("worst element") == 2
    assert "--all" not in everything
    many = printed(samples.large(faults=40))
    assert "… and 30 more parameters: divergent" in many
    assert "… and 20 more parameters: equivalent" in many
    assert "--all" not in printed(samples.divergent())


def test_long_names_that_differ_stay_different() -> None:
    text = printed(samples.large(faults=3))
    assert all(f"layers.{at}." in text for at in range(3))


def test_names_are_whole_where_nobody_counts_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    name, path = "model." * 30 + "weight", "/" + "folder/" * 20 + "train.py"
    found = replace(samples.batchnorm(), location=Location(file=path, line=12))
    long = samples.divergent(parameters=(samples.row(name, outcome=Outcome.DIVERGENT),), findings=(found,))
    assert name in printed(long) and name in render([long], "text")
    monkeypatch.setenv("COLUMNS", "80")
    assert name not in (text := printed(long)) and f"{path}:12" in text


def test_what_is_hidden_is_more_only_beside_what_is_shown() -> None:
    assert "  60 parameters: equivalent (use --all)" in printed(samples.large(faults=0))


def test_worst_comes_first() -> None:
    names = ("0.weight", "1.weight", "0.bias", "2.weight", "2.bias")
    places = [printed(samples.divergent()).index(f"\n  {name}") for name in names]
    assert all(before < after for before, after in pairwise(places))


def test_an_unused_parameter_says_so() -> None:
    line = next(line for line in printed(samples.divergent()).splitlines() if "spare.bias" in line)
    assert line.split()[-1] == "unused"
    assert "unused" not in printed(samples.equivalent())


def test_parameters_that_were_not_compared_do_not_agree() -> None:
    spare = samples.row("spare.bias", shape=(7,), method="not-compared", why=NotCompared.UNUSED)
    text = printed(samples.equivalent(parameters=(samples.row(), spare)))
    assert "EQUIVALENT  1 of 2 parameters agrees to rounding, 1 was not compared" in text
    assert text.count("not compared") == 1
    assert "not compared" not in printed(samples.equivalent())


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("working-precision", "decided in working precision; a relative difference above"),
        ("float64-control", "by repeating both runs in float64"),
        ("noise-floor", "by the rounding noise of the full batch"),
        ("two-samples", "by the rounding of two samples, which agree in float64"),
        ("tolerance", "by the tolerances that were asked for (rtol 0.01, atol 0.1)"),
        ("not-compared", "nothing was compared"),
        ("something-new", "by something-new"),
    ],
)
def test_the_method_is_said_in_words(method: str, words: str) -> None:
    verdict = samples.equivalent(method=method, spec={"rtol": 0.01, "atol": 0.1})
    assert words in " ".join(printed(verdict).split())


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (CountedTargets(29.0, 48, (-1,)), "tokens (29 of 48 targets: all but -1), losses ×"),
        (CountedTargets(48.0, 48, (-100, 0)), "tokens (48 of 48 targets: none is -100 or 0), losses ×"),
        (CountedTargets(37.25, 48, (-100,), weighted=True), "tokens (class weights of all targets but -100: 37.25)"),
    ],
)
def test_what_counts_as_a_token_is_said_with_the_value_that_does_not(targets: CountedTargets, words: str) -> None:
    run = samples.run(weighting="tokens", weights=(0.25, 0.75), targets=targets)
    assert words in " ".join(printed(samples.equivalent(run=run)).split())


def test_nothing_compared_is_never_a_pass() -> None:
    text = printed(samples.equivalent(outcome=Outcome.INCONCLUSIVE, parameters=(), method="not-compared"))
    assert "INCONCLUSIVE  nothing was compared" in text
    assert "EQUIVALENT" not in text


def test_a_pipe_gets_no_escape_codes_and_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in printed(samples.divergent())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1;31m" in printed(samples.divergent())
    monkeypatch.delenv("FORCE_COLOR")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    print_answer(samples.divergent(), file=terminal)
    assert "\x1b[" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    print_answer(samples.divergent(), file=plain)
    assert "\x1b" not in plain.getvalue()
    assert "DIVERGENT" in plain.getvalue()


def test_an_unknown_format_names_the_known() -> None:
    with pytest.raises(SpecError, match="text, json, junit, svg, html"):
        render([], "pdf")


def test_importing_the_report_is_cheap() -> None:
    script = """
import sys, gaverify.report
assert not {'torch', 'rich', 'pydantic', 'xml.etree.ElementTree'} & set(sys.modules)
sys.path.insert(0, sys.argv[1])
import samples
for format in gaverify.report.FORMATS:
    format = format.name
    gaverify.report.render([samples.divergent()], format)
assert not {'rich', 'torch'} & set(sys.modules)
"""
    assert (
        subprocess.run([sys.executable, "-c", script, str(Path(samples.__file__).parent)], check=False).returncode == 0
    )


def test_rounding_orders_no_rows_and_shows_no_element() -> None:
    """Two machines round differently; their reports of an equivalent model differ in numbers only."""
    verdict = samples.equivalent()
    other = replace(
        verdict,
        parameters=tuple(
            row._replace(difference_norm=row.allowed * at / 9, worst=None if at % 2 else row.worst)
            for at, row in enumerate(verdict.parameters)
        ),
    )
    assert names_of(printed(other)) == names_of(printed(verdict)) == [row.name for row in verdict.parameters]
    assert "worst" not in printed(verdict) + printed(other)


def names_of(text: str) -> list[str]:
    """The parameters of a table, in its order."""
    return re.findall(r"^  ([\w.]+) .* equivalent$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("number", "noun", "said"), [(1, "pass", "1 pass"), (2, "pass", "2 passes"), (2, "row", "2 rows")]
)
def test_things_are_counted_in_words(number: int, noun: str, said: str) -> None:
    assert count_text(number, noun) == said
