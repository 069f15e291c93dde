"""Both strategies as they run, and how far their gradients are apart."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property

import torch

from gaverify.errors import ProblemError
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import PassResult
from gaverify.passes.nesting import leaves
from gaverify.passes.precision import coarsest_unit, rounded_products, rounded_unit
from gaverify.passes.terms import Terms
from gaverify.records.comparison import Outcome, relative_total
from gaverify.thresholds import SHOWS_UNITS, U32
from gaverify.verdict.comparison import measure
from gaverify.verdict.criteria import Difference, decide_at_once
from gaverify.verdict.non_finite import first_non_finite
from gaverify.verdict.sketches import GradientSketches, SketchedPass, Sketches, sketch_full_batch, window_of

WORTH, WORTH_SAMPLES = 1 << 16, 1024
"""Elements of parameters and batch, or samples, from which on a part is cheaper than what it saves."""


@dataclass
class Measurement:
    """The two passes of an experiment, and the difference of each parameter's gradients."""

    experiment: Experiment
    """What was run, with the draws that the full batch made."""
    full: PassResult
    """The full-batch pass; its gradients are None once they are freed."""
    accumulated: PassResult
    """The micro-batches' pass; its gradients are None once they are freed."""
    differences: dict[str, Difference]
    """Parameter name → gradient norms and their difference, in working precision."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Parameter name → 2-norm of Σ|terms| of its gradient's sum, where one was seen."""
    plain_terms: Mapping[str, float] = field(default_factory=dict)
    """The entries of `terms` whose operation was a plain sum."""
    sketch: SketchedPass | None = None
    """Of the full batch's gradient; None: no diagnosis is expected."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase → seconds."""

    @cached_property
    def unit(self) -> float:
        """Unit roundoff of the coarsest arithmetic that gradients were computed in."""
        return working_unit(self.experiment, self.full, self.accumulated)

    @cached_property
    def rounded_products(self) -> dict[str, str]:
        """Kind of product → format that its float32 inputs are rounded to; empty: none is rounded."""
        return rounded_product_kinds(self.experiment, self.full, self.accumulated)

    @property
    def coarse_unit(self) -> float:
        """`unit`, or that of products whose inputs are rounded where it is coarser."""
        return max(self.unit, rounded_unit(self.rounded_products))

    @property
    def dtype(self) -> torch.dtype:
        """The least precise dtype among the trainable parameters."""
        return lowest_precision(self.experiment)

    @property
    def window(self) -> Sketches | None:
        """The micro-batches' gradients in sketches; None where they were not listened to."""
        return self.sketch.shares if self.sketch is not None else None

    @property
    def has_gradients(self) -> bool:
        """Whether the gradients are still there."""
        return any(gradient is not None for gradient in self.full.gradients.values())

    def free_gradients(self) -> None:
        """Frees the gradients, before the next passes need the memory."""
        for result in (self.full, self.accumulated):
            result.gradients = dict.fromkeys(result.gradients)


def measure_strategies(experiment: Experiment, *, with_sketch: bool = False, find_worst: bool = False) -> Measurement:
    """Runs the full batch, then the K micro-batches with the same draws, and measures their difference.

    Args:
        experiment: What to run; its draws are recorded by this.
        with_sketch: Keep a sketch of the full batch's gradient where a diagnosis is to be expected; and, below float32,
            of every micro-batch's, from which the weights are fitted.
        find_worst: Look for the worst element of every parameter, not only where the difference may be no rounding.

    Raises:
        ProblemError: The loss of the full batch is not finite, or the user's code raised.
    """
    started = time.perf_counter()
    experiment.progress("the full batch")
    experiment, full = experiment.record()
    full_at = time.perf_counter()
    if not math.isfinite(full.loss):
        raise ProblemError(
            f"the loss of the full batch is {full.loss}; a gradient of it proves nothing: "
            "check the inputs, the targets (are all ignored?) and the learning state"
            + (f"; {where}" if (where := first_non_finite(experiment)) else "")
        )
    coarse = max(working_unit(experiment, full), rounded_unit(rounded_product_kinds(experiment, full)))
    with_sketch = with_sketch and experiment.strategy == "accumulate" and experiment.steps > 1
    # In float32 the difference itself tells; below it only the fit of the window's weights does.
    listens = with_sketch and coarse > U32 and is_large(experiment)
    accumulation = _accumulate(experiment, full, listens, find_worst)
    accumulated_at = time.perf_counter()
    experiment = experiment.with_counts_of(accumulation.result.draws)
    if accumulation.result.draws.ambiguous and not _agree_in_float32(experiment, full, accumulation):
        # Draws that agree in shape alone may belong to other samples than their order says.
        experiment, accumulation = _choose_reading(experiment, full, accumulation, listens, find_worst)
    window = (
        window_of(experiment, full, accumulation.result, accumulation.sketches) if accumulation.sketches.taken else None
    )
    measurement = Measurement(
        experiment,
        full,
        accumulation.result,
        {row.name: row for row in accumulation.differences},
        *_fetch_terms(full.terms),
    )
    # An equivalent verdict in float32 does not pay for the sketch, which is a pass over all gradients.
    if window is not None or (with_sketch and shows_divergence(measurement, coarse)):
        measurement.sketch = sketch_full_batch(experiment, full, window)
    measurement.seconds = {
        "full_batch": full_at - started,
        "accumulated": accumulated_at - full_at,
        "comparison": time.perf_counter() - accumulated_at,
    }
    return measurement


@dataclass(frozen=True)
class _Accumulation:
    """The micro-batches' pass, the sketches of what each gave, and how it differs from the full batch."""

    result: PassResult
    sketches: GradientSketches
    differences: list[Difference]

    @property
    def total(self) -> float:
        """The differences that could be measured, added up."""
        return sum(row.difference for row in self.differences if math.isfinite(row.difference))


def _accumulate(experiment: Experiment, full: PassResult, listens: bool, find_worst: bool) -> _Accumulation:
    sketches = GradientSketches(experiment)
    with sketches.listening() if listens else nullcontext() as note:
        result = experiment.micro_batches(full, after_backward=note)
    differences = measure(result.gradients, full.gradients, experiment.ranks, find_worst=find_worst)
    return _Accumulation(result, sketches, differences)


def _agree_in_float32(experiment: Experiment, full: PassResult, accumulation: _Accumulation) -> bool:
    """Whether all gradients are equal within float32's rounding at least: then no draw went to the wrong sample."""
    unit = working_unit(experiment, full, accumulation.result)
    if unit > U32:
        return False
    return all(row.outcome is Outcome.EQUIVALENT for row in decide_at_once(accumulation.differences, unit, {}))


def _choose_reading(
    experiment: Experiment, full: PassResult, first: _Accumulation, listens: bool, find_worst: bool
) -> tuple[Experiment, _Accumulation]:
    """Deals the draws out in the second reading (`randomness`), and keeps it where it brings the gradients closer.

    Only the right reading can make the gradients of an equivalent model agree.
    """
    by_contents = experiment.with_second_reading()
    # numbers that were not meant for these samples may raise: indices out of range, for example
    with suppress(ProblemError):
        second = _accumulate(by_contents, full, listens, find_worst)
        if second.total < first.total:
            return by_contents, second
    return experiment, first


def _fetch_terms(terms: Mapping[str, Terms]) -> tuple[dict[str, float], dict[str, float]]:
    """Σ|terms| of all sums and of plain ones, fetched from each device at once: each fetch is a synchronisation."""
    devices: dict[torch.device, list[str]] = {}
    for name, term_values in terms.items():
        devices.setdefault(term_values.scale.device, []).append(name)
    numbers: dict[str, float] = {}
    for names in devices.values():
        values = torch.stack([terms[name].scale.double() for name in names]).tolist()
        numbers |= dict(zip(names, values, strict=True))
    return numbers, {name: number for name, number in numbers.items() if terms[name].plain}


def shows_divergence(measurement: Measurement, unit: float) -> bool:
    """Whether the difference is clearly more than rounding: then a part of the batch, or a diagnosis, is worth it."""
    experiment, rows = measurement.experiment, measurement.differences.values()
    finite = [(row.difference, row.reference) for row in rows if math.isfinite(row.difference)]
    return experiment.strategy == "accumulate" and experiment.steps > 1 and relative_total(finite) > SHOWS_UNITS * unit


def is_large(experiment: Experiment) -> bool:
    """Whether a batch is so large that float64 on all of it costs more than what a part of it shows."""
    tensors = [leaf for _, leaf in leaves(experiment.problem.batch) if isinstance(leaf, torch.Tensor)]
    elements = sum(tensor.numel() for tensor in (*experiment.parameters.values(), *tensors))
    return elements >= WORTH or experiment.batch_size >= WORTH_SAMPLES


def working_unit(experiment: Experiment, *passes: PassResult) -> float:
    """Returns the unit roundoff of the coarsest arithmetic that gradients were computed in during some passes."""
    carried = (dtype for result in passes for observed in result.observed for dtype in observed.arithmetic.dtypes)
    dtypes = (parameter.dtype for parameter in experiment.parameters.values())
    return coarsest_unit([*dtypes, experiment.autocast, *carried])


def rounded_product_kinds(experiment: Experiment, *passes: PassResult) -> dict[str, str]:
    """Returns the kinds of products that ran in some passes and round their float32 inputs, and to what."""
    products = {kind for result in passes for kind in result.observed[0].arithmetic.products}
    if lowest_precision(experiment) is not torch.float32:
        return {}
    return {kind: to for device in experiment.devices for kind, to in rounded_products(device, products).items()}


def lowest_precision(experiment: Experiment) -> torch.dtype:
    """Returns the least precise dtype among the trainable parameters."""
    dtypes = {parameter.dtype.to_real() for parameter in experiment.parameters.values()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
