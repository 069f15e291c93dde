"""Documents: complete, valid under their schemas, and read back as the answers that wrote them."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import profiles
import pydantic
import pytest
import samples

import gaverify.report.documents
from gaverify.errors import SpecError
from gaverify.records.experiment import WeightFit
from gaverify.records.outcomes import Outcome
from gaverify.records.ranks import Collective, Engine, RankFacts, RankShares, RankTraffic, Replicas, Traffic
from gaverify.report import NoAnswer, Report, render
from gaverify.report.documents import answer_text, report_text, schema_text
from gaverify.report.documents.reading import answer_of, read_report
from gaverify.report.verdict_page import method, sentence

# --- The JSON document: complete, valid under its schema, always JSON ------------------------------------------------


@pytest.mark.parametrize("sample", samples.EVERY)
def test_verdict_satisfies_the_schema(sample) -> None:
    verdict = sample()
    document = json.loads(answer_text(verdict))
    assert list(document)[:5] == ["version", "kind", "name", "outcome", "exit_code"]
    assert document["outcome"] == verdict.outcome.value
    assert document["exit_code"] == verdict.outcome.exit_code
    assert [row["name"] for row in document["parameters"]] == [row.name for row in verdict.parameters]
    assert verdict.to_json() == answer_text(verdict)


@pytest.mark.parametrize(
    ("report", "outcome", "code"),
    [
        (Report((samples.equivalent(),)), "equivalent", 0),
        (Report((samples.divergent(),)), "divergent", 1),
        (Report((samples.inconclusive(), samples.divergent())), "divergent", 1),
        (Report((samples.equivalent(),), (NoAnswer("a", "b"),)), "inconclusive", 2),
        (Report(()), "inconclusive", 2),
        (Report((samples.equivalent(),), exit_code=1), "equivalent", 1),  # stale entries of the project
    ],
)
def test_one_answer_has_the_keys_of_many(report: Report, outcome: str, code: int) -> None:
    document = json.loads(report_text(report))
    keys = ["version", "outcome", "exit_code", "started", "answers", "errors", "skipped"]
    assert list(document) == keys
    assert (document["outcome"], document["exit_code"], len(document["answers"])) == (
        outcome,
        code,
        len(report.answers),
    )


def test_overall_outcome_is_the_worst() -> None:
    equivalent, divergent, inconclusive = samples.equivalent(), samples.divergent(), samples.inconclusive()
    assert Report((equivalent, equivalent)).outcome is Outcome.EQUIVALENT
    assert Report((equivalent, inconclusive)).outcome is Outcome.INCONCLUSIVE
    assert Report((inconclusive, divergent, equivalent)).outcome is Outcome.DIVERGENT


def test_numbers_are_kept_and_non_finite_ones_become_null() -> None:
    finite = json.loads(answer_text(samples.divergent()))
    assert finite["parameters"][0]["relative_difference"] == pytest.approx(0.88)
    assert finite["parameters"][0]["worst"] == {"index": [3, 14], "reference": 0.0123457, "accumulated": -0.0456789}
    assert finite["parameters"][3]["relative_difference"] is None
    assert finite["findings"][0]["evidence"][0]["values"]["limit"] is None
    assert finite["spec"] == {"model": "mlp-batchnorm", "steps": 4, "shape": [3, 32], "limit": None}
    assert json.loads(answer_text(samples.inconclusive()))["parameters"][1]["difference_norm"] is None


def test_odd_values_in_evidence_are_still_json() -> None:
    values = {"set": {2, 1}, "outcome": Outcome.DIVERGENT, 3: object, "deep": [(math.nan, {"x": -math.inf})]}
    finding = samples.batchnorm()
    evidence = replace(finding.evidence[0], values=values)
    verdict = samples.divergent(findings=(replace(finding, evidence=(evidence,)),))
    found = json.loads(answer_text(verdict))["findings"][0]["evidence"][0]["values"]
    assert found["set"] == [1, 2]
    assert found["outcome"] == "divergent"
    assert found["deep"] == [[None, {"x": None}]]


@pytest.mark.parametrize(
    ("key", "value"), [("outcome", "fine"), ("version", 1), ("kind", "x"), ("unheard", 1), ("parameters", None)]
)
def test_the_schema_refuses_what_is_wrong(key: str, value: object) -> None:
    document = json.loads(answer_text(samples.equivalent()))
    document[key] = value
    with pytest.raises(pydantic.ValidationError):
        answer_of(document)


def test_schema_is_json_and_names_both_forms() -> None:
    schema = json.loads(schema_text("run"))
    assert {"Verdict", "Audit", "Profile", "Report"} <= set(schema["$defs"])
    assert "null" in json.dumps(schema["$defs"]["ParameterComparison"]["properties"]["difference_norm"])


@pytest.mark.skipif(pydantic.version.version_short() != "2.14", reason="other versions word the same schema otherwise")
def test_the_schema_that_is_checked_in_is_that_of_the_records() -> None:
    stored = Path(gaverify.report.documents.__file__).with_name("documents.json")
    assert json.loads(stored.read_text(encoding="utf-8")) == json.loads(schema_text("run")), (
        f"write it again with `gaverify schema > {stored}`"
    )


@pytest.mark.skipif(importlib.util.find_spec("jsonschema") is None, reason="jsonschema is not installed")
@pytest.mark.parametrize("command", ["run", "audit", "profile"])
def test_json_schema_accepts_the_documents(command: str) -> None:
    import jsonschema

    kind = {"run": "verdict"}.get(command, command)
    validator = jsonschema.Draft202012Validator(json.loads(schema_text(command)))
    for answer in ANSWERS:
        document = json.loads(answer_text(answer))
        assert validator.is_valid(document) == (document["kind"] == kind)
        validator.validate(json.loads(render([answer], "json")))


def test_neither_pydantic_nor_torch_is_imported() -> None:
    heavy = "bool({'torch', 'pydantic', 'rich'} & set(sys.modules))"
    script = f"import sys, gaverify.report.documents; sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("missing", ["name", "source", "exit_code", "patch"])
def test_an_older_document_without_a_newer_key_is_still_read(missing: str) -> None:
    document = json.loads(answer_text(samples.divergent()))
    del document[missing]
    assert answer_of(document) is not None


@pytest.mark.parametrize("command", ["run", "audit", "profile"])
def test_every_command_has_a_schema(command: str) -> None:
    assert json.loads(schema_text(command))["title"].endswith("document, version 2")


def test_why_float64_was_impossible_is_told_in_text_and_json() -> None:
    why = '"_grouped_mm" not implemented for Double'
    verdict = samples.equivalent(method="noise-floor", control_failure=why)
    assert json.loads(verdict.to_json())["control_failure"] == why
    assert f"by the rounding noise of the full batch; float64 was impossible: {why}" in method(verdict)
    assert "impossible" not in method(samples.equivalent())
    assert json.loads(samples.equivalent().to_json())["control_failure"] == ""


def test_a_gradient_of_zero_is_not_told_by_how_many_times_it_differs() -> None:
    zero = samples.row("bias", Outcome.DIVERGENT, reference_norm=0.0, accumulated_norm=1.0, difference_norm=1.0)
    told = sentence(samples.divergent(parameters=(*samples.divergent().parameters, zero)))
    assert (
        "relative difference up to 8.8e-01;" in told
        and "where the full-batch gradient is zero, by more than rounding" in told
    )
    alone = sentence(samples.divergent(parameters=(zero,)))
    assert "up to" not in alone and "zero" in alone


# --- Documents that are read back are the answers that wrote them; anything else gets a sentence ---------------------


_TRAFFIC = RankTraffic(Traffic({Collective.REDUCE: 1}, 2308))
_RANKS = RankFacts(
    2,
    Engine.DDP,
    0.1,
    replicas=Replicas(0.0),
    traffic=_TRAFFIC,
    shares=RankShares(WeightFit((0.6, 0.4), 1e-8, used=(0.5, 0.5))),
)
RANKED = [
    samples.divergent(ranks=_RANKS),
    replace(samples.audited(), ranks=_RANKS),
    samples.equivalent(ranks=RankFacts(2, None, 0.0, traffic=_TRAFFIC)),
]
ANSWERS = [sample() for sample in samples.EVERY] + [samples.audited(), profiles.profile(), profiles.failing(), *RANKED]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_what_is_read_is_what_was_written(answer) -> None:
    text = answer_text(answer)
    again = answer_of(json.loads(text))
    assert type(again) is type(answer)
    assert answer_text(again) == text
    assert render([again], "text", show_all=True) == render([answer], "text", show_all=True)


# To shrink an answer of 200 fields takes minutes.
def test_several_answers_and_errors(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    file.write_text(render(ANSWERS, "json", errors=[("broken.toml", "no `model`")]))
    report = read_report(file)
    assert len(report.answers) == len(ANSWERS)
    assert report.errors == (NoAnswer("broken.toml", "no `model`"),)


def test_calls_in_order_are_a_success_that_is_not_called_equivalent() -> None:
    checked = samples.audited(Outcome.INCONCLUSIVE)
    checked = replace(checked, findings=(), events_only=True, calls_in_order=True, name="calls")
    document = json.loads(answer_text(checked))
    assert (document["outcome"], document["exit_code"], document["name"]) == ("inconclusive", 0, "calls")
    assert answer_of(document).exit_code == 0
    assert render([checked], "text").splitlines()[0].endswith("audit: calls")
    assert json.loads(render([checked], "sarif"))["runs"][0]["results"] == []
    assert "<error" not in render([checked], "junit")
    assert "INCONCLUSIVE calls: calls in order: " in repr(checked)
    for expected, stale, code in ((Outcome.DIVERGENT, (), 3), (None, ("stale",), 1)):
        acceptance = replace(checked.acceptance, expected=expected, stale=stale, strict=True)
        assert replace(checked, acceptance=acceptance).exit_code == code


GOOD = json.loads(answer_text(samples.divergent()))
ROW = GOOD["parameters"][0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "is no document of gaverify's"),
        ('{"version": 2}', "is no document of gaverify's"),
        (json.dumps({**GOOD, "version": 1}), "has version 1; this gaverify reads version 2"),
        (json.dumps({**GOOD, "outcome": "fine"}), r"\$.verdict.outcome: input should be"),
        (json.dumps({**GOOD, "more": 1}), r"\$.verdict.more: extra inputs are not permitted"),
        (
            json.dumps({**GOOD, "parameters": [{**GOOD["parameters"][0], "method": "zzz"}]}),
            r"\$.verdict.parameters.0.method: input should be",
        ),
        (json.dumps({**GOOD, "parameters": [{}]}), r"more problems\); it is not as gaverify wrote it"),
        ("[" * 100_000, "is no JSON"),
        ('{"version": 1' + "0" * 400 + "}", "is no JSON: a number of 401 digits stands in it"),
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
