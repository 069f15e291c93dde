"""Decides what working precision leaves open: by float64, by sketches, on a few samples, or by moved weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from gaverify.errors import GaverifyError, ProblemError
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import Gradients, PassProbe, PassResult
from gaverify.passes.isolation import generator_states
from gaverify.passes.lifting import LiftedWeights, lift_weights
from gaverify.passes.precision import coarsest_unit, move_weights, return_freed, rounding_share, short_name
from gaverify.passes.sketches import SINGULAR_FLOAT32, SINGULAR_FLOAT64, fit_weights
from gaverify.records.outcomes import FewSamples, Method, Outcome, ParameterComparison, PrecisionLoss
from gaverify.thresholds import (
    BITS_WORTH_A_NOTE,
    CAPPED_UNITS,
    COHERENT,
    FEW_UNITS,
    GROUPINGS,
    LOST_UNITS,
    SHOWS_GROUPINGS,
    SHOWS_UNITS,
    U32,
    U64,
)
from gaverify.tracebacks import hands_over, is_own_fault
from gaverify.verdict.comparison import left_between, measure
from gaverify.verdict.criteria import Difference, Grounds, decide, fine, zero_in_float64
from gaverify.verdict.measurement import Measurement, count_few, weight_among_two
from gaverify.verdict.sketches import GradientSketches, Sums, fit_runs

# Decides without a float64 control of the whole batch: a window by sketches of gradients, or by a few samples.
#
#     weights     g_full ≈ Σ w_k g_k with the weights that were used, and no other weights explain what is left
#     structure   a few samples at once and one by one, in float32, and in float64 where that leaves more than its own
#                 rounding: a fault of structure shows in any few samples
#     the rest    ‖g_full − Σ w_k g_k‖, compared with what the same few samples differ by in working precision, at once
#                 and one by one: that is rounding, since the higher precision says that they agree
#
# Rounding is not coherent with the micro-batches' gradients, and a wrong weight is nothing else. So c is known better
# than any single parameter is: one weight of four that is 3 % off is seen in bfloat16, where parameters are
# 2 to 90 % apart. Moving every weight by a unit roundoff is no measure of rounding below float32: it moves a
# bfloat16 gradient by 10 to 90 %.
#
# In float32 two samples settle the few parameters that are open: structure and rounding as above. Only both together
# settle anything, and only differences below 1e-5 of the gradient, or of a gradient that is zero there. (The bias of
# attention's keys has one: it shifts the logits of a softmax.) The rest goes to the float64 control of the whole
# batch.


def judge_few_samples(measurement: Measurement) -> tuple[Outcome, FewSamples] | None:
    """Returns what a window's weights, and a few of its samples, show; None where these have no gradient.

    Divergent is what no rounding of these samples explains: a part of the batch, or all of it, then tells in float64.

    Args:
        measurement: With the window's gradients in sketches.

    Raises:
        Exception: Whatever a kernel without float64, or a model that takes no single sample, raises.
    """
    experiment, window = measurement.experiment, measurement.window
    assert window is not None
    measured = _measure_few(measurement)
    if measured is None:
        return None
    few, alike = measured
    # Relative to rounding, which is not coherent with the micro-batches' gradients, wrong weights stand out in the fit.
    best = window.used.new_tensor(fit_runs([window]).weights)
    residual, coherent = window.left_by(window.used), window.relative(window.columns @ (best - window.used))
    lost = window.relative(window.accumulated - window.columns @ window.used)
    off = float((best / window.used - 1).abs().max())
    few = replace(few, rest=residual, weights=off, lost=lost, allowed=GROUPINGS * few.rounding + lost)
    unit = coarsest_unit(parameter.dtype for parameter in experiment.parameters.values())
    added_up = lost <= LOST_UNITS * unit * math.sqrt(experiment.steps)
    # Each of the four can be true of a fault: only together they leave nothing but rounding.
    if added_up and alike and coherent <= COHERENT * residual and residual <= GROUPINGS * few.rounding:
        return Outcome.EQUIVALENT, few
    shows = residual > SHOWS_GROUPINGS * max(few.rounding, few.error)
    return Outcome.DIVERGENT if shows else Outcome.INCONCLUSIVE, few


class _FewGradients(NamedTuple):
    """Sketches of the gradient of the first samples: at once (S,), and of each (S, samples)."""

    at_once: torch.Tensor
    singles: torch.Tensor


def _measure_few(measurement: Measurement) -> tuple[FewSamples, bool] | None:
    """Returns facts of the first samples, and whether they have the same gradient at once and one by one.

    None where they have no gradient; where it is not the same one, their error stands for their rounding.
    """
    experiment = measurement.experiment
    count = count_few(experiment)
    experiment.progress(f"{count} samples")
    # Where they are the first micro-batch, their gradient at once was sketched when that was run.
    at_once = _first_column(measurement, count)
    rounded = _sketch_samples(measurement, experiment, count, at_once)
    is_real = not any(parameter.is_complex() for parameter in experiment.parameters.values())
    # Float64 costs three to five times as much as float32, which runs first where it is finer than what is asked about.
    for precision in (torch.float32, torch.float64) if is_real else (torch.float64,):
        experiment.progress(f"{short_name(precision)}: {count} samples")
        is_float64 = precision is torch.float64
        exact = _sketch_in_precision(measurement, precision, count)
        norm = float(torch.linalg.vector_norm(exact.at_once))
        if not math.isfinite(norm) or norm == 0.0:
            return None
        singular = SINGULAR_FLOAT64 if is_float64 else SINGULAR_FLOAT32
        used = torch.ones_like(exact.at_once[:count])
        shares = used.new_tensor(fit_weights(exact.singles, exact.at_once, singular=singular, weights=used).weights)
        structure = float(torch.linalg.vector_norm(exact.at_once - exact.singles @ shares)) / norm
        # In float32 they agree where a batch in float32 would: what is a little more may be its rounding or a fault.
        alike = structure <= (CAPPED_UNITS if is_float64 else FEW_UNITS) * U32
        if alike or structure > SHOWS_UNITS * U32:
            break
    error = float(torch.linalg.vector_norm(rounded.at_once - exact.at_once)) / norm
    difference = float(torch.linalg.vector_norm(rounded.at_once - rounded.singles @ shares)) / norm
    return FewSamples(count, structure, difference if alike else error, error), alike


def _first_column(measurement: Measurement, count: int) -> torch.Tensor | None:
    """The sketch of the first micro-batch's gradient before its weight, where that micro-batch is these samples."""
    window = measurement.window
    # Another weight than a power of two rounds the gradient once more.
    if window is None or measurement.experiment.sizes[0] != count or math.frexp(float(window.used[0]))[0] != 0.5:
        return None
    return window.columns[:, 0]


def _sketch_samples(
    measurement: Measurement,
    experiment: Experiment,
    count: int,
    at_once: torch.Tensor | None = None,
    *,
    lifted: bool = False,
) -> _FewGradients:
    """Sketches the gradients of the first samples.

    Args:
        measurement: The measurement of the whole batch.
        experiment: Its own, or that in a higher precision.
        count: How many samples.
        at_once: Their gradient at once, where it is known.
        lifted: Whether weights are lifted as they are used.
    """
    run_sketches = [] if at_once is None else [at_once.unsqueeze(1)]
    for sizes in [(count,), (1,) * count][len(run_sketches) :]:
        gradient_sketches = GradientSketches(experiment, release=True)
        # the lifted weights hand each gradient over, so that none is formed as a whole
        probes = [LiftedWeights(experiment, gradient_sketches.add_gradient)] if lifted else []
        with gradient_sketches.listening(handed_over=probes[0].places if probes else ()) as note:
            cut = experiment.with_cut(sizes, 1.0)
            cut.micro_batches(measurement.full, *probes, after_backward=note)
        run_sketches.append(gradient_sketches.columns())
    return _FewGradients(run_sketches[0][:, 0], run_sketches[1])


def _sketch_in_precision(measurement: Measurement, precision: torch.dtype, count: int) -> _FewGradients:
    """The sketches in a higher precision, with weights lifted as they are used; in a copy where that does not go."""
    experiment = measurement.experiment
    with suppress(ProblemError), experiment.in_precision(precision, weights=False) as exact:
        return _sketch_samples(measurement, exact, count, lifted=True)
    with experiment.in_precision(precision) as exact:
        return _sketch_samples(measurement, exact, count)


class _Only(PassProbe):
    """Forms the gradients of some parameters alone: those of the other weights are up to a third of a pass."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)

    @hands_over
    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Puts these gradients of `weight` · `loss` into `.grad`."""
        (loss * weight if weight != 1.0 else loss).backward(inputs=self._parameters)  # type: ignore[no-untyped-call]


class Rounding(NamedTuple):
    """How far working precision rounds a gradient, and whether float64 leaves nothing of that."""

    size: float
    zero: bool


def rounding_of_two_samples(
    experiment: Experiment, full: PassResult, names: Sequence[str], share: float, zero: float
) -> dict[str, Rounding] | None:
    """Returns how far working precision rounds the gradient of the first two samples, for the parameters `names`.

    None where these samples at once and one by one have not the same gradient in float64, or may have got other draws.

    Args:
        experiment: The experiment to run, of two samples at least.
        full: The full-batch pass.
        names: The parameters whose gradients are looked at.
        share: The weight of a sample: 1/2 of a mean, 1 of a sum.
        zero: The norm up to which a gradient may be float64's rounding.

    Raises:
        Exception: Whatever a kernel without float64, or a model that takes no single sample, raises.
    """
    # The few open parameters alone: forming all gradients would be most of what the two passes cost.
    probes: list[PassProbe] = [_Only([experiment.parameters[name] for name in names])]
    doubts: list[bool] = []  # of each pass: whether a sample may have got other draws than its own

    def gradients(two: Experiment, count: int, weight: float) -> Gradients:
        part = two.with_cut((2 // count,) * count, weight).micro_batches(full, *probes)
        doubts.append(part.draws.is_doubtful)
        return {name: part.gradients[name] for name in names}

    experiment.progress("two samples")
    rounded: Gradients = {}
    with suppress(ProblemError):
        rounded = gradients(experiment, 1, 1.0)
    # reentrant activation checkpointing forms all gradients or none
    if not rounded or any(gradient is None for gradient in rounded.values()):
        probes.clear()
        rounded = gradients(experiment, 1, 1.0)
    with experiment.in_float64() as exact:
        exact.progress("float64: two samples")
        at_once = gradients(exact, 1, 1.0)
        rows = measure(gradients(exact, 2, share), at_once, exact.ranks)
        if not _agree(rows, zero) or any(doubts):
            return None
        on_device = {name: g if g is None else g.to(exact.parameters[name].device) for name, g in rounded.items()}
        differences = measure(on_device, at_once, exact.ranks)
        return {row.name: Rounding(row.difference, row.reference <= zero) for row in differences if row.why is None}


def _agree(rows: Sequence[Difference], zero: float) -> bool:
    """Whether all rows that were measured in float64 are rounding."""
    grounds = Grounds(Method.FLOAT64_CONTROL, U64)
    return all(decide(row, grounds).outcome is Outcome.EQUIVALENT or row.scale <= zero for row in rows)


def decide_open_rows(measurement: Measurement, open_rows: Sequence[Difference]) -> list[ParameterComparison] | None:
    """Returns the records of rows that working precision left open, all equivalent; None where they are not settled.

    The relative rounding error of a mean over B samples is at most that of a mean over two. A sum that is formed term
    by term rounds in proportion to its terms at most, and independent roundings add in squares. A sum over B has B/2
    times it.
    """
    experiment, unit = measurement.experiment, measurement.coarse_unit
    norms = [row.reference for row in measurement.differences.values()]
    share = weight_among_two(experiment, measurement.accumulated)
    small = math.sqrt(unit) * max(filter(math.isfinite, norms), default=0.0)  # what may be rounding of nothing
    if share is None or experiment.reading.by_contents or measurement.accumulated.draws.is_doubtful:
        return None
    if not all(fine(row) or row.scale <= small for row in open_rows):
        return None
    try:
        names, zero = [row.name for row in open_rows], zero_in_float64(norms)
        rounding = rounding_of_two_samples(experiment, measurement.full, names, share, zero)
    except Exception as error:  # single samples that the model does not take, a kernel without float64
        if is_own_fault(error):
            raise
        return None
    if rounding is None:
        return None
    # For a mean the rounding is that of two samples or less; a sum over B has as many terms as B/2 pairs.
    times = 1.0 if share < 1.0 else experiment.batch_size / 2
    roundings = [rounding.get(row.name, Rounding(0.0, zero=False)) for row in open_rows]
    grounds = [Grounds(Method.TWO_SAMPLES, unit, floor=times * each.size, zero=each.zero) for each in roundings]
    decided = [decide(row, roundings) for row, roundings in zip(open_rows, grounds, strict=True)]
    return decided if all(row.outcome is Outcome.EQUIVALENT for row in decided) else None


# The control runs that decide what working precision leaves open: float64, and the noise floor of moved weights.


_PERTURBED_RUNS = 3
_LIFTED = 1 << 22
"""Elements of all weights from which on float64 lifts them as they are used: a copy would take 32 MB."""

MakeWatch = Callable[[Experiment], PassProbe]
"""Makes a probe that looks on at the passes of an experiment."""


@dataclass(frozen=True)
class Watched:
    """Notes from the float64 runs, so that a diagnosis need not run them again."""

    probe: PassProbe
    """The listener of both passes."""
    sums: Sums
    """Sketches of what had accumulated after each backward pass."""


@dataclass
class Float64Run:
    """The float64 runs: rows in float64, and the passes that later probes read."""

    rows: dict[str, Difference]
    """Parameter name → gradient norms and their difference, in float64."""
    full: PassResult
    """The full-batch pass, with its gradients."""
    accumulated: PassResult
    """The micro-batches' pass; its gradients are None unless they were asked for."""
    watched: Watched | None = None
    """The notes of a listener of the passes; None: there was none, or they ran only without it."""
    lifted: bool = False
    """Whether weights were lifted as they were used; else they were converted."""

    def check_losses(self, full: PassResult, accumulated: PassResult) -> None:
        """Refuses a control whose losses are no numbers, although those in working precision are.

        Args:
            full: The full batch in working precision.
            accumulated: The micro-batches in working precision.

        Raises:
            ProblemError: A kernel that has no float64 may say so, or return what the memory held.
        """
        losses = [self.full.loss, *self.accumulated.micro_losses]
        broken = next((loss for loss in losses if not math.isfinite(loss)), None)
        if broken is not None and all(map(math.isfinite, [full.loss, *accumulated.micro_losses])):
            raise ProblemError(f"a loss is {broken} in float64 and finite otherwise: some kernel has no float64")


def run_in_float64(
    experiment: Experiment, make_watch: MakeWatch | None = None, *, keep_gradients: bool = False
) -> Float64Run:
    """Runs both strategies in float64 and returns their comparison.

    Args:
        experiment: The experiment to run.
        make_watch: Makes what looks on at both; where they do not run with it, they run without it.
        keep_gradients: Keep those of the micro-batches, too.

    Raises:
        Exception: Whatever a kernel without float64 raises; the caller then falls back to the noise floor.
    """
    # Fewer weights cost less as a copy than by being lifted for every operation.
    if sum(weight.numel() for weight in experiment.parameters.values()) >= _LIFTED:
        with suppress(ProblemError):  # what does not go with lifted weights goes with converted ones
            return _compare_in_float64(experiment, make_watch, keep_gradients, lifted=True)
    return _compare_in_float64(experiment, make_watch, keep_gradients, lifted=False)


def enter_float64(experiment: Experiment, *, lifted: bool) -> AbstractContextManager[Experiment]:
    """Gives the experiment in float64, with weights that are lifted as they are used, or converted."""
    return lift_weights(experiment, torch.float64) if lifted else experiment.in_float64()


def _compare_in_float64(
    experiment: Experiment, make_watch: MakeWatch | None, keep_gradients: bool, lifted: bool
) -> Float64Run:
    with enter_float64(experiment, lifted=lifted) as exact:
        exact.progress("float64 control: the full batch")
        full, accumulated, watched = _run_watched(exact, make_watch)
        rows = {row.name: row for row in measure(accumulated.gradients, full.gradients, exact.ranks)}
        # The full batch keeps its gradients: the noise floor and the repairs are compared with them.
        if not keep_gradients:
            accumulated.gradients = dict.fromkeys(accumulated.gradients)  # measured; a diagnosis needs the memory
    return Float64Run(rows, full, accumulated, watched, lifted)


def _run_watched(exact: Experiment, make_watch: MakeWatch | None) -> tuple[PassResult, PassResult, Watched | None]:
    """Both passes in float64, watched where that is possible."""
    if make_watch is not None:
        try:
            watched = Watched(make_watch(exact), Sums(exact))
            full = exact.full_batch(watched.probe)
            return_freed()  # the activations of all samples, before a second set of gradients is formed
            return full, exact.micro_batches(full, watched.probe, after_backward=watched.sums.note), watched
        except Exception as error:
            if is_own_fault(error):
                raise
    full = exact.full_batch()
    return_freed()
    return full, exact.micro_batches(full), None


def float64_floor(experiment: Experiment, float64_run: Float64Run) -> dict[str, float]:
    """Returns the noise floor of a float64 run: its full batch with each weight moved by one unit roundoff."""
    with experiment.as_reference() as reference, reference.in_float64() as exact:
        return noise_floor(exact, float64_run.full if reference is experiment else exact.full_batch(), U64)


def judge_by_float64(
    working: Mapping[str, Difference],
    float64_run: Float64Run,
    scales: Mapping[str, float],
    working_unit: float,
    floor: Mapping[str, float] | None = None,
) -> list[ParameterComparison]:
    """Decides every parameter by how its difference shrank from working precision to float64."""
    return [
        decide(
            row,
            Grounds(
                Method.FLOAT64_CONTROL,
                U64,
                terms=scales.get(name, 0.0),
                working=working[name].difference,
                working_unit=working_unit,
                floor=floor[name] if floor is not None else None,
            ),
        )
        for name, row in float64_run.rows.items()
    ]


def noise_floor(experiment: Experiment, full: PassResult, unit: float) -> dict[str, float]:
    """Returns per parameter how far the full-batch gradient moves when each weight moves by one unit roundoff.

    The largest of three runs, each with its own random signs; the weights come back bit for bit.
    """
    floor = {name: 0.0 for name in experiment.parameters}
    weights = list(experiment.parameters.values())
    shares = [rounding_share(weight, unit) for weight in weights]
    restore = generator_states()
    for run in range(_PERTURBED_RUNS):
        experiment.progress(f"noise floor: run {run + 1} of {_PERTURBED_RUNS}")
        with move_weights(weights, shares, run):
            # The state of before would put the weights back that are moved here.
            moved_run = experiment.with_current_state().full_batch()
        for row in measure(moved_run.gradients, full.gradients, experiment.ranks):
            if math.isfinite(row.difference):
                floor[row.name] = max(floor[row.name], row.difference)
    restore()
    return floor


def judge_by_floor(
    working: Mapping[str, Difference], floor: Mapping[str, float], scales: Mapping[str, float], unit: float
) -> list[ParameterComparison]:
    """Decides every parameter by its difference over its noise floor; between the thresholds it stays inconclusive."""
    return [
        decide(row, Grounds(Method.NOISE_FLOOR, unit, terms=scales.get(name, 0.0), floor=floor[name]))
        for name, row in working.items()
    ]


def failure_sentence(error: BaseException) -> str:
    """Returns one line on why a control run was not possible."""
    text = str(error).strip().splitlines()
    name = "" if isinstance(error, GaverifyError) else f"{type(error).__name__}: "
    return name + (text[0] if text else "no message")


def precision_loss(measurement: Measurement, float64_run: Float64Run) -> PrecisionLoss | None:
    """Compares each strategy's gradients with its own in float64; where bits are lost, those of float32 sums as well.

    A fault changes the accumulated gradient in float64 too, so the comparison shows rounding alone.

    Args:
        measurement: In working precision, with its gradients.
        float64_run: Both strategies in float64, with the gradients of both.

    Returns:
        None where every gradient is zero in float64.
    """
    ranks, exact = measurement.experiment.ranks, float64_run.accumulated.gradients
    full = left_between(measurement.full.gradients, float64_run.full.gradients, ranks)
    accumulated = left_between(measurement.accumulated.gradients, exact, ranks)
    loss = PrecisionLoss(short_name(measurement.dtype), full, accumulated)
    if not math.isfinite(loss.full + loss.accumulated):
        return None
    if loss.bits_lost < BITS_WORTH_A_NOTE or measurement.experiment.strategy != "accumulate":
        return loss
    return replace(loss, in_float32=left_between(_sum_in_float32(measurement), exact, ranks))


def _sum_in_float32(measurement: Measurement) -> Gradients:
    """Accumulates once more, each micro-batch's gradient added to a float32 sum: the remedy for lost bits."""
    parameters = measurement.experiment.parameters
    sums: dict[str, torch.Tensor | None] = dict.fromkeys(parameters)

    def add(_: int) -> None:
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                so_far = sums[name]
                part = parameter.grad.to(torch.promote_types(parameter.grad.dtype, torch.float32))
                sums[name] = part if so_far is None else so_far + part
                # Taken away, so that the next backward pass does not add to it in the parameter's own precision.
                parameter.grad = None

    measurement.experiment.micro_batches(measurement.full, after_backward=add)
    return sums
