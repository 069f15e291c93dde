"""How a rank scales its losses and when it synchronises: its micro-batches alone, and under an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gaverify.passes.gradients import PassProbe
from gaverify.passes.task import Task
from gaverify.ranks.engines import Reach, blocks
from gaverify.records.ranks import Engine


class Scaled(PassProbe):
    """A rank's own gradients, scaled as its loop scales them: the engines average over the ranks.

    Args:
        ranks: R; each micro-batch's loss counts R times its weight.
        share: What the loss is multiplied by besides, in a control.
    """

    def __init__(self, ranks: int, share: float = 1.0) -> None:
        self._ranks = ranks * share

    def backward(self, k: int | None, loss: torch.Tensor, weight: float) -> None:
        """Puts the gradients of R · `weight` · `loss` into `.grad`."""
        super().backward(k, loss, weight * self._ranks)


class Alone(Scaled):
    """A rank's micro-batches without an engine; notes what they reach of the model.

    Args:
        task: With the bare model.
        ranks: R.
    """

    def __init__(self, task: Task, ranks: int) -> None:
        super().__init__(ranks)
        self._parameters = task.parameters
        self._blocks = list(blocks(task.problem.model))
        self._reached: list[set[str]] = []
        self._calls: list[list[int]] = [[] for _ in self._blocks]

    @property
    def reach(self) -> Reach:
        """What was noted."""
        unused = any(len(reached) < len(self._parameters) for reached in self._reached)
        left_out = set(self._parameters).difference(*self._reached)
        return Reach(unused, tuple(map(tuple, self._calls)), frozenset(left_out))

    @contextlib.contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Notes the parameters that the backward reaches, and the blocks that run."""
        reached: set[str] = set()
        self._reached.append(reached)
        with contextlib.ExitStack() as stack:
            for name, parameter in self._parameters.items():
                hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.add(name))
                stack.callback(hook.remove)
            for block, calls in zip(self._blocks, self._calls, strict=True):
                calls.append(0)
                stack.callback(block.register_forward_pre_hook(_counting(calls)).remove)
            yield


def _counting(calls: list[int]) -> Callable[..., None]:
    def count(*_: Any) -> None:
        calls[-1] += 1

    return count


def _outermost(root: Any, name: str) -> Iterator[Any]:
    """Yields the modules that have a switch of this name and lie in no other that has it."""
    if hasattr(root, name):
        yield root
    elif isinstance(root, nn.Module):
        for child in root.children():
            yield from _outermost(child, name)


class Synchronised(Scaled):
    """Reduces the gradients with a rank's last micro-batch only, as `no_sync` is meant to be used.

    Args:
        task: Under its engine.
        engine: Which it is.
        last: The rank's last micro-batch.
        ranks: R.
        share: What the loss is multiplied by besides, in a control.
    """

    def __init__(self, task: Task, engine: Engine, last: int, ranks: int, share: float = 1.0) -> None:
        super().__init__(ranks, share)
        name = "no_sync" if engine is Engine.DDP else "set_requires_gradient_sync"
        self._wrappers = [m for root in (task.problem.model, task.problem.loss) for m in _outermost(root, name)]
        self._engine, self._last = engine, last

    @contextlib.contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Leaves the reduction out of all micro-batches but the last."""
        with contextlib.ExitStack() as stack:
            for wrapper in self._wrappers:
                if self._engine is Engine.FSDP2:
                    wrapper.set_requires_gradient_sync(k == self._last)
                    wrapper.set_is_last_backward(k == self._last)
                elif k != self._last:
                    stack.enter_context(wrapper.no_sync())
            yield
