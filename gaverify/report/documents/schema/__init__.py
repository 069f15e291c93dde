"""The document of a call, and what it holds: verdicts, audits, profiles. An answer's `to_json` is one of the latter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from gaverify.records.audit_report import AuditReport
from gaverify.records.comparison import Outcome
from gaverify.records.profile import Profile
from gaverify.records.verdict import Verdict
from gaverify.report.documents import overall_outcome
from gaverify.report.documents.schema.audit import AuditDocument
from gaverify.report.documents.schema.shape import Of, Shape, as_json, to_record
from gaverify.report.documents.schema.verdict import ProfileDocument, VerdictDocument, Version
from gaverify.report.pages import Answer, Report


class ErrorItem(Shape):
    """A run that came to no answer."""

    source: str
    message: str

    @staticmethod
    def of(error: tuple[str, str]) -> dict[str, str]:
        """Returns the object of one error of a report."""
        return {"source": error[0], "message": error[1]}


def _answers_of(kind: type[Answer], report: Report) -> list[Answer]:
    return [answer for answer in report.answers if isinstance(answer, kind)]


class RunDocument(Shape, record=Report):
    """The answers of one call, and the runs that failed."""

    version: Version
    outcome: Annotated[Outcome, Of(overall_outcome)]
    exit_code: Annotated[Literal[0, 1, 2, 3, 70, 130] | None, Of("code")] = None
    started: str = ""
    verdicts: Annotated[tuple[VerdictDocument, ...], Of(lambda report: _answers_of(Verdict, report))]
    audits: Annotated[tuple[AuditDocument, ...], Of(lambda report: _answers_of(AuditReport, report))] = ()
    profiles: Annotated[tuple[ProfileDocument, ...], Of(lambda report: _answers_of(Profile, report))] = ()
    errors: Annotated[tuple[ErrorItem, ...], Of(lambda report: list(map(ErrorItem.of, report.errors)))]

    def to_record(self) -> Report:
        """Returns the report."""
        return Report(
            to_record((*self.verdicts, *self.audits, *self.profiles)),
            tuple((error.source, error.message) for error in self.errors),
            exit_code=self.exit_code,
            started=self.started,
        )


Document = VerdictDocument | AuditDocument | ProfileDocument | RunDocument

_PRINTED = {"run": VerdictDocument, "audit": AuditDocument, "profile": ProfileDocument}
"""Command → the shape of its answers."""


def validate_document(text: str | bytes) -> Document:
    """Returns the parsed document of any kind.

    Raises:
        pydantic.ValidationError: `text` is not a document of this version.
    """
    adapter: TypeAdapter[Document] = TypeAdapter(Document)
    return adapter.validate_json(text)


def parse_document(document: Mapping[str, Any]) -> Document:
    """Returns a document as the kind that it says it is, so that messages name the keys of this kind alone.

    Raises:
        pydantic.ValidationError: It is not a document of this version.
    """
    kinds: dict[Any, type[Document]] = {"audit": AuditDocument, "profile": ProfileDocument}
    shape = RunDocument if "verdicts" in document else kinds.get(document.get("kind"), VerdictDocument)
    # Strict types accept an array for a tuple only in JSON text, whose parser refuses names with lone surrogates.
    return shape.model_validate(document, strict=False)


class _SchemaOfWritten(GenerateJsonSchema):
    """The schema of documents that this version writes; it may not read one that lacks a newer key."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        """Whether a key is always there: all are."""
        return True


def schema_text(command: str) -> str:
    """Returns the JSON schema of what `gaverify COMMAND --format json` prints, and of one answer's `to_json()`."""
    shapes: Any = RunDocument | _PRINTED[command]
    schema = TypeAdapter(shapes).json_schema(schema_generator=_SchemaOfWritten)
    schema |= {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"gaverify {command} document, version 1",
    }
    return json.dumps(as_json(schema), indent=2, ensure_ascii=False)  # a default of NaN is null, too
