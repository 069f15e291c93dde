"""Frozen records of a profile. No tensors, no torch.

Legend: B samples in the full batch, K micro-batches, n samples in the largest of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gaverify.records.answers import Answer
from gaverify.records.json_objects import JsonObject, JsonRecord
from gaverify.records.numbers import Number
from gaverify.records.outcomes import Outcome, together

Strategy = Literal["full-batch", "summed-loss", "accumulate"]
Status = Literal["measured", "out-of-memory", "does-not-fit", "failed", "not-run"]

STRATEGIES: tuple[Strategy, ...] = ("full-batch", "summed-loss", "accumulate")
LABELS = {"full-batch": "full batch", "summed-loss": "summed loss", "accumulate": "accumulate"}
"""How reports call the strategies."""
OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
"""Optimizers whose step may belong to an update, and their classes in torch."""


MemoryKind = Literal["cuda-allocated", "resident"]
"""How peak memory is measured: by torch's allocator on a GPU, or of the process on a CPU."""


@dataclass(frozen=True)
class Plan:
    """One row to measure."""

    strategy: Strategy
    """Strategy to measure."""
    steps: int
    """K, the number of micro-batches."""


@dataclass(frozen=True)
class Setting(JsonRecord):
    """The profiled model and machine, as the first process that got so far reported them."""

    model: str
    """Model as the spec names it."""
    parameters: int
    """Number of elements of all parameters, shared ones counted once."""
    trainable: int
    """Number of elements of the trained parameters."""
    batch_size: int
    """B, the number of samples in the full batch."""
    device: str
    """Torch device, such as "cuda:0"."""
    device_name: str
    """Name of the GPU; on a CPU the name of the processor or machine."""
    device_memory: int | None
    """Total memory of the device in bytes; None where torch does not count it, as on a CPU."""
    dtype: str
    """Coarsest data type of the trained parameters."""
    autocast: str | None
    """Data type of autocast; None where autocast was off."""
    mode: str
    """Training or evaluation mode of the model, as the spec gave it."""
    seed: int
    """Seed of the random number generators."""
    threads: int
    """Number of CPU threads that torch uses."""
    optimizer: str | None
    """Optimizer whose step is part of the measurement; None where there is none."""
    repeats: int
    """Number of timed repetitions of each row."""
    torch: str
    """Version of PyTorch."""


@dataclass(frozen=True)
class Memory(JsonRecord):
    """Device memory around one update."""

    written = ("increment",)

    kind: MemoryKind
    """"cuda-allocated" (torch's allocator on a GPU) or "resident" (the process, on a CPU)."""
    baseline: int
    """Bytes with the model, the batch and its micro-batches loaded, before the update."""
    peak: int
    """Largest number of bytes during the update."""
    reserved: int | None = None
    """Largest number of bytes that torch's allocator reserved on the GPU; None on a CPU."""

    @property
    def increment(self) -> int:
        """Bytes that the update needed on top of the baseline."""
        return max(self.peak - self.baseline, 0)


@dataclass(frozen=True)
class Seconds(JsonRecord):
    """The time of one update over repeats, in seconds."""

    median: Number
    """Median."""
    low: Number
    """Lower quartile; the smallest time below four repeats."""
    high: Number
    """Upper quartile; the largest time below four repeats."""
    smallest: Number
    """Smallest time."""
    largest: Number
    """Largest time."""
    repeats: int
    """Number of repeats."""

    @classmethod
    def of(cls, times: Sequence[float]) -> Seconds:
        """Returns the summary of at least one time."""
        low, high = min(times), max(times)
        # Quartiles of fewer times would be extrapolated.
        if len(times) >= 4:
            low, _, high = statistics.quantiles(times, n=4, method="inclusive")
        return cls(statistics.median(times), low, high, min(times), max(times), len(times))


@dataclass(frozen=True)
class Row(JsonRecord):
    """One strategy with one K; figures are None where the row did not get so far."""

    written = ("samples_per_second",)

    strategy: Strategy
    """Which of `STRATEGIES`."""
    steps: int
    """K, the number of micro-batches."""
    status: Status
    """"measured", or why there are no (or not all) figures."""
    message: str = ""
    """The reason in a sentence; "" where all is well."""
    micro_batches: tuple[int, ...] = ()
    """Number of samples in each micro-batch."""
    activation_bytes: int | None = None
    """Largest number of bytes in the window that autograd keeps for the backward pass."""
    memory: Memory | None = None
    """Device memory around one update."""
    seconds: Seconds | None = None
    """Time per update."""
    outcome: Outcome | None = None
    """Verdict against the full batch; None for the full batch itself and where nothing was compared."""
    relative_difference: Number | None = None
    """Largest relative difference of any parameter, in the precision that decided."""
    method: str | None = None
    """How the verdict was decided."""

    @property
    def micro_batch(self) -> int | None:
        """n, the size of the largest micro-batch."""
        return max(self.micro_batches) if self.micro_batches else None

    @property
    def samples_per_second(self) -> Number | None:
        """B over the median time of an update."""
        if self.seconds is None or not self.micro_batches or self.seconds.median <= 0:
            return None
        return sum(self.micro_batches) / self.seconds.median


@dataclass(frozen=True, repr=False)
class Profile(Answer):
    """All rows of one call, in the order in which they ran."""

    kind: ClassVar[Literal["profile"]] = "profile"
    """The word for it in documents."""

    setting: Setting | None
    """The profiled model and machine; None when no process got as far as loading the model."""
    rows: tuple[Row, ...]
    """One row per plan; those that Ctrl-C left out have the status "not-run"."""
    steps: tuple[int, ...] = ()
    """Every K that was asked for."""
    interrupted: bool = False
    """Whether Ctrl-C ended it."""
    spec: JsonObject = field(default_factory=dict)
    """The spec, as plain values."""

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
        """1 for a divergent row; else 2 where the user's code failed in one; else 0 or 3 (nothing compared, too)."""
        # A K that does not fit, and a row that ran out of memory, are results of a profile and change no exit code.
        if self.outcome is not Outcome.DIVERGENT and any(row.status == "failed" for row in self.rows):
            return 2
        return self.outcome.exit_code


def plans(strategies: Sequence[Strategy], steps: Sequence[int]) -> tuple[Plan, ...]:
    """Returns the rows to measure: the full batch once, every other strategy once per K."""
    rows = [Plan("full-batch", 1)] if "full-batch" in strategies else []
    for strategy in STRATEGIES[1:]:
        if strategy in strategies:
            # With one micro-batch all strategies are the same update, which the row of the full batch has measured.
            rows += [Plan(strategy, k) for k in sorted(set(steps)) if k > 1 or "full-batch" not in strategies]
    return tuple(rows)
