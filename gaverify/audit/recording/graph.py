"""Reads facts about a script's code from the graph of autograd.

It tells which parameters lie behind a number, and in which lines the rows of a batch meet. It tells which forwards a
backward pass reaches: a forward whose result is only looked at feeds no window. For a loss it tells by which factor
the script multiplies it (`loss / K` gives 1/K), and which terms it adds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from gaverify.audit.recording.values import plain, tensors_in
from gaverify.passes.calls import addends, skip_scaling, walk_from
from gaverify.thresholds import COMPUTED_FLOAT32
from gaverify.tracebacks import Owner, Place, owner_of

_LINE = re.compile(r'File "(.+?)", line (\d+)')


def keep_lines() -> None:
    """Lets torch note with every operation the lines that called it."""
    # Anomaly mode stores a traceback with each node. Its check for NaN would raise in the script, so it is off.
    torch.autograd.set_detect_anomaly(True, check_nan=False)


def line_of(node: Any) -> Place | None:
    """Returns the user's line that ran an operation, where the process keeps the lines of all operations."""
    # From the innermost frame outwards, because several of the user's functions may be on the stack.
    return next((place for place in reversed(_lines_of(node)) if owner_of(place[0]) is Owner.USER), None)


def _lines_of(node: Any) -> list[Place]:
    stack: Sequence[str] = node.metadata.get("traceback_", ()) if node is not None else ()
    return [(match[1], int(match[2])) for entry in stack if (match := _LINE.search(entry))]


def meetings(
    roots: Iterable[Any], ends: Collection[Any], rows: Collection[int], *, may_meet: bool = False
) -> list[Place]:
    """Returns the user's lines in which rows of a batch meet, in the order in which they ran.

    They meet in a mean or a deviation: an operation makes something without rows of something with rows, and its result
    goes back to rows or stays in another shape than a number. They also meet in a matrix whose two dimensions both
    count rows.

    Args:
        roots: Operations, from which the graph is looked at.
        ends: Operations behind which nothing is looked at; they are looked at as operands.
        rows: How many rows a tensor may have.
        may_meet: Also where other sizes may be meant: a micro-batch has as many rows as many a layer has features.
    """
    lines: dict[int, Place] = {}
    roots = list(roots)
    # No node reads a root, but a root may itself be a matrix of rows by rows.
    edges = [(None, root, 0) for root in roots]
    edges += [(node, child, slot) for node in behind(roots, ends) for child, slot in node.next_functions]
    for reader, node, slot in edges:
        shape = _shape(node, slot)
        if shape is None or node in ends:
            continue
        operands = [_shape(*edge) for edge in node.next_functions]
        # Only the line that makes such a matrix counts, not the softmax behind it, whose operand is one already.
        mixed = _is_matrix(shape, rows) and (may_meet or not any(_is_matrix(operand, rows) for operand in operands))
        # A micro-batch may have as many rows as a layer has features, so that sizes alone prove nothing there.
        without = may_meet or not any(size in rows for size in shape)
        reduced = without and any(operand and operand[0] in rows for operand in operands)
        # A number counts only if rows read it again, as in `x - x.mean()`: every loss is a number made of rows.
        is_kept = shape not in ((), (1,)) or any(size in rows for size in _shape(reader, 0) or ())
        place = line_of(node) if mixed or (reduced and is_kept) else None
        if place is not None:
            # The walk comes to the operations in another order than the one in which they ran.
            lines[node._sequence_nr()] = place
    return list(dict.fromkeys(lines[number] for number in sorted(lines)))


def behind(roots: Iterable[Any], ends: Collection[Any] = ()) -> Iterator[Any]:
    """Yields the operations from some roots on, each once, without `ends` and what lies behind them."""

    def onwards(nodes: Iterable[Any]) -> list[Any]:
        return [node for node in nodes if node is not None and node not in ends]

    return walk_from(onwards(roots), lambda node: onwards(child for child, _ in node.next_functions))


def _shape(node: Any, slot: int) -> tuple[int, ...] | None:
    outputs = getattr(node, "_input_metadata", ())
    return tuple(outputs[slot].shape) if slot < len(outputs) else None


def _is_matrix(shape: tuple[int, ...] | None, rows: Collection[int]) -> bool:
    return shape is not None and any(size in rows and shape.count(size) > 1 for size in shape)


_MOST = 64  # results of one forward that are listened to


class ForwardReach:
    """Listens at the results of forwards for gradients that flow into them."""

    def __init__(self) -> None:
        self._reached: set[int] = set()
        self._unknown: list[int] = []

    def listen(self, output: Any, forward: int) -> None:
        """Listens at the result of the forward with this number; one whose result hides its graph counts as reached."""
        results = tensors_in(output)
        nodes = [result.grad_fn for result in results if result.grad_fn is not None]
        # A hook lives as long as its node: it keeps no graph longer than the script does.
        for node in nodes[:_MOST]:
            node.register_prehook(lambda *_: self._reached.add(forward))
        # Such a result can be traced to no forward; without its rows the window would seem to lack samples.
        if not nodes and (not results or any(result.requires_grad for result in results)):
            self._unknown.append(forward)

    def begin(self) -> None:
        """A backward pass begins."""
        self._reached.clear()

    def peek(self) -> list[int]:
        """Returns the forwards that a differentiation has reached, which may turn out to be no backward pass."""
        return sorted({*self._reached, *self._unknown})

    def end(self) -> list[int]:
        """Returns the forwards that the backward pass has reached."""
        forwards = self.peek()
        self._reached.clear()
        self._unknown.clear()
        return forwards


def ends_in_parameters(roots: Any) -> bool:
    """Whether the graph behind what is differentiated has a parameter at one of its ends.

    A graph that ends in inputs, or in weights that `functional_call` was given, trains nothing.

    Args:
        roots: A tensor, or several in any nesting.
    """
    tensors = tensors_in(roots)
    if any(isinstance(tensor, torch.nn.Parameter) for tensor in tensors):
        return True
    return any(
        # A function written in Python, as checkpointing is, may differentiate parameters that its node does not name.
        isinstance(node, torch.autograd.function.BackwardCFunction)
        or isinstance(getattr(node, "variable", None), torch.nn.Parameter)
        for node in behind(tensor.grad_fn for tensor in tensors)
    )


MOST = 4
"""Terms that are told apart; those of a longer sum after the first three count as one."""
_DEEPEST = 8  # steps from what is differentiated down to the loss itself


class Weight:
    """Listens, while a backward pass runs, to the gradient of the innermost number that the loss was made from.

    The chain of operations that have one operand with a gradient is followed from the root of the graph, for as long as
    the operands are single numbers. The gradient that flows into the last of them is what the script multiplied it by.
    The gradient of the rows behind it is 1/n of that for a mean over n of them, which tells how many the script has
    counted; for a sum of several terms the first tells it.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._seen: dict[int, float] = {}
        self._share = 0.0

    def begin(self, roots: Any) -> None:
        """A backward pass from `roots` begins; several roots have no one weight."""
        self._seen, self._share = {}, 0.0
        node = roots.grad_fn if isinstance(roots, torch.Tensor) and roots.numel() == 1 else None
        alone = True
        for depth in range(_DEEPEST):
            if node is None:
                return
            self._hooks.append(node.register_prehook(partial(self._note, depth, alone)))
            following = [child for child, _ in node.next_functions if child is not None]
            # Behind a sum the chain follows its first term, whose weight is not the loss's.
            alone = alone and len(following) == 1
            node = following[0] if following else None

    def end(self) -> float | None:
        """Returns the weight; None where none was seen."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return self._seen[max(self._seen)] if self._seen else None

    @property
    def scales(self) -> list[float]:
        """The gradient of each number on the way to the innermost one: the product of all factors up to that number."""
        return [self._seen[depth] for depth in sorted(self._seen)]

    def value_of(self, root: Any) -> float:
        """Returns the number that was differentiated, times what `backward` was given and hooks made of that.

        NaN where several numbers were, or nothing of it can be read.
        """
        values = plain(root) if 0 in self._seen else None
        return math.nan if values is None else float(values) * self._seen[0]

    @property
    def divisor(self) -> float | None:
        """The divisor of the loss, up to a factor that all micro-batches share; None where that was not seen."""
        return 1 / self._share if self._share and math.isfinite(1 / self._share) else None

    @property
    def of_a_sum(self) -> bool:
        """Whether the loss is a sum of its rows that the script divided itself: each row has the weight of the sum."""
        weight = abs(self._seen[max(self._seen)]) if self._seen else 0.0
        return weight > 0.0 and math.isclose(weight, self._share, rel_tol=COMPUTED_FLOAT32)

    def _note(self, depth: int, alone: bool, gradients: tuple[torch.Tensor, ...]) -> None:
        if len(gradients) != 1:
            return
        if gradients[0].numel() == 1:
            self._seen |= {depth: float(gradients[0])} if alone else {}
        elif not self._share:
            # The largest entry: behind a cross entropy, ignored rows and all classes but the target's have zero.
            # Infinity stands for a selection without rows, whose divisor is 0.
            self._share = float(gradients[0].abs().max()) if gradients[0].numel() else math.inf


class Terms:
    """The terms of one loss, in the order in which they are written.

    From the root down, operations that only scale a number (`loss / K`, the scale of a `GradScaler`) are skipped; the
    first sum or difference of numbers gives the terms. The gradients of all terms add up to that of the loss.

    Args:
        roots: The differentiated tensors; several have no one sum.
    """

    def __init__(self, roots: Any) -> None:
        alone = isinstance(roots, torch.Tensor) and roots.numel() == 1
        self._loss_node = skip_scaling(roots.grad_fn if alone else None)
        edges = addends(self._loss_node)
        self._groups = [[edge] for edge in edges[: MOST - 1]] + [edges[MOST - 1 :]] * (len(edges) >= MOST)

    def __len__(self) -> int:
        return len(self._groups)

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        """Lets no gradient flow into the other terms; a loss without such a term gives none at all.

        Args:
            number: The number of the term, from 1.
        """
        other_edges = [edge for at, group in enumerate(self._groups, 1) if at != number for edge in group]
        # Cut at the sum, not at the term's own node: a term that is also part of another one counts there still.
        with ExitStack() as stack:
            for node, slot in other_edges:
                stack.callback(node.register_hook(partial(_zero_gradient, slot)).remove)
            yield

    def place(self, number: int) -> Place | None:
        """Returns the user's line that made a term, where the process keeps the lines of all operations."""
        if number > len(self._groups):
            return None
        node, slot = self._groups[number - 1][0]
        return line_of(node.next_functions[slot][0])

    @property
    def loss_line(self) -> Place | None:
        """The user's line that made the loss: behind what only scales it."""
        return line_of(self._loss_node)

    def made_within(self, place: Place | None) -> Place | None:
        """Returns `loss_line` if a library that was called at `place` made the loss, as a framework's loop does."""
        lines = [(os.path.abspath(file), line) for file, line in _lines_of(self._loss_node)]
        # The stack runs from the outside in: what the line at `place` called stands behind it.
        inside = lines[lines.index(place) + 1 :] if place in lines else []
        called = next((owner for file, _ in inside if (owner := owner_of(file)) is not Owner.MACHINERY), None)
        return self.loss_line if called is Owner.LIBRARY else None


def _zero_gradient(slot: int, gradients: Sequence[Any], _: Any) -> tuple[Any, ...]:
    """The hook of a node that makes nothing of the gradient for one operand."""
    return tuple(
        torch.zeros_like(gradient) if at == slot and gradient is not None else gradient
        for at, gradient in enumerate(gradients)
    )
