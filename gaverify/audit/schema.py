"""The shape of an audit's JSON document, as pydantic models; imported only when someone asks for the schema."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from gaverify.schema import Environment, FindingItem, Number, OutcomeName, Parameter


class _Record(BaseModel):
    # Strict and closed, as the verdict's: a key that is new, missing or of another type must change the version.
    model_config = ConfigDict(extra="forbid", strict=True)


class ModelItem(_Record):
    """The outermost modules that trained, the optimizers, and how many elements they train."""

    modules: list[str]
    optimizers: list[str]
    trainable: int


class WhereItem(_Record):
    """Where the script trained, and in which precision."""

    device: str
    dtype: str
    autocast: str | None


class RunItem(_Record):
    """One process of the audit."""

    role: Literal["full", "perturbed", "accumulated", "frozen", "events"]
    command: str
    updates: int
    seconds: Number
    disk_bytes: int
    ended: str
    how: str


class CountItem(_Record):
    """backward : step : zero_grad of one window."""

    update: int
    backward: int
    step: int
    zero_grad: int
    complete: bool


class DataItem(_Record):
    """Rows that fed the window in both runs, and how many have no counterpart."""

    full: int
    accumulated: int
    differing: int
    path: str
    padded: bool
    checked: bool
    same: bool


class WeightsItem(_Record):
    """Least squares over sampled gradient elements; residuals are relative."""

    factor: Number
    factor_residual: Number
    used: list[Number]
    used_residual: Number
    right: list[Number]
    residual: Number
    determined: bool
    multipliers: list[Number]


class UpdateItem(_Record):
    """One optimizer update of both runs."""

    number: int
    outcome: OutcomeName
    judged: bool
    relative_difference: Number
    norm_ratio: Number
    resolution: Number
    backwards: int
    rows_per_forward: list[int]
    valid_targets: list[int]
    data: DataItem
    weights: WeightsItem | None
    learning_rates: list[Number]
    learning_rates_full: list[Number]
    weights_difference: Number
    noise: Number
    started_apart: Number
    drifted_buffers: list[str]
    unrepeatable: str
    parameters: list[Parameter]


class AuditDocument(_Record):
    """One audit."""

    version: Literal[1]
    kind: Literal["audit"]
    outcome: OutcomeName
    exit_code: Literal[0, 1, 3]
    reason: str
    method: Literal["noise-floor", "events", "not-compared"]
    script: str
    events_only: bool
    model: ModelItem
    where: WhereItem
    environment: Environment
    runs: list[RunItem]
    counts: list[CountItem]
    updates: list[UpdateItem]
    findings: list[FindingItem]
    timings: dict[str, Number]


def validate_document(text: str) -> AuditDocument:
    """Returns the parsed document.

    Raises:
        pydantic.ValidationError: `text` is not a document of this version.
    """
    return AuditDocument.model_validate_json(text)


def document_schema() -> dict[str, Any]:
    """Returns the JSON schema of the document."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gaverify audit document, version 1",
        **AuditDocument.model_json_schema(),
    }
