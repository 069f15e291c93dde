"""The shapes of a verdict's and of a profile's JSON document, and of what all documents hold."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gaverify.records.comparison import Element, FewSamples, ParameterComparison
from gaverify.records.experiment import ModuleDifference
from gaverify.records.findings import Evidence, Excerpt, Finding, Location
from gaverify.records.profile import (
    Line,
    Memory,
    Profile,
    Row,
    Seconds,
    Setting,
    activation_line,
    peak_line,
)
from gaverify.records.ranks import RankFacts, Traffic
from gaverify.records.verdict import RunInfo, Trace, TraceRow, TraceStep, Verdict
from gaverify.report import verdict_page
from gaverify.report.documents.schema.deriving import Of, Shape, derive_shape

OutcomeName = Literal["equivalent", "divergent", "inconclusive"]


@derive_shape(Element)
class Worst(Shape):
    """The element of a gradient with the largest difference."""


@derive_shape(
    ParameterComparison,
    "name shape outcome method reference_norm accumulated_norm difference_norm relative_difference allowed "
    "working_difference_norm worst reason",
)
class Parameter(Shape):
    """One parameter's gradients from both strategies; norms are Euclidean."""

    method: str


class Environment(Shape):
    """The versions that the run used, when it was made, and the commit of git in its working folder."""

    torch: str
    gaverify: str
    python: str
    platform: str
    started: str = ""
    commit: str = ""


@derive_shape(Excerpt)
class ExcerptItem(Shape):
    """Lines of the user's file around a finding, as they stood when it was made."""


class AcceptanceItem(Shape):
    """What the user accepts or expects, and which of the entries match nothing any more."""

    accepted: bool
    expected: Annotated[OutcomeName | None, Of("acceptance.expected")]
    stale: Annotated[list[str], Of("acceptance.stale")]
    strict: Annotated[bool, Of("acceptance.strict")]
    refused: Annotated[list[str], Of("acceptance.refused")] = Field(default_factory=list)


@derive_shape(Location, older="excerpt")
class Place(Shape):
    """Where a finding lies; null where unknown."""


@derive_shape(Evidence)
class EvidenceItem(Shape):
    """What one probe saw."""


@derive_shape(Finding, "code name severity location summary evidence remedy proven accepted", older="accepted")
class FindingItem(Shape):
    """A named cause or a remark."""


@derive_shape(Traffic, "collectives bytes=bytes_moved")
class TrafficItem(Shape):
    """Collectives of one rank in one window, by kind, and the bytes of their tensors."""

    collectives: Annotated[dict[str, int], Of("counts")]


@derive_shape(
    RankFacts,
    "ranks engine replicas_apart=replicas.difference window=traffic.window own=traffic.own difference "
    "from_one_process right_weights=shares.fit.weights used_weights=shares.fit.used residual=shares.fit.residual "
    "buffers_apart=replicas.buffers",
)
class RanksItem(Shape):
    """What was measured on R ranks; `own` are the collectives of the model and the loss, without the engine's."""

    engine: str | None


@derive_shape(
    RunInfo,
    "model parameters trainable batch_size steps micro_batches weights weighting strategy device dtype autocast seed "
    "mode loss_full=losses.full loss_accumulated=losses.accumulated reference reference_failed rounded part guesses "
    "environment",
    older="rounded part guesses",
)
class Run(Shape):
    """What was run: enough to run it again."""

    reference: Literal["full", "offload"] = "full"
    reference_failed: list[Literal["full"]] = Field(default_factory=list)
    environment: Environment


@derive_shape(TraceRow)
class TraceRowItem(Shape):
    """The state after one micro-batch."""


@derive_shape(TraceStep)
class TraceStepItem(Shape):
    """The optimizer step after the window."""


@derive_shape(Trace)
class TraceItem(Shape):
    """One row per micro-batch, then the optimizer step."""


@derive_shape(ModuleDifference)
class ModuleItem(Shape):
    """How far a module's outputs for the same samples are apart in the forward, relative to its largest value."""


@derive_shape(FewSamples)
class FewSamplesItem(Shape):
    """What decided a window below float32: its weights by fit, and what a few of its samples showed."""


@derive_shape(
    Verdict,
    "version kind source name outcome exit_code command acceptance sentence method control_failure resolution run spec "
    "parameters findings modules ranks few_samples timings trace",
    older="source command control_failure modules ranks few_samples",
)
class VerdictDocument(Shape):
    """One verdict."""

    version: Literal[1]
    kind: Literal["verdict"] = "verdict"
    name: str = ""
    exit_code: Literal[0, 1, 3]
    acceptance: Annotated[AcceptanceItem | None, Of("")] = None
    sentence: Annotated[str, Of(verdict_page.sentence)] = ""


@derive_shape(Setting)
class SettingItem(Shape):
    """What was profiled and where."""


@derive_shape(Memory, "kind baseline peak reserved increment")
class MemoryItem(Shape):
    """Device memory around one update, bytes."""


@derive_shape(Seconds, finite=True)
class SecondsItem(Shape):
    """Time per update; `low` and `high` are quartiles."""


@derive_shape(
    Row,
    "strategy steps micro_batches status message activation_bytes memory seconds samples_per_second outcome "
    "relative_difference method",
)
class RowItem(Shape):
    """One strategy with one K; figures are null where the row did not get so far."""


@derive_shape(Line, "intercept slope residual points usable", finite=True)
class LineItem(Shape):
    """A least-squares line through (samples of the largest micro-batch, bytes)."""


class LinesItem(Shape):
    """The lines through accumulation and the full batch; null where fewer than two sizes were measured."""

    activations: Annotated[LineItem | None, Of(lambda profile: activation_line(profile.rows))]
    peak: Annotated[LineItem | None, Of(lambda profile: peak_line(profile.rows))]


@derive_shape(
    Profile,
    "version kind source name outcome exit_code command interrupted setting spec steps rows lines",
    older="source command",
)
class ProfileDocument(Shape):
    """One profile."""

    version: Literal[1]
    kind: Literal["profile"]
    name: str = ""
    exit_code: Literal[0, 1, 2, 3]
    lines: Annotated[LinesItem, Of("")]
