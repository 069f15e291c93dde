"""Both strategies as they run, how far their gradients are apart, and what `--trace` shows of each micro-batch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from gaverify.errors import GaverifyError, ProblemError
from gaverify.passes.calls import OperationMode, operation_name
from gaverify.passes.dispatch import TermNorm
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import Gradients, PassProbe, PassResult
from gaverify.passes.layouts import leaves
from gaverify.passes.precision import coarsest_unit, rounded_products, rounded_unit, short_name, unit_roundoff
from gaverify.passes.sketches import sketch
from gaverify.passes.user_code import valid_targets
from gaverify.records.outcomes import NotCompared, Outcome, PrecisionLoss, relative_total
from gaverify.records.verdict import Trace, TraceRow, TraceStep
from gaverify.thresholds import BACKWARD_TOO, HOST_BOUND, HOST_BOUND_CPU, LARGEST_COPY, SAME_NUMBER, SHOWS_UNITS, U32
from gaverify.torch_internals import tree_leaves
from gaverify.tracebacks import calling_frame, display_path
from gaverify.verdict.comparison import measure
from gaverify.verdict.criteria import Difference, decide_at_once
from gaverify.verdict.sketches import GradientSketches, SketchedPass, Sketches, sketch_full_batch, window_of

# Where numbers stop to be finite: in the model's own tensors, in the batch, or at an operation of the forward.


# Constants that code writes on purpose (a mask of −∞), and memory that nothing was written to yet.
_MEANT = (
    "masked_fill",
    "full",
    "fill",
    "new_full",
    "scalar_tensor",
    "empty",
    "new_empty",
    "_to_copy",
    "copy_",
    "where",
)


def first_non_finite(experiment: Experiment) -> str:
    """Returns a clause that names the first parameter, buffer, input or operation that is not finite; empty if none."""
    for root in experiment.modules:
        for kind, named in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
            for name, tensor in named:
                if _spoilt(tensor, nan_only=kind == "buffer"):
                    return f"{kind} `{name}` is not finite before anything runs: was it ever initialised?"
    for path, leaf in leaves(experiment.problem.batch):
        if isinstance(leaf, torch.Tensor) and _spoilt(leaf, nan_only=True):
            return f"the batch holds NaN{f' in `{path}`' if str(path) else ''}"
    listener = _Listener()
    with suppress(GaverifyError):  # what was found until then counts
        experiment.forward(None, listener)
    return listener.describe_first


class _Listener(PassProbe):
    """Notes the first operation that makes NaN of numbers; where none does, the first that makes infinity of them."""

    def __init__(self) -> None:
        self._nan = self._infinite = ""

    @property
    def describe_first(self) -> str:
        """The first failure in words: a NaN, else an infinite value; empty where there was none."""
        return self._nan or self._infinite

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Listens to one forward."""
        with OperationMode(self._ran):
            yield

    def _ran(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if self._nan or operation_name(func).rstrip("_").startswith(_MEANT):
            return result
        inputs, outputs = tree_leaves((args, kwargs)), tree_leaves(result)
        if any(_spoilt(leaf, nan_only=True) for leaf in outputs) and not any(_spoilt(i, nan_only=True) for i in inputs):
            self._nan = self._name_call(func, "NaN")
        elif not self._infinite and any(map(_spoilt, outputs)) and not any(map(_spoilt, inputs)):
            self._infinite = self._name_call(func, "infinity")
        return result

    def _name_call(self, func: Any, what: str) -> str:
        frame = calling_frame()
        place = f" at {display_path(frame[0])}:{frame[1]}" if frame is not None else ""
        return f"`{operation_name(func)}`{place} is the first to give {what}"


def _spoilt(leaf: Any, *, nan_only: bool = False) -> bool:
    if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()) or leaf.is_nested:
        return False
    values = leaf.detach()
    values = values.to_dense() if values.layout is not torch.strided else values
    return bool(values.isnan().any()) if nan_only else not bool(values.isfinite().all())


# Both strategies as they run, and how far their gradients are apart.


WORTH, WORTH_SAMPLES = 1 << 16, 1024
"""Elements of parameters and batch, or samples, from which on a part is cheaper than what it saves."""
_SAMPLES, _SHARE, _LEAST = 4, 8, 2


@dataclass(frozen=True)
class FirstRuns:
    """The parts of a first run, in the precision that the user trains in, which are needed after float32 decides."""

    dtype: torch.dtype
    """The least precise dtype among the trainable parameters."""
    autocast: torch.dtype | None
    """The dtype of `torch.autocast`; None: no autocast."""
    rounded: dict[str, str]
    """Kind of product → format that its float32 inputs were rounded to."""
    losses: tuple[float, float]
    """The losses of the full batch, and accumulated."""
    differences: dict[str, Difference]
    """Parameter name → gradient norms and their difference."""
    may_have_wrong_weights: bool = False
    """Whether the micro-batches' weights or targets are not alike."""
    sketches: tuple[torch.Tensor, ...] = ()
    """The sketches of both gradients where parameters are below float32, else none."""


@dataclass
class Measurement:
    """The two passes of an experiment, and the difference of each parameter's gradients."""

    experiment: Experiment
    """The experiment that was run, with the draws that the full batch made."""
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
    """The sketch of the full batch's gradient; None: no diagnosis is expected."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase → seconds."""
    first_runs: FirstRuns | None = None
    """The runs in the precision that the user trains in; None: this measurement is in it."""
    precision: PrecisionLoss | None = None
    """Relative errors of the first runs' gradients, where their parameters are below float32."""
    decides_in_float32: bool = False
    """Whether both strategies are to run once more in float32, which decides in the place of a few samples."""

    @cached_property
    def unit(self) -> float:
        """Unit roundoff of the coarsest arithmetic that gradients were computed in."""
        return self.experiment.coarsest(working_unit(self.experiment, self.full, self.accumulated))

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

    @property
    def in_users_precision(self) -> FirstRuns:
        """The runs in the precision that the user trains in: these, or the ones before them."""
        if self.first_runs is not None:
            return self.first_runs
        return FirstRuns(
            self.dtype,
            self.experiment.autocast,
            self.rounded_products,
            (self.full.loss, self.accumulated.loss),
            self.differences,
        )

    def leave_to_float32(self) -> FirstRuns:
        """Returns what is kept of these runs, and frees their gradients."""
        is_uneven = weight_among_two(self.experiment, self.accumulated) is None
        sketches = _sketch_both(self) if unit_roundoff(self.dtype) > U32 else ()
        self.free_gradients()
        return replace(self.in_users_precision, may_have_wrong_weights=is_uneven, sketches=sketches)

    def free_gradients(self) -> None:
        """Frees the gradients, before the next passes need the memory."""
        for result in (self.full, self.accumulated):
            result.gradients = dict.fromkeys(result.gradients)


def measure_strategies(
    experiment: Experiment, *, with_sketch: bool = False, find_worst: bool | None = None, repeats: bool = False
) -> Measurement:
    """Runs the full batch, then the K micro-batches with the same draws, and measures their difference.

    Args:
        experiment: The experiment to run; its draws are recorded by this.
        with_sketch: Keep a sketch of the full batch's gradient where a diagnosis is to be expected; and, below float32,
            of every micro-batch's, from which the weights are fitted.
        find_worst: As `measure` takes it.
        repeats: Whether `measure_again` may follow: nothing is sketched where it is cheaper than a few samples.

    Raises:
        ProblemError: The loss of the full batch is not finite, or the user's code raised.
    """
    started = time.perf_counter()
    experiment.progress("the full batch")
    experiment, full = experiment.record()
    with_sketch = with_sketch and experiment.strategy == "accumulate" and experiment.steps > 1
    # In float32 the difference itself tells; below it only the fit of the window's weights does.
    is_low = with_sketch and working_unit(experiment, full) > U32 and is_large(experiment)
    repeats = repeats and is_low and is_cheaper_in_float32(experiment, full)
    wanted = _Wanted(with_sketch, is_low and not repeats, find_worst, repeats)
    return _measure_after(experiment, full, started, wanted)


def measure_again(first_runs: FirstRuns, experiment: Experiment) -> Measurement:
    """Measures once more with the same draws, in float32, or without rounded products.

    Args:
        first_runs: The runs in the user's precision.
        experiment: The same experiment in the other precision.

    Raises:
        ProblemError: The loss of the full batch is not finite, or the user's code raised.
    """
    started = time.perf_counter()
    experiment.progress("float32: the full batch")
    full = experiment.full_batch()
    with_sketch = experiment.strategy == "accumulate" and experiment.steps > 1
    wanted = _Wanted(with_sketch, with_sketch and first_runs.may_have_wrong_weights)
    measurement = _measure_after(experiment, full, started, wanted)
    measurement.first_runs = first_runs
    if first_runs.sketches:
        full_error, error = map(_relative_error, first_runs.sketches, _sketch_both(measurement))
        if math.isfinite(full_error + error):
            # whether a sum in float32 regains it is not tried: the whole batch is as any number of samples
            name, samples = short_name(first_runs.dtype), experiment.batch_size
            measurement.precision = PrecisionLoss(name, full_error, error, samples=samples)
    return measurement


def _sketch_both(measurement: Measurement) -> tuple[torch.Tensor, ...]:
    results, ranks = (measurement.full, measurement.accumulated), measurement.experiment.ranks
    return tuple(sketch(result.gradients.values(), ranks).double() for result in results)


def _relative_error(rounded: torch.Tensor, exact: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(rounded.to(exact.device) - exact) / torch.linalg.vector_norm(exact))


class _Wanted(NamedTuple):
    """The optional parts of a measurement, beside its differences."""

    sketch: bool
    """A sketch of the full batch's gradient where a diagnosis is to be expected."""
    window: bool
    """Sketches of every micro-batch's gradient."""
    find_worst: bool | None = None
    """As `measure` takes it."""
    repeats: bool = False
    """Nothing that decides: `measure_again` follows."""


def _measure_after(experiment: Experiment, full: PassResult, started: float, wanted: _Wanted) -> Measurement:
    """Runs the micro-batches after the full batch, and measures the difference."""
    full_at = time.perf_counter()
    if not math.isfinite(full.loss):
        raise ProblemError(
            f"the loss of the full batch is {full.loss}; a gradient of it proves nothing: "
            "check the inputs, the targets (are all ignored?) and the learning state"
            + (f"; {where}" if (where := first_non_finite(experiment)) else "")
        )
    coarse = max(working_unit(experiment, full), rounded_unit(rounded_product_kinds(experiment, full)))
    accumulation = _accumulate(experiment, full, wanted)
    accumulated_at = time.perf_counter()
    experiment = experiment.with_counts_of(accumulation.result.draws)
    # a gradient on one side alone, or one that is not finite, is no question of precision
    repeats = wanted.repeats and all(row.why in (None, NotCompared.UNUSED) for row in accumulation.differences)
    is_open = accumulation.result.draws.ambiguous and not repeats and not experiment.on_ranks
    if is_open and not _agree_in_float32(experiment, full, accumulation):
        # Draws that agree in shape alone may belong to other samples than their order says.
        experiment, accumulation = _choose_reading(experiment, full, accumulation, wanted)
    window = window_of(experiment, full, accumulation.result, accumulation.sketches) if wanted.window else None
    measurement = Measurement(
        experiment,
        full,
        accumulation.result,
        {row.name: row for row in accumulation.differences},
        *_fetch_terms(full.terms),
        decides_in_float32=repeats,
    )
    # An equivalent verdict in float32 does not pay for the sketch, which is a pass over all gradients.
    if window is not None or (wanted.sketch and not repeats and shows_divergence(measurement, coarse)):
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


def _accumulate(experiment: Experiment, full: PassResult, wanted: _Wanted) -> _Accumulation:
    sketches = GradientSketches(experiment)
    with sketches.listening() if wanted.window else nullcontext() as note:
        result = experiment.micro_batches(full, after_backward=note)
    find_worst = False if wanted.repeats else wanted.find_worst
    differences = measure(result.gradients, full.gradients, experiment.ranks, find_worst=find_worst)
    return _Accumulation(result, sketches, differences)


def _agree_in_float32(experiment: Experiment, full: PassResult, accumulation: _Accumulation) -> bool:
    """Whether all gradients are equal within float32's rounding at least: then no draw went to the wrong sample."""
    unit = working_unit(experiment, full, accumulation.result)
    if unit > U32:
        return False
    return all(row.outcome is Outcome.EQUIVALENT for row in decide_at_once(accumulation.differences, unit, {}))


def _choose_reading(
    experiment: Experiment, full: PassResult, first: _Accumulation, wanted: _Wanted
) -> tuple[Experiment, _Accumulation]:
    """Deals the draws out in the second reading (`randomness`), and keeps it where it brings the gradients closer.

    Only the right reading can make the gradients of an equivalent model agree. Where something else makes them differ,
    the contents of rows tell.
    """
    by_contents = experiment.with_second_reading()
    # numbers that were not meant for these samples may raise: indices out of range, for example
    with suppress(ProblemError):
        second = _accumulate(by_contents, full, wanted)
        report = second.result.draws
        if (report.is_found and not report.unaligned) or second.total < first.total:
            return by_contents, second
    return experiment, first


def _fetch_terms(terms: Mapping[str, TermNorm]) -> tuple[dict[str, float], dict[str, float]]:
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


def weight_among_two(experiment: Experiment, accumulated: PassResult) -> float | None:
    """Returns the weight that a sample would have among two; None where the micro-batches do not tell.

    Their weights, or their shares of the targets, are not alike then. A weight that is a little wrong, and a target
    more or less, are seen where all micro-batches are run.
    """
    weights = accumulated.weights
    if experiment.steps < 2 or experiment.batch_size < 2 or len(weights) != experiment.steps:
        return None
    targets = valid_targets(accumulated.observed)
    if len({None if count is None else count / n for count, n in zip(targets, experiment.sizes, strict=True)}) > 1:
        return None
    if all(
        math.isclose(w, n / experiment.batch_size, rel_tol=SAME_NUMBER)
        for w, n in zip(weights, experiment.sizes, strict=True)
    ):
        return 1 / 2
    return 1.0 if all(weight == 1.0 for weight in weights) else None


def count_few(experiment: Experiment) -> int:
    """Returns how many samples are looked into: an eighth of the batch, four at most and two at least.

    Two show a fault of structure as well as any number does; four still do where two of them are alike.
    """
    return max(_LEAST, min(_SAMPLES, experiment.batch_size // _SHARE))


def is_cheaper_in_float32(experiment: Experiment, full: PassResult) -> bool:
    """Whether both strategies once more in float32 cost less than a few samples: the host is the limit, not the work.

    Args:
        experiment: The experiment that was run.
        full: The full-batch pass, which counted its operations and their work: no clock is asked.
    """
    passes, passes_of_few = experiment.steps + 1, 2 * (1 + count_few(experiment))  # these in two precisions
    half = (p.numel() for p in experiment.parameters.values() if unit_roundoff(p.dtype) > U32)
    if passes > passes_of_few or sum(half) > LARGEST_COPY:
        return False
    arithmetic = full.observed[0].arithmetic
    largest = HOST_BOUND_CPU if experiment.device.type == "cpu" else HOST_BOUND
    return BACKWARD_TOO * arithmetic.work <= largest * arithmetic.operations


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


# `--trace`: what each micro-batch leaves behind, and the optimizer step after the window.
#
# Shapes: P elements of all trainable parameters together; a one-element model is shown by value, others by norm.


def trace_passes(measurement: Measurement, lr: float) -> Trace:
    """Returns the accumulated gradient after every backward pass, and the weights after a step of SGD with both."""
    experiment = measurement.experiment
    before = [parameter.detach().clone() for parameter in experiment.parameters.values()]
    scalar = sum(value.numel() for value in before) == 1
    rows: list[TraceRow] = []

    def note(k: int) -> None:
        gradients = [parameter.grad for parameter in experiment.parameters.values()]
        moved = [
            parameter.detach() - old for parameter, old in zip(experiment.parameters.values(), before, strict=True)
        ]
        rows.append(TraceRow(k + 1, _summary(gradients, scalar), _summary(moved, False), k + 1, 0, 1))

    if experiment.strategy == "accumulate":
        experiment.micro_batches(measurement.full, after_backward=note)
    else:
        gradients = list(measurement.accumulated.gradients.values())
        rows.append(TraceRow(experiment.steps, _summary(gradients, scalar), 0.0, 1, 0, 1))
    after_full = _step_once(experiment, measurement.full.gradients, lr)
    after_accumulated = _step_once(experiment, measurement.accumulated.gradients, lr)
    differences = [a - b for a, b in zip(after_accumulated, after_full, strict=True)]
    step = TraceStep(
        lr,
        _summary(before, scalar),
        _summary(after_full, scalar),
        _summary(after_accumulated, scalar),
        _summary(differences, False),
        scalar,
    )
    return Trace(tuple(rows), step)


def _step_once(experiment: Experiment, gradients: Gradients, lr: float) -> list[torch.Tensor]:
    """Returns the weights after one step of SGD; the model keeps its own."""
    # A copy: the step must not move the user's weights.
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in experiment.parameters.items()}
    for name, weight in weights.items():
        weight.grad = gradients[name]
    torch.optim.SGD(weights.values(), lr=lr).step()
    return [weight.detach() for weight in weights.values()]


def _summary(tensors: list[torch.Tensor | None] | list[torch.Tensor], scalar: bool) -> float:
    """The value of a one-element model, the Euclidean norm over everything otherwise."""
    present = [t.to_dense() if t.layout is not torch.strided else t for t in tensors if t is not None]
    if scalar and present:
        return float(present[0].reshape(()))
    norms = [torch.linalg.vector_norm(t if t.is_complex() else t.double()) for t in present]
    return math.sqrt(sum(float(norm) ** 2 for norm in norms))
