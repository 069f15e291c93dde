"""The JSON document of a verdict."""

from __future__ import annotations

from typing import Any

from gaverify.records.verdict import RunInfo, Trace, Verdict
from gaverify.report.documents.encoding import VERSION, acceptance_item, finding_item, parameter_item
from gaverify.report.documents.ranks import ranks_item
from gaverify.report.text.wording import sentence


def verdict_item(verdict: Verdict) -> dict[str, Any]:
    """Returns the document of a verdict, with everything it rests on."""
    return {
        "version": VERSION,
        "kind": "verdict",
        "source": verdict.source,
        "name": verdict.name,
        "outcome": verdict.outcome.value,
        "exit_code": verdict.exit_code,
        "command": verdict.command,
        "acceptance": acceptance_item(verdict),
        "sentence": sentence(verdict),
        "method": verdict.method,
        "control_failure": verdict.control_failure,
        "resolution": verdict.resolution,
        "run": _run(verdict.run),
        "spec": verdict.spec,
        "parameters": [parameter_item(row) for row in verdict.parameters],
        "findings": [finding_item(finding) for finding in verdict.findings],
        "modules": [vars(module) for module in verdict.modules],
        "ranks": None if verdict.ranks is None else ranks_item(verdict.ranks),
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
        "reference": run.reference.value,
        "reference_failed": [way.value for way in run.reference_failed],
        "spill": run.spill,
        "environment": {
            "torch": run.torch,
            "gaverify": run.gaverify,
            "python": run.python,
            "platform": run.platform,
        },
    }


def _trace(trace: Trace) -> dict[str, Any]:
    return {"rows": [vars(row) for row in trace.rows], "step": vars(trace.step)}
