"""Frozen records of a profile: strings and numbers only, no tensors, no torch.

Legend: B samples in the full batch, K micro-batches, n samples in the largest of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gaverify.records.comparison import Outcome
from gaverify.records.ranks import Moved
from gaverify.records.totals import together

Strategy = Literal["full-batch", "summed-loss", "accumulate"]
Status = Literal["measured", "out-of-memory", "does-not-fit", "failed", "not-run"]

STRATEGIES: tuple[Strategy, ...] = ("full-batch", "summed-loss", "accumulate")
LABELS = {"full-batch": "full batch", "summed-loss": "summed loss", "accumulate": "accumulate"}
"""How reports call the strategies."""


@dataclass(frozen=True)
class Plan:
    """One row to measure."""

    strategy: Strategy
    steps: int


@dataclass(frozen=True)
class Setting:
    """What was profiled and where, as the first process that got so far reported it."""

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


@dataclass(frozen=True)
class Memory:
    """Device memory in bytes around one update.

    Args:
        kind: "cuda-allocated" (torch's allocator on a GPU) or "resident" (the process, on a CPU).
        baseline: With the model, the batch and its micro-batches loaded, before the update.
        peak: The high-water mark during the update.
        reserved: What torch's allocator held from the GPU at its highest; None on a CPU.
    """

    kind: Literal["cuda-allocated", "resident"]
    baseline: int
    peak: int
    reserved: int | None = None

    @property
    def increment(self) -> int:
        """What the update needed on top of the baseline."""
        return max(self.peak - self.baseline, 0)


@dataclass(frozen=True)
class Seconds:
    """The time of one update over repeats; `low` and `high` are quartiles (the extremes below four repeats)."""

    median: float
    low: float
    high: float
    smallest: float
    largest: float
    repeats: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Seconds:
        """Returns the summary of at least one time."""
        low, high = min(times), max(times)
        if len(times) >= 4:
            low, _, high = statistics.quantiles(times, n=4, method="inclusive")
        return cls(statistics.median(times), low, high, min(times), max(times), len(times))


@dataclass(frozen=True)
class Row:
    """One strategy with one K. Figures are None where the row did not get so far; `message` then says why.

    Args:
        strategy: Which of `STRATEGIES`.
        steps: K.
        status: "measured", or why there are no (or not all) figures.
        message: The reason in a sentence; "" where all is well.
        micro_batches: n_1 … n_K.
        activation_bytes: What autograd keeps for the backward, at its highest point in the window.
        memory: Peak device memory.
        seconds: Time per update.
        outcome: The verdict against the full batch; None for the full batch itself and where nothing was compared.
        relative_difference: The largest of any parameter, in the precision that decided.
        method: Which step of the method decided.
        moved: What the ranks send each other in a window of K micro-batches each; None without ranks.
    """

    strategy: Strategy
    steps: int
    status: Status
    message: str = ""
    micro_batches: tuple[int, ...] = ()
    activation_bytes: int | None = None
    memory: Memory | None = None
    seconds: Seconds | None = None
    outcome: Outcome | None = None
    relative_difference: float | None = None
    method: str | None = None
    moved: Moved | None = None

    @property
    def micro_batch(self) -> int | None:
        """n, the size of the largest micro-batch."""
        return max(self.micro_batches) if self.micro_batches else None

    @property
    def samples_per_second(self) -> float | None:
        """B over the median time of an update."""
        if self.seconds is None or not self.micro_batches or self.seconds.median <= 0:
            return None
        return sum(self.micro_batches) / self.seconds.median


@dataclass(frozen=True)
class Profile:
    """All rows of one call, in the order in which they ran.

    Args:
        setting: What was profiled; None when no process got as far as loading the model.
        rows: One per plan; those that Ctrl-C left out have the status "not-run".
        steps: Every K that was asked for.
        memory_limit: `--memory` in bytes.
        wanted_batch: The batch that the prediction is for.
        interrupted: Whether Ctrl-C ended it.
        spec: The spec, as plain values.
        source: The spec's file; "" where the command line said what to profile.
        command: The words that make it again.
    """

    setting: Setting | None
    rows: tuple[Row, ...]
    steps: tuple[int, ...] = ()
    memory_limit: int | None = None
    wanted_batch: int | None = None
    interrupted: bool = False
    spec: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    command: str = ""

    @property
    def name(self) -> str:
        """The name that the spec gives itself; "" where it has none."""
        return str(self.spec.get("name") or "")

    @property
    def compared(self) -> tuple[Row, ...]:
        """The rows that hold a verdict."""
        return tuple(row for row in self.rows if row.outcome is not None)

    @property
    def outcome(self) -> Outcome:
        """Divergent if any row is, equivalent if every row with a verdict is and there is one, else inconclusive."""
        return together(row.outcome for row in self.rows if row.outcome is not None)

    @property
    def exit_code(self) -> int:
        """1 for a divergent row; else 2 where the user's code failed in one; else 0 or 3 (nothing compared, too).

        A K that does not fit, and a row that ran out of memory, are results of a profile and change nothing.
        """
        if self.outcome is not Outcome.DIVERGENT and any(row.status == "failed" for row in self.rows):
            return 2
        return self.outcome.exit_code


def plans(strategies: Sequence[Strategy], steps: Sequence[int]) -> tuple[Plan, ...]:
    """Returns the rows to measure: the full batch once, every other strategy once per K.

    With one micro-batch all strategies are the same update, so K = 1 is measured once: as the full batch where that is
    asked for.
    """
    rows = [Plan("full-batch", 1)] if "full-batch" in strategies else []
    for strategy in STRATEGIES[1:]:
        if strategy in strategies:
            rows += [Plan(strategy, k) for k in sorted(set(steps)) if k > 1 or "full-batch" not in strategies]
    return tuple(rows)
