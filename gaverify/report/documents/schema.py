"""The document of a call, and what it holds: verdicts, audits, profiles. An answer's `to_json` is one of the latter."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from gaverify.records.answers import Environment
from gaverify.records.audit import Clip, RowCheck, SettingDifference, Stage, StageComparison, UpdateComparison
from gaverify.records.audit_report import Arithmetic, AuditReport, Moment, RunSummary, TrainedModels, WindowCount
from gaverify.records.comparison import (
    Element,
    FewSamples,
    Method,
    NotCompared,
    Outcome,
    ParameterComparison,
    Reference,
)
from gaverify.records.experiment import ModuleDifference, WeightFit
from gaverify.records.findings import Acceptance, Conclusion, Evidence, Finding, Location, Severity
from gaverify.records.numbers import Number
from gaverify.records.patch import Patch
from gaverify.records.profile import (
    Memory,
    MemoryKind,
    Profile,
    Row,
    Seconds,
    Setting,
    Status,
    Strategy,
)
from gaverify.records.ranks import Collective, Engine, RankFacts, Traffic
from gaverify.records.verdict import CountedTargets, RunInfo, Trace, Verdict
from gaverify.report import verdict_page
from gaverify.report.documents import VERSION, overall_outcome
from gaverify.report.pages import Answer, NoAnswer, Report

# Shapes: what the JSON object of a record looks like, where it differs from the record's own fields.
#
# A record without a shape is written as its fields. Pydantic checks both and makes the schema of both.


@dataclass(frozen=True)
class Of:
    """Annotates a key that a record does not hold in an attribute of the same name.

    Args:
        source: A path of attributes, such as "window.sizes", or a function of the record.
    """

    source: str | Callable[[Any], Any]


class Shape(BaseModel):
    """A JSON object with exactly these keys; a key with a default is missing in older documents."""

    # A key that is new, missing or of another type must change the version or fail the tests.
    # Validators are built when they are used: to write a document takes none.
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    record: ClassVar[Any] = None
    """The dataclass or NamedTuple that fills the object; None where the answer's document groups values in it."""

    def __init_subclass__(cls, record: Any = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.record = record
        if record is not None:
            _SHAPES[record] = cls

    def to_record(self) -> Any:
        """Returns the record that this object was written of; keys that an older document lacks have its defaults."""
        values = _Group()
        for key, source in _sources(type(self)).items():
            *groups, name = (source if isinstance(source, str) else key).split(".")
            # A record computes the keys that it has no field for.
            if key in self.model_fields_set and (groups or [name])[0] in _field_types(self.record):
                place = values
                for group in groups:
                    place = place.setdefault(group, _Group())
                place[name] = to_record(getattr(self, key))
        return _build(self.record, values)


_SHAPES: dict[Any, type[Shape]] = {}


class _Group(dict[str, Any]):
    """Values of the fields of a record that lies inside another and has no JSON object of its own."""


def as_json(value: Any) -> Any:
    """Returns any value in terms of JSON: records as their objects, NaN and infinities, which JSON lacks, as None.

    Evidence and specs may hold anything.
    """
    if (shape := _SHAPES.get(type(value))) is not None:
        return {key: as_json(_read(value, source)) for key, source in _sources(shape).items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(_scalar(key)): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((as_json(item) for item in value), key=str)
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, Enum):
        return as_json(value.value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    # A subclass, such as a number of NumPy, may print in its own way.
    kind = next((kind for kind in (int, float) if isinstance(value, kind)), str)
    return kind(value)


def _read(record: Any, source: str | Callable[[Any], Any]) -> Any:
    if callable(source):
        return source(record)
    for name in source.split("."):
        record = None if record is None else getattr(record, name)
    return record


def to_record(value: Any) -> Any:
    """Returns a value of a checked document with the record of each object in it."""
    if isinstance(value, tuple):
        return tuple(map(to_record, value))
    return value.to_record() if isinstance(value, Shape) else value


def _build(record: Any, values: _Group) -> Any:
    """Returns a record of the values of its fields; a group without any value leaves its field at the default."""
    arguments = {}
    for name, value in values.items():
        if not isinstance(value, _Group):
            arguments[name] = value
        elif any(part is not None for part in value.values()):
            arguments[name] = _build(_present(_field_types(record)[name]), value)
    return record(**arguments)


def _present(kind: Any) -> Any:
    """A type without None."""
    return next((part for part in get_args(kind) if part is not NoneType), kind)


_field_types = cache(get_type_hints)


@cache
def _sources(shape: type[Shape]) -> dict[str, str | Callable[[Any], Any]]:
    """Returns key → where a record holds its value."""
    return {
        key: next((note.source for note in field.metadata if isinstance(note, Of)), key)
        for key, field in shape.model_fields.items()
    }


# The shapes of a verdict's and of a profile's JSON document, and of what all documents hold.


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


class TargetsItem(Shape, record=CountedTargets):
    """What the weighting `tokens` counted in the full batch."""

    counted: Number
    total: int
    ignored: tuple[int, ...]
    weighted: bool


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
    in_evaluation: tuple[str, ...] = ()
    targets: TargetsItem | None = None
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
    patch: Patch | None = None
    patch_written: str = ""
    patch_refused: str = ""


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


# The shape of an audit's JSON document.


class DataItem(Shape, record=RowCheck):
    """Rows that fed the window in both runs, and how many have no counterpart."""

    full: int
    accumulated: int
    differing: int
    path: str
    padded: bool
    checked: bool
    same: bool


class WeightsItem(Shape, record=WeightFit):
    """Least squares over sampled gradient elements; residuals are relative."""

    factor: Number
    factor_residual: Number
    used: tuple[Number, ...]
    used_residual: Number
    right: Annotated[tuple[Number, ...], Of("weights")]
    residual: Number
    determined: bool
    multipliers: tuple[Number, ...]


class SettingItem(Shape, record=SettingDifference):
    """A number of an optimizer that differs between the runs at the same update."""

    optimizer: int
    group: int
    name: str
    full: Number
    accumulated: Number


class UpdateItem(Shape, record=UpdateComparison):
    """One optimizer update of both runs."""

    number: int
    outcome: Outcome
    judged: bool
    relative_difference: Number
    norm_ratio: Number
    resolution: Number
    backwards: Annotated[int, Of("window.steps")]
    rows_per_forward: Annotated[tuple[int, ...], Of("window.sizes")]
    valid_targets: Annotated[tuple[int, ...], Of("window.valid_targets")]  # whole in a script, not always in a run
    data: DataItem
    weights: Annotated[WeightsItem | None, Of("window.fit")]
    ignored_targets: Annotated[bool, Of("window.ignored_targets")] = False
    learning_rates: Annotated[tuple[Number, ...], Of("step.learning_rates")]
    learning_rates_full: Annotated[tuple[Number, ...], Of("step.learning_rates_full")]
    weights_difference: Annotated[Number, Of("step.weights_difference")]
    noise: Number
    started_apart: Number
    drifted_buffers: Annotated[tuple[str, ...], Of("step.drifted")]
    unrepeatable: str
    decided: Stage = Stage.USED
    unclear: bool = False
    stages: tuple[StageComparison, ...] = ()
    clips: Annotated[tuple[Clip, ...], Of("step.clips")] = ()
    clips_full: Annotated[tuple[Clip, ...], Of("step.clips_full")] = ()
    settings: Annotated[tuple[SettingItem, ...], Of("step.settings")] = ()
    parameters: tuple[Parameter, ...]


class AuditDocument(Shape, record=AuditReport):
    """One audit."""

    version: Version
    kind: Annotated[Literal["audit"], Of(lambda _: "audit")]
    source: str = ""
    name: str = ""
    outcome: Outcome
    exit_code: Literal[0, 1, 3]
    command: str = ""
    acceptance: Annotated[AcceptanceItem | None, Of(AcceptanceItem.of)] = None
    reason: str
    method: Method
    script: str
    events_only: bool
    calls_in_order: bool = False
    model: Annotated[TrainedModels, Of("trained")]
    where: Annotated[Arithmetic, Of("arithmetic")]
    environment: Environment
    runs: tuple[RunSummary, ...]
    timeline: Annotated[tuple[Moment, ...], Of("calls.timeline")] = ()
    counts: Annotated[tuple[WindowCount, ...], Of("calls.counts")]
    updates: tuple[UpdateItem, ...]
    findings: tuple[FindingItem, ...]
    left_out: Annotated[Mapping[str, int], Of("calls.left_out")] = {}
    ranks: RanksItem | None = None
    timings: Mapping[str, Number]
    patch: Patch | None = None
    patch_written: str = ""
    patch_refused: str = ""


# The document of a call, and what it holds: verdicts, audits, profiles. An answer's `to_json` is one of the latter.


class NoAnswerItem(Shape, record=NoAnswer):
    """Why a run came to no answer; `position` says how many runs were asked for before it."""

    source: str
    message: str
    position: int | None = None


def _answers_of(kind: type[Answer], report: Report) -> list[Answer]:
    return [answer for answer in report.answers if isinstance(answer, kind)]


class RunDocument(Shape, record=Report):
    """The answers of one call, and the runs that failed or were skipped."""

    version: Version
    outcome: Annotated[Outcome, Of(overall_outcome)]
    exit_code: Annotated[Literal[0, 1, 2, 3, 70, 130] | None, Of("code")] = None
    started: str = ""
    verdicts: Annotated[tuple[VerdictDocument, ...], Of(lambda report: _answers_of(Verdict, report))]
    audits: Annotated[tuple[AuditDocument, ...], Of(lambda report: _answers_of(AuditReport, report))] = ()
    profiles: Annotated[tuple[ProfileDocument, ...], Of(lambda report: _answers_of(Profile, report))] = ()
    errors: tuple[NoAnswerItem, ...]
    skipped: tuple[NoAnswerItem, ...] = ()

    def to_record(self) -> Report:
        """Returns the report."""
        return Report(
            to_record((*self.verdicts, *self.audits, *self.profiles)),
            to_record(self.errors),
            to_record(self.skipped),
            exit_code=self.exit_code,
            started=self.started,
        )


Document = VerdictDocument | AuditDocument | ProfileDocument | RunDocument

_PRINTED = {"run": VerdictDocument, "audit": AuditDocument, "profile": ProfileDocument}
"""Command → the shape of its answers."""


def validate_document(text: str | bytes) -> Document:
    """Returns the parsed document of any kind.

    Raises:
        pydantic.ValidationError: `text` is not a document of this version.
    """
    adapter: TypeAdapter[Document] = TypeAdapter(Document)
    return adapter.validate_json(text)


def parse_document(document: Mapping[str, Any]) -> Document:
    """Returns a document as the kind that it says it is, so that messages name the keys of this kind alone.

    Raises:
        pydantic.ValidationError: It is not a document of this version.
    """
    kinds: dict[Any, type[Document]] = {"audit": AuditDocument, "profile": ProfileDocument}
    shape = RunDocument if "verdicts" in document else kinds.get(document.get("kind"), VerdictDocument)
    # Strict types accept an array for a tuple only in JSON text, whose parser refuses names with lone surrogates.
    return shape.model_validate(document, strict=False)


class _SchemaOfWritten(GenerateJsonSchema):
    """The schema of documents that this version writes; it may not read one that lacks a newer key."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        """Whether a key is always there: all are."""
        return True


def schema_text(command: str) -> str:
    """Returns the JSON schema of what `gaverify COMMAND --format json` prints, and of one answer's `to_json()`."""
    shapes: Any = RunDocument | _PRINTED[command]
    schema = TypeAdapter(shapes).json_schema(schema_generator=_SchemaOfWritten)
    schema |= {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"gaverify {command} document, version 1",
    }
    return json.dumps(as_json(schema), indent=2, ensure_ascii=False)  # a default of NaN is null, too
