"""The shapes of a verdict's and of a profile's JSON document, and of what all documents hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from gaverify.records.comparison import (
    Element,
    FewSamples,
    Method,
    NotCompared,
    Outcome,
    ParameterComparison,
    Reference,
)
from gaverify.records.environment import Environment
from gaverify.records.experiment import ModuleDifference
from gaverify.records.findings import Acceptance, Conclusion, Evidence, Finding, Location, Severity
from gaverify.records.numbers import Number
from gaverify.records.profile import (
    Line,
    Memory,
    MemoryKind,
    Profile,
    Row,
    Seconds,
    Setting,
    Status,
    Strategy,
    activation_line,
    peak_line,
)
from gaverify.records.ranks import Collective, Engine, RankFacts, Traffic
from gaverify.records.verdict import RunInfo, Trace, Verdict
from gaverify.report import verdict_page
from gaverify.report.documents import VERSION
from gaverify.report.documents.schema.shape import Of, Shape

_REASONS = {why.text: why for why in NotCompared}
"""A document has the words of a reason."""
Version = Annotated[Literal[1], Of(lambda _: VERSION)]


class Worst(Shape, record=Element):
    """The element of a gradient with the largest difference."""

    index: tuple[int, ...]
    reference: Number
    accumulated: Number


class Parameter(Shape, record=ParameterComparison):
    """One parameter's gradients from both strategies; norms are Euclidean."""

    name: str
    shape: tuple[int, ...]
    outcome: Outcome
    method: str
    reference_norm: Number
    accumulated_norm: Number
    difference_norm: Number
    relative_difference: Number
    allowed: Number
    working_difference_norm: Number
    worst: Worst | None
    reason: str

    def to_record(self) -> ParameterComparison:
        """Returns the comparison."""
        row: ParameterComparison = super().to_record()
        return row._replace(method=Method(self.method), why=_REASONS.get(self.reason))


class AcceptanceItem(Shape, record=Acceptance):
    """What the user accepts or expects, and which of the entries match nothing any more."""

    accepted: bool
    expected: Outcome | None
    stale: tuple[str, ...]
    strict: bool
    refused: tuple[str, ...] = ()

    @staticmethod
    def of(answer: Conclusion) -> dict[str, Any]:
        """Returns the object: whether a divergence is accepted depends on the findings, too."""
        return {"accepted": answer.accepted, **vars(answer.acceptance)}


class FindingItem(Shape, record=Finding):
    """A named cause or a remark."""

    code: str
    name: str
    severity: Severity
    location: Location | None
    summary: str
    evidence: tuple[Evidence, ...]
    remedy: str
    proven: bool
    accepted: str = ""


class TrafficItem(Shape, record=Traffic):
    """Collectives of one rank in one window, by kind, and the bytes of their tensors."""

    collectives: Annotated[Mapping[Collective, int], Of("counts")]
    bytes: Annotated[int, Of("bytes_moved")]


class RanksItem(Shape, record=RankFacts):
    """What was measured on R ranks; `own` are the collectives of the model and the loss, without the engine's."""

    ranks: int
    engine: Engine | None
    replicas_apart: Annotated[Number, Of("replicas.difference")]
    window: Annotated[TrafficItem, Of("traffic.window")]
    own: Annotated[TrafficItem, Of("traffic.own")]
    difference: Number
    from_one_process: Number
    right_weights: Annotated[tuple[Number, ...] | None, Of("shares.fit.weights")]
    used_weights: Annotated[tuple[Number, ...] | None, Of("shares.fit.used")]
    residual: Annotated[float | None, Of("shares.fit.residual")]
    buffers_apart: Annotated[tuple[str, ...], Of("replicas.buffers")]


class Run(Shape, record=RunInfo):
    """What was run: enough to run it again."""

    model: str
    parameters: int
    trainable: int
    batch_size: int
    steps: int
    micro_batches: tuple[int, ...]
    weights: tuple[Number, ...]
    weighting: str
    strategy: str
    device: str
    dtype: str
    autocast: str | None
    seed: int
    mode: str
    loss_full: Annotated[Number, Of("losses.full")]
    loss_accumulated: Annotated[Number, Of("losses.accumulated")]
    reference: Reference = Reference.FULL
    reference_failed: tuple[Reference, ...] = ()
    rounded: tuple[str, ...] = ()
    part: tuple[int, ...] = ()
    guesses: tuple[str, ...] = ()
    environment: Environment


class VerdictDocument(Shape, record=Verdict):
    """One verdict."""

    version: Version
    kind: Annotated[Literal["verdict"], Of(lambda _: "verdict")] = "verdict"
    source: str = ""
    name: str = ""
    outcome: Outcome
    exit_code: Literal[0, 1, 3]
    command: str = ""
    acceptance: Annotated[AcceptanceItem | None, Of(AcceptanceItem.of)] = None
    sentence: Annotated[str, Of(verdict_page.sentence)] = ""
    method: str
    control_failure: str = ""
    resolution: Number
    run: Run
    spec: Mapping[str, Any] | None
    parameters: tuple[Parameter, ...]
    findings: tuple[FindingItem, ...]
    modules: tuple[ModuleDifference, ...] = ()
    ranks: RanksItem | None = None
    few_samples: FewSamples | None = None
    timings: Mapping[str, Number]
    trace: Trace | None


class MemoryItem(Shape, record=Memory):
    """Device memory around one update, bytes."""

    kind: MemoryKind
    baseline: int
    peak: int
    reserved: int | None
    increment: int


class RowItem(Shape, record=Row):
    """One strategy with one K; figures are null where the row did not get so far."""

    strategy: Strategy
    steps: int
    micro_batches: tuple[int, ...]
    status: Status
    message: str
    activation_bytes: int | None
    memory: MemoryItem | None
    seconds: Seconds | None
    samples_per_second: float | None
    outcome: Outcome | None
    relative_difference: float | None
    method: str | None


class LineItem(Shape, record=Line):
    """A least-squares line through (samples of the largest micro-batch, bytes)."""

    intercept: float
    slope: float
    residual: float | None
    points: tuple[tuple[int, int], ...]
    usable: bool


class LinesItem(Shape):
    """The lines through accumulation and the full batch; null where fewer than two sizes were measured."""

    activations: LineItem | None
    peak: LineItem | None

    @staticmethod
    def of(profile: Profile) -> dict[str, Any]:
        """Returns the object: a line is made of all rows."""
        return {"activations": activation_line(profile.rows), "peak": peak_line(profile.rows)}


class ProfileDocument(Shape, record=Profile):
    """One profile."""

    version: Version
    kind: Annotated[Literal["profile"], Of(lambda _: "profile")]
    source: str = ""
    name: str = ""
    outcome: Outcome
    exit_code: Literal[0, 1, 2, 3]
    command: str = ""
    interrupted: bool
    setting: Setting | None
    spec: dict[str, Any]
    steps: tuple[int, ...]
    rows: tuple[RowItem, ...]
    lines: Annotated[LinesItem, Of(LinesItem.of)]
