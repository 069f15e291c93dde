"""Listeners inside a pass: to modules, operations, functions; and walks through the graph that a pass leaves.

Whoever listens to torch writes a function and opens one of these; no other mode is defined in gaverify.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from gaverify.torch_internals import TorchDispatchMode, is_in_functorch_transform
from gaverify.tracebacks import hands_over

# Walks through whatever hangs together (steps of a trace, nodes of a graph, classes), and the addends of a loss.


T = TypeVar("T", bound=Hashable)


def walk_from(starts: Iterable[T], onwards: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yields everything that a walk from some starts comes to, these among it, each once.

    Args:
        starts: Where it begins.
        onwards: Returns the values that follow one; none where the walk ends.
    """
    queue, visited = list(starts), set[T]()
    while queue:
        current = queue.pop()
        if current not in visited:
            visited.add(current)
            yield current
            queue.extend(onwards(current))


_SUMS = ("AddBackward0", "SubBackward0")
_DEEPEST = 64  # operations from the root down to the sum

Edge = tuple[Any, int]  # a node of the graph, and which of its operands


def skip_scaling(node: Any) -> Any:
    """Returns the operation that made a number, behind those that only scale it."""
    for _ in range(_DEEPEST):
        if node is None or not _is_number(node):
            return None
        operands = [child for child, _ in node.next_functions if child is not None]
        if len(operands) != 1 or not _is_number(operands[0]):
            return node
        node = operands[0]
    return None


def addends(node: Any) -> list[Edge]:
    """Returns the operands of a sum, and of the sums among them in their place; none of another operation."""
    operands: list[Edge] = []
    summed = node is not None and node.name() in _SUMS
    waiting = [(node, slot) for slot in reversed(range(len(node.next_functions)))] if summed else []
    while waiting:
        holder, slot = waiting.pop()
        child = holder.next_functions[slot][0]
        # An operand without a graph: a constant.
        if child is None:
            continue
        if child.name() in _SUMS:
            # Reversed, so that operands come out in the order in which the user wrote them.
            waiting += [(child, inner) for inner in reversed(range(len(child.next_functions)))]
        else:
            operands.append((holder, slot))
    return operands


def has_constant_addend(node: Any) -> bool:
    """Whether an operation is a sum with an operand that has no gradient, or holds such a sum among its operands."""

    def operands(each: Any) -> list[Any]:
        return [child for child, _ in each.next_functions] if each is not None and each.name() in _SUMS else []

    return None in walk_from([node], operands)


_VIEWS = (
    "TBackward0",
    "TransposeBackward0",
    "PermuteBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "ExpandBackward0",
    "UnsqueezeBackward0",
    "ToCopyBackward0",
    "_LiftBackward",  # of `passes/lifting`
)


def skip_views(node: Any) -> Any:
    """Returns the operation whose result has only been given another shape, order or precision since."""
    while node.name() in _VIEWS and _operands(node):
        node = _operands(node)[0]
    return node


def read_by_parameters(starts: Iterable[Any]) -> set[Any]:
    """Returns every node whose result, or what was made of it, was combined with a parameter of several elements.

    Args:
        starts: The nodes of a loss.
    """
    read: list[Any] = []
    for node in walk_from((start for start in starts if start is not None), _operands):
        operands = _operands(node)
        # Two operands at least: a parameter that is only reshaped or cast combines nothing.
        if len(operands) > 1 and any(map(_is_parameter, operands)):
            read += operands
    return set(walk_from(read, _operands))


def is_made_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter of several elements, in another shape or precision maybe."""
    if tensor.grad_fn is None:
        return tensor.requires_grad and tensor.numel() > 1
    return _is_parameter(tensor.grad_fn)


def _operands(node: Any) -> list[Any]:
    return [operand for operand, _ in node.next_functions if operand is not None]


def _is_parameter(node: Any) -> bool:
    """Whether a node is a parameter, in another shape or precision maybe; a learned scale of a loss is a number."""
    node = skip_views(node)
    return hasattr(node, "variable") and node.variable.numel() > 1


def _is_number(node: Any) -> bool:
    shapes = [tuple(each.shape) for each in getattr(node, "_input_metadata", ())]
    return len(shapes) == 1 and all(size == 1 for size in shapes[0])  # a loss of shape (1,) is one as well


# Listeners inside a pass, of a problem or a script: to modules, nested as they run, to operations, to functions.


Begins = Callable[["RunningCall", tuple[Any, ...], dict[str, Any]], "tuple[tuple[Any, ...], dict[str, Any]] | None"]
"""Told of a call before it runs; may return other arguments for it, where only known modules are listened to."""
Ends = Callable[["RunningCall", Any], Any]
"""Told of a call and its output, unless that lives in a transform of `torch.func` alone; may return another output."""


@dataclass
class RunningCall:
    """One call of a module.

    Args:
        module: The module that was called.
        path: Its path; empty where none is known.
        number: The how-manieth call of this path, from 1.
        position: Among all calls, in the order in which they begin, from 0.
        parents: The calls around it, outermost first.
        under: The path of the module whose forward called it.
        args: Its arguments by position.
        kept: A value that a listener keeps from the beginning of the call to its end.
    """

    module: nn.Module
    path: str
    number: int
    position: int
    parents: tuple[RunningCall, ...]
    under: str
    args: tuple[Any, ...]
    kept: dict[str, Any] = field(default_factory=dict)


@contextmanager
def listening(
    paths: Mapping[nn.Module, str],
    begins: Begins = lambda *_: None,
    ends: Ends = lambda *_: None,
    *,
    outside: str | None = None,
) -> Iterator[list[RunningCall]]:
    """Tells of the calls of modules, and gives those that are running, outermost first.

    Args:
        paths: The modules that are known, by path.
        begins: Called for every call.
        ends: Called for every call that ends.
        outside: Path that an outermost call is `under`, where only these modules are listened to; None: every module
            is, by hooks that run before its own and know no arguments by name, and a call that raised has no output.
    """
    running: list[RunningCall] = []
    counts: Counter[str] = Counter()
    positions = count()

    def begin_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        path, under = paths.get(module, ""), running[-1].path if running else outside or ""
        counts[path] += 1
        running.append(RunningCall(module, path, counts[path], next(positions), tuple(running), under, args))
        return begins(running[-1], args, kwargs or {})

    def end_call(module: nn.Module, args: tuple[Any, ...], output_value: Any) -> Any:
        if not any(call.module is module for call in running):
            return None  # it began before
        # The user's code may catch what a module raises and go on.
        while running[-1].module is not module:  # a call that raised has no end
            running.pop()
        # These arguments ran: another hook may have exchanged them since the call began.
        running[-1].args = args
        call = running.pop()
        return None if is_in_functorch_transform() else ends(call, output_value)

    with ExitStack() as hooks:
        if outside is None:
            hooks.callback(register_module_forward_pre_hook(begin_call).remove)
            hooks.callback(register_module_forward_hook(end_call, always_call=True).remove)
        for module in paths if outside is not None else ():
            hooks.callback(module.register_forward_pre_hook(begin_call, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(end_call).remove)
        yield running


_UNEXPLAINED = 1e-5  # what a·x + b may leave over of an output before it counts as something else
_ALIKE = 1e-5  # relative spread of the slopes that rounding explains, where the forward ran in float32


def per_channel_affine(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether `after` is a·`before` + b with one (a, b) per channel, the slopes not all alike."""
    if before.shape != after.shape or before.dim() < 2 or not after.is_floating_point():
        return False
    for channel in {1, before.dim() - 1}:
        x = before.detach().movedim(channel, 0).flatten(1).double()
        y = after.detach().movedim(channel, 0).flatten(1).double()
        # Through two points there is always a line.
        if x.shape[1] < 3:
            continue
        # Without the means the offset b falls out, and one slope is left to fit.
        x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
        slope = (x * y).sum(1, keepdim=True) / x.square().sum(1, keepdim=True).clamp_min(1e-300)
        unexplained = (y - slope * x).norm() / y.norm().clamp_min(1e-300)
        spread = slope.std() if len(slope) > 1 else slope.abs().max()
        if float(unexplained) < _UNEXPLAINED and float(spread) > _ALIKE * float(slope.abs().max()):
            return True
    return False


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""`handler(func, args, kwargs)` returns what the caller of the operation gets; it runs `func` itself, or does not."""


class OperationMode(TorchDispatchMode):
    """Gives every operation that reaches the dispatcher to `handler`, in the backward as well."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handler = hands_over(handler)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch wraps a mode in `torch._dynamo.disable` unless it says no here, and that import costs a second."""
        return False

    @hands_over
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handler(func, args, kwargs or {})


class FunctionMode(TorchFunctionMode):
    """Gives every outermost call of a torch function or method to `handler`: what these call in turn is not seen."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = hands_over(handler)

    @hands_over
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handler(func, args, kwargs or {})


def operation_name(func: Any) -> str:
    """Returns `bernoulli_` for `aten::bernoulli_.float`."""
    return str(func._schema.name.split("::")[-1])
