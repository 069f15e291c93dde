"""What the JSON documents of all answers share. Numbers that are not finite have no JSON; they become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

from gaverify.records.audit_report import AuditReport
from gaverify.records.comparison import ParameterComparison
from gaverify.records.findings import Evidence, Finding, Location
from gaverify.records.verdict import Verdict

VERSION = 1
"""Version of the documents; it grows when a reader of the older one would break."""


def dumped(document: Mapping[str, Any]) -> str:
    """Returns a document as JSON text."""
    # ASCII escapes keep lone surrogates in names legal and make the bytes the same under every encoding.
    return json.dumps(plain(document), indent=2, ensure_ascii=True, allow_nan=False)


def plain(value: Any) -> Any:
    """Returns `value` in terms of JSON: evidence and specs may hold tuples, enumerations and numbers out of range."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    return str(value)


def parameter_item(row: ParameterComparison) -> dict[str, Any]:
    """Returns one compared parameter."""
    return {
        "name": row.name,
        "shape": row.shape,
        "outcome": row.outcome.value,
        "method": row.method,
        "reference_norm": row.reference_norm,
        "accumulated_norm": row.accumulated_norm,
        "difference_norm": row.difference_norm,
        "relative_difference": row.relative_difference,
        "allowed": row.allowed,
        "working_difference_norm": row.working_difference_norm,
        "worst": None if row.worst is None else row.worst._asdict(),
        "reason": row.reason,
    }


def finding_item(finding: Finding) -> dict[str, Any]:
    """Returns one finding with its evidence."""
    place = finding.location
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity,
        "location": None if place is None else _location(place),
        "summary": finding.summary,
        "evidence": [_evidence(evidence) for evidence in finding.evidence],
        "remedy": finding.remedy,
        "proven": finding.proven,
        "accepted": finding.accepted,
    }


def acceptance_item(answer: Verdict | AuditReport) -> dict[str, Any]:
    """Returns what the user accepts or expects, and which of the entries are stale."""
    acceptance = answer.acceptance
    return {
        "accepted": answer.accepted,
        "expected": acceptance.expected,
        "stale": acceptance.stale,
        "strict": acceptance.strict,
        "refused": acceptance.refused,
    }


def _location(place: Location) -> dict[str, Any]:
    excerpt = place.excerpt
    return {
        "module": place.module,
        "kind": place.kind,
        "file": place.file,
        "line": place.line,
        "excerpt": None if excerpt is None else {"first": excerpt.first, "lines": excerpt.lines},
    }


def _evidence(evidence: Evidence) -> dict[str, Any]:
    return {
        "probe": evidence.probe,
        "label": evidence.label,
        "statement": evidence.statement,
        "values": evidence.values,
    }
