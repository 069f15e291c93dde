"""JSON documents back into answers: what `gaverify report` reads.

A document is checked against the types of the records. A number that is null is NaN again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gaverify.errors import SpecError
from gaverify.records.answers import Answer
from gaverify.records.json_objects import adapter_of
from gaverify.report.pages import AnyAnswer, Report
from gaverify.text_files import text_of_file

_LARGEST = 512 * 2**20
_LONGEST_NUMBER = 20  # digits: bytes and seeds have 64 bits
"""Bytes of a file that is read at all; a verdict over a million parameters has less."""


def read_report(path: Path) -> Report:
    """Returns what a JSON file of gaverify's holds.

    Raises:
        SpecError: It cannot be read, is no JSON, is of another version, or is not gaverify's; a sentence says which.
    """
    from pydantic import ValidationError

    document = _parse_file(path)
    version = document.get("version")
    if not isinstance(version, int) or "outcome" not in document:
        raise SpecError("is no document of gaverify's; write one with `--output FILE.json`", str(path))
    if version != Answer.version:
        raise SpecError(f"has version {version}; this gaverify reads version {Answer.version}", str(path))
    try:
        record = adapter_of(Report if "answers" in document else AnyAnswer).validate_python(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, ("$", *first["loc"])))
        more = f" (and {error.error_count() - 1} more problems)" if error.error_count() > 1 else ""
        raise SpecError(f"{place}: {first['msg'].lower()}{more}; it is not as gaverify wrote it", str(path)) from error
    return record if isinstance(record, Report) else Report((record,))


def answer_of(document: Mapping[str, Any]) -> Answer:
    """Returns the answer that the document of one verdict, audit or profile describes.

    Raises:
        pydantic.ValidationError: It is no such document.
    """
    answer: Answer = adapter_of(AnyAnswer).validate_python(document)
    return answer


def _parse_file(path: Path) -> dict[str, Any]:
    try:
        text = text_of_file(path, "document of gaverify's", _LARGEST)
        document = json.loads(text, parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"is no JSON: {error}; write one with `--output FILE.json`", str(path)) from error
    if not isinstance(document, dict):
        raise SpecError("is no document of gaverify's: an object was expected", str(path))
    return document


def _whole_number(word: str) -> int:
    """A whole number of a document: a report divides and multiplies it, which longer ones do not allow."""
    if len(word) > _LONGEST_NUMBER:
        raise ValueError(f"a number of {len(word)} digits stands in it")
    return int(word)
