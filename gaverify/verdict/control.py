"""The control runs that decide what working precision leaves open: float64, and the noise floor of moved weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from gaverify.errors import GaverifyError, ProblemError
from gaverify.passes.devices import return_freed
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import Gradients, PassProbe, PassResult
from gaverify.passes.isolation import generator_states
from gaverify.passes.precision import move_weights, rounding_share, short_name
from gaverify.records.comparison import Method, ParameterComparison, PrecisionLoss
from gaverify.thresholds import BITS_WORTH_A_NOTE, U64
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.comparison import left_between, measure
from gaverify.verdict.criteria import Difference, Grounds, decide
from gaverify.verdict.measurement import Measurement
from gaverify.verdict.sketches import Sums

_PERTURBED_RUNS = 3

MakeWatch = Callable[[Experiment], PassProbe]
"""Makes a probe that looks on at the passes of an experiment."""


@dataclass(frozen=True)
class Watched:
    """What was seen of the float64 runs, so that a diagnosis need not run them again."""

    probe: PassProbe
    """What looked on."""
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
    """The micro-batches' pass, without its gradients."""
    watched: Watched | None = None
    """What looked on at the passes; None: nothing did, or they ran only without it."""

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


def run_in_float64(experiment: Experiment, make_watch: MakeWatch | None = None) -> Float64Run:
    """Runs both strategies in float64 and returns their comparison.

    Args:
        experiment: What to run.
        make_watch: Makes what looks on at both; where they do not run with it, they run without it.

    Raises:
        Exception: Whatever a kernel without float64 raises; the caller then falls back to the noise floor.
    """
    with experiment.in_float64() as exact:
        exact.progress("float64 control: the full batch")
        full, accumulated, watched = _run_watched(exact, make_watch)
        rows = {row.name: row for row in measure(accumulated.gradients, full.gradients, exact.ranks)}
        # The full batch keeps its gradients: the noise floor and the repairs are compared with them.
        accumulated.gradients = dict.fromkeys(accumulated.gradients)  # measured; a diagnosis needs the memory
    return Float64Run(rows, full, accumulated, watched)


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
    with experiment.in_float64() as exact:
        return noise_floor(exact, float64_run.full, U64)


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


def precision_loss(measurement: Measurement, exact: Gradients) -> PrecisionLoss | None:
    """Holds both gradients against the exact one; where bits are lost, those of float32 sums as well.

    Args:
        measurement: In working precision, with its gradients.
        exact: The full batch's gradients in float64.

    Returns:
        None where every gradient is zero in float64.
    """
    ranks = measurement.experiment.ranks
    full = left_between(measurement.full.gradients, exact, ranks)
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
