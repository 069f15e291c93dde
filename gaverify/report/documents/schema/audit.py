"""The shape of an audit's JSON document."""

from __future__ import annotations

from typing import Annotated, Literal

from gaverify.records.audit import RowCheck, UpdateComparison
from gaverify.records.audit_report import Arithmetic, AuditReport, Moment, RunSummary, TrainedModels, WindowCount
from gaverify.records.experiment import WeightFit
from gaverify.records.stages import Clip, SettingDifference, StageComparison
from gaverify.report.documents.schema.deriving import Of, Shape, derive_shape
from gaverify.report.documents.schema.verdict import AcceptanceItem, Environment


@derive_shape(TrainedModels)
class ModelItem(Shape):
    """The outermost modules that trained, the optimizers, and how many elements they train."""


@derive_shape(Arithmetic)
class WhereItem(Shape):
    """Where the script trained, and in which precision."""


@derive_shape(RunSummary)
class RunItem(Shape):
    """One process of the audit."""

    role: Literal[
        "full",
        "perturbed",
        "accumulated",
        "frozen",
        "unclipped",
        "terms",
        "weights",
        "ranks",
        "float32",
        "coupling",
        "state",
        "events",
    ]


@derive_shape(WindowCount)
class CountItem(Shape):
    """backward : step : zero_grad of one window."""


@derive_shape(Moment)
class MomentItem(Shape):
    """One call of the script that matters to accumulation."""


@derive_shape(RowCheck, "full accumulated differing path padded checked same")
class DataItem(Shape):
    """Rows that fed the window in both runs, and how many have no counterpart."""


@derive_shape(WeightFit, "factor factor_residual used used_residual right=weights residual determined multipliers")
class WeightsItem(Shape):
    """Least squares over sampled gradient elements; residuals are relative."""


@derive_shape(StageComparison)
class StageItem(Shape):
    """How far both runs are apart at one stage of an update, relative to the full batch."""


@derive_shape(Clip)
class ClipItem(Shape):
    """One clipping after the last backward pass of a window."""


@derive_shape(SettingDifference, "optimizer group name full accumulated")
class SettingItem(Shape):
    """A number of an optimizer that differs between the runs at the same update."""


@derive_shape(
    UpdateComparison,
    "number outcome judged relative_difference norm_ratio resolution backwards=window.steps "
    "rows_per_forward=window.sizes valid_targets data weights=window.fit ignored_targets=window.ignored_targets "
    "learning_rates=step.learning_rates learning_rates_full=step.learning_rates_full "
    "weights_difference=step.weights_difference noise started_apart drifted_buffers=step.drifted unrepeatable decided "
    "unclear stages clips=step.clips clips_full=step.clips_full settings=step.settings missed parameters",
    older="ignored_targets decided unclear stages clips clips_full settings missed",
)
class UpdateItem(Shape):
    """One optimizer update of both runs."""

    valid_targets: Annotated[list[int], Of("window.valid_targets")]  # a script's are whole; a run's need not be


@derive_shape(
    AuditReport,
    "version kind source name outcome exit_code command acceptance reason method script events_only calls_in_order "
    "model where environment runs timeline=calls.timeline counts=calls.counts updates findings "
    "left_out=calls.left_out ranks timings",
    older="source command calls_in_order timeline left_out ranks",
)
class AuditDocument(Shape):
    """One audit."""

    version: Literal[1]
    kind: Literal["audit"]
    name: str = ""
    exit_code: Literal[0, 1, 3]
    acceptance: Annotated[AcceptanceItem | None, Of("")] = None
    method: Literal["noise-floor", "events", "not-compared"]
    model: Annotated[ModelItem, Of("trained")]
    where: Annotated[WhereItem, Of("arithmetic")]
    environment: Environment
