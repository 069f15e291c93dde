"""The shape of the JSON document, as pydantic models; imported only when someone asks for the schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Number = Annotated[float | None, Field(description="A finite number; null stands for NaN or an infinity.")]
OutcomeName = Literal["equivalent", "divergent", "inconclusive"]


class _Record(BaseModel):
    # Strict and closed: a key that is new, missing or of another type must change the version or fail the tests.
    model_config = ConfigDict(extra="forbid", strict=True)


class Worst(_Record):
    """The element of a gradient with the largest difference."""

    index: list[int]
    reference: Number
    accumulated: Number


class Parameter(_Record):
    """One parameter's gradients from both strategies; norms are Euclidean."""

    name: str
    shape: list[int]
    outcome: OutcomeName
    method: str
    reference_norm: Number
    accumulated_norm: Number
    difference_norm: Number
    relative_difference: Number
    allowed: Number
    working_difference_norm: Number
    worst: Worst | None
    reason: str


class Environment(_Record):
    """The versions that the run used."""

    torch: str
    gaverify: str
    python: str
    platform: str


class Run(_Record):
    """What was run: enough to run it again."""

    model: str
    parameters: int
    trainable: int
    batch_size: int
    steps: int
    micro_batches: list[int]
    weights: list[Number]
    weighting: str
    strategy: str
    device: str
    dtype: str
    autocast: str | None
    seed: int
    mode: str
    loss_full: Number
    loss_accumulated: Number
    environment: Environment


class Place(_Record):
    """Where a finding lies; null where unknown."""

    module: str | None
    kind: str | None
    file: str | None
    line: int | None


class EvidenceItem(_Record):
    """What one probe saw."""

    probe: str
    label: str
    statement: str
    values: dict[str, Any]


class FindingItem(_Record):
    """A named cause or a remark."""

    code: str
    name: str
    severity: Literal["fault", "note"]
    location: Place | None
    summary: str
    evidence: list[EvidenceItem]
    remedy: str
    proven: bool


class TraceRowItem(_Record):
    """The state after one micro-batch."""

    micro_batch: int
    gradient: Number
    movement: Number
    backward: int
    step: int
    zero_grad: int


class TraceStepItem(_Record):
    """The optimizer step after the window."""

    optimizer: str
    lr: Number
    before: Number
    after_full: Number
    after_accumulated: Number
    weights_difference: Number
    scalar: bool


class TraceItem(_Record):
    """One row per micro-batch, then the optimizer step."""

    rows: list[TraceRowItem]
    step: TraceStepItem


class VerdictDocument(_Record):
    """One verdict."""

    version: Literal[1]
    outcome: OutcomeName
    exit_code: Literal[0, 1, 3]
    method: str
    resolution: Number
    run: Run
    spec: dict[str, Any] | None
    parameters: list[Parameter]
    findings: list[FindingItem]
    timings: dict[str, Number]
    trace: TraceItem | None


class ErrorItem(_Record):
    """A run that came to no verdict."""

    source: str
    message: str


class RunDocument(_Record):
    """Several verdicts of one call, and the runs that failed."""

    version: Literal[1]
    outcome: OutcomeName
    verdicts: list[VerdictDocument]
    errors: list[ErrorItem]


def validate_document(text: str) -> VerdictDocument | RunDocument:
    """Returns the parsed document.

    Raises:
        pydantic.ValidationError: `text` is not a document of this version.
    """
    adapter: TypeAdapter[VerdictDocument | RunDocument] = TypeAdapter(VerdictDocument | RunDocument)
    return adapter.validate_json(text)


def document_schema() -> dict[str, Any]:
    """Returns the JSON schema of both forms of the document."""
    schema = TypeAdapter(VerdictDocument | RunDocument).json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gaverify verdict document, version 1",
        **schema,
    }
