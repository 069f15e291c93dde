"""The JSON documents of all answers: `schema/` says what they hold and fills them, `reading` reads them back."""

from __future__ import annotations

from typing import Any

from gaverify.records.audit_report import AuditReport
from gaverify.records.comparison import Outcome, together
from gaverify.records.profile import Profile
from gaverify.records.verdict import Verdict
from gaverify.report.documents.encoding import VERSION, dump_json
from gaverify.report.pages import Answer, Report


def answer_item(answer: Answer) -> dict[str, Any]:
    """Returns the document of any answer as plain containers, not yet fit for JSON."""
    from gaverify.report.documents.schema import shape_of  # pydantic, which only documents need
    from gaverify.report.documents.schema.deriving import encode_record

    kinds = {Verdict: "verdict", AuditReport: "audit", Profile: "profile"}
    return encode_record(shape_of({"kind": kinds[type(answer)]}), answer)


def answer_text(answer: Answer) -> str:
    """Returns one answer as a JSON document, with everything it rests on.

    NaN and infinite numbers (the norm of a gradient that does not exist, a relative difference to zero) become null.
    """
    return dump_json(answer_item(answer))


def report_text(report: Report) -> str:
    """Returns a whole report as one JSON document; its keys are the same for one answer and for many."""
    items = [answer_item(answer) for answer in report.answers]
    document = {
        "version": VERSION,
        "outcome": overall_outcome(report).value,
        "exit_code": report.code,
        "started": report.started,
        "verdicts": [item for item in items if item["kind"] == "verdict"],
        "audits": [item for item in items if item["kind"] == "audit"],
        "profiles": [item for item in items if item["kind"] == "profile"],
        "errors": [{"source": source, "message": message} for source, message in report.errors],
    }
    return dump_json(document) + "\n"


def overall_outcome(report: Report) -> Outcome:
    """Returns the outcome of a whole report: divergent if any answer is, equivalent if all are and nothing failed."""
    outcome = together(answer.outcome for answer in report.answers)
    return Outcome.INCONCLUSIVE if report.errors and outcome is Outcome.EQUIVALENT else outcome
