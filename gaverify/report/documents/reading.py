"""JSON documents back into answers: what `gaverify report` reads.

A document is checked against the schema first, which also says where each key's value came from. Then the records are
built from what bears their fields' names. A number that is null is NaN again.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from gaverify.errors import SpecError
from gaverify.records.audit_report import AuditReport
from gaverify.records.comparison import NotCompared, ParameterComparison
from gaverify.records.profile import Profile
from gaverify.records.verdict import Verdict
from gaverify.report.documents.encoding import VERSION, fields_of
from gaverify.report.pages import Answer, Report
from gaverify.text_files import text_of_file

_LARGEST = 512 * 2**20
"""Bytes of a file that is read at all; a verdict over a million parameters has less."""


_REASONS = {why.text: why for why in NotCompared}


def read_report(path: Path) -> Report:
    """Returns what a JSON file of gaverify's holds.

    Raises:
        SpecError: It cannot be read, is no JSON, is of another version, or is not gaverify's; a sentence says which.
    """
    document = _parse_file(path)
    _check(document, path)
    try:
        return _report(document)
    except ValueError as error:  # a word that is none of an enum's
        raise SpecError(f"{error}; it is not as gaverify wrote it", str(path)) from error


def _report(document: Mapping[str, Any]) -> Report:
    if "verdicts" in document:
        items = [*document["verdicts"], *document.get("audits", ()), *document.get("profiles", ())]
        return Report(
            tuple(map(answer_of, items)),
            tuple((error["source"], error["message"]) for error in document["errors"]),
            exit_code=document.get("exit_code"),
            started=document.get("started", ""),
        )
    return Report((answer_of(document),))


def answer_of(document: Mapping[str, Any]) -> Answer:
    """Returns the answer that a valid document of one verdict, audit or profile describes."""
    from gaverify.report.documents.schema import shape_of
    from gaverify.report.documents.schema.deriving import decode_document

    kinds = {"audit": AuditReport, "profile": Profile}
    answer: Answer = _build_value(
        kinds.get(document.get("kind", ""), Verdict), decode_document(shape_of(document), document)
    )
    return answer


def _parse_file(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(text_of_file(path, "document of gaverify's", _LARGEST), object_hook=_as_today)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"is no JSON: {error}; write one with `--output FILE.json`", str(path)) from error
    if not isinstance(document, dict):
        raise SpecError("is no document of gaverify's: an object was expected", str(path))
    return document


def _as_today(item: dict[str, Any]) -> dict[str, Any]:
    """An object of a document, without what only older ones say: spilling, a profile's ranks and predictions."""
    for key in ("spill", "moved"):
        item.pop(key, None)
    if "repeats" in item:
        for key in ("ranks", "engine", "batch_bytes"):
            item.pop(key, None)
    if item.get("kind") == "profile":
        for key in ("memory_limit", "wanted_batch", "prediction", "no_prediction"):
            item.pop(key, None)
    if item.keys() == {"torch", "gaverify", "python", "platform"}:
        item |= {"started": "", "commit": ""}  # else the record would say that it was made now
    return item


def _check(document: Mapping[str, Any], path: Path) -> None:
    from pydantic import ValidationError

    from gaverify.report.documents.schema import shape_of

    version = document.get("version")
    if not isinstance(version, int) or not ({"outcome"} <= document.keys()):
        raise SpecError("is no document of gaverify's; write one with `--output FILE.json`", str(path))
    if version != VERSION:
        raise SpecError(f"has version {version}; this gaverify reads version {VERSION}", str(path))
    try:
        shape_of(document).model_validate_json(json.dumps(document))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, ("$", *first["loc"])))
        more = f" (and {error.error_count() - 1} more problems)" if error.error_count() > 1 else ""
        raise SpecError(f"{place}: {first['msg'].lower()}{more}; it is not as gaverify wrote it", str(path)) from error


def _build_value(kind: Any, value: Any) -> Any:
    """Returns `value`, which came out of JSON, as what the annotation `kind` says."""
    if kind is Any:
        return value
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return (
            None if value in (None, {}) else _build_value(next(part for part in inner if part is not type(None)), value)
        )
    if origin is tuple:
        parts = inner[:1] * len(value) if inner[-1:] == (...,) else inner
        return tuple(_build_value(part, item) for part, item in zip(parts, value, strict=True))
    if origin is not None and isinstance(value, Mapping):
        return {_build_value(inner[0], key): _build_value(inner[-1], item) for key, item in value.items()}
    if kind is float:
        return math.nan if value is None else float(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return value if isinstance(value, kind) else kind(value)
    if kind is ParameterComparison:  # a document has the words of its reason
        value = {**value, "why": _REASONS.get(value["reason"])}
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return kind(
            **{name: _build_value(part, value[name]) for name, part in fields_of(kind).items() if name in value}
        )
    return value
