"""The random generators: torch's, Python's and NumPy's global ones, and those that the user's code holds itself."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gaverify.passes.devices import (
    generator_state,
    generators_in_use,
    rewind_generator,
    seed_torch,
    set_generator_state,
)

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


def hold(generator: Any) -> None:
    """Counts a Python or NumPy generator of the user's among the global ones until `isolated_generators` closes."""
    if _scopes:
        _scopes[-1][id(generator)] = generator


def _held() -> list[Any]:
    return list(_scopes[-1].values()) if _scopes else []


def generator_states() -> Callable[[], None]:
    """Takes the states of all generators and returns the function that puts them back."""
    devices = {device: generator_state(device) for device in generators_in_use()}
    python = random.getstate()
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    numpy = numpy_random.get_state() if numpy_random is not None else None
    held = [restorer(generator) for generator in _held()]

    def restore() -> None:
        for device in generators_in_use():
            if device in devices:
                set_generator_state(device, devices[device])
            else:  # first used meanwhile
                rewind_generator(device)
        random.setstate(python)
        if numpy_random is not None and numpy is not None:
            numpy_random.set_state(numpy)
        for put_back in held:
            put_back()

    return restore


def seed_everything(seed: int) -> None:
    """Seeds the torch, Python and NumPy generators."""
    seed_torch(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def restorer(generator: Any) -> Callable[[], None]:
    """Takes the state of one Python or NumPy generator and returns the function that puts it back."""
    if isinstance(generator, random.Random):
        kept = generator.getstate()
        return lambda: generator.setstate(kept)
    if hasattr(generator, "set_state"):  # numpy.random.RandomState
        old = generator.get_state()
        return lambda: generator.set_state(old)
    bits = getattr(generator, "bit_generator", generator)  # numpy.random.Generator, or a bare BitGenerator
    state = bits.state

    def restore() -> None:
        bits.state = state

    return restore


def foreign_generator_states() -> tuple[Any, ...]:
    """Returns comparable states of the Python and NumPy generators, whose draws the dispatcher does not see."""
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    held = tuple(_comparable(generator) for generator in _held())
    numpy = _comparable(numpy_random) if numpy_random is not None else None
    return (random.getstate(), numpy, *held)


def _comparable(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "set_state"):
        kind, keys, position, *rest = generator.get_state()
        return (kind, keys.tobytes(), position, *rest)
    return repr(getattr(generator, "bit_generator", generator).state)
