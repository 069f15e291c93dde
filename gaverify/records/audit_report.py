"""The answer of an audit: frozen records that the reports show. Imports no torch."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from gaverify.records.audit import UpdateComparison
from gaverify.records.comparison import Method, Outcome
from gaverify.records.findings import Acceptance, Finding, Settled
from gaverify.records.ranks import RankFacts
from gaverify.records.windows import Window
from gaverify.version import __version__, current_time, git_commit

TITLES = {
    "full": "full-batch run",
    "perturbed": "full-batch run with moved weights",
    "accumulated": "accumulated run",
    "frozen": "accumulated run with its steps undone",
    "unclipped": "runs with smaller losses",
    "terms": "runs with one term of each loss alone",
    "weights": "accumulated run with its losses times what they should count",
    "ranks": "controls of the ranks",
    "float32": "the same runs in float32",
    "coupling": "both runs with what every module gives for each row",
    "transformed": "accumulated runs some of whose losses count -0.5 times",
    "state": "accumulated run with what forwards move put back before each micro-batch",
    "events": "run",
}
"""How sentences call the runs of an audit."""


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
class Moment:
    """One call of the script that matters to accumulation, in the order of the calls of its rank."""

    kind: str
    update: int
    file: str | None = None
    line: int | None = None
    rank: int = 0


@dataclass(frozen=True, repr=False)
class AuditReport(Settled):
    """The answer of an audit, with everything that it rests on."""

    script: str
    outcome: Outcome
    reason: str
    findings: tuple[Finding, ...] = ()
    updates: tuple[UpdateComparison, ...] = ()
    counts: tuple[WindowCount, ...] = ()
    runs: tuple[RunSummary, ...] = ()
    device: str = "unknown"
    dtype: str = "unknown"
    autocast: str | None = None
    torch: str = "not loaded"
    gaverify: str = __version__
    modules: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    trainable: int = 0
    method: str = Method.NOT_COMPARED
    events_only: bool = False
    timings: Mapping[str, float] = field(default_factory=dict)
    source: str = ""  # the options file; "" where the command line said what to run
    command: str = ""  # the words that make it again
    timeline: tuple[Moment, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)  # calls that could not be recorded, by what hid them
    calls_in_order: bool = False  # calls alone were checked, those of one update at least, and no rule finds a fault
    name: str = ""  # how reports call it; "" for the script's own
    ranks: RankFacts | None = None  # of an accumulated run in several processes that were all seen
    acceptance: Acceptance = field(default_factory=Acceptance)
    python: str = field(default_factory=platform.python_version)
    platform: str = field(default_factory=platform.platform)
    started: str = field(default_factory=current_time)
    """When the answer was made: UTC, to the second; "" in documents that older versions wrote."""
    commit: str = field(default_factory=git_commit)
    """The commit of git that was checked out in the working folder; "" outside a repository."""

    @property
    def exit_code(self) -> int:
        """As of a verdict; of calls that were checked alone and are in order 0, although no gradient was compared."""
        if not self.calls_in_order or self.acceptance.expected is not None:
            return super().exit_code
        return 1 if self.acceptance.strict and self.acceptance.stale else 0

    @property
    def decisive(self) -> UpdateComparison | None:
        """The update that the outcome rests on: the first that differs, else the first."""
        return next((update for update in self.updates if update.differs), next(iter(self.updates), None))


def counts_of(windows: tuple[Window, ...]) -> tuple[WindowCount, ...]:
    """Returns backward : step : zero_grad of every window."""
    return tuple(
        WindowCount(window.number, len(window.of("backward")), len(window.steps), window.zero_grads, window.complete)
        for window in windows
    )


_SHOWN = frozenset({"backward", "step", "zero_grad", "cleared", "moved", "clip", "scheduler", "scaler", "average"})
_MOMENTS = 400
"""A timeline of more calls shows nothing that these do not, and makes documents of megabytes."""


def timeline_of(ranks: Sequence[Sequence[Window]]) -> tuple[Moment, ...]:
    """Returns the calls of every rank's windows in order, without the forwards; the first few hundred of each rank."""
    moments: list[Moment] = []
    for rank, windows in enumerate(ranks):
        events = (event for window in windows for event in window.events if event.kind in _SHOWN)
        moments += [Moment(e.kind, e.update, e.file, e.line, rank) for e in islice(events, _MOMENTS // len(ranks))]
    return tuple(moments)
