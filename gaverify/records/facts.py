"""What was measured about one comparison, in frozen parts: the rules read nothing else.

Shapes: B samples in K micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from gaverify.records.audit import Record
from gaverify.records.comparison import Compared, Method, ParameterComparison
from gaverify.records.experiment import Cause, ControlRun, Count, ModuleDifference, Operation, WeightFit, are_shares
from gaverify.records.ranks import RankFacts
from gaverify.thresholds import AGREE_FLOAT64, COMPUTED_FLOAT32, LOST_SHARE, SMALL_PART

SCRIPT = "the script's own"
"""The weighting of a training loop."""


@dataclass(frozen=True)
class StateChange:
    """A value that the forward changes: where it lives, and the line that wrote it."""

    name: str
    place: Literal["parameter", "buffer", "attribute", "closure", "unnamed"]
    writer: Operation | None = None


@dataclass(frozen=True)
class State:
    """What the forward changes, and the control run with it held still (or restored before each micro-batch).

    `alone`: the difference that the blamed changes make by themselves, with every other cause neutralised; `beside`:
    how far restoring them moves the accumulated gradient where the others cannot be neutralised without them.
    `elsewhere`: how far the gradient with the state held is from the full batch's, whose own forward moves it.
    """

    changes: tuple[StateChange, ...]
    control: ControlRun | None = None
    blamed: tuple[StateChange, ...] = ()
    remedies: tuple[ControlRun, ...] = ()
    alone: float = math.nan
    beside: float = math.nan
    elsewhere: float = math.nan


@dataclass(frozen=True)
class SampleCoupling:
    """On how many `others` the outputs of one sample depend, and the largest gradient by its own one's norm.

    `batch`: how many samples were looked at, which may be a part of the batch.
    """

    sample: int
    others: int
    strength: float
    batch: int


@dataclass(frozen=True)
class Repeatability:
    """How far a pass is from itself with everything known restored: a micro-batch's, or the full batch's."""

    forward: float
    backward: float


EXPLICIT = "explicit"
"""The weighting of a recipe in numbers, or in a function of the user's."""


@dataclass(frozen=True)
class Weights:
    """What every micro-batch holds and what it counts; `fit` has the weights that would be right, `remedy` tried them.

    `failure`: why that was impossible; the weights stay suspected then. `losses` are those of the micro-batches;
    `valid_targets` is empty where the loss does not tell; `ignored_targets`: whether some targets count for nothing.
    `place` is the loss call or division whose result the fitted weights add up; `counts` what each micro-batch divides
    by itself, where dividing by the window's instead is the remedy that was tried.
    """

    used: tuple[float, ...]
    weighting: str
    sizes: tuple[int, ...]
    losses: tuple[float, ...] = ()
    valid_targets: tuple[float, ...] = ()
    ignored_targets: bool = False
    fit: WeightFit | None = None
    remedy: ControlRun | None = None
    failure: str = ""
    place: Operation | None = None
    counts: tuple[Count, ...] = ()

    @property
    def blamed(self) -> bool:
        """Whether the fitted weights are what is wrong: they were tried, or only the trial was impossible."""
        return self.remedy is not None or bool(self.failure)

    @property
    def lost(self) -> tuple[int, ...]:
        """The micro-batches of a strategy that never reach its gradient."""
        largest = max(map(abs, self.used), default=0.0)
        return tuple(k for k, w in enumerate(self.used) if self.weighting == SCRIPT and abs(w) < LOST_SHARE * largest)

    @property
    def given_wrong(self) -> bool:
        """Whether weights were given as numbers where the shares of the samples are right: nothing in a model is so."""
        return self.weighting == EXPLICIT and self.fit is not None and are_shares(self.fit.weights, self.sizes)


@dataclass(frozen=True)
class Draws:
    """The random draws of the full batch and how they were dealt out to the micro-batches.

    `unaligned` has the reason for each that could not be, `places` its line. `control` held every draw constant;
    `alone` is the difference that such draws make with all other causes neutralised. `shared` draws have no row per
    sample: every micro-batch was given the full batch's; each with its line, where that is known.
    """

    count: int = 0
    dealt: int = 0
    unaligned: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    foreign_differ: bool = False
    shared: Mapping[str, tuple[str, int] | None] = field(default_factory=dict)
    control: ControlRun | None = None
    alone: float = math.nan


@dataclass(frozen=True)
class Buffers:
    """Buffers that end up different after the micro-batches, with their relative difference (NaN: more than rounding).

    `update` is the number of the update after which they were seen, in a training loop.
    """

    drift: Mapping[str, float] = field(default_factory=dict)
    update: int | None = None


@dataclass(frozen=True)
class Forward:
    """What the traces of both forwards showed: the causes that were found in them, and what was ruled out.

    `agree`: no operation of the forward differs; `loss_gap`: how far the weighted losses are apart, relative, with
    the weights that come nearest: `shares`. `modules` are those whose outputs could be compared sample by sample.
    `adds_constant`: the loss adds a constant of the batch, which has no gradient and by which it differs.
    `branch` is the first operation that one side alone computes its loss with, where a gradient is missing.
    """

    causes: tuple[Cause, ...] = ()
    agree: bool = False
    loss_gap: float = math.nan
    adds_constant: bool = False
    shares: tuple[float, ...] = ()
    coupling: SampleCoupling | None = None
    ruled_out: tuple[Operation, ...] = ()
    modules: tuple[ModuleDifference, ...] = ()
    branch: Operation | None = None


class BackwardPlace(Enum):
    """What kind of place it is where gradients part although all forwards agree."""

    MODULE = "the backward of a module or of a custom function"
    PARAMETER_HOOK = "gradient hooks of parameters"
    MODULE_HOOK = "backward hooks of a module"
    TENSOR_HOOK = "a gradient hook that the forward puts on a tensor"
    CONSTANT = "a number that was computed from the batch and is a constant to the backward"
    LOSS = "the backward of the loss"


@dataclass(frozen=True)
class Backward:
    """Where gradients part although all forwards agree; `hooked` parameters carry gradient hooks.

    `kept` is the control run with those gradients put back that a forward clears, where one does; `clearing` clears.
    """

    place: BackwardPlace | None = None
    culprit: Operation | None = None
    control: ControlRun | None = None
    hooked: tuple[str, ...] = ()
    kept: ControlRun | None = None
    clearing: Operation | None = None


@dataclass(frozen=True)
class Facts:
    """Everything measured about one comparison; each question of the search returns it with fields replaced."""

    steps: int
    """K, the number of micro-batches; in an audit the backward passes of the update."""
    batch_size: int
    """B, the number of samples in the full batch."""
    compared: Compared
    """Compared parameters and the method that decided."""
    weights: Weights
    """Weight of each micro-batch in the accumulated gradient, and the weights that would be right."""
    draws: Draws = Draws()
    """Random draws of the full batch, and which of them the micro-batches reused."""
    buffers: Buffers = Buffers()
    """Buffers that differ after the micro-batches."""
    state: State | None = None
    """Values that the forward changes, with control runs; None where none was examined or found."""
    forward: Forward = Forward()
    """Causes found in the forward passes, and what was ruled out."""
    backward: Backward = Backward()
    """Where gradients differ although the forwards agree."""
    repeatability: Repeatability | None = None
    """Relative difference of a pass from its repetition; None where no pass was repeated."""
    ranks: RankFacts | None = None
    """Measurements over several ranks; None for one process."""
    identical: bool = False
    """Whether all samples of the batch are the same."""
    left: float = math.nan
    """Relative difference that remains with all found causes neutralised; NaN where not measured."""
    cleared: bool = False
    """Whether the difference that remains is rounding; in an audit also where other weights explain it."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Questions that could not be asked, with the reason for each."""
    diagnosed: bool = False
    """Whether the search for a cause ran."""
    stopped_after: float | None = None
    """Time limit in seconds that ended the search; None where none did."""
    loop: Record | None = None
    """Windows and compared updates of a training script; None outside an audit."""

    @property
    def weights_first(self) -> bool:
        """Whether other weights leave next to nothing of the difference, though more than rounding: named first."""
        run = self.weights.remedy
        return run is not None and not run.rounding and run.left <= SMALL_PART * self.compared.total

    @property
    def blind(self) -> bool:
        """Whether no fault but one of scale could have shown: equal samples that no random draw tells apart.

        They have the same statistics, the same loss and the same weight in every micro-batch.
        """
        return self.identical and self.steps > 1 and not self.draws.dealt

    @property
    def comparisons(self) -> tuple[tuple[int | None, tuple[ParameterComparison, ...]], ...]:
        """The rows of every comparison that means something, with the number of its update in a training loop."""
        if self.loop is None:
            return ((None, self.compared.rows),)
        return tuple((update.number, update.parameters) for update in self.loop.updates if update.judged)

    @property
    def repeats(self) -> float:
        """The relative difference of two runs of the same batch that arithmetic without a fixed order may leave."""
        return AGREE_FLOAT64 if self.compared.method == Method.FLOAT64_CONTROL else COMPUTED_FLOAT32

    @property
    def repeats_itself(self) -> bool:
        """Whether two runs of the full batch came to the same loss, as far as is known."""
        return self.repeatability is None or self.repeatability.forward <= self.repeats


def facts_of_loop(loop: Record) -> Facts:
    """Returns what an audit knows in the parts that a run delivers: the first differing update, else the first.

    An update whose runs had other samples or other weights gives no rows: they would mean nothing.
    """
    update = loop.divergent or next(iter(loop.updates), None)
    if update is None:
        compared, weights = Compared((), Method.EVENTS), Weights((), SCRIPT, ())
    else:
        rows = update.parameters if update.judged else ()
        compared = Compared(rows, Method.NOISE_FLOOR, update=update.number)
        used = update.fit.used if update.fit is not None else ()
        counts = tuple(map(float, update.valid_targets))
        weights = Weights(used, SCRIPT, update.sizes, (), counts, update.ignored_targets, update.fit)
    drifted = next((candidate for candidate in loop.updates if candidate.judged and candidate.drifted), None)
    buffers = Buffers(dict.fromkeys(drifted.drifted, math.nan), drifted.number) if drifted is not None else Buffers()
    controls = [cause.control for cause in loop.coupling if cause.control is not None]
    controls += [loop.state.control] if loop.state is not None and loop.state.control is not None else []
    return Facts(
        steps=update.backwards if update is not None else 0,
        batch_size=update.data.full if update is not None else 0,
        compared=compared,
        weights=weights,
        draws=Draws(loop.dealt, loop.dealt, loop.unaligned),
        buffers=buffers,
        forward=Forward(loop.coupling),
        state=loop.state,
        cleared=bool(controls) and (controls[-1].rounding or controls[-1].fit is not None),
        ranks=loop.together,
        loop=loop,
    )
