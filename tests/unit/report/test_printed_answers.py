"""What Python does with an answer: truth, `print`, the prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import samples

from gaverify.records.findings import Acceptance


@pytest.mark.parametrize("sample", [samples.equivalent, samples.divergent, samples.inconclusive, samples.audited])
def test_an_answer_is_neither_true_nor_false(sample) -> None:
    with pytest.raises(TypeError, match=r"`verdict.is_equivalent`.*Outcome.EQUIVALENT`.*assert_equivalent"):
        bool(sample())


def test_equivalent_is_what_the_gradients_are() -> None:
    assert samples.equivalent().is_equivalent
    assert not samples.inconclusive().is_equivalent
    expected = replace(samples.divergent(), acceptance=Acceptance(expected=samples.divergent().outcome))
    assert expected.exit_code == 0 and not expected.is_equivalent


@pytest.mark.parametrize("sample", [samples.equivalent, samples.divergent, samples.inconclusive, samples.audited])
def test_print_shows_the_outcome_and_every_finding(sample) -> None:
    answer, text = sample(), str(sample())
    assert text.splitlines()[1].startswith(answer.outcome.name)
    assert all(finding.code in text for finding in answer.findings)
    assert "batch  " not in text and not text.endswith("\n")


def test_the_prompt_shows_one_line() -> None:
    line = repr(samples.divergent())
    why = "3 of 6 parameters differ, relative difference up to 8.8e-01"
    assert line == f"<Verdict DIVERGENT mlp-batchnorm: GAV101 in layer 1 at train.py:12; {why}>"
    assert repr(samples.audited()).startswith("<Audit DIVERGENT train.py: GAV101 in layer 1 at train.py:12; update 2: ")
