"""The two strategies: the gradient of the full batch in one backward pass, and the accumulated one in K.

Shapes: B samples in K micro-batches of n_k; a gradient per trainable parameter, of the parameter's shape.

    full         g = ∂ loss(batch) / ∂θ
    accumulated  g = Σ_k w_k ∂ loss(micro_batch_k) / ∂θ

Both start from the same state (`ModelState`) and use the same random draws, dealt out per sample.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gaverify.errors import HiddenDraw, NoMemory, ProblemError
from gaverify.passes.batching import fresh
from gaverify.passes.dispatch import Observed, PassMode, TermNorm
from gaverify.passes.isolation import foreign_generator_states, generator_states, merge_names, seed_torch, storage
from gaverify.passes.randomness import (
    Dealer,
    Dealing,
    DealingReport,
    DrawLedger,
    DrawRecorder,
    Recomputing,
    named_modules,
)
from gaverify.passes.user_code import explain_user_errors, loss_of, micro_batch_of, micro_batch_weight, named_parameters
from gaverify.passes.wrappers import keep_reducers, settle
from gaverify.records.outcomes import Reference
from gaverify.torch_internals import no_dispatch_modes
from gaverify.tracebacks import hands_over

if TYPE_CHECKING:
    from gaverify.passes.experiment import Experiment


# Activations of the full batch that do not stay on the device: kept in host memory until the backward.


_SMALL = 1 << 14  # elements that stay where they are: a transfer costs more than it frees


@contextmanager
def offload_saved(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Moves what autograd saves to the host, and back when the backward asks for it.

    Tensors on a CPU are there already and are left alone. So are parameters and buffers, which stay on the device
    anyway. The transfers are hidden from gaverify's modes: a control run compares the operations of both strategies.
    """
    if device.type == "cpu":
        yield
        return
    weight_storages = {storage(tensor) for root in modules for tensor in (*root.parameters(), *root.buffers())}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.device | None]:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "cpu"
        # A tensor subclass, or one whose memory is kept anyway, is left where it is.
        if not plain or tensor.numel() <= _SMALL or storage(tensor) in weight_storages:
            # detached: a node that saves its own output would otherwise keep itself alive
            return tensor.detach(), None
        with no_dispatch_modes(), torch.no_grad():
            return tensor.to("cpu"), tensor.device

    def unpack(packed: tuple[torch.Tensor, torch.device | None]) -> torch.Tensor:
        tensor, where = packed
        if where is None:
            return tensor
        with no_dispatch_modes(), torch.no_grad():
            return tensor.to(where)

    with saved_tensors_hooks(pack, unpack):
        yield


@dataclass
class Fitting:
    """The way that a verification runs its full batch; all its passes share one, so that what did not fit stays out.

    Args:
        asked: The way that the user asked for.
    """

    asked: Reference = Reference.FULL
    failed: list[Reference] = field(default_factory=list)

    @property
    def way(self) -> Reference:
        """The way that is run now."""
        if self.asked is not Reference.AUTO:
            return self.asked
        return Reference.OFFLOAD if self.failed else Reference.FULL

    def falls_through(self, device: torch.device) -> bool:
        """Notes that memory ran out; returns whether another way is left to try.

        On a CPU the saved activations lie in the host's memory already, so that offloading them would change nothing.
        """
        if self.asked is not Reference.AUTO or self.failed or device.type == "cpu":
            return False
        self.failed.append(Reference.FULL)
        return True


@contextmanager
def fit_memory(fitting: Fitting, modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Runs the forward and the backward inside the way that `fitting` says."""
    if fitting.way is Reference.OFFLOAD:
        with offload_saved(modules, device):
            yield
    else:
        yield


# The two strategies: the gradient of the full batch in one backward pass, and the accumulated one in K.


_STATISTIC = 1 << 16  # elements of a buffer that is compared after a pass; larger ones are masks and tables
Gradients = Mapping[str, torch.Tensor | None]
AfterBackward = Callable[[int], None]


class PassProbe:
    """A listener that may change a pass; k is the micro-batch, None for the full batch. The base class adds nothing."""

    values_differed: bool | None = None
    """Whether values that it replaced in the micro-batches were others before; None: it replaces none."""
    needs_weights = False
    """Whether it listens to gradients of weights, or forms them, so that these cannot be lifted as they are used."""

    def around(self, k: int | None) -> AbstractContextManager[Any]:
        """Entered after gaverify's own mode: sees every operation before it does, and its result after it."""
        return nullcontext()

    @hands_over
    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Puts the gradients of `weight` · `loss` into `.grad`."""
        (loss * weight if weight != 1.0 else loss).backward()  # type: ignore[no-untyped-call]


class GradientStore(PassProbe):
    """A probe that keeps the gradients of a pass itself, in place of `.grad`."""

    @abstractmethod
    def clear(self) -> None:
        """Lets go of them."""

    @abstractmethod
    def take(self) -> Gradients:
        """Returns what has accumulated so far, by parameter name."""


@dataclass
class PassResult:
    """Gradients by parameter name (None where the parameter had none), the loss, and what the pass showed."""

    gradients: Gradients
    loss: float
    micro_losses: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    observed: tuple[Observed, ...] = ()
    terms: Mapping[str, TermNorm] = field(default_factory=dict)
    foreign: tuple[Any, ...] = ()
    foreign_draws_differ: bool = False
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    draws: DealingReport = field(default_factory=DealingReport)


class ComposedProbe(PassProbe):
    """Several probes at once; the last one's backward is used."""

    def __init__(self, probes: Sequence[PassProbe]) -> None:
        self._probes = tuple(probes)

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Enters all of them, the first outermost."""
        with ExitStack() as stack:
            for probe in self._probes:
                stack.enter_context(probe.around(k))
            yield

    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Leaves the backward to the last probe."""
        self._probes[-1].backward(k, loss, weight)


def combine_probes(probes: Sequence[PassProbe]) -> PassProbe | None:
    """Returns one probe that stands for several; None where there is none."""
    return ComposedProbe(probes) if len(probes) > 1 else next(iter(probes), None)


def record_full_batch(
    experiment: Experiment, probe: PassProbe | None = None, *, ends_at_hidden: bool = False
) -> tuple[PassResult, DrawLedger]:
    """Runs the whole batch in one backward pass, and records the random draws that it makes.

    Args:
        experiment: The experiment to run.
        probe: A listener of the pass.
        ends_at_hidden: Whether the first draw inside a kernel ends the pass.

    Raises:
        HiddenDraw: It did.
        ProblemError: The model or loss raised, or the loss cannot be differentiated.
        NoMemory: It does not fit; where `experiment.fitting` was asked to, the ways that need less have been tried.
    """
    recorders: list[DrawRecorder] = []

    def record_draws() -> DrawRecorder:
        recorders.append(DrawRecorder(ends_at_hidden=ends_at_hidden))
        return recorders[-1]

    try:
        result = _fit_full_batch(experiment, record_draws, probe)
    except ProblemError:
        # the interpreter of scripted code makes an error of its own of any exception
        if recorders and recorders[-1].has_ended:
            raise HiddenDraw from None
        raise
    return result, recorders[-1].ledger


def full_batch_gradients(experiment: Experiment, probe: PassProbe | None = None) -> PassResult:
    """Returns the gradient of the whole batch from one backward pass, with the draws that were recorded.

    Raises:
        ProblemError: The model or loss raised, or the loss cannot be differentiated.
        NoMemory: It does not fit.
    """
    dealings: list[Dealing] = []

    def deal_draws() -> Dealer:
        dealings.append(experiment.deal())
        return Dealer(dealings[-1], 0, experiment.batch_size, experiment.batch_size)

    result = _fit_full_batch(experiment, deal_draws, probe)
    result.draws = dealings[-1].report
    return result


def _fit_full_batch(
    experiment: Experiment, make_draws: Callable[[], DrawRecorder | Dealer], probe: PassProbe | None
) -> PassResult:
    """The full-batch pass, by the ways that need less memory where it does not fit."""
    while True:
        try:
            return _run_full_batch(experiment, make_draws(), probe or PassProbe())
        except NoMemory as error:
            # a probe has seen a part of the pass already; a store is emptied when the next pass begins
            if probe not in (None, experiment.store) or not experiment.fitting.falls_through(experiment.device):
                # Offloading needs less memory where it was not tried yet, on a device with memory of its own.
                has_other_way = experiment.fitting.way is not Reference.OFFLOAD and experiment.device.type != "cpu"
                hint = "; `--reference offload` needs less" if has_other_way else ""
                raise NoMemory(f"{error}{hint}") from error
        gc.collect()  # here the exception is gone, and with it the frames that held what the pass had made
        experiment.progress(f"the full batch with {experiment.fitting.way}")


def _run_full_batch(experiment: Experiment, random_draws: DrawRecorder | Dealer, probe: PassProbe) -> PassResult:
    mode = PassMode(
        experiment.state, random_draws, lift=experiment.lift, observe_terms=experiment.lift is not torch.float64
    )
    with one_pass(experiment):
        # A lazy layer or a cache may register parameters in its first forward.
        names_before = set(named_parameters(experiment.problem))
        with explain_user_errors("the full batch", experiment):
            batch = fresh(experiment.problem.batch)
        fit = fit_memory(experiment.fitting, experiment.modules, experiment.device)
        with mode, explain_user_errors("the full batch", experiment), probe.around(None), fit:
            loss = loss_of(experiment, batch, "the full batch")
            probe.backward(None, loss, 1.0)
        _check_none_added(experiment, names_before)
        gradients = take_gradients(experiment)
        terms = _terms(mode.observed, gradients)
        buffers = _buffers(experiment)
        value, foreign = float(loss.detach()), foreign_generator_states()
    return PassResult(gradients, value, observed=(mode.observed,), terms=terms, foreign=foreign, buffers=buffers)


def _check_none_added(experiment: Experiment, known: Collection[str]) -> None:
    """Raises `ProblemError` where a forward has made parameters that get a gradient: nothing would compare them."""
    named = named_parameters(experiment.problem)
    added = [f"`{name}`" for name, tensor in named.items() if name not in known and tensor.grad is not None]
    if added:
        what, them = ("parameters", "them") if len(added) > 1 else ("the parameter", "it")
        raise ProblemError(
            f"the forward adds {what} {', '.join(added)}, which an optimizer made before it would miss; "
            f"create {them} in `__init__`, or run one forward first: `loss(model, batch)`"
        )


@hands_over  # calls `backward` on the summed loss
def accumulated_gradients(
    experiment: Experiment,
    reference: PassResult,
    *,
    after_backward: AfterBackward | None = None,
    probe: PassProbe | None = None,
    own: Collection[int] | None = None,
) -> PassResult:
    """Returns the gradient that K micro-batches accumulate, each loss multiplied by its micro-batch weight.

    Args:
        experiment: The experiment to run; "summed-loss" sums the weighted losses and calls `backward` once. The
            micro-batches see each other's changes of the state, as in training.
        reference: The full-batch pass, whose target counts the weighting "tokens" needs.
        after_backward: Called with k after each backward pass.
        probe: A listener, which may change the pass.
        own: The micro-batches that are run, of the K; None runs all. A rank runs its own ones only.
    """
    dealing = experiment.deal(reference)
    probe = probe or PassProbe()
    losses, weights, observed, dealers, total, foreign = [], [], [], [], None, False
    with one_pass(experiment):
        at_start = generator_states()
        for k, (start, stop) in enumerate(experiment.bounds()):
            if own is not None and k not in own:
                continue
            # Each begins with the full batch's generator states: a draw that is not dealt is at least the same.
            at_start()
            if experiment.strategy != "accumulate":
                seed_torch(k)  # each graph its own states, by which its draws are known again in the backward
            where = f"micro-batch {k + 1} of {experiment.steps} (samples {start} to {stop - 1})"
            dealer = Dealer(dealing, start, stop, experiment.batch_size)
            dealers.append(dealer)
            mode = PassMode(experiment.state, dealer, lift=experiment.lift)
            # A copy: a forward may change its inputs (`batch.pop("labels")`), and the batch is run many times.
            micro_batch = fresh(micro_batch_of(experiment, start, stop, where))
            with mode, explain_user_errors(where, experiment), probe.around(k):
                loss = loss_of(experiment, micro_batch, where)
                weight = micro_batch_weight(experiment, k, micro_batch, mode.observed, reference.observed[0])
                if experiment.strategy == "accumulate":
                    probe.backward(k, loss, weight)
                else:
                    total = loss * weight if total is None else total + loss * weight
            dealer.finish()
            # Python's and NumPy's generators have no dispatcher: only that they were drawn from is seen.
            foreign = foreign or foreign_generator_states() != reference.foreign
            losses.append(loss.detach())
            weights.append(weight)
            observed.append(mode.observed)
            experiment.progress(where)
            if after_backward is not None and experiment.strategy == "accumulate":
                after_backward(k)
        if total is not None:
            with (
                PassMode(experiment.state, Recomputing(dealers), lift=experiment.lift),
                explain_user_errors("the summed loss", experiment),
            ):
                total.backward()
        gradients = take_gradients(experiment)
        buffers = _buffers(experiment)
    # Fetched at once, after the last backward: each number for itself would wait for the device K times.
    values = torch.stack([loss.double() for loss in losses]).tolist() if losses else []
    value = sum(weight * loss for weight, loss in zip(weights, values, strict=True))
    return PassResult(
        gradients,
        value,
        tuple(values),
        tuple(weights),
        tuple(observed),
        foreign_draws_differ=foreign,
        buffers=buffers,
        draws=dealing.report,
    )


def forward_pass(
    experiment: Experiment, k: int | None, probe: PassProbe | None = None, dealing: Dealing | None = None
) -> torch.Tensor:
    """Runs one forward without a backward, from the restored state, and returns its loss.

    Args:
        experiment: The experiment to run.
        k: The micro-batch; None for the full batch.
        probe: A listener of the pass.
        dealing: The draws on their way to the forwards of one window; None where this is the only one.
    """
    start, stop = (0, experiment.batch_size) if k is None else list(experiment.bounds())[k]
    where = (
        "the full batch" if k is None else f"micro-batch {k + 1} of {experiment.steps} (samples {start} to {stop - 1})"
    )
    dealer = Dealer(dealing or experiment.deal(), start, stop, experiment.batch_size)
    mode = PassMode(experiment.state, dealer, lift=experiment.lift)
    probe = probe or PassProbe()
    with one_pass(experiment):
        batch = fresh(experiment.problem.batch if k is None else micro_batch_of(experiment, start, stop, where))
        with mode, explain_user_errors(where, experiment), probe.around(k):
            return loss_of(experiment, batch, where)


@contextmanager
def one_pass(experiment: Experiment) -> Iterator[None]:
    """One strategy's pass: no gradients at its start, the state and the generators restored at its end."""
    restore = generator_states()
    with ExitStack() as stack:
        stack.enter_context(named_modules(experiment.modules))
        if experiment.math_kernels:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        try:
            _clear_gradients(experiment)
            yield
        finally:
            _clear_gradients(experiment)
            if experiment.ranks is not None:
                settle(experiment.modules)
            experiment.state.restore()
            keep_reducers()
            restore()


def _clear_gradients(experiment: Experiment) -> None:
    for parameter in experiment.parameters.values():
        parameter.grad = None
    if experiment.store is not None:
        experiment.store.clear()


def take_gradients(experiment: Experiment) -> Gradients:
    """Returns what has accumulated so far, without a copy: after a pass nothing else holds it."""
    if experiment.store is not None:
        return experiment.store.take()
    return {name: parameter.grad for name, parameter in experiment.parameters.items()}


def _buffers(experiment: Experiment) -> dict[str, torch.Tensor]:
    """The floating-point buffers as a pass leaves them; large ones are no statistics."""
    named = merge_names(module.named_buffers() for module in experiment.modules)
    return {
        name: buffer.detach().clone()
        for name, buffer in named.items()
        if buffer.is_floating_point() and buffer.numel() <= _STATISTIC
    }


def _terms(observed: Observed, gradients: Gradients) -> dict[str, TermNorm]:
    """Σ|terms| of the gradients that the backward formed as sums."""
    by_name = {name: observed.terms.of(gradient) for name, gradient in gradients.items()}
    return {name: terms for name, terms in by_name.items() if terms is not None}
