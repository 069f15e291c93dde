"""Does every micro-batch divide by a count of its own, where the full batch divides once by that of the window?

A mean over valid elements, positives, hard examples, weights that are normalised over the batch: each is a sum and a
count, and the repair is one division by the window's count. Whatever averages is listened to in the forwards; then the
micro-batches are run with the full batch's counts, everything else live. Terms of the loss that nothing divides are
heard as well: a sum over the samples beside a mean, a penalty that is the same in every micro-batch.

Shapes: K micro-batches; counts are numbers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gaverify.causes.bench import Bench
from gaverify.causes.trace.operations import intercept_calls
from gaverify.causes.trace.traces import locate_operation
from gaverify.passes.calls import Call, listening
from gaverify.passes.gradients import PassProbe
from gaverify.passes.precision import move_weights
from gaverify.passes.walks import (
    addends,
    has_constant_addend,
    is_made_of_parameter,
    read_by_parameters,
    skip_scaling,
    skip_views,
)
from gaverify.records.experiment import ControlKind, ControlRun, Count, FunctionKey, TermKind
from gaverify.records.facts import Facts
from gaverify.thresholds import COMPUTED_FLOAT32, HELPS, SAME_NUMBER, SMALL_PART
from gaverify.torch_internals import is_in_functorch_transform, tree_leaves, without_torch_function

_DIVISIONS = ("div", "div_", "true_divide", "divide")
_PRODUCTS = ("mul", "mul_", "multiply")
_MEANS = ("mean", "nanmean")


def ask(bench: Bench, facts: Facts) -> Facts:
    """Runs the micro-batches with the counts of the full batch; nothing where none counts otherwise than it weighs.

    What leaves next to nothing of the difference is a cause as well; the questions after this one look for the rest.
    """
    window_counts = None if facts.weights_first else _attempt_counts(bench, facts, SMALL_PART * facts.left)
    return facts if window_counts is None else _note_counts(facts, window_counts)


def ask_first(bench: Bench, facts: Facts) -> tuple[Bench, Facts]:
    """Returns a bench with the window's counts for all other questions, where nothing can be compared without them."""
    window_counts = _attempt_counts(bench, facts, sys.float_info.max) if math.isinf(facts.left) else None
    if window_counts is None:
        return bench, facts
    return replace(window_counts.apply_to(bench), reference=None), _note_counts(facts, window_counts)


def _attempt_counts(bench: Bench, facts: Facts, most: float) -> WindowCounts | None:
    return bench.attempt("counts of the window", lambda: find_counts(bench, facts.weights.used, most))


def _note_counts(facts: Facts, window_counts: WindowCounts) -> Facts:
    weights = replace(
        facts.weights,
        counts=window_counts.counts,
        remedy=window_counts.control,
        place=window_counts.counts[0].operation,
    )
    return replace(facts, weights=weights, left=window_counts.control.left, cleared=window_counts.control.rounding)


@dataclass(frozen=True)
class WindowCounts:
    """The counts that decide, the control run that shows it, and what that multiplied: results by call."""

    counts: tuple[Count, ...]
    control: ControlRun
    factors: Mapping[FunctionKey, Sequence[float]]

    def apply_to(self, bench: Bench) -> Bench:
        """Another bench with the window's counts."""
        added_up = any(count.added_up for count in self.counts)
        return (bench.with_weights([1.0] * bench.experiment.steps) if added_up else bench).without(
            _Rescaled(self.factors)
        )


def find_counts(bench: Bench, used: Sequence[float], most: float = 0.0) -> WindowCounts | None:
    """Returns the counts that leave no difference, or no larger one than `most`; None where there are none.

    A loss that adds its micro-batches up by itself (weights normalised over the batch, then summed) is tried with
    weights of 1 after that.
    """
    divisors = _find_divisors(bench, used)
    for added_up in (False, True):
        shares = [1.0] * len(used) if added_up else list(used)
        factors = {key: count.factors(shares) for key, count in divisors.items()}
        wrong = {key: each for key, each in factors.items() if any(abs(f - 1) > SAME_NUMBER for f in each)}
        counts = tuple(divisors[key].record(key) for key in wrong if any(divisors[key].own_share_differs(used)))
        weighted_bench = bench.with_weights(shares) if added_up else bench
        what = "the window's counts in every micro-batch"
        control = weighted_bench.run_repair(what, _Rescaled(wrong), kind=ControlKind.COUNTS) if counts else None
        if control is None or not (control.rounding or control.left <= SMALL_PART * bench.total):
            continue
        while not control.rounding and len(wrong) > 1:  # some of them may belong to what is left
            fewer = [{key: each for key, each in wrong.items() if key != left_out} for left_out in wrong]
            runs = [(weighted_bench.run_repair(what, _Rescaled(some), kind=ControlKind.COUNTS), some) for some in fewer]
            less, some = min(runs, key=lambda run: run[0].left)
            if less.left * HELPS > control.left:
                break
            control, wrong = less, some
        if not (control.rounding or control.left <= most):
            continue
        counts = tuple(replace(divisors[key].record(key), added_up=added_up) for key in wrong)
        return WindowCounts(counts, control, wrong)
    return None


@dataclass
class _Divisor:
    """What one call divides by: in the full batch, and in each micro-batch; `trained`: its result has a gradient.

    Of a term that nothing divides, it is how much belongs to each: all of a sum, 1/K of a penalty.
    """

    of_full_batch: float
    trained: bool
    of_micro_batches: list[float]
    term: TermKind | None = None

    @property
    def adds_up(self) -> bool:
        """Whether the full batch's is the sum of the micro-batches', rather than their mean; empty ones may count 1."""
        if self.term is not None:
            return True
        total = sum(self.of_micro_batches)
        return abs(total - self.of_full_batch) < abs(total / len(self.of_micro_batches) - self.of_full_batch)

    def factors(self, shares: Sequence[float]) -> list[float]:
        """What the call's result is multiplied by in each micro-batch, so that it is divided by the window's count.

        A count that adds up makes the micro-batch's weight superfluous.
        """
        counted = self.trained and self.adds_up
        return [
            divisor / self.of_full_batch / (w if counted and w else 1.0)
            for divisor, w in zip(self.of_micro_batches, shares, strict=True)
        ]

    def own_share_differs(self, used: Sequence[float]) -> list[bool]:
        """Whether a micro-batch's share of the count is another one than its weight."""
        shares = used if self.adds_up else [1.0] * len(self.of_micro_batches)
        pairs = zip(self.of_micro_batches, shares, strict=True)
        return [not math.isclose(divisor / self.of_full_batch, w, rel_tol=SAME_NUMBER) for divisor, w in pairs]

    def record(self, key: FunctionKey) -> Count:
        """The count with its place."""
        name, frame, _ = key
        operation, divisors = locate_operation(name, frame), tuple(self.of_micro_batches)
        if name in _PRODUCTS and self.term is None:
            return Count(
                operation, tuple(1 / count for count in divisors), 1 / self.of_full_batch, self.adds_up, times=True
            )
        return Count(operation, divisors, self.of_full_batch, self.adds_up, term=self.term)


def _find_divisors(bench: Bench, used: Sequence[float]) -> dict[FunctionKey, _Divisor]:
    """Every call that averages in all forwards, and not by the same number in all of them; none where all weigh right.

    A number that moves with the parameters, as a loss that was cut out of the graph, is no count.
    """
    bench.experiment.progress("counts of the full batch and of the micro-batches")
    bench.experiment.draws.rewind()
    full_batch, *micro_batches = (_listen_to_forward(bench, k) for k in (None, *range(bench.experiment.steps)))
    divisors = {
        key: _Divisor(count, trained, [part.counts[key][0] for part in micro_batches])
        for key, (count, trained) in full_batch.counts.items()
        if count and all(key in part.counts for part in micro_batches)
    }
    divisors = {
        key: count
        for key, count in divisors.items()
        if any(divisor != count.of_full_batch for divisor in count.of_micro_batches)
    }
    terms = _find_undivided_terms(full_batch.terms, [part.terms for part in micro_batches])
    if not divisors or not any(any(each.own_share_differs(used)) for each in (*divisors.values(), *terms.values())):
        return terms
    weights = list(bench.experiment.parameters.values())
    with move_weights(weights, [SAME_NUMBER] * len(weights)):
        at_moved_parameters = _listen_to_forward(replace(bench, experiment=bench.experiment.with_current_state()), None)
    unmoved = {
        key: count for key, count in divisors.items() if at_moved_parameters.counts.get(key) == full_batch.counts[key]
    }
    return terms | unmoved


def find_terms_beside_constants(bench: Bench) -> list[tuple[float, Sequence[float]]]:
    """Returns the terms of a loss that adds a constant of the batch, in the full batch and in each micro-batch.

    A constant has no gradient: how it depends on the batch makes no difference. Empty without one, or where the
    micro-batches have other terms.
    """
    bench.experiment.draws.rewind()
    whole, *parts = (_listen_to_forward(bench, k) for k in (None, *range(bench.experiment.steps)))
    if any(part.beside_constants.keys() != whole.beside_constants.keys() for part in parts):
        return []
    return [(value, [part.beside_constants[key] for part in parts]) for key, value in whole.beside_constants.items()]


def _find_undivided_terms(
    full_batch: Mapping[FunctionKey, float], micro_batches: Sequence[Mapping[FunctionKey, float]]
) -> dict[FunctionKey, _Divisor]:
    """The terms of the loss that add up over the micro-batches, and those that are the same in all of them."""
    steps, divisors = len(micro_batches), {}
    for key, value in full_batch.items():
        values = [part[key] for part in micro_batches if key in part]
        if len(values) < steps:
            continue
        if all(math.isclose(each, value, rel_tol=COMPUTED_FLOAT32) for each in values):
            divisors[key] = _Divisor(steps, True, [1.0] * steps, TermKind.PENALTY)
        elif math.isclose(sum(values), value, rel_tol=COMPUTED_FLOAT32):
            divisors[key] = _Divisor(1.0, True, [1.0] * steps, TermKind.SUM)
    return divisors


def _listen_to_forward(bench: Bench, k: int | None) -> _Listener:
    listener = _Listener(bench.experiment.problem.model)
    listener.note_terms(bench.experiment.forward(k, listener))
    return listener


class _Listener(PassProbe):
    """Notes what each call divides by, and which calls made the terms of the loss, with their values.

    What scales activations is no count of a mean: samples interact there. Activations are what a model returns, where
    that is no loss, and what parameters are applied to.
    """

    def __init__(self, model: Any) -> None:
        self._modules = {module: path for path, module in model.named_modules()} if isinstance(model, nn.Module) else {}
        self._running: Sequence[Call] = ()
        self._in_model: list[tuple[Any, FunctionKey]] = []
        # by identity, which no other tensor takes as long as this one is kept
        self._inputs: dict[int, tuple[torch.Tensor, set[FunctionKey]]] = {}
        self._applied: set[FunctionKey] = set()
        self._returns_loss = False
        self.counts: dict[FunctionKey, tuple[float, bool]] = {}
        self.beside_constants: dict[FunctionKey, float] = {}
        self.terms: dict[FunctionKey, float] = {}
        self._numbers: dict[Any, tuple[FunctionKey, torch.Tensor]] = {}

    def note_terms(self, loss: torch.Tensor) -> None:
        """Takes the terms of the loss that came out of the forward."""
        total = skip_views(loss.grad_fn)
        if has_constant_addend(total):
            nodes = [node.next_functions[slot][0] for node, slot in addends(total)]
            known = [self._numbers[node] for node in nodes if node in self._numbers]
            self.beside_constants = {key: float(value) for key, value in known} if len(known) == len(nodes) else {}
        for node, slot in addends(skip_scaling(loss.grad_fn)):
            key, value = self._numbers.get(node.next_functions[slot][0], (None, loss))
            if key is not None:
                self.terms[key] = float(value)
        self._numbers.clear()
        trained = read_by_parameters([loss.grad_fn]) if self._returns_loss and self._in_model else set()
        for node, key in self._in_model:
            if not self._returns_loss or node in trained or key in self._applied:
                self.counts.pop(key, None)
        self._in_model.clear()
        self._inputs.clear()

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Sees the calls of one forward; what runs in a transform is another function's."""
        with listening(self._modules, ends=self._note_output) as self._running, intercept_calls(self._handle_call):
            yield

    def _note_output(self, call: Call, output: Any) -> None:
        if not call.parents and call.module in self._modules:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self._returns_loss |= any(tensor.numel() == 1 and tensor.requires_grad for tensor in tensors)

    def _handle_call(self, key: FunctionKey, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        self._follow_inputs((args, kwargs), result)
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
        """Follows scaled inputs, which have no graph, to where a parameter is applied to them."""
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


class _Rescaled(PassProbe):
    """Multiplies the results of some calls, each by a number per micro-batch."""

    def __init__(self, factors: Mapping[FunctionKey, Sequence[float]]) -> None:
        self._factors = factors

    def around(self, k: int | None) -> AbstractContextManager[Any]:
        """Sees the calls of one forward; what one writes in place is multiplied in place."""

        def handle_call(key: FunctionKey, func: Any, args: Any, kwargs: Any) -> Any:
            factor = self._factors[key][k] if k is not None and key in self._factors else None
            if factor == 0 and key[0] in _DIVISIONS:  # by nothing: NaN times 0 stays NaN
                return func(args[0], math.inf, **kwargs)
            result = func(*args, **kwargs)
            if factor is None:
                return result
            return result.mul_(factor) if key[0].endswith("_") else result * factor

        return intercept_calls(handle_call)


def _read_count(name: str, func: Callable[..., Any], args: Any, kwargs: Any, result: torch.Tensor) -> float | None:
    """What a call divides by, where that is one number without a gradient; None where it does not average."""
    if name in _DIVISIONS and len(args) > 1 and not kwargs.get("rounding_mode"):
        return _read_number(args[1])
    if name in _PRODUCTS and len(args) > 1:
        numbers = [n for n in map(_read_number, args) if n]
        # by infinity: the share of a mask that keeps nothing, which no number of the window stands in for
        return 1 / numbers[0] if len(numbers) == 1 and math.isfinite(numbers[0]) else None
    if kwargs.get("reduction") in ("mean", "batchmean") and result.dim() == 0 and result.requires_grad:
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
