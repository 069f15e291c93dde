"""The shape of a profile's JSON document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from gaverify.records.prediction import Prediction, activation_line, peak_line, predict
from gaverify.records.profile import Profile
from gaverify.report.documents.schema.shared import Number, Of, OutcomeName, Shape, TrafficItem


class SettingItem(Shape):
    """What was profiled and where."""

    model: str
    parameters: int
    trainable: int
    batch_size: int
    batch_bytes: int
    device: str
    device_name: str
    device_memory: int | None
    dtype: str
    autocast: str | None
    mode: str
    seed: int
    threads: int
    optimizer: str | None
    repeats: int
    torch: str
    gaverify: str
    python: str
    platform: str
    ranks: int | None = None
    engine: str | None = None


class MemoryItem(Shape):
    """Device memory around one update, bytes."""

    kind: Literal["cuda-allocated", "resident"]
    baseline: int
    peak: int
    reserved: int | None
    increment: int


class SecondsItem(Shape):
    """Time per update; `low` and `high` are quartiles."""

    median: float
    low: float
    high: float
    smallest: float
    largest: float
    repeats: int


class MovedItem(Shape):
    """What the busiest rank sends in one window: reduced by the last micro-batch only, and by every one."""

    no_sync: TrafficItem
    every: TrafficItem


class RowItem(Shape):
    """One strategy with one K; figures are null where the row did not get so far."""

    strategy: Literal["full-batch", "summed-loss", "accumulate"]
    steps: int
    micro_batches: list[int]
    status: Literal["measured", "out-of-memory", "does-not-fit", "failed", "not-run"]
    message: str
    activation_bytes: int | None
    memory: MemoryItem | None
    seconds: SecondsItem | None
    samples_per_second: Number
    outcome: OutcomeName | None
    relative_difference: Number
    method: str | None
    moved: MovedItem | None = None


class LineItem(Shape):
    """A least-squares line through (samples of the largest micro-batch, bytes)."""

    intercept: float
    slope: float
    residual: float | None
    points: list[tuple[int, int]]
    usable: bool


class LinesItem(Shape):
    """The lines through accumulation and the full batch; null where fewer than two sizes were measured."""

    activations: Annotated[LineItem | None, Of(lambda profile: activation_line(profile.rows))]
    peak: Annotated[LineItem | None, Of(lambda profile: peak_line(profile.rows))]


class PredictionItem(Shape):
    """What the lines predict; nothing of it was measured."""

    predicted: Literal[True]
    basis: Literal["peak", "activations"]
    rest: float
    limit: int
    largest_micro_batch: int
    wanted_batch: int
    smallest_steps: int | None
    extrapolated: bool


def _predicted(profile: Profile) -> Prediction | None:
    found = predict(profile)
    return found if isinstance(found, Prediction) else None


def _not_predicted(profile: Profile) -> str | None:
    found = predict(profile)
    return found if isinstance(found, str) else None


class ProfileDocument(Shape):
    """One profile."""

    version: Literal[1]
    kind: Literal["profile"]
    source: str = ""
    name: str = ""
    outcome: OutcomeName
    exit_code: Literal[0, 1, 2, 3]
    command: str = ""
    memory_limit: int | None = None
    wanted_batch: int | None = None
    interrupted: bool
    setting: SettingItem | None
    spec: dict[str, Any]
    steps: list[int]
    rows: list[RowItem]
    lines: Annotated[LinesItem, Of("")]
    prediction: Annotated[PredictionItem | None, Of(_predicted)]
    no_prediction: Annotated[str | None, Of(_not_predicted)]
