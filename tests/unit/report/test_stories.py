"""What verdicts, audits and profiles have in common, and what JUnit makes of it."""

from __future__ import annotations

from xml.etree import ElementTree

import profiles
import pytest
import samples

from gaverify.records.comparison import Outcome
from gaverify.report import render
from gaverify.report.stories import story_of


@pytest.mark.parametrize(
    ("answer", "kind", "title", "tables"),
    [
        (samples.divergent(), "run", "mlp-batchnorm", 1),
        (samples.audited(), "audit", "train.py", 2),
        (profiles.profile(), "profile", "mnist-mlp", 0),
    ],
)
def test_every_answer_has_a_story(answer, kind: str, title: str, tables: int) -> None:
    story = story_of(answer)
    assert (story.kind, story.title, len(story.tables)) == (kind, title, tables)
    assert story.outcome is answer.outcome and story.sentence


def cases(answer) -> dict[str, str]:
    (suite,) = ElementTree.fromstring(render([answer], "junit"))
    return {case.attrib["name"]: case[0].tag if len(case) else "passed" for case in suite}


def test_an_audit_is_one_suite_with_its_updates() -> None:
    assert cases(samples.audited()) == {"verdict": "failure", "update 1: 0": "passed", "update 2: 0": "failure"}
    assert "seed" not in render([samples.audited()], "junit")


def test_an_update_that_means_nothing_is_no_failure() -> None:
    assert cases(samples.audited(Outcome.INCONCLUSIVE, judged=False))["update 2: 0"] == "skipped"
    assert cases(samples.audited(Outcome.INCONCLUSIVE, judged=False))["verdict"] == "error"


def test_a_profile_is_a_suite_of_rows() -> None:
    assert set(cases(profiles.profile()).values()) == {"passed"}
    found = cases(profiles.failing())
    assert found["accumulate, K = 2"] == "failure"
    assert found["accumulate, K = 8"] == "failure"
    assert found["accumulate, K = 64"] == "skipped"
