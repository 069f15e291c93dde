"""The answer of a run: frozen records of strings and floats, no tensors, no torch."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gaverify.records.comparison import FewSamples, Outcome, ParameterComparison, Reference, badness
from gaverify.records.experiment import ModuleDifference
from gaverify.records.findings import Acceptance, Finding, Settled
from gaverify.records.ranks import RankFacts
from gaverify.version import current_time, git_commit


@dataclass(frozen=True)
class RunInfo:
    """What was run: enough to run it again."""

    model: str
    parameters: int
    trainable: int
    batch_size: int
    micro_batches: tuple[int, ...]
    weights: tuple[float, ...]
    weighting: str
    strategy: str
    device: str
    dtype: str
    seed: int
    mode: str
    torch: str
    gaverify: str
    autocast: str | None = None
    loss_full: float = math.nan
    loss_accumulated: float = math.nan
    reference: Reference = Reference.FULL
    """How the full batch was run."""
    reference_failed: tuple[Reference, ...] = ()
    """The ways that did not fit into memory before."""
    rounded: tuple[str, ...] = ()
    """Products whose float32 inputs were rounded before they were multiplied: "matmul tf32"."""
    part: tuple[int, ...] = ()
    """The two micro-batches of the part in which the cause was found, and where the method says so, which decided."""
    guesses: tuple[str, ...] = ()
    """What of the factory `gaverify init` guessed and nobody replaced: "the loss"."""
    python: str = field(default_factory=platform.python_version)
    platform: str = field(default_factory=platform.platform)
    started: str = field(default_factory=current_time)
    """When the answer was made: UTC, to the second; "" in documents that older versions wrote."""
    commit: str = field(default_factory=git_commit)
    """The commit of git that was checked out in the working folder; "" outside a repository."""

    @property
    def steps(self) -> int:
        """K, the number of micro-batches."""
        return len(self.micro_batches)


@dataclass(frozen=True)
class TraceRow:
    """The state after one micro-batch: accumulated gradient, movement of the weights, running event counts."""

    micro_batch: int
    gradient: float
    movement: float
    backward: int
    step: int
    zero_grad: int


@dataclass(frozen=True)
class TraceStep:
    """The optimizer step after the window, and the weights after it (norm, or value of a one-element model)."""

    optimizer: str
    lr: float
    before: float
    after_full: float
    after_accumulated: float
    weights_difference: float
    scalar: bool


@dataclass(frozen=True)
class Trace:
    """`--trace`: one row per micro-batch, then the optimizer step."""

    rows: tuple[TraceRow, ...]
    step: TraceStep


@dataclass(frozen=True, repr=False)
class Verdict(Settled):
    """The answer to "does accumulation compute the full-batch gradient?", with everything that it rests on.

    `control_failure` says why the float64 control was impossible, where it was wanted and something else decided.
    """

    outcome: Outcome
    parameters: tuple[ParameterComparison, ...]
    findings: tuple[Finding, ...]
    run: RunInfo
    method: str
    resolution: float
    timings: Mapping[str, float] = field(default_factory=dict)
    trace: Trace | None = None
    spec: Mapping[str, Any] | None = None
    source: str = ""  # the spec's file; "" where the command line or a call said what to run
    command: str = ""  # the words that make it again; "" where it came from a call
    acceptance: Acceptance = field(default_factory=Acceptance)

    control_failure: str = ""
    ranks: RankFacts | None = None
    few_samples: FewSamples | None = None
    """What decided, where a few samples did."""
    modules: tuple[ModuleDifference, ...] = ()
    """How far forward values are apart, by module in the order of the calls; empty where no search ran."""

    @property
    def name(self) -> str:
        """The name that the spec gives itself; "" where it has none."""
        return str((self.spec or {}).get("name") or "")

    @property
    def divergent(self) -> tuple[ParameterComparison, ...]:
        """The parameters that differ, worst first."""
        rows = (row for row in self.parameters if row.outcome is Outcome.DIVERGENT)
        return tuple(sorted(rows, key=badness, reverse=True))
