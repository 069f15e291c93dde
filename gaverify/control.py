"""The control runs that decide what working precision leaves open: float64, and the noise floor of moved weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from gaverify.batching import fresh
from gaverify.comparison import WORKING_UNITS, Difference, judged, measure
from gaverify.errors import GaverifyError
from gaverify.gradients import Gradients, PassResult, Task, accumulated_gradients, full_batch_gradients
from gaverify.isolation import ModelState, generator_states
from gaverify.precision import converted, unit_roundoff
from gaverify.problem import Problem
from gaverify.randomness import DrawRecord
from gaverify.results import Outcome, ParameterComparison

U32, U64 = unit_roundoff(torch.float32), unit_roundoff(torch.float64)
# Code that casts to float32 where the lift does not reach (NumPy, a fused kernel) leaves float32 rounding in the
# control: a difference of a few u32 there is rounding still. The smallest true fault on record is 6e-5 (design, 4).
_CAPPED = 4.0 * U32
# Largest Δ/floor seen on equivalent models 9.7, smallest on faulty ones 4e5 (design, section 4.3). Between the two
# thresholds nothing is claimed.
_FLOOR_EQUIVALENT, _FLOOR_DIVERGENT = 32.0, 320.0
_PERTURBED_RUNS = 3
# A gradient this far below the model's largest one is a sum that cancels; float64 leaves 1e-16 of its terms.
VANISHING = 1e-9


@dataclass
class Control:
    """The float64 runs: rows in float64, and the passes that later probes read."""

    rows: dict[str, Difference]
    full: PassResult
    accumulated: PassResult


@contextmanager
def in_float64(task: Task, state: ModelState) -> Iterator[tuple[Task, ModelState]]:
    """Gives the task in float64: the same weights, batch and draws, on the CPU where the device has no float64."""
    device = torch.device("cpu") if task.device.type == "mps" else task.device
    default = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(converted(task.modules, device=device, dtype=torch.float64))
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.set_default_dtype, default)
        if task.autocast is not None:
            stack.enter_context(torch.autocast(task.device.type, enabled=False))
        batch = fresh(task.problem.batch, device, torch.float64)
        problem = Problem(task.problem.model, task.problem.loss, batch, task.problem.split, task.problem.batch_size)
        lifted = replace(task, problem=problem, device=device, autocast=None)
        yield lifted, ModelState(task.modules, (task.problem.loss,))


def float64_control(task: Task, state: ModelState, record: DrawRecord) -> Control:
    """Runs both strategies in float64 and returns their comparison.

    Raises:
        Exception: Whatever a kernel without float64 raises; the caller then falls back to the noise floor.
    """
    with in_float64(task, state) as (lifted, lifted_state):
        task.progress("float64 control: the full batch")
        full, _ = full_batch_gradients(lifted, lifted_state, record, lift=True)
        accumulated = accumulated_gradients(lifted, lifted_state, record, full, lift=True)
        rows = {row.name: row for row in measure(accumulated.gradients, full.gradients)}
        accumulated.gradients = dict.fromkeys(accumulated.gradients)  # measured; a diagnosis needs the memory
    return Control(rows, full, accumulated)


def vanishing(rows: Sequence[ParameterComparison]) -> bool:
    """Whether a gradient that is zero but for float64's own rounding is what diverges.

    Its difference may be exactly zero in low precision (everything rounded to the same bits) and then cannot shrink.
    """
    largest = max((row.reference_norm for row in rows if math.isfinite(row.reference_norm)), default=0.0)
    return any(
        row.outcome is Outcome.DIVERGENT and max(row.reference_norm, row.accumulated_norm) <= VANISHING * largest
        for row in rows
    )


def control_floor(task: Task, state: ModelState, record: DrawRecord, control: Control) -> dict[str, float]:
    """Returns the noise floor of the float64 control: its full batch with each weight moved by one unit roundoff."""
    with in_float64(task, state) as (lifted, lifted_state):
        return noise_floor(lifted, lifted_state, record, control.full, U64, lift=True)


def judge_by_control(
    working: Mapping[str, Difference], control: Control, scales: Mapping[str, float], working_unit: float,
    floor: Mapping[str, float] | None = None,
) -> list[ParameterComparison]:  # fmt: skip
    """Decides every parameter by how its difference shrank from working precision to float64.

    Rounding where Δ64 ≤ max(16 u64 · scale, sqrt(u64 / u) · Δ, 4 u32 · scale, 32 floor64); a fault otherwise.
    """
    shrink = math.sqrt(U64 / working_unit) if working_unit > U64 else 0.0
    rows = []
    for name, row in control.rows.items():
        scale = max(row.scale, scales.get(name, 0.0))
        before = working[name].difference
        explained = shrink * before if math.isfinite(before) else 0.0
        allowed = max(WORKING_UNITS * U64 * scale, explained, _CAPPED * scale)
        allowed = max(allowed, _FLOOR_EQUIVALENT * floor[name]) if floor is not None else allowed
        outcome = Outcome.EQUIVALENT if row.difference <= allowed else Outcome.DIVERGENT
        rows.append(judged(row, outcome, "float64-control", allowed, before))
    return rows


def noise_floor(
    task: Task, state: ModelState, record: DrawRecord, full: PassResult, unit: float, *, lift: bool = False
) -> dict[str, float]:
    """Returns per parameter how far the full-batch gradient moves when each weight moves by one unit roundoff.

    The largest of three runs, each with its own random signs; the weights come back bit for bit.
    """
    floor = {name: 0.0 for name in task.parameters}
    restore = generator_states()
    for run in range(_PERTURBED_RUNS):
        task.progress(f"noise floor: run {run + 1} of {_PERTURBED_RUNS}")
        with perturbed(task, unit, run):
            moved, _ = full_batch_gradients(task, ModelState(task.modules, (task.problem.loss,)), record, lift=lift)
        for row in measure(moved.gradients, full.gradients):
            if math.isfinite(row.difference):
                floor[row.name] = max(floor[row.name], row.difference)
    restore()
    return floor


def judge_by_floor(
    working: Mapping[str, Difference], floor: Mapping[str, float], scales: Mapping[str, float], unit: float
) -> list[ParameterComparison]:
    """Decides every parameter by its difference over its noise floor; between the thresholds it stays inconclusive."""
    rows = []
    for name, row in working.items():
        smallest = WORKING_UNITS * unit * max(row.scale, scales.get(name, 0.0))
        allowed = max(smallest, _FLOOR_EQUIVALENT * floor[name])
        outcome = Outcome.DIVERGENT
        capped = _CAPPED * max(row.scale, scales.get(name, 0.0)) if unit <= U64 else 0.0
        if row.difference <= allowed:
            outcome = Outcome.EQUIVALENT
        elif row.difference <= capped:  # a float64 model whose code casts to float32: moved weights do not show it
            outcome, allowed = Outcome.EQUIVALENT, capped
        elif row.difference <= max(smallest, _FLOOR_DIVERGENT * floor[name]):
            outcome = Outcome.INCONCLUSIVE
        rows.append(judged(row, outcome, "noise-floor", allowed))
    return rows


@contextmanager
def perturbed(task: Task, unit: float, run: int = 0) -> Iterator[None]:
    """Moves each weight up or down by one unit in the last place, by a coin of its own."""
    kept = {name: parameter.detach().clone() for name, parameter in task.parameters.items()}
    generator = torch.Generator().manual_seed(run)
    try:
        with torch.no_grad():
            for parameter in task.parameters.values():
                real = torch.view_as_real(parameter.data) if parameter.is_complex() else parameter.data
                coin = torch.randint(0, 2, real.shape, generator=generator).to(real.device, real.dtype)
                real.add_(real * (coin * 2 - 1), alpha=2 * unit)
        yield
    finally:
        with torch.no_grad():
            for name, parameter in task.parameters.items():
                parameter.data.copy_(kept[name])


def failure_sentence(error: BaseException) -> str:
    """Returns one line on why a control run was not possible."""
    text = str(error).strip().splitlines()
    name = "" if isinstance(error, GaverifyError) else f"{type(error).__name__}: "
    return name + (text[0] if text else "no message")


def gradients_exist(gradients: Gradients) -> bool:
    """Whether any parameter has a gradient."""
    return any(gradient is not None for gradient in gradients.values())
