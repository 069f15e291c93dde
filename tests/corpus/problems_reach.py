"""Counters that a loss keeps between calls, in every place that Python has for one.

Each builder returns a loss whose value depends on its number of calls so far, and a function that reads that number.
"""

from __future__ import annotations

import array
import contextlib
import functools
import random
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from problems import cross_entropy, mlp
from torch import nn

Built = tuple[Callable[..., torch.Tensor], Callable[[], int]]
COUNTERS: dict[str, Callable[[], Built]] = {}
STEP = CALLS = 0
HISTORY: list[int] = []
SETTINGS = types.ModuleType("settings_of_a_test")
SETTINGS.step = 0


def counter(build: Callable[[], Built]) -> Callable[[], Built]:
    COUNTERS[build.__name__] = build
    return build


def scaled(model: nn.Module, batch: Any, calls: int) -> torch.Tensor:
    return cross_entropy(model, batch) * min(1.0, calls / 10)


def kept_in(tick: Callable[[], int], read: Callable[[], int]) -> Built:
    """A loss that calls `tick`, through its closure."""
    return lambda model, batch: scaled(model, batch, tick()), read


def _appended(model: nn.Module, batch: Any, seen: list[int]) -> torch.Tensor:
    seen.append(0)
    return scaled(model, batch, len(seen))


@counter
def argument_of_a_partial() -> Built:
    seen: list[int] = []
    return functools.partial(_appended, seen=seen), lambda: len(seen)


@counter
def position_of_a_partial() -> Built:
    seen: list[int] = []
    return functools.partial(lambda seen, model, batch: _appended(model, batch, seen), seen), lambda: len(seen)


@counter
def attribute_of_a_partial() -> Built:
    def loss(model: nn.Module, batch: Any, name: str) -> torch.Tensor:
        bound.calls += 1
        return scaled(model, batch, bound.calls)

    bound = functools.partial(loss, name="x")
    bound.calls = 0
    return bound, lambda: bound.calls


@counter
def default_argument() -> Built:
    def loss(model: nn.Module, batch: Any, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
        return _appended(model, batch, seen)

    return loss, lambda: len(loss.__defaults__[0])


@counter
def keyword_default() -> Built:
    def loss(model: nn.Module, batch: Any, *, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
        return _appended(model, batch, seen)

    return loss, lambda: len(loss.__kwdefaults__["seen"])


@counter
def attribute_of_a_function() -> Built:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        loss.calls += 1
        return scaled(model, batch, loss.calls)

    loss.calls = 0
    return loss, lambda: loss.calls


@counter
def enclosed_number() -> Built:
    calls = 0

    def tick() -> int:
        nonlocal calls
        calls += 1
        return calls

    return kept_in(tick, lambda: calls)


def _next_step() -> int:
    global STEP
    STEP += 1
    return STEP


@counter
def global_of_a_helper() -> Built:
    return (lambda model, batch: scaled(model, batch, _next_step())), lambda: STEP


@counter
def global_that_was_not_there() -> Built:
    def tick() -> int:
        global MADE_ANEW
        MADE_ANEW = globals().get("MADE_ANEW", 0) + 1
        return MADE_ANEW

    return kept_in(tick, lambda: globals().get("MADE_ANEW", 0))


@counter
def global_named_in_a_comprehension() -> Built:
    return kept_in(lambda: sum([HISTORY.append(0) or len(HISTORY) for _ in range(1)]), lambda: len(HISTORY))


@counter
def attribute_of_a_module_of_the_user() -> Built:
    def tick() -> int:
        SETTINGS.step += 1
        return SETTINGS.step

    return kept_in(tick, lambda: SETTINGS.step)


class _Shared:
    calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        type(self).calls += 1
        return scaled(model, batch, self.calls)


class _Own:
    """A loss with state of its own, called directly or by a method."""

    def __init__(self) -> None:
        self.calls, self.total = 0, torch.zeros(1)

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        self.total += 1
        return scaled(model, batch, int(self.total))


@counter
def attribute_of_an_object() -> Built:
    held = _Own()
    return held, lambda: held.calls + int(held.total)


@counter
def attribute_of_a_methods_object() -> Built:
    held = _Own()
    return held.__call__, lambda: held.calls


@counter
def attribute_of_a_class() -> Built:
    return _Shared(), lambda: _Shared.calls


class _Counted(nn.Module):
    made = 0
    kept: dict[str, int] = {}  # noqa: RUF012

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        _Counted.made += 1
        self.kept["made"] = self.kept.get("made", 0) + 1
        assert self.made == self.kept["made"]
        return scaled(model, batch, self.made)


@counter
def attribute_of_a_module_class() -> Built:
    return _Counted(), lambda: _Counted.made


@counter
def built_in_method() -> Built:
    seen: list[int] = []
    append, length = seen.append, seen.__len__
    return kept_in(lambda: append(0) or length(), length)


@counter
def behind_decorators() -> Built:
    calls = 0

    @contextlib.contextmanager
    def counting() -> Iterator[int]:
        nonlocal calls
        calls += 1
        yield calls

    @torch.autocast("cpu", enabled=False)
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with counting() as number:
            return scaled(model, batch, number)

    return loss, lambda: calls


class _CountingInAGlobal:
    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        global CALLS
        CALLS += 1
        return scaled(model, batch, CALLS)


@counter
def global_of_a_special_method() -> Built:
    return _CountingInAGlobal(), lambda: CALLS


class _CountingInMethods:
    @staticmethod
    def tick() -> int:
        global CALLS
        CALLS += 1
        return CALLS

    @property
    def ticked(self) -> int:
        return self.tick()


@counter
def global_of_a_static_method() -> Built:
    held = _CountingInMethods()
    return kept_in(lambda: held.tick(), lambda: CALLS)


@counter
def global_of_a_property() -> Built:
    held = _CountingInMethods()
    return kept_in(lambda: held.ticked, lambda: CALLS)


@counter
def attribute_of_a_list() -> Built:
    held = _Named()
    held.calls = 0
    return kept_in(lambda: vars(held).update(calls=held.calls + 1) or held.calls, lambda: held.calls)


class _Slotted:
    __slots__ = ("__private", "later", "seen")

    def __init__(self) -> None:
        self.seen = self.__private = 0

    def tick(self) -> int:
        self.seen += 1
        self.__private += 1
        self.later = self.seen
        assert self.seen == self.__private
        return self.seen


class _SlottedBelow(_Slotted):
    __slots__ = ("own",)


@counter
def slots() -> Built:
    held = _SlottedBelow()
    return kept_in(held.tick, lambda: held.seen + hasattr(held, "later"))


@dataclass
class _Record:
    step: int = 0
    marks: list[int] = field(default_factory=list)

    def tick(self) -> int:
        self.step += 1
        self.marks.append(self.step)
        return len(self.marks)


@counter
def dataclass_instance() -> Built:
    held = {"deep": [(_Record(),)]}
    return kept_in(lambda: held["deep"][0][0].tick(), lambda: held["deep"][0][0].step)


@dataclass(frozen=True, slots=True)
class _Frozen:
    step: int = 0


@counter
def frozen_dataclass() -> Built:
    held = _Frozen()

    def tick() -> int:
        object.__setattr__(held, "step", held.step + 1)
        return held.step

    return kept_in(tick, lambda: held.step)


@counter
def namespace() -> Built:
    held = types.SimpleNamespace(step=0)
    return kept_in(lambda: vars(held).update(step=held.step + 1) or held.step, lambda: held.step)


def _entries(container: Any, add: Callable[[Any], Any]) -> Built:
    return kept_in(lambda: add(container) or len(container), lambda: len(container))


class _Named(list):
    """A list with an attribute, whose methods do something else."""

    name = "x"

    def clear(self) -> None:
        raise AssertionError("a restore goes past this")

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a restore goes past this")


for _name, _make, _add in (
    ("in_a_set", lambda: {"a"}, lambda c: c.add(len(c))),
    ("in_a_deque", lambda: deque([0], 99), lambda c: c.append(0)),
    ("in_a_defaultdict", lambda: defaultdict(list), lambda c: c[len(c)].append(0)),
    ("in_a_counter", lambda: Counter("ab"), lambda c: c.update([len(c)])),
    ("in_an_ordered_dict", lambda: OrderedDict(a=1), lambda c: c.setdefault(len(c), 0) and None),
    ("in_a_user_dict", lambda: UserDict(a=1), lambda c: c.update({len(c): 0})),
    ("in_a_subclass_of_list", _Named, lambda c: c.append(0)),
    ("in_a_bytearray", lambda: bytearray(1), lambda c: c.append(0)),
    ("in_an_array", lambda: array.array("i", [1]), lambda c: c.append(0)),
):
    COUNTERS[_name] = lambda make=_make, add=_add: _entries(make(), add)


def _first(container: Any) -> Built:
    def tick() -> int:
        container[...] += 1
        return int(container.flat[0])

    return kept_in(tick, lambda: int(container.flat[0]))


COUNTERS["in_a_numpy_array"] = lambda: _first(numpy.zeros((2, 2), dtype=int)[:, :1])
COUNTERS["in_a_numpy_scalar"] = lambda: _first(numpy.zeros(()))
COUNTERS["in_a_numpy_array_of_objects"] = lambda: _first(numpy.array([0, 0], dtype=object))
COUNTERS["in_a_tensor"] = lambda: kept_in(*(lambda t: (lambda: int(t.add_(1)), lambda: int(t)))(torch.zeros(())))


@counter
def objects_in_a_numpy_array() -> Built:
    held = numpy.array([_Record()], dtype=object)
    return kept_in(lambda: held[0].tick(), lambda: held[0].step)


def _drawn(generator: Any, draw: Callable[[], float], picture: Callable[[], Any]) -> Built:
    first = picture()
    return (lambda model, batch: cross_entropy(model, batch) * (1 + draw())), lambda: int(picture() != first)


# A generator of the user's own that draws once per forward draws the same for every micro-batch, as global ones do.
def _generators() -> dict[str, Built]:
    new, old, python = numpy.random.default_rng(1), numpy.random.RandomState(2), random.Random(3)
    torches = torch.Generator().manual_seed(4)
    return {
        "numpy Generator": _drawn(new, new.random, lambda: str(new.bit_generator.state)),
        "numpy RandomState": _drawn(old, old.rand, lambda: str(old.get_state()[1:])),
        "python Random": _drawn(python, python.random, python.getstate),
        "torch Generator": _drawn(
            torches, lambda: float(torch.rand((), generator=torches)), lambda: torches.get_state().tolist()
        ),
    }


GENERATORS = {name: lambda name=name: _generators()[name] for name in _generators()}


def reach_batch() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return mlp(), (torch.randn(8, 6), torch.randint(4, (8,)))
