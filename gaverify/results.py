"""Frozen records of a verification: strings and floats only, no tensors, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

Severity = Literal["fault", "note"]
Method = Literal["working-precision", "float64-control", "noise-floor", "tolerance", "not-compared"]


class Outcome(str, Enum):
    """What a verification, or one parameter of it, came to; the values are what JSON prints."""

    EQUIVALENT = "equivalent"
    DIVERGENT = "divergent"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> int:
        """0, 1 or 3, as the command line leaves."""
        return {"equivalent": 0, "divergent": 1, "inconclusive": 3}[self.value]


class Element(NamedTuple):
    """The element of a gradient with the largest difference: its index and the two values (moduli where complex)."""

    index: tuple[int, ...]  # type: ignore[assignment]
    reference: float
    accumulated: float


class ParameterComparison(NamedTuple):
    """One parameter's gradients from both strategies, in the precision that decided.

    All norms are Euclidean. `allowed` is the largest `difference_norm` that rounding explains. NaN norms stand for
    gradients that were not finite, or that did not exist (`reason` says which). A tuple, not a dataclass, because
    models have thousands of these and building them must cost less than a microsecond each.
    """

    name: str
    shape: tuple[int, ...]
    outcome: Outcome
    method: Method
    reference_norm: float
    accumulated_norm: float
    difference_norm: float
    allowed: float
    working_difference_norm: float
    worst: Element | None
    reason: str = ""

    @property
    def relative_difference(self) -> float:
        """‖accumulated − full‖ / ‖full‖; 0 where both are zero, infinite where only the full-batch gradient is."""
        return _relative(self.difference_norm, self.reference_norm)

    @property
    def relative_allowed(self) -> float:
        """`allowed` / ‖full‖, comparable with `relative_difference`."""
        return _relative(self.allowed, self.reference_norm)


def _relative(difference: float, scale: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / scale if scale != 0.0 else math.inf


@dataclass(frozen=True)
class Location:
    """Where a finding lies: module path in the model, its class, and file and line in the user's code where known."""

    module: str | None = None
    kind: str | None = None
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        parts = []
        if self.module is not None:
            parts.append(f"`{self.module or '(root)'}`" + (f" ({self.kind})" if self.kind else ""))
        if self.file is not None:
            parts.append(f"{self.file}:{self.line}" if self.line is not None else self.file)
        return " at ".join(parts)


@dataclass(frozen=True)
class Evidence:
    """What one probe saw: a sentence for people, and the numbers behind it for rules and JSON."""

    probe: str
    label: str
    statement: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A named cause (`severity` "fault") or a remark that changes no exit code ("note")."""

    code: str
    name: str
    severity: Severity
    summary: str
    location: Location | None = None
    evidence: tuple[Evidence, ...] = ()
    remedy: str = ""
    proven: bool = False


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


@dataclass(frozen=True)
class Verdict:
    """The answer to "does accumulation compute the full-batch gradient?", with everything that it rests on."""

    outcome: Outcome
    parameters: tuple[ParameterComparison, ...]
    findings: tuple[Finding, ...]
    run: RunInfo
    method: str
    resolution: float
    timings: Mapping[str, float] = field(default_factory=dict)
    trace: Trace | None = None
    spec: Mapping[str, Any] | None = None

    @property
    def divergent(self) -> tuple[ParameterComparison, ...]:
        """The parameters that differ, worst first."""
        rows = (row for row in self.parameters if row.outcome is Outcome.DIVERGENT)
        return tuple(sorted(rows, key=badness, reverse=True))

    def to_json(self) -> str:
        """Returns the document that `--format json` prints."""
        from gaverify.document import verdict_document

        return verdict_document(self)


def badness(row: ParameterComparison) -> tuple[int, float]:
    """A sort key that puts the worst parameter last: outcome first, then how large the difference is.

    Divergent ones by the relative difference, others by the difference over what was allowed.
    """
    rank = {Outcome.EQUIVALENT: 0, Outcome.INCONCLUSIVE: 1, Outcome.DIVERGENT: 2}[row.outcome]
    if math.isnan(row.difference_norm):
        return rank, math.inf if row.outcome is Outcome.DIVERGENT else -1.0
    if row.outcome is Outcome.DIVERGENT:
        return rank, row.relative_difference
    return rank, _relative(row.difference_norm, row.allowed)
