"""The shapes that all JSON documents share, as pydantic models; imported only when a document is checked or read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Number = Annotated[float | None, Field(description="A finite number; null stands for NaN or an infinity.")]
OutcomeName = Literal["equivalent", "divergent", "inconclusive"]


@dataclass(frozen=True)
class Of:
    """Where a record holds the value of a key, if not in the attribute of that name.

    Args:
        source: A path of attributes, "" for the record itself, whose fields a document groups, or a function of it.
    """

    source: str | Callable[[Any], Any]


class Shape(BaseModel):
    """A JSON object with exactly these keys; one with a default may be missing, as older documents lack it."""

    # Strict and closed: a key that is new, missing or of another type must change the version or fail the tests.
    model_config = ConfigDict(extra="forbid", strict=True)


class Worst(Shape):
    """The element of a gradient with the largest difference."""

    index: list[int]
    reference: Number
    accumulated: Number


class Parameter(Shape):
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


class Environment(Shape):
    """The versions that the run used."""

    torch: str
    gaverify: str
    python: str
    platform: str


class ExcerptItem(Shape):
    """Lines of the user's file around a finding, as they stood when it was made."""

    first: int
    lines: list[str]


class AcceptanceItem(Shape):
    """What the user accepts or expects, and which of the entries match nothing any more."""

    accepted: bool
    expected: Annotated[OutcomeName | None, Of("acceptance.expected")]
    stale: Annotated[list[str], Of("acceptance.stale")]
    strict: Annotated[bool, Of("acceptance.strict")]
    refused: Annotated[list[str], Of("acceptance.refused")] = Field(default_factory=list)


class Place(Shape):
    """Where a finding lies; null where unknown."""

    module: str | None
    kind: str | None
    file: str | None
    line: int | None
    excerpt: ExcerptItem | None = None


class EvidenceItem(Shape):
    """What one probe saw."""

    probe: str
    label: str
    statement: str
    values: dict[str, Any]


class FindingItem(Shape):
    """A named cause or a remark."""

    code: str
    name: str
    severity: Literal["fault", "note"]
    location: Place | None
    summary: str
    evidence: list[EvidenceItem]
    remedy: str
    proven: bool
    accepted: str = ""


class TrafficItem(Shape):
    """Collectives of one rank in one window, by kind, and the bytes of their tensors."""

    collectives: Annotated[dict[str, int], Of("counts")]
    bytes: Annotated[int, Of("bytes_moved")]


class RanksItem(Shape):
    """What was measured on R ranks; `own` are the collectives of the model and the loss, without the engine's."""

    ranks: int
    engine: str | None
    replicas_apart: Annotated[Number, Of("apart")]
    window: TrafficItem
    own: TrafficItem
    difference: Number
    from_one_process: Number
    right_weights: Annotated[list[Number] | None, Of("weights.weights")]
    used_weights: Annotated[list[Number] | None, Of("weights.used")]
    residual: Annotated[Number, Of("weights.residual")]
    buffers_apart: list[str]
