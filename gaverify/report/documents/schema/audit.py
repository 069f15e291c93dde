"""The shape of an audit's JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from gaverify.records.audit import RowCheck, UpdateComparison
from gaverify.records.audit_report import Arithmetic, AuditReport, Moment, RunSummary, TrainedModels, WindowCount
from gaverify.records.comparison import Method, Outcome
from gaverify.records.environment import Environment
from gaverify.records.experiment import WeightFit
from gaverify.records.numbers import Number
from gaverify.records.stages import Clip, SettingDifference, Stage, StageComparison
from gaverify.report.documents.schema.shape import Of, Shape
from gaverify.report.documents.schema.verdict import AcceptanceItem, FindingItem, Parameter, RanksItem, Version


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
    missed: DataItem | None = None
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
