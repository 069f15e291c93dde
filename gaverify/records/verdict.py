"""The answer of a run: frozen records of strings and floats, no tensors, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gaverify.records.answers import Answer
from gaverify.records.experiment import ModuleDifference
from gaverify.records.json_objects import JsonObject, JsonRecord
from gaverify.records.numbers import Number
from gaverify.records.outcomes import FewSamples, Outcome, ParameterComparison, Reference, badness
from gaverify.records.ranks import RankFacts


@dataclass(frozen=True)
class Losses(JsonRecord):
    """Losses of a run; NaN where not known."""

    full: Number = math.nan
    """Loss of the full batch."""
    accumulated: Number = math.nan
    """Loss of the accumulated micro-batches."""


@dataclass(frozen=True)
class CountedTargets(JsonRecord):
    """The targets that the weighting `tokens` counted."""

    counted: Number
    """The targets that count, or the sum of their class weights."""
    total: int
    """All targets that were looked at."""
    ignored: tuple[int, ...]
    """The values of targets that do not count."""
    weighted: bool = False
    """Whether `counted` is a sum of class weights."""


@dataclass(frozen=True)
class RunInfo(JsonRecord):
    """Everything that is needed to run it again."""

    written = ("model", "steps")

    model: str
    """Name of the problem, or the class name of its model."""
    parameters: int
    """Number of elements of all parameters, shared ones counted once."""
    trainable: int
    """Number of elements of the trained parameters."""
    batch_size: int
    """B, the number of samples in the full batch."""
    micro_batches: tuple[int, ...]
    """Number of samples in each of the K micro-batches."""
    weights: tuple[Number, ...]
    """Weight of each micro-batch in the accumulated gradient."""
    weighting: str
    """Rule for the weights, the name of a function, or "numbers"."""
    strategy: str
    """How gradients accumulate, such as "accumulate", or "summed-loss" for one backward over the summed losses."""
    device: str
    """Torch device; several are joined by " and "."""
    dtype: str
    """Data type in which the gradients were computed."""
    seed: int
    """Seed of the random number generators."""
    mode: str
    """Training or evaluation mode of the model; "as is" where none was set."""
    autocast: str | None = None
    """Data type of autocast; None where autocast was off."""
    losses: Losses = field(default_factory=Losses)
    """Losses of both strategies."""
    reference: Reference = Reference.FULL
    """How the full batch was run."""
    reference_failed: tuple[Reference, ...] = ()
    """Ways to run the full batch that did not fit into memory."""
    rounded: tuple[str, ...] = ()
    """Products whose float32 inputs were rounded before they were multiplied: "matmul tf32"."""
    part: tuple[int, ...] = ()
    """Sizes of the two micro-batches of a smaller batch that decided or showed the cause; empty where none did."""
    in_evaluation: tuple[str, ...] = ()
    """Layers in evaluation mode beside others in training mode: "6 BatchNorm2d"."""
    targets: CountedTargets | None = None
    """The targets that the weighting `tokens` counted in the full batch; None under another weighting."""

    @property
    def steps(self) -> int:
        """K, the number of micro-batches."""
        return len(self.micro_batches)


@dataclass(frozen=True)
class TraceRow(JsonRecord):
    """The state after one micro-batch."""

    micro_batch: int
    """k, counted from 1."""
    gradient: Number
    """Norm of the accumulated gradient; its value in a model of one element."""
    movement: Number
    """Norm of the change of the weights since the window began."""
    backward: int
    """Backward passes so far."""
    step: int
    """Optimizer steps so far."""
    zero_grad: int
    """Calls of `zero_grad` so far."""


@dataclass(frozen=True)
class TraceStep(JsonRecord):
    """The step of SGD after the window; of a model of one element the value stands in place of each norm."""

    lr: Number
    """Learning rate."""
    before: Number
    """Norm of the weights before the step."""
    after_full: Number
    """Norm of the weights after a step with the full batch's gradient."""
    after_accumulated: Number
    """Norm of the weights after a step with the accumulated gradient."""
    weights_difference: Number
    """Norm of the difference between both."""
    scalar: bool
    """Whether the model has one element."""


@dataclass(frozen=True)
class Trace(JsonRecord):
    """The micro-batches and the step that `--trace` shows."""

    rows: tuple[TraceRow, ...]
    """One row per micro-batch."""
    step: TraceStep
    """The optimizer step after the last one."""


@dataclass(frozen=True, repr=False)
class Verdict(Answer):
    """The answer to "does accumulation compute the full-batch gradient?", with everything that it rests on."""

    kind: ClassVar[Literal["verdict"]] = "verdict"
    """The word for it in documents."""
    written = (*Answer.written, "accepted")

    outcome: Outcome
    """Equivalent, divergent or inconclusive."""
    parameters: tuple[ParameterComparison, ...]
    """Comparison of each parameter's gradient."""
    run: RunInfo
    """The model, the batch and the arithmetic of the run."""
    method: str
    """How the parameters were decided."""
    resolution: Number
    """Smallest relative difference that could have been seen in the least clear parameter; NaN where there is none."""
    trace: Trace | None = None
    """Gradient and weights after each micro-batch; None without `--trace`."""
    spec: JsonObject | None = None
    """The spec as a mapping; None where the verdict came from a call without one."""
    control_failure: str = ""
    """Why the float64 control was impossible, where it was wanted; "" otherwise."""
    ranks: RankFacts | None = None
    """Measurements over several ranks; None for one process."""
    few_samples: FewSamples | None = None
    """Comparison on a few samples that decided; None where another method decided."""
    modules: tuple[ModuleDifference, ...] = ()
    """Difference of forward outputs by module, in call order; empty where no search ran."""

    @property
    def name(self) -> str:
        """The name that the spec gives itself; "" where it has none."""
        # A call has no spec, and the name of a spec may be None.
        return str((self.spec or {}).get("name") or "")

    @property
    def divergent(self) -> tuple[ParameterComparison, ...]:
        """The parameters that differ, worst first."""
        rows = (row for row in self.parameters if row.outcome is Outcome.DIVERGENT)
        return tuple(sorted(rows, key=badness, reverse=True))
