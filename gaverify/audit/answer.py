"""The answer of an audit: frozen records that the reports show. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gaverify.audit.records import UpdateComparison
from gaverify.audit.windows import Window
from gaverify.results import Finding, Outcome


@dataclass(frozen=True)
class WindowCount:
    """backward : step : zero_grad of one window."""

    update: int
    backward: int
    step: int
    zero_grad: int
    complete: bool


@dataclass(frozen=True)
class RunSummary:
    """One process of an audit; `how` says what was set so that its random draws could be seen."""

    role: str
    command: str
    updates: int
    seconds: float
    disk_bytes: int
    ended: str
    how: str = ""


@dataclass(frozen=True)
class AuditReport:
    """The answer of an audit, with everything that it rests on."""

    script: str
    outcome: Outcome
    reason: str
    findings: tuple[Finding, ...]
    updates: tuple[UpdateComparison, ...]
    counts: tuple[WindowCount, ...]
    runs: tuple[RunSummary, ...]
    device: str
    dtype: str
    autocast: str | None
    torch: str
    gaverify: str
    modules: tuple[str, ...]
    optimizers: tuple[str, ...]
    trainable: int
    method: str
    events_only: bool
    timings: Mapping[str, float] = field(default_factory=dict)

    @property
    def decisive(self) -> UpdateComparison | None:
        """The update that the outcome rests on: the first that differs, else the first."""
        differs = (update for update in self.updates if update.judged and update.outcome is Outcome.DIVERGENT)
        return next(differs, self.updates[0] if self.updates else None)

    def to_json(self) -> str:
        """Returns the document that `gaverify audit --format json` prints."""
        from gaverify.audit.document import audit_document

        return audit_document(self)


def counts_of(windows: tuple[Window, ...]) -> tuple[WindowCount, ...]:
    """Returns backward : step : zero_grad of every window."""
    return tuple(
        WindowCount(window.number, len(window.of("backward")), len(window.steps), window.zero_grads, window.complete)
        for window in windows
    )
