"""The control runs that decide what working precision leaves open: float64, and the noise floor of moved weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from gaverify.errors import GaverifyError, ProblemError
from gaverify.passes.batching import fresh, move_split
from gaverify.passes.devices import return_freed, widest
from gaverify.passes.gradients import (
    AfterBackward,
    Gradients,
    PassProbe,
    PassResult,
    accumulated_gradients,
    full_batch_gradients,
)
from gaverify.passes.isolation import ModelState, generator_states
from gaverify.passes.precision import convert_weights, move_weights, rounding_share, short_name
from gaverify.passes.problem import Problem
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.task import Task
from gaverify.records.comparison import Method, ParameterComparison, PrecisionLoss
from gaverify.thresholds import BITS_WORTH_A_NOTE, U64
from gaverify.tracebacks import is_own_fault
from gaverify.verdict.comparison import left_between, measure
from gaverify.verdict.criteria import Difference, Grounds, decide

_PERTURBED_RUNS = 3


class Listener(Protocol):
    """Looks on while the micro-batches of the float64 control run, so that a diagnosis need not run them again."""

    def begin(self, task: Task, state: ModelState) -> tuple[PassProbe, AfterBackward]:
        """Returns what looks on, and what is called after each backward."""

    def forget(self) -> None:
        """Drops what was seen: the run ended early."""


@dataclass
class Control:
    """The float64 runs: rows in float64, and the passes that later probes read."""

    rows: dict[str, Difference]
    full: PassResult
    accumulated: PassResult

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


@contextmanager
def in_float64(task: Task, state: ModelState, *, weights: bool = True) -> Iterator[tuple[Task, ModelState]]:
    """Gives the task in float64: the same weights, batch and draws, all on the CPU where a device has no float64.

    Where `weights` is false, the weights stay as they are: they are to be lifted as they are used.
    """
    everywhere = all(widest(device) is torch.float64 for device in task.devices)
    device = None if everywhere else torch.device("cpu")  # None: each tensor where it is
    devices = task.devices if device is None else (device,)
    default = torch.get_default_dtype()
    return_freed()  # what the passes before left in pieces
    with ExitStack() as stack:
        stack.callback(return_freed)
        stack.enter_context(convert_weights(task.modules, device=device, dtype=torch.float64, weights=weights))
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.set_default_dtype, default)
        stack.enter_context(task.autocasting(enabled=False))
        batch = fresh(task.problem.batch, device, torch.float64)
        split = task.problem.split and move_split(task.problem.split, device, torch.float64)
        problem = Problem(task.problem.model, task.problem.loss, batch, split, task.problem.batch_size)
        lifted = replace(task, problem=problem, device=devices[0], devices=devices, autocast=None)
        float64_state = ModelState(task.modules, (task.problem.loss,))
        stack.callback(float64_state.forget)  # who looked on may live longer, and would keep the weights in float64
        yield lifted, float64_state


def float64_control(task: Task, state: ModelState, record: DrawRecord, listener: Listener | None = None) -> Control:
    """Runs both strategies in float64 and returns their comparison.

    Args:
        task: What to run.
        state: Restored in the end.
        record: The full batch's draws.
        listener: Listens to the micro-batches; where that does not run, they run without it.

    Raises:
        Exception: Whatever a kernel without float64 raises; the caller then falls back to the noise floor.
    """
    with in_float64(task, state) as (lifted, lifted_state):
        task.progress("float64 control: the full batch")
        full, _ = full_batch_gradients(lifted, lifted_state, record, lift=True)
        accumulated = _heard(lifted, lifted_state, record, full, listener)
        rows = {row.name: row for row in measure(accumulated.gradients, full.gradients)}
        accumulated.gradients = dict.fromkeys(accumulated.gradients)  # measured; a diagnosis needs the memory
    return Control(rows, full, accumulated)


def _heard(
    task: Task, state: ModelState, record: DrawRecord, full: PassResult, listener: Listener | None
) -> PassResult:
    """The accumulated pass in float64, listened to where that is possible."""
    if listener is not None:
        try:
            probe, note = listener.begin(task, state)
            return accumulated_gradients(task, state, record, full, lift=True, probe=probe, after_backward=note)
        except Exception as error:
            if is_own_fault(error):
                raise
            listener.forget()
    return accumulated_gradients(task, state, record, full, lift=True)


def control_floor(task: Task, state: ModelState, record: DrawRecord, control: Control) -> dict[str, float]:
    """Returns the noise floor of the float64 control: its full batch with each weight moved by one unit roundoff."""
    with in_float64(task, state) as (lifted, lifted_state):
        return noise_floor(lifted, lifted_state, record, control.full, U64, lift=True)


def judge_by_control(
    working: Mapping[str, Difference],
    control: Control,
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
        for name, row in control.rows.items()
    ]


def noise_floor(
    task: Task, state: ModelState, record: DrawRecord, full: PassResult, unit: float, *, lift: bool = False
) -> dict[str, float]:
    """Returns per parameter how far the full-batch gradient moves when each weight moves by one unit roundoff.

    The largest of three runs, each with its own random signs; the weights come back bit for bit.
    """
    floor = {name: 0.0 for name in task.parameters}
    weights = list(task.parameters.values())
    shares = [rounding_share(weight, unit) for weight in weights]
    restore = generator_states()
    for run in range(_PERTURBED_RUNS):
        task.progress(f"noise floor: run {run + 1} of {_PERTURBED_RUNS}")
        with move_weights(weights, shares, run):
            moved_run, _ = full_batch_gradients(task, ModelState(task.modules, (task.problem.loss,)), record, lift=lift)
        for row in measure(moved_run.gradients, full.gradients):
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


class Measured(NamedTuple):
    """The full-batch pass in working precision, its draws, and the state that it began with."""

    full: PassResult
    record: DrawRecord
    state: ModelState


def precision_loss(
    task: Task, passes: Measured, exact: Gradients, full: Gradients, accumulated: Gradients
) -> PrecisionLoss | None:
    """Holds both gradients against the exact one; where bits are lost, those of float32 sums as well.

    Args:
        task: What is verified.
        passes: What another accumulation needs.
        exact: The full batch's gradients in float64.
        full: The same in working precision.
        accumulated: Those of the micro-batches.

    Returns:
        None where every gradient is zero in float64.
    """
    loss = PrecisionLoss(
        short_name(lowest_precision(task)), left_between(full, exact), left_between(accumulated, exact)
    )
    if not math.isfinite(loss.full + loss.accumulated):
        return None
    if loss.bits_lost < BITS_WORTH_A_NOTE or task.strategy != "accumulate":
        return loss
    return replace(loss, in_float32=left_between(_summed_in_float32(task, passes), exact))


def lowest_precision(task: Task) -> torch.dtype:
    """Returns the least precise dtype among the trainable parameters."""
    dtypes = {parameter.dtype.to_real() for parameter in task.parameters.values()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _summed_in_float32(task: Task, passes: Measured) -> Gradients:
    """Accumulates once more, each micro-batch's gradient added to a float32 sum: the remedy for lost bits."""
    sums: dict[str, torch.Tensor | None] = dict.fromkeys(task.parameters)

    def add(_: int) -> None:
        for name, parameter in task.parameters.items():
            if parameter.grad is not None:
                so_far = sums[name]
                part = parameter.grad.to(torch.promote_types(parameter.grad.dtype, torch.float32))
                sums[name] = part if so_far is None else so_far + part
                parameter.grad = None

    accumulated_gradients(task, passes.state, passes.record, passes.full, after_backward=add)
    return sums
