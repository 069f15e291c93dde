"""Does every micro-batch divide by its own count, where the full batch divides once by the count of the window?

A mean over valid elements, positives, hard examples, weights that are normalised over the batch: each is a sum and a
count, and the repair is one division by the window's count. Every call that averages is recorded in the forwards. Then
the micro-batches run with the full batch's counts and nothing else changed. Terms of the loss that nothing divides are
recorded as well: a sum over the samples beside a mean, a penalty that is the same in every micro-batch.

Shapes: K micro-batches; counts are numbers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gaverify.passes.calls import (
    RunningCall,
    addends,
    has_constant_addend,
    is_made_of_parameter,
    listening,
    read_by_parameters,
    skip_scaling,
    skip_views,
)
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import PassProbe
from gaverify.passes.precision import move_weights
from gaverify.passes.randomness import Dealing
from gaverify.records.comparison import Comparison
from gaverify.records.experiment import ControlKind, ControlRun, Count, FunctionKey, TermKind
from gaverify.search.bench import Bench, Intervention
from gaverify.search.trace.operations import OperationTracer, intercept_calls, make_tracer
from gaverify.search.trace.state import StateWatch
from gaverify.search.trace.traces import OperationTrace, locate_operation
from gaverify.thresholds import COMPUTED_FLOAT32, HELPS, SAME_NUMBER, SMALL_PART
from gaverify.torch_internals import is_in_functorch_transform, tree_leaves, without_torch_function
from gaverify.tracebacks import hands_over

_DIVISIONS = ("div", "div_", "true_divide", "divide")
_PRODUCTS = ("mul", "mul_", "multiply")
_MEANS = ("mean", "nanmean")


def ask(bench: Bench, comparison: Comparison) -> Comparison:
    """Runs the micro-batches with the counts of the full batch, where some counts differ from the weights."""
    # Counts that leave a small part of the difference are a cause too; the next questions look for the rest.
    window_counts = (
        None if comparison.weights_first else _attempt_counts(bench, comparison, SMALL_PART * comparison.left)
    )
    return comparison if window_counts is None else _note_counts(comparison, window_counts)


def ask_first(bench: Bench, comparison: Comparison) -> tuple[Bench, Comparison]:
    """Returns a bench with the window's counts for all other questions, where nothing can be compared without them."""
    # A micro-batch that holds nothing to count divides 0 by 0. With NaN on one side no other control tells anything.
    # So counts which leave any finite difference are kept for the questions after this one.
    window_counts = _attempt_counts(bench, comparison, sys.float_info.max) if math.isinf(comparison.left) else None
    if window_counts is None:
        return bench, comparison
    # the earlier pass of the full batch was one without these counts
    return replace(bench.neutralise(*window_counts.control.interventions), reference=None), _note_counts(
        comparison, window_counts
    )


def _attempt_counts(bench: Bench, comparison: Comparison, most: float) -> WindowCounts | None:
    return bench.attempt("counts of the window", lambda: find_counts(bench, comparison.window.used, most))


def _note_counts(comparison: Comparison, window_counts: WindowCounts) -> Comparison:
    weights = replace(
        comparison.window,
        counts=window_counts.counts,
        remedy=window_counts.control,
        place=window_counts.counts[0].operation,
    )
    return replace(comparison, window=weights, left=window_counts.control.left, cleared=window_counts.control.rounding)


@dataclass(frozen=True)
class WindowCounts:
    """Counts of the window that explain a difference."""

    counts: tuple[Count, ...]
    """The numbers that each of the calls divides by."""
    control: ControlRun
    """The run with the window's counts."""


def find_counts(bench: Bench, used: Sequence[float], most: float = 0.0) -> WindowCounts | None:
    """Returns the counts that leave no difference, or no larger one than `most`; None where there are none."""
    divisors = _find_divisors(bench, used)
    # Weights that are normalised over the batch and then summed make a loss that adds up by itself: the micro-batches'
    # losses must not be weighted again, so that weights of 1 are tried after the user's.
    for added_up in (False, True):
        shares = [1.0] * len(used) if added_up else list(used)
        factors = {key: count.factors(shares) for key, count in divisors.items()}
        # A factor of 1 changes nothing in this run, and its count is then no part of the repair.
        wrong = {key: each for key, each in factors.items() if any(abs(f - 1) > SAME_NUMBER for f in each)}
        counts = tuple(divisors[key].make_record(key) for key in wrong if divisors[key].contradicts(used))
        weigh = partial(Experiment.with_weights, weights=shares) if added_up else None
        control = bench.run(_use_counts(wrong, weigh)) if counts else None
        if control is None or not (control.rounding or control.left <= SMALL_PART * bench.total):
            continue
        # Some divisors may belong to a second cause, which is what remains. The repair must not name them: whatever
        # can be left out without more than doubling the rest is no part of it.
        while not control.rounding and len(wrong) > 1:
            fewer = [{key: each for key, each in wrong.items() if key != left_out} for left_out in wrong]
            runs = [(bench.run(_use_counts(some, weigh)), some) for some in fewer]
            less, some = min(runs, key=lambda run: run[0].left)
            if less.left * HELPS > control.left:
                break
            control, wrong = less, some
        if not (control.rounding or control.left <= most):
            continue
        counts = tuple(replace(divisors[key].make_record(key), added_up=added_up) for key in wrong)
        return WindowCounts(counts, control)
    return None


def _use_counts(
    factors: Mapping[FunctionKey, Sequence[float]], weigh: Callable[[Experiment], Experiment] | None
) -> Intervention:
    """The results of some calls multiplied in each micro-batch, so that they divide by the window's count."""
    what = "the window's counts in every micro-batch"
    return Intervention(what, ControlKind.COUNTS, partial(_Rescaled, factors), weigh, in_reference=False)


@dataclass
class _Divisor:
    """The numbers that one call divides by.

    A term that nothing divides is noted as a divisor that gives each micro-batch its right share: all of a sum, 1/K of
    a penalty.
    """

    of_full_batch: float
    """The divisor in the full batch."""
    trained: bool
    """Whether the call's result has a gradient."""
    of_micro_batches: list[float]
    """The divisor in each micro-batch."""
    term: TermKind | None = None
    """For a term that nothing divides, its kind; None for a call that divides."""

    @property
    def adds_up(self) -> bool:
        """Whether the full batch's divisor is the sum of the micro-batches' divisors, rather than their mean."""
        if self.term is not None:
            return True
        # the nearer of the two and not an equation: losses clamp the count of an empty micro-batch to 1
        total = sum(self.of_micro_batches)
        return abs(total - self.of_full_batch) < abs(total / len(self.of_micro_batches) - self.of_full_batch)

    def factors(self, shares: Sequence[float]) -> list[float]:
        """Factors of the call's result, one per micro-batch, with which it is divided by the window's count."""
        # A sum divided by the window's count is the micro-batch's share already: its weight would apply that twice.
        counted = self.trained and self.adds_up
        return [
            divisor / self.of_full_batch / (w if counted and w else 1.0)
            for divisor, w in zip(self.of_micro_batches, shares, strict=True)
        ]

    def contradicts(self, used: Sequence[float]) -> bool:
        """Whether some micro-batch's share of the count is another one than its weight."""
        shares = used if self.adds_up else [1.0] * len(self.of_micro_batches)
        pairs = zip(self.of_micro_batches, shares, strict=True)
        return any(not math.isclose(divisor / self.of_full_batch, w, rel_tol=SAME_NUMBER) for divisor, w in pairs)

    def make_record(self, key: FunctionKey) -> Count:
        """The count with its place."""
        name, frame, _ = key
        operation, divisors = locate_operation(name, frame), tuple(self.of_micro_batches)
        if name in _PRODUCTS and self.term is None:
            return Count(
                operation, tuple(1 / count for count in divisors), 1 / self.of_full_batch, self.adds_up, times=True
            )
        return Count(operation, divisors, self.of_full_batch, self.adds_up, term=self.term)


def _find_divisors(bench: Bench, used: Sequence[float]) -> dict[FunctionKey, _Divisor]:
    """Every call that averages in all forwards by different numbers; none where all shares are the weights already."""
    bench.experiment.progress("counts of the full batch and of the micro-batches")
    full_batch, *micro_batches = _listen_to_window(bench)
    divisors = {}
    for key, (count, trained) in full_batch.counts.items():
        if count and all(key in micro_batch.counts for micro_batch in micro_batches):
            numbers = [micro_batch.counts[key][0] for micro_batch in micro_batches]
            if any(number != count for number in numbers):
                divisors[key] = _Divisor(count, trained, numbers)
    terms = _find_undivided_terms(full_batch.terms, [micro_batch.terms for micro_batch in micro_batches])
    # losses that count as they are weighted, which most are, cost no further forward
    if not divisors or not any(each.contradicts(used) for each in (*divisors.values(), *terms.values())):
        return terms
    # A count belongs to the data. A number that changes when every parameter moves by one rounding (a norm, a loss
    # that was cut out of the graph) is no count. No number of the window could stand in for it.
    weights = list(bench.experiment.parameters.values())
    with move_weights(weights, [SAME_NUMBER] * len(weights)):
        at_moved_parameters = _listen_to_forward(bench.experiment.with_current_state(), None)
    unmoved = {
        key: count for key, count in divisors.items() if at_moved_parameters.counts.get(key) == full_batch.counts[key]
    }
    return terms | unmoved


def find_terms_beside_constants(bench: Bench) -> list[tuple[float, Sequence[float]]]:
    """Returns the terms of a loss that adds a constant of the batch, in the full batch and in each micro-batch.

    Empty where the loss adds no constant, or where the micro-batches have other terms.
    """
    # A constant has no gradient, so that it may depend on the batch in any way: only the other terms tell whether the
    # losses add up.
    listeners = _listen_to_window(bench)
    terms = next(listeners).beside_constants
    # Most losses add no constant: the full batch shows it, and no micro-batch has to run for that.
    micro_batches = list(listeners) if terms else []
    if any(micro_batch.beside_constants.keys() != terms.keys() for micro_batch in micro_batches):
        return []
    return [(value, [each.beside_constants[key] for each in micro_batches]) for key, value in terms.items()]


def _find_undivided_terms(
    full_batch: Mapping[FunctionKey, float], micro_batches: Sequence[Mapping[FunctionKey, float]]
) -> dict[FunctionKey, _Divisor]:
    """The terms of the loss that add up over the micro-batches, and those that are the same in all of them."""
    steps, divisors = len(micro_batches), {}
    for key, value in full_batch.items():
        values = [terms[key] for terms in micro_batches if key in terms]
        if len(values) < steps:  # a branch that not every micro-batch takes
            continue
        if all(math.isclose(each, value, rel_tol=COMPUTED_FLOAT32) for each in values):
            divisors[key] = _Divisor(steps, True, [1.0] * steps, TermKind.PENALTY)
        elif math.isclose(sum(values), value, rel_tol=COMPUTED_FLOAT32):
            divisors[key] = _Divisor(1.0, True, [1.0] * steps, TermKind.SUM)
    return divisors


def _listen_to_window(bench: Bench) -> Iterator[_DivisionListener]:
    """Listens to the forward of the full batch, then to those of the micro-batches, each when it is asked for."""
    watch = bench.watch
    is_watched = isinstance(watch, SearchWatch) and len(watch.forwards) == bench.experiment.steps + 1
    earlier = watch.forwards if isinstance(watch, SearchWatch) and is_watched else {}
    dealing = bench.experiment.deal()
    for k in (None, *range(bench.experiment.steps)):
        yield earlier[k] if k in earlier else _listen_to_forward(bench.experiment, k, dealing)


def _listen_to_forward(experiment: Experiment, k: int | None, dealing: Dealing | None = None) -> _DivisionListener:
    listener = _DivisionListener(experiment.problem.model)
    listener.note_terms(experiment.forward(k, listener, dealing=dealing))
    return listener


class _DivisionListener(PassProbe):
    """Records what each call divides by, and which calls made the terms of the loss, with their values.

    A divisor of activations is no count of a mean: samples interact there. Activations are what a model returns, where
    that is no loss, and whatever parameters are applied to.
    """

    def __init__(self, model: Any) -> None:
        self._modules = {module: path for path, module in model.named_modules()} if isinstance(model, nn.Module) else {}
        self._running: Sequence[RunningCall] = ()
        self._in_model: list[tuple[Any, FunctionKey]] = []
        # by identity, and with the tensor: Python gives the identity of a freed object to the next one
        self._inputs: dict[int, tuple[torch.Tensor, set[FunctionKey]]] = {}
        self._applied: set[FunctionKey] = set()
        self._returns_loss = False
        self.counts: dict[FunctionKey, tuple[float, bool]] = {}
        self.beside_constants: dict[FunctionKey, float] = {}
        self.terms: dict[FunctionKey, float] = {}
        self._numbers: dict[Any, tuple[FunctionKey, torch.Tensor]] = {}

    def note_terms(self, loss: torch.Tensor) -> None:
        """Records the terms of the loss that came out of the forward."""
        total = skip_views(loss.grad_fn)
        if has_constant_addend(total):
            nodes = [node.next_functions[slot][0] for node, slot in addends(total)]
            addend_values = [self._numbers[node] for node in nodes if node in self._numbers]
            # with an addend that no seen call made, the others do not add up to the loss
            if len(addend_values) == len(nodes):
                self.beside_constants = {key: float(value) for key, value in addend_values}
        for node, slot in addends(skip_scaling(loss.grad_fn)):
            key, value = self._numbers.get(node.next_functions[slot][0], (None, loss))
            if key is not None:
                self.terms[key] = float(value)
        self._numbers.clear()  # its keys keep the whole graph of the forward in memory
        # A model that returns its loss contains the loss's own means. Only divisors whose results go through a layer
        # with parameters scale activations there; of any other model, all divisors inside do.
        trained = read_by_parameters([loss.grad_fn]) if self._returns_loss and self._in_model else set()
        for node, key in self._in_model:
            if not self._returns_loss or node in trained or key in self._applied:
                self.counts.pop(key, None)
        self._in_model.clear()
        self._inputs.clear()

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Sees the calls of one forward."""
        with listening(self._modules, ends=self._note_output) as self._running, intercept_calls(self._handle_call):
            yield

    def _note_output(self, call: RunningCall, output: Any) -> None:
        if not call.parents and call.module in self._modules:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self._returns_loss |= any(tensor.numel() == 1 and tensor.requires_grad for tensor in tensors)

    def _handle_call(self, key: FunctionKey, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        self._follow_inputs((args, kwargs), result)
        # inside a transform of torch.func one tensor stands for many, whose numbers cannot be read
        if isinstance(result, torch.Tensor) and result.is_floating_point() and not is_in_functorch_transform():
            with without_torch_function(), torch.no_grad():
                count = _read_count(key[0], func, args, kwargs, result)
            if count is not None and abs(count) < math.inf:
                self.counts[key] = count, result.requires_grad
                if result.numel() > 1 and any(call.module in self._modules for call in self._running):
                    self._note_in_model(result, {key})
            if result.numel() == 1 and result.grad_fn is not None:
                self._numbers[result.grad_fn] = key, result.detach()
        return result

    def _follow_inputs(self, arguments: Sequence[Any], result: Any) -> None:
        """Follows scaled inputs, which have no graph that could be walked, to where a parameter is applied to them."""
        if not self._inputs:  # most models scale none, and the walk through the arguments of every call is slow
            return
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        keys = {key for tensor in tensors if id(tensor) in self._inputs for key in self._inputs[id(tensor)][1]}
        if not keys:
            return
        with without_torch_function():
            if any(map(is_made_of_parameter, tensors)):
                self._applied |= keys
                return
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._note_in_model(leaf, keys)

    def _note_in_model(self, tensor: torch.Tensor, keys: set[FunctionKey]) -> None:
        self._in_model += [(tensor.grad_fn, key) for key in keys]
        if tensor.grad_fn is None:
            self._inputs[id(tensor)] = tensor, keys


class SearchWatch(StateWatch):
    """Looks on while both strategies run, so that the search need not run these forwards again.

    It watches the state of the micro-batches, listens to the counts of all forwards, and traces the shapes of the first
    micro-batch.
    """

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(experiment)
        self._experiment = experiment
        self._listener = _DivisionListener(experiment.problem.model)
        self._tracer: OperationTracer | None = None
        self._forward = ExitStack()
        self.forwards: dict[int | None, _DivisionListener] = {}
        self.shapes: OperationTrace | None = None

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Looks on at one pass; the state of the full batch's is of no interest."""
        self._listener = _DivisionListener(self._experiment.problem.model)
        self._tracer = make_tracer(self._experiment) if k == 0 else None
        with nullcontext() if k is None else super().around(k), ExitStack() as self._forward:
            self._forward.enter_context(self._listener.around(k))
            if self._tracer is not None:
                self._forward.enter_context(self._tracer.around(k))
            yield

    @hands_over
    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Ends what looks on at the forward, and runs the backward."""
        self._forward.close()  # a backward may call functions, and compute parts of the forward again
        self._listener.note_terms(loss)
        self.forwards[k] = self._listener
        if self._tracer is not None:
            self.shapes = self._tracer.finish(loss)
        if k is None:
            PassProbe.backward(self, k, loss, weight)
        else:
            super().backward(k, loss, weight)


class _Rescaled(PassProbe):
    """Multiplies the results of some calls, each by a number per micro-batch."""

    def __init__(self, factors: Mapping[FunctionKey, Sequence[float]], _: Experiment) -> None:
        self._factors = factors

    def around(self, k: int | None) -> AbstractContextManager[Any]:
        """Sees the calls of one forward; what one writes in place is multiplied in place."""

        def handle_call(key: FunctionKey, func: Any, args: Any, kwargs: Any) -> Any:
            factor = self._factors[key][k] if k is not None and key in self._factors else None
            if factor == 0 and key[0] in _DIVISIONS:  # a division by zero made NaN, which stays NaN times 0
                return func(args[0], math.inf, **kwargs)
            result = func(*args, **kwargs)
            if factor is None:
                return result
            # the caller of an in-place division keeps the tensor that it was called on, and not what is returned
            return result.mul_(factor) if key[0].endswith("_") else result * factor

        return intercept_calls(handle_call)


def _read_count(name: str, func: Callable[..., Any], args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    """The one number without a gradient that a call divides by; None where it does not average."""
    if name in _DIVISIONS and len(args) > 1 and not kwargs.get("rounding_mode"):
        return _read_number(args[1])
    if name in _PRODUCTS and len(args) > 1:
        numbers = [n for n in map(_read_number, args) if n]
        # a product with infinity is the share of a mask that keeps nothing: no number of the window can stand in for it
        return 1 / numbers[0] if len(numbers) == 1 and math.isfinite(numbers[0]) else None
    if kwargs.get("reduction") in ("mean", "batchmean") and result.dim() == 0 and result.requires_grad:
        # Class weights and `ignore_index` decide what a loss of torch divides by, so that it is asked for the sum.
        mean = float(result)
        return float(func(*args, **{**kwargs, "reduction": "sum"})) / mean if mean else None
    averaged = args[0] if args else kwargs.get("input")
    if name in _MEANS and isinstance(averaged, torch.Tensor) and result.requires_grad and result.numel():
        counted = averaged.numel() if name == "mean" else int((~averaged.isnan()).sum())
        return counted / result.numel()
    return None


def _read_number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and not value.requires_grad and not value.is_complex() else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
