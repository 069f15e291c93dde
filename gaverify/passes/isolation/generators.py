"""The random generators: torch's, Python's and NumPy's global ones, and those that the user's code holds itself.

The functions here read, compare and restore the state of a generator of any of these kinds.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from gaverify.passes.devices import generators_in_use

# Generators of Python and NumPy that a `ModelState` found in the user's code while `isolated_generators` is open: until
# it closes they count as the global ones do. Draws of a `torch.Generator` are dealt out at the dispatcher instead.
_scopes: list[dict[int, Any]] = []


@contextmanager
def isolated_generators() -> Iterator[None]:
    """Restores the states of torch's generators on every device, and of Python's and NumPy's."""
    restore = generator_states()
    _scopes.append({})
    try:
        yield
    finally:
        _scopes.pop()
        restore()


def register_generator(generator: Any) -> None:
    """Lets a Python or NumPy generator of the user's count as a global one until `isolated_generators` closes."""
    if _scopes:
        _scopes[-1][id(generator)] = generator


def foreign_generators() -> dict[str, Any]:
    """Returns Python's and, where it is loaded, NumPy's global generator: modules that answer as their objects do."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    return {"random": random} | ({"numpy": numpy} if numpy is not None else {})


def generator_states() -> Callable[[], None]:
    """Takes the states of all generators and returns the function that puts them back."""
    states = {device: state_of(generator) for device, generator in generators_in_use().items()}
    foreign_restorers = [restorer(generator) for generator in _foreign()]

    def restore() -> None:
        for device, generator in generators_in_use().items():
            if device in states:
                set_state(generator, states[device])
            else:  # first used meanwhile
                # Its state before the pass is the one that it was seeded with: nobody had drawn from it.
                generator.manual_seed(generator.initial_seed())
        for put_back in foreign_restorers:
            put_back()

    return restore


def seed_everything(seed: int) -> None:
    """Seeds the torch, Python and NumPy generators."""
    seed_torch(seed)
    for generator in foreign_generators().values():
        # NumPy refuses seeds of more than 32 bits.
        generator.seed(seed if generator is random else seed % 2**32)


def seed_torch(seed: int) -> None:
    """Seeds the default generators of all devices in use.

    Not `torch.manual_seed`: that leaves the seed waiting for devices which the user's code may use much later.
    """
    for generator in generators_in_use().values():
        generator.manual_seed(seed)


def torch_generator_states() -> list[bytes]:
    """Returns comparable states of torch's generators."""
    return [comparable(state_of(generator)) for generator in generators_in_use().values()]


def foreign_generator_states() -> tuple[Any, ...]:
    """Returns comparable states of the Python and NumPy generators, whose draws the dispatcher does not see."""
    return tuple(comparable(state_of(generator)) for generator in _foreign())


def state_of(generator: Any) -> Any:
    """Returns the state of a generator of torch, Python or NumPy, or of a module of global ones."""
    if hasattr(generator, "getstate"):
        return generator.getstate()
    if hasattr(generator, "get_state"):
        return generator.get_state()
    return getattr(generator, "bit_generator", generator).state  # numpy.random.Generator, or a bare BitGenerator


def set_state(generator: Any, state: Any) -> None:
    """Puts a generator into a state that `state_of` has returned."""
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def restorer(generator: Any) -> Callable[[], None]:
    """Takes the state of one generator and returns the function that puts it back."""
    return partial(set_state, generator, state_of(generator))


def comparable(state: Any) -> Any:
    """Returns a state as something that equals another such state; NumPy, which torch does not need, is not asked."""
    if isinstance(state, torch.Tensor):  # contiguous, and on the CPU
        return ctypes.string_at(state.data_ptr(), state.numel())
    if isinstance(state, tuple):
        return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)
    return repr(state)


def _foreign() -> list[Any]:
    return [*foreign_generators().values(), *(_scopes[-1].values() if _scopes else ())]
