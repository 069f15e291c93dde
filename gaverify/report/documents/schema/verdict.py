"""The shape of a verdict's JSON document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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
from gaverify.report.text import wording


class Run(Shape):
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
    reference: Literal["full", "offload", "recompute"] = "full"
    reference_failed: list[Literal["full", "offload"]] = Field(default_factory=list)
    spill: bool = False
    rounded: list[str] = Field(default_factory=list)
    part: list[int] = Field(default_factory=list)
    environment: Annotated[Environment, Of("")]


class TraceRowItem(Shape):
    """The state after one micro-batch."""

    micro_batch: int
    gradient: Number
    movement: Number
    backward: int
    step: int
    zero_grad: int


class TraceStepItem(Shape):
    """The optimizer step after the window."""

    optimizer: str
    lr: Number
    before: Number
    after_full: Number
    after_accumulated: Number
    weights_difference: Number
    scalar: bool


class TraceItem(Shape):
    """One row per micro-batch, then the optimizer step."""

    rows: list[TraceRowItem]
    step: TraceStepItem


class ModuleItem(Shape):
    """How far a module's outputs for the same samples are apart in the forward, relative to its largest value."""

    module: str
    difference: Number


class VerdictDocument(Shape):
    """One verdict."""

    version: Literal[1]
    kind: Literal["verdict"] = "verdict"
    source: str = ""
    name: str = ""
    outcome: OutcomeName
    exit_code: Literal[0, 1, 3]
    command: str = ""
    acceptance: Annotated[AcceptanceItem | None, Of("")] = None
    sentence: Annotated[str, Of(wording.sentence)] = ""
    method: str
    control_failure: str = ""
    resolution: Number
    run: Run
    spec: dict[str, Any] | None
    parameters: list[Parameter]
    findings: list[FindingItem]
    modules: list[ModuleItem] = Field(default_factory=list)
    ranks: RanksItem | None = None
    timings: dict[str, Number]
    trace: TraceItem | None
