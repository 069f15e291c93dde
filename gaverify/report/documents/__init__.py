"""The JSON documents of all answers: `schema` says what they hold and fills them, `reading` reads them back."""

from __future__ import annotations

import json

from gaverify.records.comparison import Outcome, together
from gaverify.report.pages import Answer, Report

VERSION = 1
"""Version of the documents; it grows when a reader of the older one would break."""


def answer_text(answer: Answer) -> str:
    """Returns one answer as a JSON document, with everything it rests on.

    NaN and infinite numbers (the norm of a gradient that does not exist, a relative difference to zero) become null.
    """
    return _document_text(answer)


def report_text(report: Report) -> str:
    """Returns a whole report as one JSON document; its keys are the same for one answer and for many."""
    return _document_text(report) + "\n"


def overall_outcome(report: Report) -> Outcome:
    """Returns the outcome of a whole report: divergent if any answer is, equivalent if all are and nothing failed."""
    outcome = together(answer.outcome for answer in report.answers)
    return Outcome.INCONCLUSIVE if report.errors and outcome is Outcome.EQUIVALENT else outcome


def _document_text(record: Answer | Report) -> str:
    # Loads pydantic, which only documents need.
    from gaverify.report.documents.schema import as_json

    # ASCII escapes keep lone surrogates in names legal and make the bytes the same under every encoding.
    return json.dumps(as_json(record), indent=2, ensure_ascii=True, allow_nan=False)
