"""The shape of an audit's JSON document."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gaverify.report.documents.schema.shared import (
    AcceptanceItem,
    Environment,
    FindingItem,
    Number,
    Of,
    OutcomeName,
    Parameter,
    RanksItem,
    Shape,
)


class ModelItem(Shape):
    """The outermost modules that trained, the optimizers, and how many elements they train."""

    modules: list[str]
    optimizers: list[str]
    trainable: int


class WhereItem(Shape):
    """Where the script trained, and in which precision."""

    device: str
    dtype: str
    autocast: str | None


class RunItem(Shape):
    """One process of the audit."""

    role: Literal["full", "perturbed", "accumulated", "frozen", "unclipped", "terms", "ranks", "coupling", "events"]
    command: str
    updates: int
    seconds: Number
    disk_bytes: int
    ended: str
    how: str


class CountItem(Shape):
    """backward : step : zero_grad of one window."""

    update: int
    backward: int
    step: int
    zero_grad: int
    complete: bool


class MomentItem(Shape):
    """One call of the script that matters to accumulation."""

    kind: str
    update: int
    file: str | None
    line: int | None
    rank: int


class DataItem(Shape):
    """Rows that fed the window in both runs, and how many have no counterpart."""

    full: int
    accumulated: int
    differing: int
    path: str
    padded: bool
    checked: bool
    same: bool


class WeightsItem(Shape):
    """Least squares over sampled gradient elements; residuals are relative."""

    factor: Number
    factor_residual: Number
    used: list[Number]
    used_residual: Number
    right: Annotated[list[Number], Of("weights")]
    residual: Number
    determined: bool
    multipliers: list[Number]


class StageItem(Shape):
    """How far both runs are apart at one stage of an update, relative to the full batch."""

    stage: Literal["summed", "used", "unclipped", "change"]
    outcome: OutcomeName
    relative_difference: Number
    norm_ratio: Number


class ClipItem(Shape):
    """One clipping after the last backward pass of a window."""

    call: str
    active: bool
    norm: Number
    limit: Number


class SettingItem(Shape):
    """A number of an optimizer that differs between the runs at the same update."""

    optimizer: int
    group: int
    name: str
    full: Number
    accumulated: Number


class ForeignItem(Shape):
    """Backward passes, from 0, that an optimizer's step uses although they are another's; what is left without them."""

    optimizer: int
    passes: list[int]
    residual: Number


class PartnerItem(Shape):
    """Another optimizer, and how many steps it had made in each run when the update's loss was computed."""

    optimizer: int
    full: int
    accumulated: int


class UpdateItem(Shape):
    """One optimizer update of both runs."""

    number: int
    outcome: OutcomeName
    judged: bool
    relative_difference: Number
    norm_ratio: Number
    resolution: Number
    backwards: int
    rows_per_forward: Annotated[list[int], Of("sizes")]
    valid_targets: list[int]
    data: DataItem
    weights: Annotated[WeightsItem | None, Of("fit")]
    ignored_targets: bool = False
    learning_rates: list[Number]
    learning_rates_full: list[Number]
    weights_difference: Number
    noise: Number
    started_apart: Number
    drifted_buffers: Annotated[list[str], Of("drifted")]
    unrepeatable: str
    decided: Literal["summed", "used", "unclipped", "change"] = "used"
    unclear: bool = False
    stages: list[StageItem] = Field(default_factory=list)
    clips: list[ClipItem] = Field(default_factory=list)
    clips_full: list[ClipItem] = Field(default_factory=list)
    settings: list[SettingItem] = Field(default_factory=list)
    foreign: ForeignItem | None = None
    partners: list[PartnerItem] = Field(default_factory=list)
    parameters: list[Parameter]


class AuditDocument(Shape):
    """One audit."""

    version: Literal[1]
    kind: Literal["audit"]
    source: str = ""
    outcome: OutcomeName
    exit_code: Literal[0, 1, 3]
    command: str = ""
    acceptance: Annotated[AcceptanceItem | None, Of("")] = None
    reason: str
    method: Literal["noise-floor", "events", "not-compared"]
    script: str
    events_only: bool
    model: Annotated[ModelItem, Of("")]
    where: Annotated[WhereItem, Of("")]
    environment: Annotated[Environment, Of("")]
    runs: list[RunItem]
    timeline: list[MomentItem] = Field(default_factory=list)
    counts: list[CountItem]
    updates: list[UpdateItem]
    findings: list[FindingItem]
    left_out: dict[str, int] = Field(default_factory=dict)
    ranks: RanksItem | None = None
    timings: dict[str, Number]
