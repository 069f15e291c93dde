"""The JSON documents of answers and reports: the records themselves, as pydantic writes, reads and describes them."""

from __future__ import annotations

import json

from gaverify.records.answers import Answer
from gaverify.records.audit_report import Audit
from gaverify.records.json_objects import adapter_of, as_json, plain_value
from gaverify.records.profile import Profile
from gaverify.records.verdict import Verdict
from gaverify.report.pages import Report

_PRINTED = {"run": Verdict, "audit": Audit, "profile": Profile}
"""Command → its answers."""


def answer_text(answer: Answer) -> str:
    """Returns one answer as a JSON document, with everything it rests on.

    NaN and infinite numbers (the norm of a gradient that does not exist, a relative difference to zero) become null.
    """
    return _document_text(answer)


def report_text(report: Report) -> str:
    """Returns a whole report as one JSON document; its keys are the same for one answer and for many."""
    return _document_text(report) + "\n"


def _document_text(record: Answer | Report) -> str:
    # ASCII escapes keep lone surrogates in names legal and make the bytes the same under every encoding.
    return json.dumps(as_json(record), indent=2, ensure_ascii=True, allow_nan=False)


def schema_text(command: str) -> str:
    """Returns the JSON schema of what `gaverify COMMAND --format json` prints, and of one answer's `to_json()`."""
    schema = adapter_of(Report | _PRINTED[command]).json_schema(mode="serialization")
    schema |= {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"gaverify {command} document, version {Answer.version}",
    }
    return json.dumps(plain_value(schema), indent=2, ensure_ascii=False)
