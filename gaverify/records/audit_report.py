"""The answer of an audit: frozen records that the reports show. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar, Literal

from gaverify.records.answers import Answer
from gaverify.records.audit import UpdateComparison
from gaverify.records.events import (
    AverageUpdate,
    Backward,
    Clipping,
    GradientsRemoved,
    ScalerCall,
    SchedulerStep,
    Step,
    WeightsMoved,
)
from gaverify.records.json_objects import JsonRecord
from gaverify.records.numbers import Number
from gaverify.records.outcomes import Method, Outcome
from gaverify.records.ranks import RankFacts
from gaverify.records.windows import Window

TITLES = {
    "full": "full-batch run",
    "perturbed": "full-batch run with weights changed in the last digit",
    "accumulated": "accumulated run",
    "frozen": "accumulated run without its steps",
    "unclipped": "runs with losses too small to be clipped",
    "terms": "runs with only one term of each loss",
    "weights": "accumulated run with correctly weighted losses",
    "ranks": "control runs of the ranks",
    "float32": "the same runs in float32",
    "coupling": "both runs with the outputs of each module recorded",
    "trace": "both runs with every call of torch traced",
    "transformed": "accumulated runs with some losses multiplied by -0.5",
    "state": "accumulated run with state restored before each micro-batch",
    "events": "run",
}
"""How sentences call the runs of an audit."""


@dataclass(frozen=True)
class WindowCount(JsonRecord):
    """backward : step : zero_grad of one window."""

    update: int
    """Number of the update, counted from 1."""
    backward: int
    """Number of backward passes."""
    step: int
    """Number of optimizer steps."""
    zero_grad: int
    """Number of `zero_grad` calls."""
    complete: bool
    """Whether the window ended with a step; the last one of a run may not have."""


@dataclass(frozen=True)
class RunSummary(JsonRecord):
    """One process of an audit."""

    role: str
    """Purpose of the run: one of the keys of `TITLES`."""
    command: str
    """Command line of the run."""
    updates: int
    """Number of complete updates."""
    seconds: Number
    """Duration in seconds."""
    disk_bytes: int
    """Bytes of its recorded tensors on disk."""
    ended: str
    """How the run ended, in words."""
    how: str = ""
    """Setting that makes its random draws visible; "" for none."""


@dataclass(frozen=True)
class Moment(JsonRecord):
    """One call of the script that matters to accumulation, in the order of the calls of its rank."""

    kind: str
    """Name of the event, such as "backward" or "step"."""
    update: int
    """Number of the update that was being worked on, counted from 1."""
    file: str | None = None
    """File of the user's line that called; None where not known."""
    line: int | None = None
    """Number of that line; None where not known."""
    rank: int = 0
    """Rank of the process that called."""


@dataclass(frozen=True)
class RecordedCalls(JsonRecord):
    """The calls of the script that matter to accumulation."""

    counts: tuple[WindowCount, ...] = ()
    """Number of backward, step and zero_grad calls in each accumulation window."""
    timeline: tuple[Moment, ...] = ()
    """Calls of all ranks in order, without forwards; only the first few hundred."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of calls that could not be recorded, by reason."""


@dataclass(frozen=True)
class TrainedModels(JsonRecord):
    """The models and optimizers of a script."""

    modules: tuple[str, ...] = ()
    """Class names of the trained models."""
    optimizers: tuple[str, ...] = ()
    """Class names of the optimizers; for hand-written updates a note instead."""
    trainable: int = 0
    """Number of trainable elements."""


@dataclass(frozen=True)
class Arithmetic(JsonRecord):
    """Where a script trained, and in which precision."""

    device: str = "unknown"
    """Device that the script trained on; "unknown" where none was seen."""
    dtype: str = "unknown"
    """Data types of the trained parameters, joined by ", "; "unknown" where none was seen."""
    autocast: str | None = None
    """Data type of autocast; None where autocast was off."""


@dataclass(frozen=True, repr=False)
class Audit(Answer):
    """The answer of an audit, with everything that it rests on."""

    kind: ClassVar[Literal["audit"]] = "audit"
    """The word for it in documents."""
    written = (*Answer.written, "accepted")

    script: str
    """Path of the audited script, as given."""
    outcome: Outcome
    """Equivalent, divergent or inconclusive."""
    reason: str
    """Why the outcome is what it is, in a sentence."""
    updates: tuple[UpdateComparison, ...] = ()
    """Comparison of each update; empty if only calls were checked or nothing ran."""
    calls: RecordedCalls = field(default_factory=RecordedCalls)
    """The script's calls that matter to accumulation."""
    runs: tuple[RunSummary, ...] = ()
    """The runs that the audit made, with their commands and seconds; empty where nothing ran."""
    trained: TrainedModels = field(default_factory=TrainedModels)
    """The models and optimizers of the script."""
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    """Where it trained, and in which precision."""
    method: str = Method.NOT_COMPARED
    """How the updates were decided."""
    events_only: bool = False
    """Whether only the calls were checked and no gradient compared."""
    calls_in_order: bool = False
    """Whether only calls were checked, of at least one update, and no rule finds a fault."""
    name: str = ""
    """Name that reports show; "" for the script's path."""
    ranks: RankFacts | None = None
    """Measurements over all ranks; None for one process or where not all ranks were seen."""

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
        WindowCount(window.number, len(window.of(Backward)), len(window.steps), window.zero_grads, window.complete)
        for window in windows
    )


_SHOWN = Backward | Step | GradientsRemoved | WeightsMoved | Clipping | SchedulerStep | ScalerCall | AverageUpdate
_MOMENTS = 400
"""A timeline of more calls shows nothing that these do not, and makes documents of megabytes."""


def timeline_of(ranks: Sequence[Sequence[Window]]) -> tuple[Moment, ...]:
    """Returns the calls of every rank's windows in order, without the forwards; the first few hundred of each rank."""
    moments: list[Moment] = []
    for rank, windows in enumerate(ranks):
        # All ranks share the limit, so that none of them is left out.
        events = (event for window in windows for event in window.events if isinstance(event, _SHOWN))
        moments += [Moment(e.kind, e.update, e.file, e.line, rank) for e in islice(events, _MOMENTS // len(ranks))]
    return tuple(moments)
