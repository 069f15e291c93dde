"""The JSON document of an audit. Numbers that are not finite have no JSON; they become null."""

from __future__ import annotations

import json
import platform
from typing import Any

from gaverify.audit.answer import AuditReport
from gaverify.audit.records import UpdateComparison
from gaverify.document import _finding, _parameter, _plain

VERSION = 1
"""Version of the document; it grows when a reader of the older one would break."""


def audit_document(report: AuditReport) -> str:
    """Returns the document that `gaverify audit --format json` prints."""
    document = {
        "version": VERSION,
        "kind": "audit",
        "outcome": report.outcome.value,
        "exit_code": report.outcome.exit_code,
        "reason": report.reason,
        "method": report.method,
        "script": report.script,
        "events_only": report.events_only,
        "model": {"modules": report.modules, "optimizers": report.optimizers, "trainable": report.trainable},
        "where": {"device": report.device, "dtype": report.dtype, "autocast": report.autocast},
        "environment": {
            "torch": report.torch,
            "gaverify": report.gaverify,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "runs": [vars(run) for run in report.runs],
        "counts": [vars(count) for count in report.counts],
        "updates": [_update(update) for update in report.updates],
        "findings": [_finding(finding) for finding in report.findings],
        "timings": report.timings,
    }
    return json.dumps(_plain(document), indent=2, ensure_ascii=True, allow_nan=False)


def audit_schema() -> str:
    """Returns the JSON schema that `audit_document` satisfies."""
    from gaverify.audit.schema import document_schema

    return json.dumps(document_schema(), indent=2, ensure_ascii=False)


def _update(update: UpdateComparison) -> dict[str, Any]:
    return {
        "number": update.number,
        "outcome": update.outcome.value,
        "judged": update.judged,
        "relative_difference": update.relative_difference,
        "norm_ratio": update.norm_ratio,
        "resolution": update.resolution,
        "backwards": update.backwards,
        "rows_per_forward": update.sizes,
        "valid_targets": update.valid_targets,
        "data": {**vars(update.data), "same": update.data.same},
        "weights": None if update.fit is None else {**vars(update.fit), "multipliers": update.fit.multipliers},
        "learning_rates": update.learning_rates,
        "learning_rates_full": update.learning_rates_full,
        "weights_difference": update.weights_difference,
        "noise": update.noise,
        "started_apart": update.started_apart,
        "drifted_buffers": update.drifted,
        "unrepeatable": update.unrepeatable,
        "parameters": [_parameter(row) for row in update.parameters],
    }
