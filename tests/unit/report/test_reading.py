"""Documents that are read back are the answers that wrote them; anything else gets a sentence."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import profiles
import pytest
import samples

from gaverify.errors import SpecError
from gaverify.records.partners import Foreign, Partner
from gaverify.records.ranks import Collective, Engine, RankFacts, Traffic
from gaverify.records.weights import WeightFit
from gaverify.report import render
from gaverify.report.documents import answer_text
from gaverify.report.documents.reading import answer_of, read_report

_ONE_REDUCE = Traffic({Collective.REDUCE: 1}, 2308)
_RANKS = RankFacts(2, Engine.DDP, 0.0, _ONE_REDUCE, Traffic(), WeightFit((0.6, 0.4), 1e-8, used=(0.5, 0.5)), 0.1)
RANKED = [
    samples.divergent(ranks=_RANKS),
    replace(samples.audited(), ranks=_RANKS),
    samples.equivalent(ranks=RankFacts(2, None, math.nan, _ONE_REDUCE, Traffic(), None, 0.0)),
]
ANSWERS = [sample() for sample in samples.EVERY] + [samples.audited(), profiles.profile(), profiles.failing(), *RANKED]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_what_is_read_is_what_was_written(answer) -> None:
    text = answer_text(answer)
    again = answer_of(json.loads(text))
    assert type(again) is type(answer)
    assert answer_text(again) == text
    assert render([again], "text", show_all=True) == render([answer], "text", show_all=True)


def test_whose_passes_and_which_partners_are_told() -> None:
    answer = samples.audited()
    update = replace(answer.updates[1], foreign=Foreign(1, (0, 2), 1e-8), partners=(Partner(0, 1, 0),))
    document = json.loads(answer_text(replace(answer, updates=(answer.updates[0], update))))
    without, told = document["updates"]
    assert (without["foreign"], without["partners"]) == (None, [])
    assert told["foreign"] == {"optimizer": 1, "passes": [0, 2], "residual": 1e-8}
    assert told["partners"] == [{"optimizer": 0, "full": 1, "accumulated": 0}]
    again = answer_of(document).updates[1]
    assert (again.foreign, again.partners) == (update.foreign, update.partners)


def test_several_answers_and_errors(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    file.write_text(render(ANSWERS, "json", errors=[("broken.toml", "no `model`")]))
    report = read_report(file)
    assert len(report.answers) == len(ANSWERS)
    assert report.errors == (("broken.toml", "no `model`"),)


GOOD = json.loads(answer_text(samples.divergent()))
ROW = GOOD["parameters"][0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "is no document of gaverify's"),
        ('{"version": 1}', "is no document of gaverify's"),
        (json.dumps({**GOOD, "version": 2}), "has version 2; this gaverify reads version 1"),
        (json.dumps({**GOOD, "outcome": "fine"}), r"\$.outcome: input should be"),
        (json.dumps({**GOOD, "more": 1}), r"\$.more: extra inputs are not permitted"),
        (
            json.dumps({**GOOD, "parameters": [{**GOOD["parameters"][0], "method": "zzz"}]}),
            "'zzz' is not a valid Method; it",
        ),
        (json.dumps({**GOOD, "parameters": [{}]}), r"more problems\); it is not as gaverify wrote it"),
        ("[" * 100_000, "is no JSON"),
        ('{"version": 1, "rules": []}', "is no document"),
    ],
)
def test_what_is_not_ours_gets_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(SpecError, match=words):
        read_report(file)


def test_what_cannot_be_read_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff")
    os.mkfifo(tmp_path / "pipe")
    told = {
        "latin": "not UTF-8",
        "pipe": "no regular file",
        "gone": "cannot be read: No such file",
        ".": "cannot be read",
    }
    for name, words in told.items():
        with pytest.raises(SpecError, match=words):
            read_report(tmp_path / name)


def test_rounded_products_are_written_and_read_back() -> None:
    verdict = samples.equivalent()
    verdict = replace(verdict, run=replace(verdict.run, rounded=("matmul tf32",)))
    document = json.loads(answer_text(verdict))
    assert document["run"]["rounded"] == ["matmul tf32"]
    assert answer_of(document).run.rounded == ("matmul tf32",)
    del document["run"]["rounded"]
    assert answer_of(document).run.rounded == (), "a document from before the key"
