"""The shape of a verdict's JSON document."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gaverify.records.compared import FewSamples
from gaverify.records.operations import ModuleDifference
from gaverify.records.verdict import RunInfo, Trace, TraceRow, TraceStep, Verdict
from gaverify.report.documents.schema.deriving import Of, Shape, derived
from gaverify.report.documents.schema.shared import AcceptanceItem, Environment
from gaverify.report.text import wording


@derived(
    RunInfo,
    "model parameters trainable batch_size steps micro_batches weights weighting strategy device dtype autocast seed "
    "mode loss_full loss_accumulated reference reference_failed spill rounded part environment",
    older="spill rounded part",
)
class Run(Shape):
    """What was run: enough to run it again."""

    reference: Literal["full", "offload", "recompute"] = "full"
    reference_failed: list[Literal["full", "offload"]] = Field(default_factory=list)
    environment: Annotated[Environment, Of("")]


@derived(TraceRow)
class TraceRowItem(Shape):
    """The state after one micro-batch."""


@derived(TraceStep)
class TraceStepItem(Shape):
    """The optimizer step after the window."""


@derived(Trace)
class TraceItem(Shape):
    """One row per micro-batch, then the optimizer step."""


@derived(ModuleDifference)
class ModuleItem(Shape):
    """How far a module's outputs for the same samples are apart in the forward, relative to its largest value."""


@derived(FewSamples)
class FewSamplesItem(Shape):
    """What decided a window below float32: its weights by fit, and what a few of its samples showed."""


@derived(
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
    sentence: Annotated[str, Of(wording.sentence)] = ""
