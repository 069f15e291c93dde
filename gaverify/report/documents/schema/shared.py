"""The shapes that all JSON documents share; imported only when a document is checked or read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gaverify.records.comparison import Element, ParameterComparison
from gaverify.records.findings import Evidence, Excerpt, Finding, Location
from gaverify.records.ranks import RankFacts, Traffic
from gaverify.report.documents.schema.deriving import Of, Shape, derived

OutcomeName = Literal["equivalent", "divergent", "inconclusive"]


@derived(Element)
class Worst(Shape):
    """The element of a gradient with the largest difference."""


@derived(
    ParameterComparison,
    "name shape outcome method reference_norm accumulated_norm difference_norm relative_difference allowed "
    "working_difference_norm worst reason",
)
class Parameter(Shape):
    """One parameter's gradients from both strategies; norms are Euclidean."""

    method: str


class Environment(Shape):
    """The versions that the run used."""

    torch: str
    gaverify: str
    python: str
    platform: str


@derived(Excerpt)
class ExcerptItem(Shape):
    """Lines of the user's file around a finding, as they stood when it was made."""


class AcceptanceItem(Shape):
    """What the user accepts or expects, and which of the entries match nothing any more."""

    accepted: bool
    expected: Annotated[OutcomeName | None, Of("acceptance.expected")]
    stale: Annotated[list[str], Of("acceptance.stale")]
    strict: Annotated[bool, Of("acceptance.strict")]
    refused: Annotated[list[str], Of("acceptance.refused")] = Field(default_factory=list)


@derived(Location, older="excerpt")
class Place(Shape):
    """Where a finding lies; null where unknown."""


@derived(Evidence)
class EvidenceItem(Shape):
    """What one probe saw."""


@derived(Finding, "code name severity location summary evidence remedy proven accepted", older="accepted")
class FindingItem(Shape):
    """A named cause or a remark."""


@derived(Traffic, "collectives bytes=bytes_moved")
class TrafficItem(Shape):
    """Collectives of one rank in one window, by kind, and the bytes of their tensors."""

    collectives: Annotated[dict[str, int], Of("counts")]


@derived(
    RankFacts,
    "ranks engine replicas_apart=apart window own difference from_one_process right_weights=weights.weights "
    "used_weights=weights.used residual=weights.residual buffers_apart",
)
class RanksItem(Shape):
    """What was measured on R ranks; `own` are the collectives of the model and the loss, without the engine's."""

    engine: str | None
