"""One comparison, measured by a run or an audit, in frozen parts: the rules read nothing else.

Shapes: B samples in K micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from gaverify.records.audit import Calls, Record
from gaverify.records.experiment import Cause, ControlRun, ModuleDifference, Operation
from gaverify.records.outcomes import Compared, Method, ParameterComparison
from gaverify.records.ranks import RankFacts
from gaverify.records.windows import AccumulationWindow
from gaverify.thresholds import AGREE_FLOAT64, COMPUTED_FLOAT32, SAME_IN_FLOAT32, SMALL_PART


@dataclass(frozen=True)
class StateChange:
    """A value that the forward changes."""

    name: str
    """Its path in the model, or the variable of the loss."""
    place: Literal["parameter", "buffer", "attribute", "closure", "unnamed"]
    """Where it lives."""
    writer: Operation | None = None
    """The operation that wrote it; None where not known."""


@dataclass(frozen=True)
class NextUpdate:
    """The relative difference of a second update, whose micro-batches start from the restored state again."""

    rounding: float
    """The largest difference that is none."""
    left: float
    """It begins with the state that the last micro-batch of the first update left."""
    from_full_batch: float
    """It begins with the state that the first full batch left: only another cause makes a difference then."""
    from_forward: float = math.nan
    """It begins with the state that a forward pass of the full batch without gradients left."""


@dataclass(frozen=True)
class State:
    """Values that the forward changes, and whether they make the difference."""

    changes: tuple[StateChange, ...]
    """Every value that changed."""
    control: ControlRun | None = None
    """The run without effect of these changes, or with the state restored before each micro-batch."""
    blamed: tuple[StateChange, ...] = ()
    """The changes that matter."""
    remedies: tuple[ControlRun, ...] = ()
    """The runs that can be written as repairs."""
    difference_alone: float = math.nan
    """Relative difference that the blamed changes make with every other cause neutralised."""
    accumulated_change: float = math.nan
    """How much restoring them changes the accumulated gradient, where no other cause can be neutralised separately."""
    new_state_difference: float = math.nan
    """Distance of the gradient without changes of the state from the full batch's, whose own forward changes it."""
    next_update: NextUpdate | None = None
    """A second update with the state restored in both; None where that was not the repair, or could not be run."""
    together: bool = False
    """Whether the blamed changes are proven only together, so that some of them may be innocent."""


@dataclass(frozen=True)
class Repeatability:
    """Relative difference between a pass and its repetition from the restored state."""

    forward: float
    """Of the losses."""
    backward: float
    """Of the gradients."""


@dataclass(frozen=True)
class Draws:
    """The random draws of the full batch, and which of them the micro-batches reused."""

    count: int = 0
    """Draws of the full batch."""
    dealt: int = 0
    """Draws of which each micro-batch used its own rows."""
    is_counted: bool = True
    """Whether `dealt` counts a draw as often as a micro-batch used it; an audit counts it once."""
    can_be_constant: bool = True
    """Whether a control could replace every draw by a constant; those of a script stay as they are."""
    uneven: bool = False
    """Whether the rows of some are no samples: time steps of packed sequences, picked elements."""
    unaligned: Mapping[str, str] = field(default_factory=dict)
    """Draw → why it could not be cut into rows of samples."""
    unmatched: frozenset[str] = frozenset()
    """Those among them whose rows may be those of other samples, and may as well be the right ones."""
    places: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Such a draw → its file and line."""
    foreign_differ: bool = False
    """Whether Python's or NumPy's generators gave the micro-batches other numbers."""
    shared: Mapping[str, tuple[str, int] | None] = field(default_factory=dict)
    """Draw without a row per sample, of which every micro-batch used all → its line, where known."""
    control: ControlRun | None = None
    """The run with every draw constant."""
    difference_alone: float = math.nan
    """Relative difference that unaligned draws make with all other causes neutralised."""

    @property
    def are_unmatched(self) -> bool:
        """Whether those that are open went to rows that cannot be told apart: that is no fault of the user's."""
        return bool(self.unmatched) and self.unaligned.keys() <= self.unmatched and not self.foreign_differ


@dataclass(frozen=True)
class Buffers:
    """Buffers that end up different after the micro-batches."""

    drift: Mapping[str, float] = field(default_factory=dict)
    """Buffer → relative difference; NaN where only known to be more than rounding."""
    update: int | None = None
    """Number of the update after which they were seen, in a training loop."""


@dataclass(frozen=True)
class ForwardComparison:
    """Results of tracing both forwards."""

    causes: tuple[Cause, ...] = ()
    """The causes that were found in them, in the order of execution."""
    agree: bool = False
    """Whether no operation of the forward differs."""
    loss_gap: float = math.nan
    """Relative difference of the weighted losses, with `shares`."""
    adds_constant: bool = False
    """Whether the loss adds a constant of the batch: it has no gradient, and the losses differ by it."""
    shares: tuple[float, ...] = ()
    """The weights with which the losses come nearest."""
    ruled_out: tuple[Operation, ...] = ()
    """Operations whose control did not help."""
    modules: tuple[ModuleDifference, ...] = ()
    """Modules whose outputs could be compared sample by sample."""
    branch: Operation | None = None
    """The first operation that only one side computes its loss with, where a gradient is missing."""

    @property
    def shows_nothing(self) -> bool:
        """Whether no operation differs, or the losses agree and no control with power blames one that does."""
        is_harmless = all(cause.lacks_power for cause in self.causes) and self.loss_gap <= SAME_IN_FLOAT32
        return is_harmless or (self.agree and not self.causes)


class BackwardPlace(Enum):
    """The kind of place where gradients start to differ although all forwards agree."""

    MODULE = "the backward of a module or of a custom function"
    PARAMETER_HOOK = "gradient hooks of parameters"
    MODULE_HOOK = "backward hooks of a module"
    TENSOR_HOOK = "a gradient hook that the forward puts on a tensor"
    CONSTANT = "a number that was computed from the batch and is a constant to the backward"
    LOSS = "the backward of the loss"


@dataclass(frozen=True)
class BackwardComparison:
    """Where gradients start to differ although all forwards agree."""

    place: BackwardPlace | None = None
    """The kind of place; None where none was found."""
    culprit: Operation | None = None
    """The module, function, hook or line."""
    control: ControlRun | None = None
    """The run with it neutralised; None where none was possible."""
    hooked: tuple[str, ...] = ()
    """Parameters with gradient hooks."""
    kept: ControlRun | None = None
    """The run with the gradients put back that a forward clears, where one does."""
    clearing: Operation | None = None
    """The operation that clears them."""


@dataclass(frozen=True)
class Comparison:
    """Everything measured about one comparison; each question of the search returns it with fields replaced."""

    batch_size: int
    """B, the number of samples in the full batch."""
    compared: Compared
    """Compared parameters and the method that decided."""
    window: AccumulationWindow
    """The micro-batches, their weights, and the weights that would be right."""
    # Frozen records can be shared as defaults.
    draws: Draws = Draws()
    """Random draws of the full batch, and which of them the micro-batches reused."""
    buffers: Buffers = Buffers()
    """Buffers that differ after the micro-batches."""
    state: State | None = None
    """Values that the forward changes, with control runs; None where none was examined or found."""
    forward: ForwardComparison = ForwardComparison()
    """Causes found in the forward passes, and what was ruled out."""
    backward: BackwardComparison = BackwardComparison()
    """Where gradients differ although the forwards agree."""
    repeatability: Repeatability | None = None
    """Relative difference of a pass from its repetition; None where no pass was repeated."""
    ranks: RankFacts | None = None
    """Measurements over several ranks; None for one process."""
    identical: bool = False
    """Whether all samples of the batch are the same."""
    unpadded: tuple[str, ...] = ()
    """Values that would pad or mask a part of the batch, and do not, each in words."""
    left: float = math.nan
    """Relative difference that remains with all found causes neutralised; NaN where not measured."""
    cleared: bool = False
    """Whether the difference that remains is rounding; in an audit also where other weights explain it."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Questions that could not be asked, with the reason for each."""
    diagnosed: bool = False
    """Whether a cause was searched; in an audit whether the samples and draws were the same, so that one would show."""
    stopped_after: float | None = None
    """Time limit in seconds that ended the search; None where none did."""
    runs_repairs: bool = True
    """Whether repairs were run, each on top of those before it; every control of an audit runs alone."""
    weights_probe: str = "micro-batch-weights"
    """The name under which documents show the run with the right weights."""
    record: Record = field(default_factory=Record)
    """Calls, compared updates and controls of a training script; those of a run are empty."""

    @property
    def calls(self) -> Calls:
        """Windows and ledgers of a training script; a run has none."""
        return self.record.calls

    @property
    def tolerance(self) -> float:
        """Below this a fit's residual is rounding, and two weights are the same."""
        return self.record.tolerance

    @property
    def weights_run(self) -> ControlRun | None:
        """The accumulated run with the right weights of its micro-batches; None where none was made."""
        return self.record.controls.weighted_run or self.window.remedy

    @property
    def weights_update(self) -> int | None:
        """Number of the update in which other weights were run, if any were; None where there is one update alone."""
        update = self.record.divergent
        return update.number if update is not None else None

    @property
    def same_split(self) -> str:
        """How both sides come to split the batch alike, so that nothing is compared; empty where they do not."""
        if self.record.same_pieces:
            return "both runs split the first update in the same way"
        is_one_piece = self.window.has_recipe and self.window.steps == 1 and self.ranks is None
        return "K = 1" if is_one_piece else ""

    @property
    def weights_first(self) -> bool:
        """Whether other weights leave next to nothing of the difference, though more than rounding: named first."""
        # Empty in an audit: each of its controls runs alone, and sets no order of repairs.
        run = self.window.remedy
        return run is not None and not run.rounding and run.left <= SMALL_PART * self.compared.total

    @property
    def blind(self) -> bool:
        """Whether no fault but one of scale could have shown: equal samples that no random draw tells apart.

        They have the same statistics, the same loss and the same weight in every micro-batch.
        """
        return self.identical and self.window.steps > 1 and not self.draws.dealt

    @property
    def undecided(self) -> bool:
        """Whether draws that went to other samples than in the full batch may be all that makes the difference."""
        control = self.draws.control
        return self.draws.are_unmatched and (control is None or control.rounding)

    @property
    def comparisons(self) -> tuple[tuple[int | None, tuple[ParameterComparison, ...]], ...]:
        """The rows of every comparison that means something, with the number of its update in a training loop."""
        if not self.record.updates:
            return ((None, self.compared.rows),)
        return tuple((update.number, update.parameters) for update in self.record.updates if update.judged)

    @property
    def repeats(self) -> float:
        """The relative difference of two runs of the same batch that arithmetic without a fixed order may leave."""
        # Kernels without a fixed order of additions round differently each time.
        return AGREE_FLOAT64 if self.compared.method == Method.FLOAT64_CONTROL else COMPUTED_FLOAT32

    @property
    def repeats_itself(self) -> bool:
        """Whether two runs of the full batch came to the same loss, as far as is known."""
        return self.repeatability is None or self.repeatability.forward <= self.repeats


def comparison_of(record: Record) -> Comparison:
    """Returns what an audit knows in the parts that a run delivers: the first differing update, else the first.

    An update whose runs had other samples or other weights gives no rows: they would mean nothing.
    """
    update = record.divergent or next(iter(record.updates), None)
    compared, window = Compared((), Method.EVENTS), AccumulationWindow()
    if update is not None:
        rows = update.parameters if update.judged else ()
        compared, window = Compared(rows, Method.NOISE_FLOOR, update=update.number), update.window
    # Buffers of later updates start from values that differ already.
    first_drift = next((candidate for candidate in record.updates if candidate.judged and candidate.step.drifted), None)
    buffers = Buffers()
    if first_drift is not None:
        # An audit compares them with the rounding of their type and keeps no difference.
        buffers = Buffers(dict.fromkeys(first_drift.step.drifted, math.nan), first_drift.number)
    state = record.controls.state
    # The state's control comes last: it explains what those of interacting samples leave.
    controls = [cause.control for cause in record.controls.coupling if cause.control is not None]
    controls += [state.control] if state is not None and state.control is not None else []
    return Comparison(
        batch_size=update.data.full if update is not None else 0,
        compared=compared,
        window=window,
        draws=Draws(record.dealt, record.dealt, is_counted=False, can_be_constant=False, unaligned=record.unaligned),
        buffers=buffers,
        forward=ForwardComparison(record.controls.coupling),
        state=state,
        cleared=bool(controls) and (controls[-1].rounding or controls[-1].fit is not None),
        ranks=record.together,
        stopped_after=record.stopped_after,
        failures=record.failures,
        diagnosed=_can_show_causes(record),
        runs_repairs=False,
        weights_probe="control",
        record=record,
    )


def _can_show_causes(record: Record) -> bool:
    """Whether the controls of an audit are conclusive about the samples and draws of the update that differs."""
    is_altered = record.together is not None and record.together.is_altered
    return record.divergent is not None and record.divergent.data.checked and not record.unaligned and not is_altered
