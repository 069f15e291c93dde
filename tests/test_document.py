"""The JSON document: complete, valid under its schema, always JSON."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace

import pydantic
import pytest
import samples

from gaverify.document import overall_outcome, run_document, verdict_document, verdict_schema
from gaverify.results import Outcome
from gaverify.schema import RunDocument, VerdictDocument, validate_document


@pytest.mark.parametrize("sample", samples.EVERY)
def test_verdict_satisfies_the_schema(sample) -> None:
    verdict = sample()
    document = validate_document(verdict_document(verdict))
    assert isinstance(document, VerdictDocument)
    assert document.outcome == verdict.outcome.value
    assert document.exit_code == verdict.outcome.exit_code
    assert [row.name for row in document.parameters] == [row.name for row in verdict.parameters]
    assert verdict.to_json() == verdict_document(verdict)


def test_several_verdicts_satisfy_the_schema() -> None:
    text = run_document([sample() for sample in samples.EVERY], [("configs/broken.toml", "no `model`")])
    document = validate_document(text)
    assert isinstance(document, RunDocument)
    assert document.outcome == "divergent"
    assert document.errors[0].message == "no `model`"


def test_one_verdict_is_its_own_document_unless_something_failed() -> None:
    verdict = samples.equivalent()
    assert run_document([verdict]) == verdict_document(verdict)
    assert json.loads(run_document([verdict], [("a", "b")]))["outcome"] == "inconclusive"
    assert json.loads(run_document([]))["outcome"] == "inconclusive"


def test_overall_outcome_is_the_worst() -> None:
    equivalent, divergent, inconclusive = samples.equivalent(), samples.divergent(), samples.inconclusive()
    assert overall_outcome([equivalent, equivalent]) is Outcome.EQUIVALENT
    assert overall_outcome([equivalent, inconclusive]) is Outcome.INCONCLUSIVE
    assert overall_outcome([inconclusive, divergent, equivalent]) is Outcome.DIVERGENT


def test_numbers_are_kept_and_non_finite_ones_become_null() -> None:
    finite = json.loads(verdict_document(samples.divergent()))
    assert finite["parameters"][0]["relative_difference"] == pytest.approx(0.88)
    assert finite["parameters"][0]["worst"] == {"index": [3, 14], "reference": 0.0123457, "accumulated": -0.0456789}
    assert finite["parameters"][3]["relative_difference"] is None
    assert finite["findings"][0]["evidence"][0]["values"]["limit"] is None
    assert finite["spec"] == {"model": "mlp-batchnorm", "steps": 4, "shape": [3, 32], "limit": None}
    assert json.loads(verdict_document(samples.inconclusive()))["parameters"][1]["difference_norm"] is None


def test_odd_values_in_evidence_are_still_json() -> None:
    values = {"set": {2, 1}, "outcome": Outcome.DIVERGENT, 3: object, "deep": [(math.nan, {"x": -math.inf})]}
    finding = samples.batchnorm()
    evidence = replace(finding.evidence[0], values=values)
    verdict = samples.divergent(findings=(replace(finding, evidence=(evidence,)),))
    document = validate_document(verdict_document(verdict))
    assert isinstance(document, VerdictDocument)
    found = document.findings[0].evidence[0].values
    assert found["set"] == [1, 2]
    assert found["outcome"] == "divergent"
    assert found["deep"] == [[None, {"x": None}]]


@pytest.mark.parametrize(
    ("key", "value"), [("outcome", "fine"), ("version", 2), ("exit_code", 2), ("unheard", 1), ("parameters", None)]
)
def test_the_schema_refuses_what_is_wrong(key: str, value: object) -> None:
    document = json.loads(verdict_document(samples.equivalent()))
    document[key] = value
    with pytest.raises(pydantic.ValidationError):
        validate_document(json.dumps(document))


def test_schema_is_json_and_names_both_forms() -> None:
    schema = json.loads(verdict_schema())
    assert {"VerdictDocument", "RunDocument"} <= set(schema["$defs"])
    assert "null" in json.dumps(schema["$defs"]["Parameter"]["properties"]["difference_norm"])


@pytest.mark.skipif(importlib.util.find_spec("jsonschema") is None, reason="jsonschema is not installed")
@pytest.mark.parametrize("sample", samples.EVERY)
def test_json_schema_accepts_the_documents(sample) -> None:
    import jsonschema

    jsonschema.validate(json.loads(verdict_document(sample())), json.loads(verdict_schema()))


def test_neither_pydantic_nor_torch_is_imported() -> None:
    script = "import sys, gaverify.document; sys.exit(bool({'torch', 'pydantic', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
