"""The JSON document of an audit."""

from __future__ import annotations

from typing import Any

from gaverify.records.audit import UpdateComparison
from gaverify.records.audit_report import AuditReport
from gaverify.records.weights import WeightFit
from gaverify.report.documents.encoding import VERSION, acceptance_item, finding_item, parameter_item


def audit_item(report: AuditReport) -> dict[str, Any]:
    """Returns the document of an audit."""
    return {
        "version": VERSION,
        "kind": "audit",
        "source": report.source,
        "outcome": report.outcome.value,
        "exit_code": report.exit_code,
        "command": report.command,
        "acceptance": acceptance_item(report),
        "reason": report.reason,
        "method": report.method,
        "script": report.script,
        "events_only": report.events_only,
        "model": {"modules": report.modules, "optimizers": report.optimizers, "trainable": report.trainable},
        "where": {"device": report.device, "dtype": report.dtype, "autocast": report.autocast},
        "environment": {
            "torch": report.torch,
            "gaverify": report.gaverify,
            "python": report.python,
            "platform": report.platform,
        },
        "runs": [vars(run) for run in report.runs],
        "timeline": [vars(moment) for moment in report.timeline],
        "counts": [vars(count) for count in report.counts],
        "updates": [_update(update) for update in report.updates],
        "findings": [finding_item(finding) for finding in report.findings],
        "left_out": report.left_out,
        "timings": report.timings,
    }


def _weights(fit: WeightFit) -> dict[str, Any]:
    return {
        "factor": fit.factor,
        "factor_residual": fit.factor_residual,
        "used": fit.used,
        "used_residual": fit.used_residual,
        "right": fit.weights,
        "residual": fit.residual,
        "determined": fit.determined,
        "multipliers": fit.multipliers,
    }


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
        "weights": None if update.fit is None else _weights(update.fit),
        "ignored_targets": update.ignored_targets,
        "learning_rates": update.learning_rates,
        "learning_rates_full": update.learning_rates_full,
        "weights_difference": update.weights_difference,
        "noise": update.noise,
        "started_apart": update.started_apart,
        "drifted_buffers": update.drifted,
        "unrepeatable": update.unrepeatable,
        "decided": update.decided.value,
        "unclear": update.unclear,
        "stages": [
            {**vars(stage), "stage": stage.stage.value, "outcome": stage.outcome.value} for stage in update.stages
        ],
        "clips": [vars(clip) for clip in update.clips],
        "clips_full": [vars(clip) for clip in update.clips_full],
        "settings": [vars(setting) for setting in update.settings],
        "parameters": [parameter_item(row) for row in update.parameters],
    }
