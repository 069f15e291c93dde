"""The document of a call, and what it holds: verdicts, audits, profiles. An answer's `to_json` is one of the latter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, TypeAdapter

from gaverify.report.documents.schema.audit import AuditDocument
from gaverify.report.documents.schema.deriving import Shape
from gaverify.report.documents.schema.verdict import OutcomeName, ProfileDocument, VerdictDocument


class ErrorItem(Shape):
    """A run that came to no answer."""

    source: str
    message: str


class RunDocument(Shape):
    """The answers of one call, and the runs that failed."""

    version: Literal[1]
    outcome: OutcomeName
    exit_code: Literal[0, 1, 2, 3, 70, 130] | None = None
    started: str = ""
    verdicts: list[VerdictDocument]
    audits: list[AuditDocument] = Field(default_factory=list)
    profiles: list[ProfileDocument] = Field(default_factory=list)
    errors: list[ErrorItem]


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


def shape_of(document: Mapping[str, Any]) -> type[Document]:
    """Returns the shape that a document should have, so that messages name the keys of this one alone."""
    if "verdicts" in document:
        return RunDocument
    kinds: dict[Any, type[Document]] = {"audit": AuditDocument, "profile": ProfileDocument}
    return kinds.get(document.get("kind"), VerdictDocument)


def schema_text(command: str) -> str:
    """Returns the JSON schema of what `gaverify COMMAND --format json` prints, and of one answer's `to_json()`."""
    shapes: Any = RunDocument | _PRINTED[command]
    schema = TypeAdapter(shapes).json_schema()
    schema |= {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"gaverify {command} document, version 1",
    }
    return json.dumps(schema, indent=2, ensure_ascii=False)
