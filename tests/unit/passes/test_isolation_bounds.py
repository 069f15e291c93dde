"""What is not the user's state is not followed, and what is large is not copied."""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from problems import cross_entropy, fault_codes, mlp, story
from torch import nn

import gaverify
from gaverify import Outcome
from gaverify.errors import InternalError
from gaverify.passes.isolation import ModelState, containers, isolated_generators, origins, tensors

CALLS = 0


class Sample:
    """One of many."""

    def __init__(self) -> None:
        self.seen = 0


def _seen(value: Any) -> list[Any]:
    state = ModelState([], (lambda: value,))
    return list(state._walk._seen.values())


def test_entries_of_a_large_container_are_kept_but_not_followed() -> None:
    small, large = [Sample() for _ in range(100)], [Sample() for _ in range(5000)]
    assert sum(isinstance(value, Sample) for value in _seen(small)) == 100
    assert not any(isinstance(value, Sample) for value in _seen(large))
    state = ModelState([], (lambda: large,))
    kept = list(large)
    large.pop()
    large[0] = None
    state.restore()
    assert all(one is other for one, other in zip(large, kept, strict=True))


def test_entries_of_a_tuple_whose_class_refuses_to_be_counted_are_kept() -> None:
    """Irreps of e3nn are a tuple whose `len` raises."""

    class Uncounted(tuple[Sample, ...]):
        def __len__(self) -> int:
            raise NotImplementedError

        def __iter__(self) -> Iterator[Sample]:
            raise NotImplementedError

    sample = Sample()
    held = Uncounted((sample,))
    state = ModelState([], (lambda: held,))
    sample.seen = 3
    state.restore()
    assert sample.seen == 0


def test_nothing_of_a_huge_container_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "_COPIED", 10)
    monkeypatch.setattr(containers, "_COPIED_BYTES", 10)
    huge: list[Any] = [list(range(11)), dict.fromkeys(range(11)), set(range(11)), bytearray(11), numpy.zeros(11)]
    state = ModelState([], (lambda: huge,))
    for value in huge[:3]:
        value.clear()
    huge[3][0], huge[4][0] = 1, 1
    state.restore()
    assert [len(value) for value in huge] == [0, 0, 0, 11, 11]
    assert huge[3][0] == 1 == huge[4][0]


def test_the_search_is_bounded_and_takes_the_nearest_first() -> None:
    """A tree of 8^6 objects: what the loss holds directly is kept, the leaves are too many."""

    class Node:
        def __init__(self, depth: int) -> None:
            self.children = [Node(depth - 1) for _ in range(8)] if depth else []
            self.seen = 0

    root = Node(5)
    found = [value for value in _seen(root) if isinstance(value, Node)]
    assert root in found and all(child in found for child in root.children)
    assert len(found) < 20_000


def test_large_tensors_outside_of_buffers_wait_for_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(tensors, "_WAITS", 100)
    table, batch = torch.randn(200), (torch.randn(8, 6), torch.randint(4, (8,)))
    before = table.clone()
    state = ModelState([], (lambda: table,))
    assert {tensors.storage(kept) for kept in _copies(state) if kept.numel() == 200} <= {tensors.storage(table)}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        table[:100].mul_(0.9)
        return cross_entropy(model, batch) * table.norm()

    assert gaverify.verify(mlp(), loss, batch, steps=1).outcome is Outcome.EQUIVALENT
    assert gaverify.verify(mlp(), loss, batch, steps=4).outcome is Outcome.DIVERGENT
    assert torch.equal(table, before)


def _copies(state: ModelState) -> list[torch.Tensor]:
    cells = [cell.cell_contents for restore in state._tensors._restorers for cell in restore.__closure__ or ()]
    return [value for value in cells if isinstance(value, torch.Tensor) and value.storage_offset() == 0]


def test_parameters_are_not_copied_unless_something_writes_to_them() -> None:
    model = nn.Linear(64, 64)
    state = ModelState([model])
    own = {tensors.storage(parameter) for parameter in model.parameters()}
    assert {tensors.storage(kept) for kept in _copies(state)} <= own
    assert state.written == ()
    state.before_write(model.weight.data[0])
    assert [tensor is model.weight for tensor in state.written] == [True]


@pytest.mark.parametrize(
    "value",
    [random, torch, numpy, nn.functional.relu, random.random, gaverify.verify],
    ids=["random", "torch", "numpy", "relu", "random.random", "verify"],
)
def test_libraries_are_not_followed(value: Any) -> None:
    """The function that names it, its attributes and classes, and nothing behind it."""
    assert len(_seen(value)) < 7


def test_whose_code_it_is() -> None:
    assert all(map(origins.is_library, ("torch.nn.modules.linear", "numpy", "random", "builtins", "collections.abc")))
    assert not any(map(origins.is_library, ("__main__", "transformers.models", "torchvision", "problems")))
    nobody, own = frozenset[str](), origins.packages_of([functools.partial(pytest.raises)])
    assert origins.is_users_function(cross_entropy, nobody)
    assert not origins.is_users_function(functools.wraps, nobody)
    assert not origins.is_users_function(nn.functional.relu, frozenset({"torch"}))
    assert not origins.is_users_function(pytest.raises, nobody)
    assert origins.is_users_function(pytest.raises, own), "an installed loss function is the user's all the same"
    assert origins.is_users_class(Sample, nobody) and not origins.is_users_class(nn.Linear, nobody)
    assert origins.has_own_state(Sample) and not origins.has_own_state(torch.Size)


def test_proxies_are_not_asked() -> None:
    """An object may answer `isinstance` and attributes as it likes, for example by importing something heavy."""

    class Proxy:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    proxy, batch = Proxy(), (torch.randn(8, 6), torch.randint(4, (8,)))

    def loss(model: nn.Module, batch: Any, proxy: Any = proxy) -> torch.Tensor:
        return cross_entropy(model, batch)

    assert gaverify.verify(mlp(), loss, batch, steps=4).outcome is Outcome.EQUIVALENT
    verdict = gaverify.verify(mlp(), loss, batch, steps=4, weighting="none")
    assert fault_codes(verdict) == {"GAV201"}, story(verdict)


def test_imports_inside_a_forward_stay() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        global colorsys
        import colorsys

        return cross_entropy(model, batch) * (1 + 0 * colorsys.ONE_THIRD)

    globals().pop("colorsys", None)
    gaverify.verify(mlp(), loss, (torch.randn(8, 6), torch.randint(4, (8,))), steps=4)
    assert globals()["colorsys"].ONE_THIRD


def test_generators_of_the_user_are_forgotten_in_the_end() -> None:
    generator = random.Random(1)
    first = generator.getstate()
    with isolated_generators():
        ModelState([], (lambda: generator,))
        generator.random()
    assert generator.getstate() != first, "it counts as global from when it was found, not from the start"
    ModelState([], (lambda: generator,))
    with isolated_generators():
        assert gaverify.passes.isolation.foreign_generator_states()[2:] == ()


def test_what_cannot_be_put_back_does_not_keep_the_rest_from_it() -> None:
    held = [Sample(), numpy.zeros(3), Sample()]
    state = ModelState([], (lambda: held,))
    held[0].seen = held[2].seen = 1
    held[1].flags.writeable = False
    with pytest.raises(InternalError, match="could not be put back: ValueError"):
        state.restore()
    assert held[0].seen == held[2].seen == 0


def test_the_copies_go_with_the_state() -> None:
    """Without waiting for a garbage collection: they may be a large part of a GPU's memory."""
    state = ModelState([nn.BatchNorm1d(4)], (lambda: CALLS,))
    gone = weakref.ref(state._tensors)
    gc.collect()
    gc.disable()
    try:
        del state
        assert gone() is None
    finally:
        gc.enable()
