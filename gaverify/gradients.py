"""The two strategies: the gradient of the full batch in one backward pass, and the accumulated one in K.

Shapes: B samples in K micro-batches of n_k; a gradient per trainable parameter, of the parameter's shape.

    full         g = ∂ loss(batch) / ∂θ
    accumulated  g = Σ_k w_k ∂ loss(micro_batch_k) / ∂θ

Both start from the same state (`ModelState`) and use the same random draws, dealt out per sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gaverify.batching import fresh, other_reading, take
from gaverify.dispatch import Observed, PassMode
from gaverify.errors import GaverifyError, ProblemError
from gaverify.isolation import ModelState, foreign_generator_states, generator_states
from gaverify.randomness import Dealer, DrawRecord, Recomputing, Recorder
from gaverify.tracebacks import user_frame
from gaverify.weighting import Weighing, micro_batch_weight

_STATISTIC = 1 << 16  # elements of a buffer that is compared after a pass; larger ones are masks and tables
Gradients = dict[str, torch.Tensor | None]
AfterBackward = Callable[[int], None]


@dataclass(kw_only=True)
class Task(Weighing):
    """A problem made ready: parameters by name, sizes, and the settings that both strategies share."""

    parameters: dict[str, nn.Parameter]
    modules: list[nn.Module]
    device: torch.device
    autocast: torch.dtype | None = None
    strategy: str = "accumulate"
    math_kernels: bool = False
    progress: Callable[[str], None] = field(default=lambda _: None)

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Yields `start, stop` of each micro-batch."""
        start = 0
        for size in self.sizes:
            yield start, start + size
            start += size


class PassProbe:
    """What a probe adds to a pass; k is the micro-batch, None for the full batch. The base class adds nothing."""

    def around(self, k: int | None) -> AbstractContextManager[Any]:
        """Entered after gaverify's own mode: sees every operation before it does, and its result after it."""
        return nullcontext()

    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Puts the gradients of `weight` · `loss` into `.grad`."""
        (loss * weight if weight != 1.0 else loss).backward()  # type: ignore[no-untyped-call]


@dataclass
class PassResult:
    """Gradients by parameter name (None where the parameter had none), the loss, and what the pass showed."""

    gradients: Gradients
    loss: float
    micro_losses: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    observed: tuple[Observed, ...] = ()
    term_scales: Mapping[str, torch.Tensor] = field(default_factory=dict)
    foreign: tuple[Any, ...] = ()
    foreign_draws_differ: bool = False
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


def full_batch_gradients(
    task: Task, state: ModelState, record: DrawRecord | None = None, *, lift: bool = False,
    probe: PassProbe | None = None,
) -> tuple[PassResult, DrawRecord]:  # fmt: skip
    """Returns the gradient of the whole batch from one backward pass, and the random draws that it made.

    Args:
        task: What to run.
        state: Restored in the end, so that whatever runs next starts equal.
        record: Draws of an earlier pass to be used again (the control runs); None records them.
        lift: Raise casts inside the model to float64.
        probe: What a control experiment adds.

    Raises:
        ProblemError: The model or loss raised, or the loss cannot be differentiated.
    """
    random_draws = Recorder(task.batch_size) if record is None else Dealer(record, 0, task.batch_size, task.batch_size)
    mode = PassMode(state, random_draws, lift=lift, observe_terms=not lift)
    probe = probe or PassProbe()
    with _pass(task, state):
        batch = fresh(task.problem.batch)
        with mode, _blame("the full batch", task), probe.around(None):
            loss = _loss(task, batch, "the full batch")
            probe.backward(None, loss, 1.0)
        gradients = _collect(task)
        scales = _scales(mode.observed, gradients)
        buffers = _buffers(task)
        value, foreign = float(loss.detach()), foreign_generator_states()
    result = PassResult(gradients, value, observed=(mode.observed,), term_scales=scales, foreign=foreign,
                        buffers=buffers)  # fmt: skip
    return result, random_draws.record


def accumulated_gradients(
    task: Task,
    state: ModelState,
    record: DrawRecord,
    reference: PassResult,
    *,
    lift: bool = False,
    after_backward: AfterBackward | None = None,
    probe: PassProbe | None = None,
) -> PassResult:
    """Returns the gradient that K micro-batches accumulate, each loss multiplied by its micro-batch weight.

    Args:
        task: What to run; `task.strategy` "summed-loss" sums the weighted losses and calls `backward` once.
        state: The micro-batches see each other's changes, as in training; restored in the end.
        record: The full batch's draws, dealt out per sample.
        reference: The full-batch pass, whose target counts the weighting "tokens" needs.
        lift: As in `full_batch_gradients`.
        after_backward: Called with k after each backward pass.
        probe: What a control experiment adds.
    """
    record.rewind()
    probe = probe or PassProbe()
    losses, weights, observed, dealers, total, foreign = [], [], [], [], None, False
    with _pass(task, state):
        at_start = generator_states()
        for k, (start, stop) in enumerate(task.bounds()):
            at_start()
            if task.strategy != "accumulate":
                torch.manual_seed(k)  # each graph its own states, by which its draws are known again in the backward
            where = f"micro-batch {k + 1} of {task.steps} (samples {start} to {stop - 1})"
            dealer = Dealer(record, start, stop, task.batch_size)
            dealers.append(dealer)
            mode = PassMode(state, dealer, lift=lift)
            micro_batch = fresh(_micro_batch(task, start, stop, where))
            with mode, _blame(where, task), probe.around(k):
                loss = _loss(task, micro_batch, where)
                weight = micro_batch_weight(task, k, micro_batch, mode.observed, reference.observed[0])
                if task.strategy == "accumulate":
                    probe.backward(k, loss, weight)
                else:
                    total = loss * weight if total is None else total + loss * weight
            dealer.finish()
            foreign = foreign or foreign_generator_states() != reference.foreign
            losses.append(loss.detach())
            weights.append(weight)
            observed.append(mode.observed)
            task.progress(where)
            if after_backward is not None and task.strategy == "accumulate":
                after_backward(k)
        if total is not None:
            with PassMode(state, Recomputing(dealers), lift=lift), _blame("the summed loss", task):
                total.backward()
        gradients = _collect(task)
        buffers = _buffers(task)
    values = torch.stack([loss.double() for loss in losses]).tolist() if losses else []
    value = sum(weight * loss for weight, loss in zip(weights, values, strict=True))
    return PassResult(
        gradients, value, tuple(values), tuple(weights), tuple(observed), foreign_draws_differ=foreign, buffers=buffers
    )


def forward_pass(
    task: Task, state: ModelState, record: DrawRecord, k: int | None, *, lift: bool = False,
    probe: PassProbe | None = None,
) -> torch.Tensor:  # fmt: skip
    """Runs one forward without a backward, from the restored state, and returns its loss, detached.

    Args:
        task: What to run.
        state: Restored in the end.
        record: The full batch's draws, dealt out per sample; rewind it before the first micro-batch.
        k: The micro-batch; None for the full batch.
        lift: As in `full_batch_gradients`.
        probe: What looks on.
    """
    start, stop = (0, task.batch_size) if k is None else list(task.bounds())[k]
    where = "the full batch" if k is None else f"micro-batch {k + 1} of {task.steps} (samples {start} to {stop - 1})"
    mode = PassMode(state, Dealer(record, start, stop, task.batch_size), lift=lift)
    probe = probe or PassProbe()
    with _pass(task, state):
        batch = fresh(task.problem.batch if k is None else _micro_batch(task, start, stop, where))
        with mode, _blame(where, task), probe.around(k):
            return _loss(task, batch, where).detach()


@contextmanager
def _pass(task: Task, state: ModelState) -> Iterator[None]:
    """One strategy's pass: no gradients at its start, the state and the generators restored at its end."""
    restore = generator_states()
    with ExitStack() as stack:
        if task.math_kernels:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        try:
            for parameter in task.parameters.values():
                parameter.grad = None
            yield
        finally:
            for parameter in task.parameters.values():
                parameter.grad = None
            state.restore()
            restore()


@contextmanager
def _blame(where: str, task: Task) -> Iterator[None]:
    """Turns whatever the user's code raises into a sentence that says on which samples and where."""
    try:
        yield
    except (GaverifyError, KeyboardInterrupt):
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _out_of_memory(where, task) from error
    except Exception as error:
        text = str(error).strip()
        if "can't allocate memory" in text or "out of memory" in text:
            raise _out_of_memory(where, task) from error
        frame = user_frame(error)
        hint = ""
        if "more than 1 value per channel" in text:
            hint = "; a BatchNorm needs at least two samples per micro-batch: lower steps or raise the batch size"
        raise ProblemError(
            f"the model or loss raised on {where}: {type(error).__name__}: {text or 'no message'}"
            + (f" ({frame})" if frame else "")
            + (hint or _other_reading(task))
        ) from error


def _other_reading(task: Task) -> str:
    problem = task.problem
    settled = problem.batch_size is not None or problem.split is not None
    return "" if settled else other_reading(problem.batch, task.batch_size)


def _out_of_memory(where: str, task: Task) -> ProblemError:
    advice = "a smaller --batch-size" if where == "the full batch" else "more steps or a smaller --batch-size"
    elsewhere = "" if task.device.type == "cpu" else ", or --device cpu"
    return ProblemError(f"out of memory on {task.device} while running {where}; try {advice}" + elsewhere)


def _micro_batch(task: Task, start: int, stop: int, where: str) -> Any:
    with _blame(f"split for {where}", task):
        return take(task.problem.batch, start, stop, task.batch_size, task.problem.split)


def _loss(task: Task, batch: Any, where: str) -> torch.Tensor:
    """Runs the user's loss and returns it as a scalar tensor with a graph."""
    with ExitStack() as stack:
        if task.autocast is not None:
            stack.enter_context(torch.autocast(task.device.type, task.autocast))
        value = task.problem.loss(task.problem.model, batch)
    if isinstance(value, Mapping) and "loss" in value:
        value = value["loss"]
    elif not isinstance(value, torch.Tensor) and hasattr(value, "loss"):
        value = value.loss
    if not isinstance(value, torch.Tensor):
        raise ProblemError(
            f"the loss on {where} is a {type(value).__name__}; return a scalar tensor, or an object with `.loss`"
            + (" (without `.item()`)" if isinstance(value, float) else "")
        )
    if value.numel() != 1:
        raise ProblemError(
            f"the loss on {where} has shape {list(value.shape)}; reduce it to a scalar, for example with `.mean()`"
        )
    if value.is_complex():
        raise ProblemError(f"the loss on {where} is complex; return a real scalar, for example `.abs().mean()`")
    if not value.requires_grad:
        raise ProblemError(
            f"the loss on {where} has no graph: no trainable parameter took part in it "
            "(look for `.detach()`, `.item()`, `torch.no_grad()`, or parameters that are all frozen)"
        )
    return value.reshape(())


def _collect(task: Task) -> Gradients:
    """Takes the gradients over without a copy: the parameters let go of them right after."""
    return {name: parameter.grad for name, parameter in task.parameters.items()}


def _buffers(task: Task) -> dict[str, torch.Tensor]:
    """The floating-point buffers as a pass leaves them; large ones are no statistics."""
    return {
        name: buffer.detach().clone()
        for module in task.modules
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and buffer.numel() <= _STATISTIC
    }


def _scales(observed: Observed, gradients: Gradients) -> dict[str, torch.Tensor]:
    """Σ|terms| of the gradients that the backward formed as sums, found by the memory that they still lie in."""
    scales = {}
    for name, gradient in gradients.items():
        if gradient is not None and gradient.layout is torch.strided:
            numel, scale = observed.term_scales.get(gradient.data_ptr(), (-1, None))
            if scale is not None and numel == gradient.numel():
                scales[name] = scale
    return scales


def seed_everything(seed: int) -> None:
    """Seeds the torch, Python and NumPy generators."""
    import sys

    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
