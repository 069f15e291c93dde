"""The shape of a profile's JSON document."""

from __future__ import annotations

from typing import Annotated, Literal

from gaverify.records.prediction import Line, NoPrediction, Prediction, activation_line, peak_line, predict
from gaverify.records.profile import Memory, Profile, Row, Seconds, Setting
from gaverify.records.ranks import Moved
from gaverify.report.documents.schema import shared as shared  # the shapes of the records inside these
from gaverify.report.documents.schema.deriving import Of, Shape, derived


@derived(Setting, older="ranks engine")
class SettingItem(Shape):
    """What was profiled and where."""


@derived(Memory, "kind baseline peak reserved increment")
class MemoryItem(Shape):
    """Device memory around one update, bytes."""


@derived(Seconds, finite=True)
class SecondsItem(Shape):
    """Time per update; `low` and `high` are quartiles."""


@derived(Moved)
class MovedItem(Shape):
    """What the busiest rank sends in one window: reduced by the last micro-batch only, and by every one."""


@derived(
    Row,
    "strategy steps micro_batches status message activation_bytes memory seconds samples_per_second outcome "
    "relative_difference method moved",
    older="moved",
)
class RowItem(Shape):
    """One strategy with one K; figures are null where the row did not get so far."""


@derived(Line, "intercept slope residual points usable", finite=True)
class LineItem(Shape):
    """A least-squares line through (samples of the largest micro-batch, bytes)."""


class LinesItem(Shape):
    """The lines through accumulation and the full batch; null where fewer than two sizes were measured."""

    activations: Annotated[LineItem | None, Of(lambda profile: activation_line(profile.rows))]
    peak: Annotated[LineItem | None, Of(lambda profile: peak_line(profile.rows))]


@derived(
    Prediction,
    "predicted basis rest limit largest_micro_batch wanted_batch smallest_steps extrapolated",
    finite=True,
)
class PredictionItem(Shape):
    """What the lines predict; nothing of it was measured."""

    predicted: Literal[True]


def _predicted(profile: Profile) -> Prediction | None:
    found = predict(profile)
    return found if isinstance(found, Prediction) else None


def _not_predicted(profile: Profile) -> str | None:
    found = predict(profile)
    return f"no prediction{found.value}" if isinstance(found, NoPrediction) else None


@derived(
    Profile,
    "version kind source name outcome exit_code command memory_limit wanted_batch interrupted setting spec steps rows "
    "lines prediction no_prediction",
    older="source command memory_limit wanted_batch",
)
class ProfileDocument(Shape):
    """One profile."""

    version: Literal[1]
    kind: Literal["profile"]
    name: str = ""
    exit_code: Literal[0, 1, 2, 3]
    lines: Annotated[LinesItem, Of("")]
    prediction: Annotated[PredictionItem | None, Of(_predicted)]
    no_prediction: Annotated[str | None, Of(_not_predicted)]
