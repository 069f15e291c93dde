"""The JSON document of a verification. Numbers that are not finite have no JSON; they become null."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from gaverify.results import Evidence, Finding, Outcome, ParameterComparison, RunInfo, Trace, Verdict

VERSION = 1
"""Version of the document; it grows when a reader of the older one would break."""


def verdict_document(verdict: Verdict) -> str:
    """Returns one verdict as a JSON document, with everything it rests on.

    NaN and infinite numbers (the norm of a gradient that does not exist, a relative difference to zero) become null.
    """
    return _dump(_verdict(verdict))


def run_document(verdicts: Sequence[Verdict], errors: Sequence[tuple[str, str]] = ()) -> str:
    """Returns several verdicts as one JSON document; exactly one verdict without errors is its own document.

    Args:
        verdicts: In the order they were run.
        errors: One (source, message) for each run that came to no verdict.
    """
    if len(verdicts) == 1 and not errors:
        return verdict_document(verdicts[0])
    return _dump(
        {
            "version": VERSION,
            "outcome": overall_outcome(verdicts, errors).value,
            "verdicts": [_verdict(verdict) for verdict in verdicts],
            "errors": [{"source": source, "message": message} for source, message in errors],
        }
    )


def overall_outcome(verdicts: Sequence[Verdict], errors: Sequence[tuple[str, str]] = ()) -> Outcome:
    """Returns the outcome of a whole run: divergent if any verdict is, equivalent if all are and nothing failed."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if Outcome.DIVERGENT in outcomes:
        return Outcome.DIVERGENT
    if outcomes == {Outcome.EQUIVALENT} and not errors:
        return Outcome.EQUIVALENT
    return Outcome.INCONCLUSIVE


def verdict_schema() -> str:
    """Returns the JSON schema that `verdict_document` and `run_document` both satisfy."""
    from gaverify.schema import document_schema

    return json.dumps(document_schema(), indent=2, ensure_ascii=False)


def _dump(document: Mapping[str, Any]) -> str:
    # ASCII escapes keep lone surrogates in names legal and make the bytes the same under every encoding.
    return json.dumps(_plain(document), indent=2, ensure_ascii=True, allow_nan=False)


def _plain(value: Any) -> Any:
    """Returns `value` in terms of JSON: evidence and specs may hold tuples, enumerations and numbers out of range."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value.value) if isinstance(value, Outcome) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    return str(value)


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "version": VERSION,
        "outcome": verdict.outcome.value,
        "exit_code": verdict.outcome.exit_code,
        "method": verdict.method,
        "resolution": verdict.resolution,
        "run": _run(verdict.run),
        "spec": verdict.spec,
        "parameters": [_parameter(row) for row in verdict.parameters],
        "findings": [_finding(finding) for finding in verdict.findings],
        "timings": verdict.timings,
        "trace": None if verdict.trace is None else _trace(verdict.trace),
    }


def _run(run: RunInfo) -> dict[str, Any]:
    return {
        "model": run.model,
        "parameters": run.parameters,
        "trainable": run.trainable,
        "batch_size": run.batch_size,
        "steps": run.steps,
        "micro_batches": run.micro_batches,
        "weights": run.weights,
        "weighting": run.weighting,
        "strategy": run.strategy,
        "device": run.device,
        "dtype": run.dtype,
        "autocast": run.autocast,
        "seed": run.seed,
        "mode": run.mode,
        "loss_full": run.loss_full,
        "loss_accumulated": run.loss_accumulated,
        "environment": {
            "torch": run.torch,
            "gaverify": run.gaverify,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
    }


def _parameter(row: ParameterComparison) -> dict[str, Any]:
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


def _finding(finding: Finding) -> dict[str, Any]:
    place = finding.location
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity,
        "location": None
        if place is None
        else {"module": place.module, "kind": place.kind, "file": place.file, "line": place.line},
        "summary": finding.summary,
        "evidence": [_evidence(evidence) for evidence in finding.evidence],
        "remedy": finding.remedy,
        "proven": finding.proven,
    }


def _evidence(evidence: Evidence) -> dict[str, Any]:
    return {
        "probe": evidence.probe,
        "label": evidence.label,
        "statement": evidence.statement,
        "values": evidence.values,
    }


def _trace(trace: Trace) -> dict[str, Any]:
    return {"rows": [vars(row) for row in trace.rows], "step": vars(trace.step)}
