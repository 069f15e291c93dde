"""The HTML page: what it shows, that names are text in it, and that it needs nothing else."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import profiles
import pytest
import samples
from documents import Reader

from gaverify.cli import main
from gaverify.records.answers import Environment
from gaverify.records.audit_report import Moment, RecordedCalls
from gaverify.records.experiment import ModuleDifference
from gaverify.records.findings import Evidence, Excerpt, Location
from gaverify.records.outcomes import Outcome
from gaverify.report import render
from gaverify.report.audit_page import collapse_repeats
from gaverify.report.charts import chart_by_outputs, parameters_chart, scale_of
from gaverify.report.documents import answer_text
from gaverify.report.documents.reading import answer_of
from gaverify.report.html import _LIMIT
from gaverify.report.layout import cells


def page(*answers: object, **options: object) -> str:
    return render(answers, "html", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("sample", [*samples.EVERY, samples.audited, profiles.profile, profiles.failing])
def test_it_is_whole_and_alone(sample) -> None:
    made = page(sample())
    Reader(made)
    assert re.findall(r"(?:href|src)=\"(?!#)", made) == []
    assert "https://" not in made and "http://" not in made.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert (
        "default-src 'none'" in html.unescape(made) and "prefers-color-scheme: dark" in made and "@media print" in made
    )


def test_verdict_and_cause_come_first_and_the_command_last() -> None:
    text = Reader(page(samples.divergent(command="gaverify run x.toml"))).text
    places = [
        text.index(words)
        for words in ("3 of 6 parameters differ", "GAV101", "0.weight", "made by", "gaverify run x.toml")
    ]
    assert places == sorted(places)
    assert "gaverify run x.toml" not in Reader(page(samples.divergent())).text


def test_the_culprit_line_stands_in_its_source() -> None:
    place = Location("1", "Centre", "net.py", 6, Excerpt(5, ("def forward(self, x):", "    return x - x.mean(0)")))
    made = page(samples.divergent(findings=(replace(samples.batchnorm(), location=place),)))
    assert re.search(r'class="hit"><span class="number">6</span><mark>    return x - x.mean\(0\)</mark>', made)
    assert "<mark>" not in page(samples.divergent())


def test_control_before_and_after() -> None:
    control = Evidence("control", "control", "frozen: proven", {"left": 8e-8})
    measured = Evidence("operations", "measured", "88 %", {"difference": 0.88})
    made = page(samples.divergent(findings=(replace(samples.batchnorm(), evidence=(measured, control)),)))
    assert "as it is: 8.8e-01, control run: 8.0e-08" in made
    whole = Evidence("control", "control", "frozen: proven", {"left": 8e-8, "alone": 0.05})
    of_values = replace(measured, values={"difference": 7.7})  # of the forward, which the bars do not show
    made = page(samples.divergent(findings=(replace(samples.batchnorm(), evidence=(of_values, whole)),)))
    assert "as it is: 5.0e-02, control run: 8.0e-08" in made
    assert "control run: " not in page(samples.divergent())


def test_a_repair_that_ran_is_a_bar_of_its_own() -> None:
    measured = Evidence("operations", "measured", "88 %", {"difference": 0.88})
    repairs = [
        {"what": "GroupNorm(8, 32)", "left": 2e-7, "rounding": True},
        {"what": "its value as a constant", "left": 0.5, "rounding": False},
    ]
    control = Evidence("control", "control", "frozen: proven", {"left": 8e-8, "repairs": repairs})
    made = page(samples.divergent(findings=(replace(samples.batchnorm(), evidence=(measured, control)),)))
    assert "repair: GroupNorm(8, 32): 2.0e-07, repair: its value as a constant: 5.0e-01" in made
    figure = made[made.index("each repair that was tried") :]
    kinds = re.findall(r'<li class="(\w+)">', figure[: figure.index("</figure>")])
    assert kinds == ["divergent", "equivalent", "equivalent", "inconclusive"]


def test_weights_are_bars_where_they_were_fitted() -> None:
    made = page(samples.audited())
    assert "micro-batch 2 0.5 0.75" in Reader(made).text
    assert made.count('<li class="used"') == made.count('<li class="right"') == 2
    fitted = Evidence("micro-batch-weights", "control", "fits", {"weights": [0.1, 0.2, 0.3, 0.4]})
    verdict = samples.divergent(findings=(replace(samples.batchnorm(), evidence=(fitted,)),))
    assert page(verdict).count('<li class="right"') == 4
    assert '<li class="right"' not in page(samples.divergent())


def test_the_timeline_groups_calls_by_update_and_rank() -> None:
    made = Reader(page(samples.audited())).text
    assert "update 1 backward × 2 train.py:7 step train.py:9 zero_grad train.py:10" in made
    ranks = tuple(Moment("step", 1, None, None, rank) for rank in (1, 0))
    on_ranks = page(replace(samples.audited(), calls=RecordedCalls(timeline=ranks)))
    assert "update 1, rank 0 step update 1, rank 1 step" in Reader(on_ranks).text
    assert "Timeline" not in Reader(page(samples.divergent())).text


def test_calls_that_repeat_are_written_once() -> None:
    forward, backward, step = (
        ("forward", "a.py:1"),
        ("backward", "a.py:2"),
        ("step", ""),
    )
    collapsed = collapse_repeats([*(forward, backward) * 4, step, *(backward,) * 3])
    assert collapsed == [((forward, backward), 4), ((step,), 1), ((backward,), 3)]


def test_equal_updates_are_one_entry_of_the_timeline() -> None:
    moments = tuple(Moment(kind, update, "a.py", 3) for update in (1, 2, 3) for kind in ("backward", "step"))
    text = Reader(page(replace(samples.audited(), calls=RecordedCalls(timeline=(*moments, Moment("step", 4)))))).text
    assert "updates 1 to 3 backward a.py:3 step a.py:3 update 4 step" in text


def test_places_below_the_current_folder_are_relative_in_the_timeline() -> None:
    moments = Moment("step", 1, str(Path("scripts", "a.py").absolute()), 3), Moment("backward", 2, "/elsewhere/b.py", 4)
    text = Reader(page(replace(samples.audited(), calls=RecordedCalls(timeline=moments)))).text
    assert "step scripts/a.py:3" in text and "backward /elsewhere/b.py:4" in text


def test_a_chart_whose_bars_are_all_red_is_left_out() -> None:
    red = [samples.row(f"{at}.weight", Outcome.DIVERGENT) for at in range(3)]
    assert not parameters_chart(red)
    chart = parameters_chart([*red, samples.row("3.weight")])
    assert [bar.name for bar in chart.bars] == ["0.weight", "1.weight", "2.weight", "3.weight"] and chart.ticks


def test_a_module_that_holds_the_cause_is_no_bar_of_its_own() -> None:
    modules = (ModuleDifference("", 0.3), ModuleDifference("block", 0.2), ModuleDifference("block.norm", 0.9))
    chart = chart_by_outputs((ModuleDifference("stem", 0.0), *modules), {"block.norm"})
    assert [bar.name for bar in chart.bars] == ["stem", "block.norm"]
    assert chart.bars[1].is_cause


def test_the_page_says_when_it_was_made_and_of_which_commit() -> None:
    verdict = samples.divergent()
    environment = Environment(started="2026-11-25T07:00:00Z", commit="0123456789abcdef" * 2)
    made = replace(verdict, environment=environment)
    text = Reader(page(made)).text
    assert "date 2026-11-25T07:00:00Z" in text and "commit 0123456789ab" in text and "duration" in text


def test_modules_stand_in_the_models_order_with_the_cause() -> None:
    text = Reader(page(samples.divergent())).text
    assert "the first that differs is that of 0" in text and "1 cause" in text
    made = page(samples.large(2, 5000))
    assert made.count('<li class="equivalent') + made.count('<li class="divergent') <= 440  # 400 modules, 40 parameters


def test_the_forward_shows_where_values_part() -> None:
    modules = (ModuleDifference("0", 0.0), ModuleDifference("1", 1.07), ModuleDifference("2", 0.67))
    text = Reader(page(samples.divergent(modules=modules))).text
    assert "the first that differ are those of 1" in text
    assert "0 the same values 1 cause 1.1e+00 2 6.7e-01" in text
    deep = [ModuleDifference(f"{block}{layer}", 0.0) for block in range(400) for layer in ("", ".norm", ".out")]
    deep[900:903] = [
        ModuleDifference(f"300{layer}", size) for layer, size in (("", 0.1), (".norm", 0.9), (".out", 1.2))
    ]
    text = Reader(page(samples.divergent(modules=tuple(deep)))).text
    assert "the first that differ are those of 300.norm" in text  # neither the block, nor the worst of its neighbours
    agreeing = tuple(ModuleDifference(name, 0.0) for name in "012")
    assert "where values part" not in Reader(page(samples.divergent(modules=agreeing))).text
    many = tuple(ModuleDifference(f"layers.{at}", 0.5) for at in range(5000))
    assert page(samples.divergent(modules=many)).count('class="track"') <= 800


def test_a_profile_has_its_chart_and_its_rows() -> None:
    made = page(profiles.profile())
    assert "Saved activations" in made and "accumulate" in Reader(made).text


def test_a_large_model_fits() -> None:
    made = page(samples.large(7, 5000))
    assert len(made.encode()) < 3_000_000
    assert made.count(" later") == 5000 - _LIMIT
    assert f"const LIMIT = {_LIMIT};" in made


@pytest.mark.parametrize("sample", [*samples.EVERY, samples.audited, profiles.profile])
def test_a_page_of_a_saved_document_is_the_same(sample) -> None:
    answer = sample()
    assert page(answer_of(json.loads(answer_text(answer)))) == page(answer)


def test_several_answers_have_an_overview() -> None:
    text = Reader(page(samples.divergent(), samples.equivalent(), errors=[("b.toml", "no `model`")])).text
    assert (
        text.index("3 runs") < text.index("GAV101 in layer 1 at train.py:12; 3 of 6") < text.index("b.toml: no model")
    )
    assert text.index("b.toml") < text.index("GAV101 batch-statistics")
    assert "runs" not in Reader(page(samples.equivalent())).text


def test_the_axis_holds_every_number() -> None:
    scale = scale_of([1e-8, 0.5, float("inf"), 0.0])
    assert (scale.low, scale.high) == (-8, 0)
    assert [scale.at(value) for value in (0.0, 1e-8, 1e-4, 1.0, float("inf"), float("nan"))] == pytest.approx(
        [0, 0, 50, 100, 100, 0]
    )
    assert len(scale_of([1e-300, 1e300]).ticks) <= 12


def test_the_template_is_shipped() -> None:
    folder = Path(__import__("gaverify.report.html", fromlist=["x"]).__file__).parent / "templates"
    assert {"page.css", "page.js", "page.html.jinja"} <= {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("width", ["40", "80", "120"])
@pytest.mark.smoke
def test_models_and_rules_break_no_words(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert max(map(cells, out.splitlines())) <= max(int(width), 60)
    for word in ("equivalent", "BatchNorm", "squared", "ragged", "mnist-mlp", "567,434"):
        assert word in out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["rules"]) == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert (
        "batch-statistics" in out
        and "normalisation" in out
        and max(map(cells, out.splitlines())) <= max(int(width), 60)
    )


def test_a_notebook_shows_the_first_screen_and_takes_no_names_for_tags() -> None:
    verdict = samples.divergent()
    (fault, *others) = verdict.findings
    odd = replace(fault, location=Location("<b>x</b>", "BatchNorm1d", "train.py", 12))
    reader = Reader(replace(verdict, findings=(odd, *others))._repr_html_())
    assert set(reader.tags) <= {"div", "p", "strong", "code"}
    for words in ("DIVERGENT mlp-batchnorm", "3 of 6 parameters differ", "GAV101", "<b>x</b>", "GroupNorm(4, 32)"):
        assert words in reader.text
