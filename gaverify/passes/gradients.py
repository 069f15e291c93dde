"""The two strategies: the gradient of the full batch in one backward pass, and the accumulated one in K.

Shapes: B samples in K micro-batches of n_k; a gradient per trainable parameter, of the parameter's shape.

    full         g = ∂ loss(batch) / ∂θ
    accumulated  g = Σ_k w_k ∂ loss(micro_batch_k) / ∂θ

Both start from the same state (`ModelState`) and use the same random draws, dealt out per sample. A window may also be
run by the user's own function: its micro-batches, as many backward passes as it likes, no step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from gaverify.errors import NoMemory, ProblemError
from gaverify.passes.batching import fresh
from gaverify.passes.dispatch import Observed, PassMode
from gaverify.passes.isolation import ModelState, foreign_generator_states, generator_states, seed_torch
from gaverify.passes.randomness import Dealer, DrawRecord, Recomputing, Recorder, named_modules
from gaverify.passes.reference import fit_memory
from gaverify.passes.task import Task, loss_of, micro_batch_of, named_parameters, told_as_users
from gaverify.passes.terms import Terms
from gaverify.passes.weighting import micro_batch_weight
from gaverify.passes.wrappers import keep_reducers, local, over_ranks, settle
from gaverify.records.comparison import Reference
from gaverify.torch_internals import version_of
from gaverify.tracebacks import hands_over

_STATISTIC = 1 << 16  # elements of a buffer that is compared after a pass; larger ones are masks and tables
Gradients = Mapping[str, torch.Tensor | None]
AfterBackward = Callable[[int], None]


class PassProbe:
    """What a probe adds to a pass; k is the micro-batch, None for the full batch. The base class adds nothing."""

    def around(self, k: int | None) -> AbstractContextManager[Any]:
        """Entered after gaverify's own mode: sees every operation before it does, and its result after it."""
        return nullcontext()

    @hands_over
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
    terms: Mapping[str, Terms] = field(default_factory=dict)
    foreign: tuple[Any, ...] = ()
    foreign_draws_differ: bool = False
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


def full_batch_gradients(
    task: Task,
    state: ModelState,
    record: DrawRecord | None = None,
    *,
    lift: bool = False,
    probe: PassProbe | None = None,
) -> tuple[PassResult, DrawRecord]:
    """Returns the gradient of the whole batch from one backward pass, and the random draws that it made.

    Args:
        task: What to run.
        state: Restored in the end, so that whatever runs next starts equal.
        record: Draws of an earlier pass to be used again (the control runs); None records them.
        lift: Raise casts inside the model to float64.
        probe: What a control experiment adds.

    Raises:
        ProblemError: The model or loss raised, or the loss cannot be differentiated.
        NoMemory: It does not fit; where `task.fitting` was asked to, the ways that need less have been tried.
    """
    while True:
        try:
            return _full_batch(task, state, record, lift, probe or PassProbe())
        except NoMemory as error:
            # a probe has seen a part of the pass already
            if probe is not None or not task.fitting.falls_through(task.device):
                raise NoMemory(f"{error}{_way_that_needs_less(task)}") from error
        gc.collect()  # here the exception is gone, and with it the frames that held what the pass had made
        task.progress(f"the full batch with {task.fitting.way}")


def _way_that_needs_less(task: Task) -> str:
    """Names offloading, where it is not what was tried and the device's memory is not the host's."""
    tried = task.fitting.way is Reference.OFFLOAD
    return "" if tried or task.device.type == "cpu" else "; `--reference offload` needs less"


def _full_batch(
    task: Task, state: ModelState, record: DrawRecord | None, lift: bool, probe: PassProbe
) -> tuple[PassResult, DrawRecord]:
    random_draws = Recorder() if record is None else Dealer(record, 0, task.batch_size, task.batch_size)
    mode = PassMode(state, random_draws, lift=lift, observe_terms=not lift)
    with one_pass(task, state):
        known = set(named_parameters(task.problem))
        with told_as_users("the full batch", task):
            batch = fresh(task.problem.batch)
        fit = fit_memory(task.fitting, task.modules, task.device)
        with mode, told_as_users("the full batch", task), probe.around(None), fit:
            loss = loss_of(task, batch, "the full batch")
            probe.backward(None, loss, 1.0)
        _check_none_added(task, known)
        gradients = take_gradients(task)
        terms = _terms(mode.observed, gradients)
        buffers = _buffers(task)
        value, foreign = float(loss.detach()), foreign_generator_states()
    result = PassResult(gradients, value, observed=(mode.observed,), terms=terms, foreign=foreign, buffers=buffers)
    return result, random_draws.record


def _check_none_added(task: Task, known: Collection[str]) -> None:
    """Raises `ProblemError` where a forward has made parameters that get a gradient: nothing would compare them."""
    named = named_parameters(task.problem)
    added = [f"`{name}`" for name, tensor in named.items() if name not in known and tensor.grad is not None]
    if added:
        what, them = ("parameters", "them") if len(added) > 1 else ("the parameter", "it")
        raise ProblemError(
            f"the forward adds {what} {', '.join(added)}, which no optimizer made before it trains; "
            f"make {them} in `__init__`, or run one forward first: `loss(model, batch)`"
        )


@hands_over  # calls `backward` on the summed loss
def accumulated_gradients(
    task: Task,
    state: ModelState,
    record: DrawRecord,
    reference: PassResult,
    *,
    lift: bool = False,
    after_backward: AfterBackward | None = None,
    probe: PassProbe | None = None,
    own: Collection[int] | None = None,
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
        own: The micro-batches that are run, of the K; None runs all. A rank runs its own ones only.
    """
    record.rewind()
    probe = probe or PassProbe()
    losses, weights, observed, dealers, total, foreign = [], [], [], [], None, False
    with one_pass(task, state):
        at_start = generator_states()
        for k, (start, stop) in enumerate(task.bounds()):
            if own is not None and k not in own:
                continue
            at_start()
            if task.strategy != "accumulate":
                seed_torch(k)  # each graph its own states, by which its draws are known again in the backward
            where = f"micro-batch {k + 1} of {task.steps} (samples {start} to {stop - 1})"
            dealer = Dealer(record, start, stop, task.batch_size)
            dealers.append(dealer)
            mode = PassMode(state, dealer, lift=lift)
            micro_batch = fresh(micro_batch_of(task, start, stop, where))
            with mode, told_as_users(where, task), probe.around(k):
                loss = loss_of(task, micro_batch, where)
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
            with PassMode(state, Recomputing(dealers), lift=lift), told_as_users("the summed loss", task):
                total.backward()
        gradients = take_gradients(task)
        buffers = _buffers(task)
    values = torch.stack([loss.double() for loss in losses]).tolist() if losses else []
    value = sum(weight * loss for weight, loss in zip(weights, values, strict=True))
    return PassResult(
        gradients, value, tuple(values), tuple(weights), tuple(observed), foreign_draws_differ=foreign, buffers=buffers
    )


def forward_pass(
    task: Task,
    state: ModelState,
    record: DrawRecord,
    k: int | None,
    *,
    lift: bool = False,
    probe: PassProbe | None = None,
) -> torch.Tensor:
    """Runs one forward without a backward, from the restored state, and returns its loss.

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
    with one_pass(task, state):
        batch = fresh(task.problem.batch if k is None else micro_batch_of(task, start, stop, where))
        with mode, told_as_users(where, task), probe.around(k):
            return loss_of(task, batch, where)


@contextmanager
def one_pass(task: Task, state: ModelState) -> Iterator[None]:
    """One strategy's pass: no gradients at its start, the state and the generators restored at its end."""
    restore = generator_states()
    with ExitStack() as stack:
        stack.enter_context(named_modules(task.modules))
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
            if over_ranks() is not None:
                settle(task.modules)
            state.restore()
            keep_reducers()
            restore()


def take_gradients(task: Task) -> Gradients:
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


def _terms(observed: Observed, gradients: Gradients) -> dict[str, Terms]:
    """Σ|terms| of the gradients that the backward formed as sums."""
    by_name = {name: observed.terms.of(gradient) for name, gradient in gradients.items()}
    return {name: terms for name, terms in by_name.items() if terms is not None}


Strategy = Callable[[Any, list[Any]], None]


@hands_over
def gradients_of_strategy(
    task: Task, state: ModelState, record: DrawRecord, strategy: Strategy, own: Collection[int]
) -> PassResult:
    """Returns what `strategy(model, micro_batches)` leaves in `.grad`.

    Args:
        task: What to run.
        state: Restored in the end.
        record: The full batch's draws.
        strategy: The user's function.
        own: The micro-batches that it is given.

    Raises:
        ProblemError: It raised, changed a parameter, or the model draws random numbers, which cannot be dealt out to
            micro-batches that nobody sees.
    """
    if record.count:
        raise ProblemError(
            "the model draws random numbers, and a strategy of your own does not say for which micro-batch; "
            "verify it with mode='eval', or switch its dropout off"
        )
    parts = []
    for k, (start, stop) in enumerate(task.bounds()):
        if k in own:
            parts.append(fresh(micro_batch_of(task, start, stop, f"micro-batch {k + 1} of {task.steps}")))
    mode = PassMode(state, Recorder())
    with one_pass(task, state):
        before = _versions(task)
        with mode, told_as_users("the strategy", task), task.autocasting():
            strategy(task.problem.model, parts)
        pairs = zip(task.parameters.values(), before, _versions(task), strict=True)
        if not all(state.unchanged(parameter) for parameter, old, new in pairs if new != old):
            raise ProblemError(
                "the strategy changes parameters, as an optimizer's step does; "
                "let it end with the gradients in `.grad`, which are what is compared"
            )
        gradients = take_gradients(task)
    return PassResult(gradients, float("nan"), observed=(mode.observed,))


def _versions(task: Task) -> list[int]:
    with torch.no_grad():
        return [version_of(local(parameter)) for parameter in task.parameters.values()]
