"""Where do the same samples first differ with the batch that they came in, in the forward and in the backward?

Shapes: B samples, K micro-batches with samples `start` to `stop - 1`; fingerprints of shape (variants, rows, 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import nn

from gaverify.passes.calls import RunningCall, listening, per_channel_affine
from gaverify.passes.gradients import PassProbe
from gaverify.passes.isolation import generator_states
from gaverify.passes.layouts import LAYOUT_KINDS, LayoutKind, leaves
from gaverify.passes.randomness import Dealing
from gaverify.records.comparison import ForwardComparison
from gaverify.records.experiment import FunctionKey, ModuleDifference, Operation, Suspect
from gaverify.records.windows import AccumulationWindow
from gaverify.search.bench import Bench, ControlFailed, take_rows
from gaverify.search.trace.operations import intercept_calls, make_tracer
from gaverify.search.trace.suspects import Dependence, Matching, SuspectFinder
from gaverify.search.trace.traces import Frame, OperationTrace, describe_step, takes_other_branch
from gaverify.thresholds import AGREE_FLOAT32, AGREE_FLOAT64, FIT_MAGNIFIES, SMALL_PART, TINY
from gaverify.torch_internals import without_torch_function
from gaverify.tracebacks import calling_frame, hands_over

# Compares the gradients at the boundaries of modules and custom functions sample by sample.
#
# Shapes: B samples, micro-batches of samples `start` to `stop - 1`.


Key = tuple[int, str, int]  # the call, "outputs" or "inputs", the position of the tensor


class BoundaryGradients(PassProbe):
    """Keeps the gradients at module boundaries of the full batch, and compares the micro-batches' with their rows."""

    def __init__(self, bench: Bench) -> None:
        self._names = {module: path for path, module in bench.experiment.named_modules()}
        self._bounds, self._size = list(bench.experiment.bounds()), bench.experiment.batch_size
        self._full: dict[Key, torch.Tensor] = {}
        self.worst: dict[int, dict[str, float]] = {}  # the largest relative difference, by call and side
        self.paths: dict[int, str] = {}
        self.outermost: set[int] = set()
        self.functions: dict[int, tuple[int, str, Frame]] = {}  # position among applications, class, line
        self._k: int | None = None
        self._calls = -1
        self._running: list[RunningCall] = []

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Registers tensor hooks while the forward runs; they fire in its backward."""
        self._k, self._calls = k, -1
        with listening(self._names, self._enter, self._leave) as self._running, intercept_applications(self._apply):
            yield

    def _enter(self, call: RunningCall, inputs: Any, _: Any) -> None:
        self._calls += 1
        if not call.parents:
            self.outermost.add(self._calls)
        if call.module in self._names:
            call.kept["at"] = self._calls
            self.paths[self._calls] = call.path
            self._listen(inputs, self._calls, "inputs")

    def _leave(self, call: RunningCall, output: Any) -> None:
        if "at" in call.kept:
            self._listen(output, call.kept["at"], "outputs")

    @hands_over
    def _apply(self, position: int, kind: type, args: Any, call: Callable[[], Any]) -> Any:
        """Hooks the inputs and outputs of a custom function."""
        self._calls += 1
        number = self._calls
        self.functions[number] = (position, kind.__name__, calling_frame())
        inside = [running.path for running in self._running if running.module in self._names]
        if inside:
            self.paths[number] = inside[-1]
        self._listen(args, number, "inputs")
        result = call()
        self._listen(result, number, "outputs")
        return result

    def _listen(self, value: Any, call: int, side: str) -> None:
        # Modules' own backward hooks would put a node at each boundary, and refuse outputs that are changed in place;
        # hooks on tensors leave the graph as it is.
        tensors = value if isinstance(value, tuple | list) else (value,)
        for position, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda g, key=(call, side, position), k=self._k: self._compare_gradient(key, k, g))

    def _compare_gradient(self, key: Key, k: int | None, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            if k is None:
                self._full[key] = gradient.detach().clone()
                return
            full = self._full.get(key)
            if full is None or full.shape == gradient.shape:
                return  # without a row per sample it is a share of the full batch's gradient, and not the same number
            try:
                rows = take_rows(full, gradient, *self._bounds[k], self._size)
            except ControlFailed:
                return
            scale = float(rows.norm()) or 1.0
            difference, sides = float((gradient.detach() - rows).norm()) / scale, self.worst.setdefault(key[0], {})
            sides[key[1]] = max(sides.get(key[1], 0.0), difference)


@contextmanager
def intercept_applications(changed: Callable[[int, type, Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Replaces every application of a custom autograd function by `changed(position, class, arguments, call)`."""
    original, positions = torch.autograd.Function.__dict__["apply"], count()

    def apply(kind: type, *args: Any, **kwargs: Any) -> Any:
        @hands_over
        def call() -> Any:
            # a classmethod, and from torch 2.14 on a descriptor in C: both are bound by `__get__`
            return original.__get__(None, kind)(*args, **kwargs)

        return changed(next(positions), kind, args, call)

    try:
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


# Does a module scale its channels, as a normalisation by statistics of the batch does?


_VARIANCES = ("var", "var_mean", "std", "std_mean")


def is_normalisation(bench: Bench, path: str, reduction: str, functions: Collection[FunctionKey] = ()) -> bool:
    """Returns whether a module normalises over the batch; one of three properties is enough.

    1. Its outputs are a·input + b with one (a, b) per channel.
    2. It computes a variance over the batch, and its output has the shape of its input.
    3. Its outputs stay the same if the input of its reduction over the batch is scaled and shifted.

    Args:
        bench: Where to run.
        path: The module's path.
        reduction: Name of the operation that reduces over the batch.
        functions: The torch calls that reduce.
    """
    module = dict(bench.experiment.named_modules())[path]
    listener = _ModuleProbe(module)
    bench.experiment.forward(None, listener)
    if listener.affine or _normalises_later(bench, module, listener.first):
        return True
    # For normalisations that scale no channel, such as those that divide by the larger of two deviations. A module that
    # contains modules is a block of a network, and one that appends a deviation as a feature changes the shape.
    if listener.same_shape and reduction in _VARIANCES and not any(True for _ in module.children()):
        return True
    return _undoes_scaling(bench, module, listener, functions)


def _normalises_later(bench: Bench, module: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Whether a module scales its channels in a second call: fresh state may cancel the batch's statistics exactly."""
    restore = generator_states()
    try:
        with torch.no_grad():
            module(*inputs)  # fresh statistics may undo those of the batch exactly; after one forward they do not
            output = module(*inputs)
    except Exception:  # it needs keyword arguments, which were not recorded: only the first call counts then
        return False
    finally:
        bench.experiment.state.restore()
        restore()
    input_tensor, output_tensor = _first_tensor(inputs), _first_tensor(output)
    return input_tensor is not None and output_tensor is not None and per_channel_affine(input_tensor, output_tensor)


def _undoes_scaling(bench: Bench, module: nn.Module, before: _ModuleProbe, functions: Collection[FunctionKey]) -> bool:
    """Whether the outputs of a module stay when the input x of its reduction over the batch becomes 2x + 1.

    They do wherever a mean is subtracted and the result divided by a deviation, except for the epsilon beside it.

    Args:
        bench: Where to run.
        module: The module.
        before: The outputs in the forward as it is.
        functions: The torch calls that reduce: the first of them is given another input.
    """
    listener = _ModuleProbe(module, functions)
    if functions:
        bench.experiment.forward(None, listener)
    if not listener.scaled or not listener.outputs:
        return False
    # A module that hardly depends on the reduction (a solver on its error norm) normalises nothing. Scaling the result
    # of the reduction shows how much the outputs depend on it.
    of_results = _ModuleProbe(module, functions, of_results=True)
    bench.experiment.forward(None, of_results)
    distance = min(_size(before), _distance(before, of_results))
    return _distance(before, listener) <= SMALL_PART * distance


def _size(listener: _ModuleProbe) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(output)) for output in listener.outputs))


def _distance(a: _ModuleProbe, b: _ModuleProbe) -> float:
    pairs = zip(a.outputs, b.outputs, strict=False)
    return math.hypot(*(float(torch.linalg.vector_norm(x - y)) for x, y in pairs))


def _first_tensor(inputs: Any) -> torch.Tensor | None:
    return next((leaf for _, leaf in leaves(inputs) if isinstance(leaf, torch.Tensor)), None)


class _ModuleProbe(PassProbe):
    """Compares input and outputs of one module, and scales the input of the first of some torch calls in place.

    With `of_results` it scales what that call returns instead.
    """

    def __init__(self, module: nn.Module, functions: Collection[FunctionKey] = (), *, of_results: bool = False) -> None:
        self._module, self._functions, self._of_results = module, functions, of_results
        self.affine = False
        self.same_shape = False
        self.first: tuple[Any, ...] = ()
        self.outputs: list[torch.Tensor] = []
        self.scaled = False

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Listens for the length of a forward."""

        def handle_call(key: FunctionKey, func: Any, args: Any, kwargs: Any) -> Any:
            scaled = args[0] if args else None
            first = key in self._functions and not self.scaled and isinstance(scaled, torch.Tensor)
            if first and self._of_results:
                scaled = result = func(*args, **kwargs)
            if first:
                with without_torch_function(), torch.no_grad():
                    for tensor in scaled if isinstance(scaled, tuple) else (scaled,):
                        tensor.data.mul_(2).add_(1)  # `detach` would note the write, and a hooked input forbids it
                self.scaled = True
            return result if first and self._of_results else func(*args, **kwargs)

        with listening({self._module: ""}, ends=self._note_output, outside=""), intercept_calls(handle_call):
            yield

    def _note_output(self, call: RunningCall, output: Any) -> None:
        self.first = self.first or call.args
        # the first of several outputs: a flow returns a determinant beside it
        input_tensor, output_tensor = _first_tensor(call.args), _first_tensor(output)
        with without_torch_function():
            if input_tensor is not None and output_tensor is not None:
                self.same_shape = self.same_shape or input_tensor.shape == output_tensor.shape
                self.affine = self.affine or per_channel_affine(input_tensor, output_tensor)
            tensors = [leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
            self.outputs += [tensor.detach().clone() for tensor in tensors if tensor.is_floating_point()]


# Which operation is the first whose result for the same samples depends on the batch that they came in?


_ADDED_UP: tuple[LayoutKind, ...] = ("global",)  # layouts of what adds up over the micro-batches


def trace_divergences(
    bench: Bench, weight_facts: AccumulationWindow, *, foreign: bool = False
) -> tuple[list[Suspect], ForwardComparison]:
    """Runs every forward once, from the same state; returns the suspects in the order of execution, and what agrees.

    A first forward of micro-batch 1 records only shapes. Their comparison with the full batch's shapes shows in which
    dimension of each result the samples are.

    Args:
        bench: Where to run, and what has been neutralised already.
        weight_facts: How micro-batches are weighted, for the gap between the full loss and their weighted sum.
        foreign: Whether generators of Python or NumPy advanced differently: rows from outside torch are draws then.
    """
    experiment = bench.experiment
    full, parts, full_loss, losses = _traces(bench)
    agree = AGREE_FLOAT64 if bench.experiment.is_float64 else AGREE_FLOAT32
    shares = [_on_host([1.0] * experiment.steps), _on_host([size / experiment.batch_size for size in experiment.sizes])]
    if len(weight_facts.valid_targets) == experiment.steps and sum(weight_facts.valid_targets) > 0:
        shares.append(_on_host([count / sum(weight_facts.valid_targets) for count in weight_facts.valid_targets]))
    # The loss agrees if it agrees for any usual weighting: wrong weights are found by the gradients, before this trace.
    total = _on_host(losses)
    candidates = [_on_host(weight_facts.used), *shares]
    gaps = [abs(float(share @ total) - full_loss) / max(abs(full_loss), TINY) for share in candidates]
    gap, nearest = min(zip(gaps, candidates, strict=True), key=lambda pair: pair[0])
    matching = Matching(full, parts, agree)
    dependence = Dependence(matching, foreign=foreign, shares=shares, agree=agree)
    finder = SuspectFinder(matching, dependence, experiment.batch_size)
    suspects = list(finder.find_suspects(shares, agree, gap <= agree))
    return suspects, ForwardComparison(
        agree=not suspects, loss_gap=gap, shares=tuple(nearest.tolist()), modules=tuple(_modules(matching))
    )


def find_reweighted_operation(bench: Bench, used: Sequence[float], fitted: Sequence[float]) -> Operation | None:
    """Returns the first operation whose results add up with the fitted weights and not with those that are used.

    That is the loss call or division that weights the micro-batches otherwise; None if no single operation does.
    """
    full, parts, _, _ = _traces(bench, _ADDED_UP)
    agree = AGREE_FLOAT64 if bench.experiment.is_float64 else AGREE_FLOAT32
    matching = Matching(full, parts, agree)
    wrong, right, alone = ([_on_host(weights)] for weights in (used, fitted, (1.0, *(0.0 for _ in used[1:]))))
    for index in sorted(full.live()):
        for position in range(len(full.steps[index].results)) if full.steps[index].differentiable else ():
            # A result that is the same for every batch (embedded positions) adds up with any weights whose sum is 1. It
            # equals that of the first micro-batch, which is excluded here.
            away = matching.additive(index, wrong, position) > FIT_MAGNIFIES * agree
            counts = away and matching.additive(index, alone, position) > FIT_MAGNIFIES * agree
            if counts and matching.additive(index, right, position) <= FIT_MAGNIFIES * agree:
                return describe_step(full, full.steps[index])
    return None


def has_diverging_branch(bench: Bench) -> bool:
    """Whether a number that Python code read makes some micro-batch take another branch than the full batch."""
    full, parts, _, _ = _traces(bench, ())
    return any(takes_other_branch(full, part) for part in parts)


def find_one_sided_branch(bench: Bench) -> Operation | None:
    """Returns the first operation from which only the full batch, or only a micro-batch, computes its loss."""
    full, parts, _, _ = _traces(bench, ())
    for trace, other_trace in (pair for part in parts for pair in ((full, part), (part, full))):
        ran = {other_trace.steps[index].signature for index in other_trace.live()}
        strays = (step for step in (trace.steps[index] for index in sorted(trace.live())) if step.signature not in ran)
        if (stray := next(strays, None)) is not None:
            return describe_step(trace, stray)
    return None


def _traces(
    bench: Bench, layouts: Collection[LayoutKind] = LAYOUT_KINDS
) -> tuple[OperationTrace, list[OperationTrace], float, list[float]]:
    """Traces the full batch and every micro-batch, with fingerprints of results in some layouts; and their losses."""
    experiment = bench.experiment

    def trace_forward(
        k: int | None, template: OperationTrace | None = None, plan: OperationTrace | None = None
    ) -> tuple[OperationTrace, float]:
        tracer = make_tracer(experiment, template, plan, layouts)
        loss = experiment.forward(k, tracer, dealing=dealing).detach()
        return tracer.finish(loss), float(loss)

    experiment.progress("tracing the full batch")
    dealing = experiment.deal()
    # Where something is drawn, the first micro-batch has to run, because its draws are matched as well.
    shapes = getattr(bench.watch, "shapes", None) if not experiment.draws.count else None
    if shapes is None:
        shapes, _ = trace_forward(0)
    full, full_loss = trace_forward(None, template=shapes)
    # The draws start again: the first micro-batch has used its rows already, when its shapes were recorded.
    dealing = Dealing(experiment.draws, experiment.reading, dealing.report.prints)
    parts, losses = [], []
    for k in range(experiment.steps):
        experiment.progress(f"tracing micro-batch {k + 1} of {experiment.steps}")
        trace, loss = trace_forward(k, plan=full)
        parts.append(trace)
        losses.append(loss)
    return full, parts, full_loss, losses


def _modules(matching: Matching) -> Iterator[ModuleDifference]:
    """Yields the modules that return rows of samples, in the order of their first calls."""
    worst: dict[str, float] = {}
    for call in matching.full.calls:
        compared = [(at, rows) for at in call.outputs if at is not None and (rows := matching.rows[at]) is not None]
        if call.path and compared:
            differences = [rows[0] if matching.differs(at) else 0.0 for at, rows in compared]
            worst[call.path] = max(worst.get(call.path, 0.0), *differences)
    return (ModuleDifference(path, difference) for path, difference in worst.items())


def _on_host(numbers: Sequence[float]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.float64, device="cpu")
