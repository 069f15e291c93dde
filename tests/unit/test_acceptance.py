"""Accepted divergences: what an entry fits, what becomes of the exit code, and what is stale.

Records that are derived: totals of a verdict, and whose passes and partners an update has.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import samples

from gaverify.acceptance import check_comments, describe_unused_entries, entries_for, mark_accepted
from gaverify.errors import SpecError
from gaverify.records.events import Backward, Event, Forward, Step
from gaverify.records.experiment import WeightFit
from gaverify.records.findings import Finding, Location
from gaverify.records.outcomes import (
    Method,
    Outcome,
    ParameterComparison,
    outcome_of,
    relative_total,
    resolution_of,
    together,
)
from gaverify.records.windows import Window, common_rounds, number_steps, windows_of
from gaverify.report import render
from gaverify.rules.rule import finding_of, measured_evidence
from gaverify.spec.entries import Accept
from gaverify.spec.loading import parse_spec
from gaverify.spec.project import Project, project_settings


def entry(location: str = "backbone.*", code: str = "GAV101", **more: Any) -> Accept:
    return Accept(code=code, location=location, reason="on purpose", **more)


def fault(module: str | None = "backbone.bn1", code: str = "GAV101", proven: bool = True, **place: object) -> Finding:
    return Finding(code, "x", "fault", "y", Location(module, **place), proven=proven)  # type: ignore[arg-type]


def verdict(*findings: Finding, outcome: Outcome = Outcome.DIVERGENT) -> samples.Verdict:
    return samples.divergent(findings=findings, outcome=outcome)


def several(*places: Location) -> Finding:
    """A fault that is proven of several places together."""
    return replace(
        finding_of("y", measured_evidence("x", "z"), remedy="", proven=True, location=places[0], together=places),
        code="GAV101",
    )


BOTH = several(Location("backbone.1", file="net.py", line=3), Location("head", file="net.py"))
LINES = several(Location(file="net.py", line=3), Location(file="net.py", line=9))


NOTE = Finding("GAV402", "buffer-drift", "note", "drift")


@pytest.mark.parametrize(
    ("findings", "entries", "code", "why"),
    [
        ([fault()], [entry()], 0, "explained and accepted"),
        ([fault()], [], 1, "nobody accepts it"),
        ([fault(), NOTE], [entry()], 0, "a note asks for nothing"),
        ([fault("head")], [entry()], 1, "another module"),
        ([fault(code="GAV102")], [entry()], 1, "another code"),
        ([fault(), fault("head")], [entry()], 1, "everything else still fails"),
        ([fault(), fault("head")], [entry(), entry("head")], 0, "both are accepted"),
        ([fault(proven=False)], [entry()], 1, "only suspected: something else may differ, too"),
        ([fault(proven=False)], [entry(suspected=True)], 0, "the entry says that this is known"),
        ([fault(None, file="net.py", line=3)], [entry("net.py")], 0, "a file"),
        ([fault(None, file="net.py", line=3)], [entry("net.py:3")], 0, "a line"),
        ([fault(None, file="net.py", line=3)], [entry("net.py:4")], 1, "another line"),
        ([fault("")], [entry("(root)")], 0, "the model itself"),
        ([replace(fault(), location=None)], [entry("*")], 0, "no place, any place"),
        ([replace(fault(), location=None)], [entry("?*")], 1, "no place is no name"),
        ([BOTH], [entry()], 1, "the head was found with it"),
        ([BOTH], [entry("head")], 1, "a part of what was found"),
        ([BOTH], [entry(), entry("head")], 0, "each of its layers is accepted"),
        ([BOTH], [entry("*")], 0, "any place"),
        ([BOTH], [entry("net.py")], 0, "all of them are in this file"),
        ([LINES], [entry("net.py:3")], 1, "another line"),
        ([LINES], [entry("net.py:3"), entry("net.py:9")], 0, "both lines"),
        ([], [entry()], 1, "no cause was found"),
        ([NOTE], [entry()], 1, "a note explains nothing"),
    ],
)
def test_the_exit_code(findings: list[Finding], entries: list[Accept], code: int, why: str) -> None:
    for accept, project in ((entries, Project()), ([], Project(tuple(entries)))):
        assert mark_accepted(verdict(*findings), accept, project).exit_code == code, why


def test_an_entry_names_its_file_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    inner = tmp_path / "src"
    inner.mkdir()
    library = "/opt/{}/lib/python3/site-packages/zoo/net.py"
    for here, there, pattern in (
        (library.format("desk"), library.format("ci"), "zoo/net.py"),
        (str(inner / "net.py"), str(inner / "net.py"), "src/net.py"),
        ("net.py", "src/net.py", "src/net.py"),  # from src/, then from the repository
    ):
        monkeypatch.chdir(inner)
        ((made,), _) = entries_for([fault(None, file=here, line=3)], "on purpose")
        assert made.location == pattern
        monkeypatch.chdir(tmp_path)
        assert mark_accepted(verdict(fault(None, file=there, line=4)), [made], Project()).exit_code == 0
    assert mark_accepted(verdict(fault(None, file="lib/net.py", line=4)), [made], Project()).exit_code == 1


def test_inconclusive_is_never_accepted() -> None:
    made = mark_accepted(verdict(fault(), outcome=Outcome.INCONCLUSIVE), [entry()], Project())
    assert made.exit_code == 3 and not made.accepted


def test_a_stale_entry_is_told_and_strict_makes_it_fail() -> None:
    quiet = mark_accepted(verdict(fault()), [entry()], Project(), strict=True)
    assert quiet.acceptance.stale == () and quiet.exit_code == 0
    made = mark_accepted(verdict(fault()), [entry(), entry("gone.*")], Project())
    assert made.acceptance.stale == ("accept entry GAV101 at `gone.*` matches nothing any more: remove it",)
    assert made.exit_code == 0
    assert mark_accepted(verdict(fault()), [entry(), entry("gone.*")], Project(), strict=True).exit_code == 1
    assert mark_accepted(samples.equivalent(), [entry()], Project((), True)).exit_code == 1
    assert mark_accepted(samples.equivalent(), [entry()], Project()).exit_code == 0


def test_entries_of_the_project_are_judged_over_all_answers() -> None:
    project = Project((entry(), entry("gone.*")), False, "pyproject.toml")
    made = [mark_accepted(verdict(fault()), [], project), mark_accepted(samples.equivalent(), [], project)]
    assert made[1].acceptance.stale == ()
    assert describe_unused_entries(made, project) == (
        "pyproject.toml: accept entry GAV101 at `gone.*` matches nothing any more: remove it",
    )


@pytest.mark.parametrize(
    ("outcome", "expect", "code"),
    [
        ("divergent", "divergent", 0),
        ("equivalent", "divergent", 1),
        ("inconclusive", "divergent", 3),
        ("inconclusive", "inconclusive", 0),
        ("divergent", "equivalent", 1),
        ("divergent", None, 1),
    ],
)
def test_expect(outcome: str, expect: str | None, code: int) -> None:
    made = mark_accepted(samples.equivalent(outcome=Outcome(outcome)), [], Project(), expect=expect)
    assert made.exit_code == code


def test_reports_name_what_is_accepted() -> None:
    made = mark_accepted(verdict(fault()), [entry(), entry("gone.*")], Project())
    text = " ".join(render([made], "text").split())
    for words in ("GAV101 x (accepted)", "accepted on purpose", "entry GAV101 at `gone.*` matches", "every cause"):
        assert words in text
        assert words not in render([verdict(fault())], "text")
    (suite,) = ElementTree.fromstring(render([made], "junit"))
    assert (suite.attrib["failures"], suite.attrib["errors"]) == ("0", "0")
    assert "accepted" in (suite.findtext("testcase/system-out") or "")
    assert ElementTree.fromstring(render([verdict(fault())], "junit")).attrib["failures"] != "0"
    assert "::error" not in render([made], "github") and "::error" in render([verdict(fault())], "github")
    assert "accepted" in render([made], "html")
    strict = mark_accepted(verdict(fault()), [entry(), entry("gone.*")], Project(), strict=True)
    assert ElementTree.fromstring(render([strict], "junit")).attrib["failures"] != "0"


def test_a_part_of_a_finding_is_told_and_a_baseline_names_all_of_it() -> None:
    made = mark_accepted(verdict(BOTH), [entry()], Project(), strict=True)
    assert made.exit_code == 1 and not made.acceptance.stale
    told = "GAV101 at `backbone.*` does not cover everything: `head` at net.py was found too and has no entry"
    assert made.acceptance.refused == (told,)
    assert [made.location for made in entries_for([BOTH], "why")[0]] == ["backbone.1", "head"]


@pytest.mark.parametrize(
    ("modules", "pattern", "strange"),
    [
        (("layers.0.norm", "layers.11.norm"), "layers.*.norm", "head.0.norm"),
        (("layers.0", "layers.1"), "layers.*", "head"),
        (("layers.0.norm", "layers.1.a.norm"), "layers.*", "head.norm"),
        (("1", "4", "10"), "[0-9]*", "head"),
        (("a[0].x", "a[0].y"), "a[[]0].*", "a0.x"),
    ],
)
def test_the_layers_of_a_finding_get_one_entry(modules: tuple[str, ...], pattern: str, strange: str) -> None:
    found = several(*map(Location, modules))
    (made,), _ = entries_for([found], "why")
    assert made.location == pattern
    assert mark_accepted(verdict(found), [made], Project()).exit_code == 0
    assert mark_accepted(verdict(fault(strange)), [made], Project()).exit_code == 1


def test_an_entry_accepts_until_its_last_day() -> None:
    assert mark_accepted(verdict(fault()), [entry(until="9999-12-31")], Project()).exit_code == 0
    made = mark_accepted(verdict(fault()), [entry(until="2020-03-01")], Project())
    assert made.exit_code == 1 and not made.acceptance.stale
    (told,) = made.acceptance.refused
    assert told.startswith("GAV101 at `backbone.*` was accepted until 2020-03-01, which is over")
    spec = "model = 'mlp'\naccept = [{ code = 'GAV101', location = 'a', reason = 'b', until = 2027-03-01 }]"
    assert parse_spec(tomllib.loads(spec), "a.toml").accept[0].until == "2027-03-01"


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("x = 1\nloss = f(x)  # gaverify: accept GAV101 (wanted here)\n", 0),
        ("# gaverify: accept GAV101 (wanted here)\nloss = f(x)\n", 0),
        ("x = 1\nloss = f(x)  # noqa  # gaverify: accept GAV101 (a (b) c)  # more\n", 0),
        ("x = 1  # gaverify: accept GAV101 (of another line)\nloss = f(x)\n", 1),
        ("x = 1\nloss = f(x)  # gaverify: accept GAV102 (another fault)\n", 1),
    ],
)
def test_a_comment_at_the_line_accepts_its_fault(lines: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "train[1].py"
    script.write_text(lines)
    made = mark_accepted(verdict(fault(None, file=str(script), line=2)), [], Project())
    assert made.exit_code == code and not made.acceptance.stale
    suspected = mark_accepted(verdict(fault(None, file=str(script), line=2, proven=False)), [], Project())
    assert suspected.exit_code == 1


@pytest.mark.parametrize(
    ("comment", "words"),
    [
        ("# gaverify: accept GAV101", "needs a code and, in parentheses, a reason"),
        ("# gaverify: accept GAV101 ()", "needs a code and, in parentheses, a reason"),
        ("# gaverify: accept (known)", "needs a code and, in parentheses, a reason"),
        ("# gaverify: accept GAV000 (known)", "an unexplained divergence cannot be accepted"),
        ("# gaverify: accept GAV199 (known)", "there is no rule GAV199"),
    ],
)
def test_a_comment_without_a_reason_is_an_error(comment: str, words: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"x = 1\nloss = f(x)  {comment}\n")
    for check in (
        lambda: check_comments(str(script)),
        lambda: mark_accepted(verdict(fault(None, file=str(script), line=2)), [], Project()),
    ):
        with pytest.raises(SpecError) as caught:
            check()
        assert f"{script}:2" in str(caught.value) and words in str(caught.value)


def test_why_an_entry_does_not_accept_is_told() -> None:
    made = mark_accepted(verdict(fault(proven=False)), [entry()], Project())
    assert "not accepted: GAV101 at `backbone.*` is only suspected" in " ".join(render([made], "text").split())


@pytest.mark.parametrize(
    ("accept", "words"),
    [
        ("GAV101", "$.accept: must be a list of tables"),
        (["GAV101"], "$.accept[0]: must be a table; write `{ code ="),
        ([{"code": "GAV101", "location": "a"}], "$.accept[0].reason: is missing; write `reason ="),
        ([{"code": "GAV101", "location": "a", "reason": " "}], "$.accept[0].reason: must be text that is not empty"),
        ([{"code": "GAV1", "location": "a", "reason": "b"}], "$.accept[0].code: must be a code such as GAV101"),
        ([{"code": "GAV199", "location": "a", "reason": "b"}], "there is no rule GAV199; did you mean GAV1"),
        ([{"code": "GAV000", "location": "a", "reason": "b"}], "an unexplained divergence cannot be accepted"),
        ([{"code": "GAV101", "location": "a", "reason": "b", "why": 1}], "$.accept[0].why: unknown key"),
        ([{"code": "GAV101", "location": 3, "reason": "b"}], "$.accept[0].location: must be text"),
        ([{"code": "GAV101", "location": "a", "reason": "b", "suspected": 1}], "suspected: must be true or false"),
        (
            [{"code": "GAV101", "location": "a", "reason": "b", "until": "May"}],
            "until: must be a day such as 2027-03-01",
        ),
        ([{"code": "GAV101", "location": "a", "reason": "b", "until": "2027-02-30"}], "write `until = 2027-03-01`"),
    ],
)
def test_wrong_entries_get_a_sentence(accept: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec({"model": "mlp", "accept": accept}, "a.toml")
    assert words in str(caught.value)
    assert len(caught.value.problems) == 1


def test_right_entries_are_read() -> None:
    spec = parse_spec({"model": "m", "accept": [{"code": "GAV101", "location": "a", "reason": "b"}]}, "a.toml")
    assert spec.accept == (Accept(code="GAV101", location="a", reason="b"),)
    assert parse_spec(spec.to_dict(), "again") == spec


def test_the_projects_settings(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert project_settings(inner).accept == () or project_settings(inner).source
    file = tmp_path / "pyproject.toml"
    file.write_text('[tool.gaverify]\nstrict = true\naccept = [{ code = "GAV101", location = "x", reason = "y" }]\n')
    assert project_settings(inner) == Project((Accept(code="GAV101", location="x", reason="y"),), True, str(file))
    (inner / "pyproject.toml").write_text("[tool.other]\n")  # says nothing about gaverify: the outer one does
    assert project_settings(inner).source == str(file)
    file.write_text("[tool.gaverify]\nstrict = 1\nacept = []\n")
    with pytest.raises(SpecError) as caught:
        project_settings(inner)
    assert len(caught.value.problems) == 2
    file.write_text("[tool.gaverify\n")
    with pytest.raises(SpecError, match="line 1, column 15: not TOML"):
        project_settings(inner)


def test_a_baseline_accepts_exactly_what_was_found() -> None:
    found = [fault("a[0].b"), fault("x", proven=False), NOTE, fault(code="GAV000"), replace(fault("z"), accepted="yes")]
    entries, problems = entries_for(found, "why")
    assert [(made.location, made.suspected) for made in entries] == [("a[[]0].b", False), ("x", True)]
    assert len(problems) == 1 and "GAV000" in problems[0]
    assert mark_accepted(verdict(*found[:2]), entries, Project()).exit_code == 0


# --- Whose gradients a step uses, and which partner a loss met: loops of two networks, as events ---------------------


CRITIC, GENERATOR = 0, 1
MODELS = {CRITIC: frozenset({0}), GENERATOR: frozenset({1})}


def loop(text: str) -> list[Event]:
    """`C` the critic's pass, `G` the generator's through the critic, `c` and `g` their steps.

    `f` is a forward of the generator, on whose result the next `R` goes on: its pass through the critic.
    """
    events: list[Event] = []
    update, stepped, number, made = 1, False, 0, 0
    for letter in text.replace(" ", ""):
        if letter == "f":
            update, stepped = update + stepped, False
            number = made = number + 1
            events.append(Forward(update, rows=2, model=1, number=number))
        elif letter in "CGHR":
            update, stepped = update + stepped, False
            models = [1, 0] if letter in "GH" else [0]
            for model in models:
                number += 1
                events.append(Forward(update, rows=2, model=model, number=number))
            numbers = [*[made] * (letter == "R"), *range(number - len(models) + 1, number + 1)]
            touched = {"C": (CRITIC,), "H": (GENERATOR,)}.get(letter, (CRITIC, GENERATOR))
            events.append(Backward(update, optimizers=touched, forwards=tuple(numbers)))
        else:
            events.append(Step(update, optimizer="cg".index(letter)))
            stepped = True
    return events


def fit(*right: float, residual: float = 1e-7) -> WeightFit:
    return WeightFit(right, residual, True, used=(1.0,) * len(right))


def windows(full: str, accumulated: str) -> tuple[list[Event], list[Event], dict[int, Window], dict[int, Window]]:
    both = loop(full), loop(accumulated)
    numbers = number_steps(common_rounds(*both))
    found = [{window.number: window for window in windows_of(events, numbers)} for events in both]
    return *both, *found


class TestWindowsOfNetworks:
    @pytest.mark.parametrize(("full", "accumulated"), [("CGcg Ccg", "CGCGcg CCcg"), ("Cc Gg Cc Gg", "CGCG cg CGCG cg")])
    def test_optimizers_that_share_passes_in_both_runs_alike_step_together(self, full: str, accumulated: str) -> None:
        alike = full.startswith("CG")
        assert [len(round_) for round_ in common_rounds(loop(full), loop(accumulated))] == [1 + alike] * (4 - 2 * alike)

    def test_optimizers_without_a_pass_in_common_have_windows_of_their_own(self) -> None:
        """H: a generator's loss whose critic is frozen meanwhile."""
        _, _, whole, part = windows("HCgc Cc", "HCCgc CCc")
        assert {number: len(window.of(Backward)) for number, window in whole.items()} == {1: 1, 2: 1, 3: 1}
        assert {number: len(window.of(Backward)) for number, window in part.items()} == {1: 1, 2: 2, 3: 2}


# --- What rows say together ------------------------------------------------------------------------------------------


SAME, FAULT, OPEN = Outcome.EQUIVALENT, Outcome.DIVERGENT, Outcome.INCONCLUSIVE


def row(outcome: Outcome, reference: float = 1.0, allowed: float = 1e-6, method: str = "working-precision"):  # type: ignore[no-untyped-def]
    return ParameterComparison(
        "w",
        (1,),
        outcome,
        method,
        reference,
        reference,
        0.0,
        allowed,
        0.0,
        None,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [((), OPEN), ((SAME,), SAME), ((SAME, OPEN), OPEN), ((SAME, OPEN, FAULT), FAULT), ((SAME, FAULT), FAULT)],
)
def test_several_outcomes_together(outcomes: tuple[Outcome, ...], expected: Outcome) -> None:
    assert together(outcomes) is expected
    assert outcome_of([row(outcome) for outcome in outcomes]) is expected


def test_gradients_of_zero_agree_whatever_accumulation_does() -> None:
    assert outcome_of([row(SAME, 0.0)]) is OPEN
    assert outcome_of([row(SAME, math.nan)]) is OPEN, "unused parameters alone"
    assert outcome_of([row(SAME, 0.0), row(SAME)]) is SAME
    assert outcome_of([row(FAULT, math.nan)]) is FAULT, "a gradient on one side only"


@pytest.mark.parametrize(("allowed", "expected"), [(0.09, SAME), (0.11, OPEN)])
def test_what_rounding_may_hide_is_no_agreement(allowed: float, expected: Outcome) -> None:
    small = row(SAME, 0.01, allowed=0.01)
    assert outcome_of([row(SAME, allowed=allowed), small]) is expected
    few = row(SAME, allowed=allowed, method=Method.FEW_SAMPLES)
    assert outcome_of([few, few._replace(reference_norm=0.0)]) is expected, "decided together: of the whole, once"
    assert outcome_of([row(FAULT, allowed=allowed)]) is FAULT
    assert outcome_of([row(SAME, allowed=allowed, method=Method.TOLERANCE)]) is SAME, "as it was asked for"


def test_relative_total() -> None:
    assert relative_total([(3.0, 30.0), (4.0, 40.0)]) == pytest.approx(0.1)
    assert relative_total([(0.0, 0.0)]) == relative_total([]) == 0.0
    assert relative_total([(1e-30, 0.0)]) == math.inf
    assert relative_total([(math.nan, math.nan), (1.0, 2.0)]) == 0.5
    assert relative_total([(1e-200, 1e-200)]) == 1.0, "squares of these would be zero"


def test_resolution_counts_no_gradient_that_is_rounding() -> None:
    assert resolution_of([row(SAME), row(SAME, 1e-8)]) == pytest.approx(1e-6)
    assert resolution_of([row(SAME), row(SAME, 2e-6)]) == pytest.approx(0.5), "above rounding, and hardly seen"
    assert math.isnan(resolution_of([row(SAME, 0.0, 0.0)]))
    asked = row(SAME, 1e-8, method="tolerance")
    assert resolution_of([asked]) == pytest.approx(100.0), "tolerances that were asked for hide what they hide"
