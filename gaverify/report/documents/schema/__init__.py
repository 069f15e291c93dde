"""One schema with three kinds of document: a verdict, an audit, a profile; and the document of several answers."""

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
    """Several answers of one call, and the runs that failed."""

    version: Literal[1]
    outcome: OutcomeName
    verdicts: list[VerdictDocument]
    audits: list[AuditDocument] = Field(default_factory=list)
    profiles: list[ProfileDocument] = Field(default_factory=list)
    errors: list[ErrorItem]


Document = VerdictDocument | AuditDocument | ProfileDocument | RunDocument

_PRINTED: dict[str, tuple[str, Any]] = {
    "run": ("verdict", VerdictDocument | RunDocument),
    "audit": ("audit", AuditDocument | RunDocument),
    "profile": ("profile", ProfileDocument),
}
"""Command → what its document is called, and the shapes that it may have."""


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
    """Returns the JSON schema of the document that `gaverify COMMAND --format json` prints."""
    title, shapes = _PRINTED[command]
    schema = TypeAdapter(shapes).json_schema()
    schema |= {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"gaverify {title} document, version 1",
    }
    return json.dumps(schema, indent=2, ensure_ascii=False)
