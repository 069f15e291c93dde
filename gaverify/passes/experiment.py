"""An experiment: a problem made ready to run, and its passes.

Variants are derived from it, never put together by hand: in float64, on its first samples, on another batch, with
other micro-batch weights, with probes that change both strategies alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from gaverify.errors import HiddenDraw, TimeLimit
from gaverify.passes.batching import Problem, draw_batch, fresh, micro_batch_sizes, move_split
from gaverify.passes.gradients import (
    AfterBackward,
    Fitting,
    GradientStore,
    PassProbe,
    PassResult,
    accumulated_gradients,
    combine_probes,
    forward_pass,
    full_batch_gradients,
    record_full_batch,
)
from gaverify.passes.isolation import ModelState, exact_products, generator_states, seed_torch
from gaverify.passes.precision import convert_weights, return_freed, widest
from gaverify.passes.randomness import Dealing, DealingReport, DrawLedger, Reading
from gaverify.passes.user_code import micro_batch_of
from gaverify.passes.wrappers import RankSum


class Placement(NamedTuple):
    """Where a model lies, each device once."""

    now: tuple[torch.device, ...]
    """Where it is run; the first is that of the first trainable parameter."""
    before: tuple[torch.device, ...] = ()
    """Where the user had put it."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A problem made ready to run: both strategies start from the same state and use the same random draws."""

    on_ranks: ClassVar[bool] = False
    """Whether each rank runs micro-batches of its own, so that no part of the batch can stand for all of it."""
    problem: Problem
    """Model, loss, batch and split."""
    parameters: dict[str, nn.Parameter]
    """The trainable parameters by name; those of a loss that is a module begin with `loss.`."""
    modules: list[nn.Module]
    """The model, and the loss where it is a module."""
    state: ModelState
    """State that every pass starts from and leaves behind: buffers, attributes, objects that the loss can reach."""
    batch_size: int
    """B, the number of samples of the full batch."""
    sizes: tuple[int, ...]
    """The number of samples of each micro-batch, K numbers."""
    weighting: Any = "uniform"
    """A word, K numbers, or the user's function: the factor of each micro-batch's loss."""
    ignore_index: int = -100
    """The target value that the weighting `tokens` does not count."""
    strategy: str = "accumulate"
    """`accumulate`: K backward passes; `summed-loss`: one over the sum of the weighted losses."""
    placement: Placement
    """The devices that the model lies on, and those that the user had put it on."""
    autocast: torch.dtype | None = None
    """The dtype of `torch.autocast` in the forwards; None: no autocast."""
    lift: torch.dtype | None = None
    """The dtype that lower casts inside the model are raised to: float64, or float32; None: they stay."""
    math_kernels: bool = False
    """Attention and recurrent layers run on unfused kernels, because draws inside a fused one are not seen."""
    draws: DrawLedger = field(default_factory=DrawLedger)
    """The random draws of the full batch, which every pass uses again."""
    reading: Reading = field(default_factory=Reading)
    """How the micro-batches' draws are matched with these."""
    ranks: RankSum | None = None
    """Makes norms and sketches those of all ranks; None: they are this process's own."""
    store: GradientStore | None = None
    """Keeps the gradients of a pass; None: `.grad` does."""
    probes: tuple[PassProbe, ...] = ()
    """Listeners of every pass, some of which change it."""
    fitting: Fitting = field(default_factory=Fitting)
    """How the full batch is run where memory is short; all variants share it."""
    limit: TimeLimit = field(default_factory=TimeLimit)
    """How long a search for a cause may take; all variants share it."""
    progress: Callable[[str], None] = field(default=lambda _: None)
    """Is told what begins."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the model lies, each device once; the first is that of the first trainable parameter."""
        return self.placement.now

    @property
    def device(self) -> torch.device:
        """The device of the first trainable parameter."""
        return self.devices[0]

    @property
    def steps(self) -> int:
        """K, the number of micro-batches."""
        return len(self.sizes)

    @property
    def is_float64(self) -> bool:
        """Whether its passes run in float64."""
        double = (torch.float64, torch.complex128)
        return self.lift is torch.float64 or all(parameter.dtype in double for parameter in self.parameters.values())

    @contextmanager
    def autocasting(self, *, enabled: bool = True) -> Iterator[None]:
        """Autocast as it was asked for, on every kind of device that the model lies on; nothing where it was not."""
        with ExitStack() as stack:
            for kind in dict.fromkeys(device.type for device in self.devices) if self.autocast is not None else ():
                stack.enter_context(torch.autocast(kind, self.autocast, enabled=enabled))
            yield

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields every module of model and loss with its path."""
        for root in self.modules:
            yield from root.named_modules()

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Yields `start, stop` of each micro-batch."""
        start = 0
        for size in self.sizes:
            yield start, start + size
            start += size

    # Its passes. Each begins with the same state, which it puts back in the end.

    def record(self, *probes: PassProbe, seed: int | None = None) -> tuple[Experiment, PassResult]:
        """Runs the full batch; returns the experiment with the draws that this made, and the pass.

        Args:
            probes: Listeners of the pass.
            seed: Seeds torch's generators before; None: they go on from where they are.

        Raises:
            ProblemError: The model or loss raised, or the loss cannot be differentiated.
        """
        restore = generator_states()
        if seed is not None:
            seed_torch(seed)
        recorded = None
        # Ranks go on: one that ended its forward would leave the others waiting in a collective.
        ends_at_hidden = not self.math_kernels and self.ranks is None
        try:
            with suppress(HiddenDraw):
                recorded = record_full_batch(self, self._combine(probes), ends_at_hidden=ends_at_hidden)
            # a fused kernel draws where nobody sees it: once more on kernels that draw outside
            if recorded is None or (recorded[1].fused and not self.math_kernels):
                return replace(self, math_kernels=True).record(*probes, seed=seed)
        finally:
            if seed is not None:
                restore()
        full, draws = recorded
        return replace(self, draws=draws, reading=Reading()), full

    def full_batch(self, *probes: PassProbe) -> PassResult:
        """Runs the full batch with the recorded draws."""
        with self._holding_weights(probes) as ready:
            return full_batch_gradients(ready, ready._combine(probes))

    def micro_batches(
        self,
        full: PassResult,
        *probes: PassProbe,
        after_backward: AfterBackward | None = None,
        own: Collection[int] | None = None,
    ) -> PassResult:
        """Runs the micro-batches, each with its share of the recorded draws.

        Args:
            full: The full-batch pass, whose target counts the weighting `tokens` needs.
            probes: Listeners of the pass, beside the experiment's own.
            after_backward: Called with k after each backward pass.
            own: The micro-batches that are run, of the K; None runs all. A rank runs its own ones only.
        """
        with self._holding_weights(probes) as ready:
            probe = ready._combine(probes)
            return accumulated_gradients(ready, full, after_backward=after_backward, probe=probe, own=own)

    def forward(self, k: int | None, *probes: PassProbe, dealing: Dealing | None = None) -> torch.Tensor:
        """Runs one forward without a backward, of the full batch where `k` is None, and returns its loss.

        Args:
            k: The micro-batch.
            probes: Listeners of the pass.
            dealing: As `deal` returned it, for all forwards of a window; None where this is the only one.
        """
        return forward_pass(self, k, self._combine(probes), dealing)

    def deal(self, full: PassResult | None = None) -> Dealing:
        """Returns the draws on their way to the micro-batches of one pass.

        Args:
            full: The full batch in the same precision, and with the same weights, where it was run again.
        """
        return Dealing(self.draws, self.reading, full.draws.prints if full is not None else None)

    @contextmanager
    def _holding_weights(self, probes: Sequence[PassProbe]) -> Iterator[Experiment]:
        """The experiment; with its weights converted where they are lifted and a probe needs them."""
        if self.store is None or not any(probe.needs_weights for probe in (*self.probes, *probes)):
            yield self
            return
        with convert_weights(self.modules, dtype=self.lift):
            yield replace(self, store=None).with_current_state()

    def _combine(self, probes: Sequence[PassProbe]) -> PassProbe | None:
        store = () if self.store is None else (self.store,)
        return combine_probes((*store, *self.probes, *probes))

    # The experiment of a rank does these in another way.

    @contextmanager
    def as_reference(self) -> Iterator[Experiment]:
        """Gives the experiment that runs the full batch as one process does: this one."""
        yield self

    def coarsest(self, unit: float) -> float:
        """Returns the coarsest unit roundoff that any process computed in."""
        return unit

    def agree_on_control(self, failure: str, error: Exception | None, seconds: float) -> str:
        """Returns why a control is impossible in any process; "" where it ran in all.

        Args:
            failure: Why it is in this one; "" where it ran.
            error: The exception that was raised.
            seconds: How long it took.
        """
        return failure

    # Its variants.

    def with_probes(self, *probes: PassProbe) -> Experiment:
        """The experiment with more probes, in every pass."""
        return replace(self, probes=(*self.probes, *probes))

    def with_weights(self, weights: Sequence[float]) -> Experiment:
        """The experiment with other micro-batch weights."""
        return replace(self, weighting=list(weights))

    def with_cut(self, sizes: tuple[int, ...], weight: float) -> Experiment:
        """The same batch, of which only the first samples are run, in micro-batches of these sizes of equal weight."""
        return replace(self, sizes=sizes, weighting=[weight] * len(sizes))

    def with_constant_draws(self) -> Experiment:
        """The experiment with every draw replaced by one typical value."""
        return replace(self, reading=replace(self.reading, constant=True))

    def with_second_reading(self) -> Experiment:
        """The experiment with its draws dealt by place and contents, not in order (`randomness`)."""
        return replace(self, reading=replace(self.reading, by_contents=True))

    def with_counts_of(self, first_reading: DealingReport) -> Experiment:
        """The experiment with what a pass in the first reading counted: the second reading places draws by it."""
        return replace(self, reading=replace(self.reading, counts=first_reading.counts))

    def with_backwards_apart(self) -> Experiment:
        """The experiment with a backward pass per micro-batch: one over their sum would not tell them apart."""
        return replace(self, strategy="accumulate")

    def with_current_state(self) -> Experiment:
        """The experiment with the state and the weights that the model has now."""
        return replace(self, state=ModelState(self.modules, (self.problem.loss,)))

    def first_samples(self, sizes: tuple[int, ...]) -> Experiment:
        """The experiment on its first samples, a batch of their own in micro-batches of these sizes.

        Its draws are not recorded yet, and its state is that which the model has now.
        """
        count = sum(sizes)
        batch = micro_batch_of(self, 0, count, "a part of the batch")
        problem = replace(self.problem, batch=batch, batch_size=count)
        first = replace(self, problem=problem, batch_size=count, sizes=sizes, draws=DrawLedger(), reading=Reading())
        return first.with_current_state()

    def with_seed(self, seed: int) -> Experiment:
        """The experiment on another batch: rows drawn again; its draws are not recorded yet.

        If only the user's split can cut the batch, the other batch is the samples behind the first micro-batch.
        """
        if self.problem.split is None:
            batch = draw_batch(self.problem.batch, self.batch_size, seed)
            return replace(self, problem=replace(self.problem, batch=batch))
        size = self.batch_size - self.sizes[0]
        batch = micro_batch_of(self, self.sizes[0], self.batch_size, "a second batch")
        problem = replace(self.problem, batch=batch, batch_size=size)
        return replace(self, problem=problem, batch_size=size, sizes=micro_batch_sizes(size, self.steps))

    def in_float64(self, *, weights: bool = True) -> AbstractContextManager[Experiment]:
        """Gives the experiment in float64; see `in_precision`."""
        return self.in_precision(torch.float64, weights=weights)

    @contextmanager
    def in_precision(self, dtype: torch.dtype, *, weights: bool = True) -> Iterator[Experiment]:
        """Gives the experiment in float32 or float64, all on the CPU where a device has no float64, for the block.

        The weights, the batch and the draws are the same numbers. The tensors are exchanged inside the user's own
        parameters, so that the working precision has no passes until the block ends. Products are not rounded.

        Args:
            dtype: `torch.float64` or `torch.float32`.
            weights: False leaves the weights as they are: they are to be lifted as they are used.
        """
        everywhere = dtype is not torch.float64 or all(widest(device) is dtype for device in self.devices)
        device = None if everywhere else torch.device("cpu")  # None: each tensor where it is
        placement = self.placement if device is None else self.placement._replace(now=(device,))
        default = torch.get_default_dtype()
        return_freed()  # what the passes before left in pieces
        with ExitStack() as stack:
            stack.callback(return_freed)
            # In float32 a GPU may round products to TF32, whose rounding looks like a fault of float32 size.
            stack.enter_context(exact_products())
            stack.enter_context(convert_weights(self.modules, device=device, dtype=dtype, weights=weights))
            torch.set_default_dtype(dtype)
            stack.callback(torch.set_default_dtype, default)
            stack.enter_context(self.autocasting(enabled=False))
            batch = fresh(self.problem.batch, device, dtype)
            split = self.problem.split and move_split(self.problem.split, device, dtype)
            problem = replace(self.problem, batch=batch, split=split)
            exact = replace(self, problem=problem, placement=placement, autocast=None, lift=dtype).with_current_state()
            # who looked on may live longer, and would keep the weights in float64
            stack.callback(exact.state.forget)
            yield exact
