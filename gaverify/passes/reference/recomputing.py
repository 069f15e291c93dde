"""Activation checkpointing over a model's own blocks: what a block computed is made again when the backward needs it.

A block that runs twice must do the second time what it did the first, and leave no second trace. So it is run again
from the state that it had before its first run (statistics, counters, caches among its arguments, every generator), and
afterwards everything is put back to where the forward left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from gaverify.passes.isolation import ModelState, generator_states
from gaverify.passes.randomness import unwatched
from gaverify.passes.reference.blocks import blocks_of, is_chain, parts_of
from gaverify.tracebacks import hands_over

_ABSENT = object()
Forward = Callable[..., Any]


@contextmanager
def recomputed(modules: Sequence[nn.Module], states: WeakSet[ModelState]) -> Iterator[None]:
    """Checkpoints every block of `modules` for as long as it is open.

    Args:
        modules: The model, and the loss where it is a module.
        states: Takes the state of each block before its first run; whoever watches writes tells them.
    """
    with ExitStack() as stack:
        for block in blocks_of(modules):
            stack.enter_context(_exchanged(block, _chained(block, modules, states)))
        yield


def _chained(block: nn.Module, modules: Sequence[nn.Module], states: WeakSet[ModelState]) -> Forward:
    """The checkpointed forward of a block; of a chain, part by part."""
    if not is_chain(block):
        return _checkpointed(block, block.forward, modules, states)
    parts = [_checkpointed(part, part.forward, modules, states) for part in parts_of(block)]

    def forward(value: Any) -> Any:
        for part in parts:
            value = part(value)
        return value

    return forward


def _checkpointed(
    block: nn.Module, inner: Forward, modules: Sequence[nn.Module], states: WeakSet[ModelState]
) -> Forward:
    @hands_over
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        from torch.utils.checkpoint import checkpoint

        state = partial(ModelState, [block], (args, kwargs), part_of=modules)
        before, generators = state(), generator_states()
        states.add(before)
        return checkpoint(
            partial(inner, **kwargs),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # `generators` are all of them, Python's and NumPy's as well
            context_fn=lambda: (nullcontext(), _again(state, before, generators)),
        )

    return forward


@contextmanager
def _again(state: Callable[[], ModelState], before: ModelState, generators: Callable[[], None]) -> Iterator[None]:
    """Runs a block from the state `before`, and puts back what that changed."""
    now, running = state(), generator_states()
    before.restore()
    generators()
    try:
        with unwatched():
            yield
    finally:
        now.restore()
        running()


@contextmanager
def _exchanged(block: nn.Module, forward: Forward) -> Iterator[None]:
    """Gives a module another `forward`, on the instance: its hooks run around it as before, and once."""
    own = vars(block)
    kept = own.get("forward", _ABSENT)
    own["forward"] = forward
    try:
        yield
    finally:
        if kept is _ABSENT:
            own.pop("forward", None)
        else:
            own["forward"] = kept
