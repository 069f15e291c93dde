"""The JSON document of a profile."""

from __future__ import annotations

from typing import Any

from gaverify.records.prediction import Line, Prediction, activation_line, peak_line, predict
from gaverify.records.profile import Profile, Row
from gaverify.report.documents.encoding import VERSION


def profile_item(profile: Profile) -> dict[str, Any]:
    """Returns the document of a profile."""
    prediction = predict(profile)
    return {
        "version": VERSION,
        "kind": "profile",
        "source": profile.source,
        "name": profile.name,
        "outcome": profile.outcome.value,
        "exit_code": profile.exit_code,
        "command": profile.command,
        "memory_limit": profile.memory_limit,
        "wanted_batch": profile.wanted_batch,
        "interrupted": profile.interrupted,
        "setting": None if profile.setting is None else vars(profile.setting),
        "spec": profile.spec,
        "steps": profile.steps,
        "rows": [_row(row) for row in profile.rows],
        "lines": {"activations": _line(activation_line(profile.rows)), "peak": _line(peak_line(profile.rows))},
        "prediction": _prediction(prediction) if isinstance(prediction, Prediction) else None,
        "no_prediction": prediction if isinstance(prediction, str) else None,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "strategy": row.strategy,
        "steps": row.steps,
        "micro_batches": row.micro_batches,
        "status": row.status,
        "message": row.message,
        "activation_bytes": row.activation_bytes,
        "memory": None if row.memory is None else {**vars(row.memory), "increment": row.memory.increment},
        "seconds": None if row.seconds is None else vars(row.seconds),
        "samples_per_second": row.samples_per_second,
        "outcome": None if row.outcome is None else row.outcome.value,
        "relative_difference": row.relative_difference,
        "method": row.method,
    }


def _line(line: Line | None) -> dict[str, Any] | None:
    if line is None:
        return None
    return {
        "intercept": line.intercept,
        "slope": line.slope,
        "residual": line.residual,
        "points": line.points,
        "usable": line.usable,
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {
        "predicted": True,
        "basis": prediction.basis,
        "rest": prediction.rest,
        "limit": prediction.limit,
        "largest_micro_batch": prediction.largest_micro_batch,
        "wanted_batch": prediction.wanted_batch,
        "smallest_steps": prediction.smallest_steps,
        "extrapolated": prediction.extrapolated,
    }
