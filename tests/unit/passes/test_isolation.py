"""Nothing stays changed, whatever the loss can reach and wherever it raises, and nothing else is looked at."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import problems_reach
import pytest
import torch
import torch.nn.functional as F
from problems import cross_entropy, fault_codes, mlp, story
from problems_busy import differences, frozen_copy, picture_of_model, picture_of_world, prepared_problem
from problems_reach import COUNTERS, GENERATORS, reach_batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gaverify
from gaverify import Outcome, ProblemError
from gaverify.errors import InternalError
from gaverify.passes.isolation import ModelState, deterministic, isolated_generators, objects, tensors

BATCH = (torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 3, 1, 0, 2]))

# --- Nothing stays changed: neither after a verdict nor after the loss raised in the middle of one -------------------


OPTIONS: list[dict[str, Any]] = [
    {},
    {"dtype": "float64"},
    {"dtype": "bfloat16"},
    {"autocast": "bfloat16"},
    {"mode": "eval"},
    {"mode": None},
    {"trace": True},
    {"rtol": 1e-3, "atol": 1e-5},
    {"diagnose": False},
    {"seed": 7, "weighting": "none"},
]


def _name(options: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in options.items()) or "defaults"


@contextlib.contextmanager
def restored(model: nn.Module, counters: Callable[[], Any], where: str = "") -> Iterator[None]:
    """Checks that the block leaves the model, the world and what the loss keeps as they were."""
    before, world, counted = picture_of_model(model), picture_of_world(), counters()
    yield
    assert differences(before, picture_of_model(model)) == [], where
    assert differences(world, picture_of_world()) == [], where
    assert counters() == counted, where


@pytest.mark.parametrize("options", OPTIONS, ids=_name)
def test_everything_is_as_it_was(options: dict[str, Any]) -> None:
    model, loss, batch, counters = prepared_problem()
    inputs = frozen_copy(batch)
    with restored(model, counters):
        assert gaverify.verify(model, loss, batch, steps=4, **options).outcome is not None
    assert frozen_copy(batch) == inputs
    assert model.head.weight is model.embedding.weight
    assert not hasattr(model, "new_attribute")


def test_everything_is_as_it_was_after_a_loss_that_raised_or_a_backward() -> None:
    """One backward over all losses cannot run: each forward writes to the weight that the last one has saved."""
    for fail_at, strategy, told in (
        (2, "accumulate", r"in the middle.*problems_busy\.py"),
        (None, "summed-loss", r"the summed loss.*inplace"),
    ):
        model, loss, batch, counters = prepared_problem(fail_at) if fail_at else prepared_problem()
        with restored(model, counters), pytest.raises(ProblemError, match=f"(?s){told}"):
            gaverify.verify(model, loss, batch, steps=4, strategy=strategy)


def test_verdict_is_the_same_twice() -> None:
    """What is restored is restored well enough to run again, digit for digit."""
    model, loss, batch, _ = prepared_problem()
    first, second = (gaverify.verify(model, loss, batch, steps=4) for _ in range(2))
    assert (first.outcome, first.parameters, first.findings) == (second.outcome, second.parameters, second.findings)


def test_state_of_the_generators_does_not_change_the_verdict() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    rows = []
    for state, seed in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(state), random.seed(state), numpy.random.seed(state)
        rows.append(gaverify.verify(model, cross_entropy, BATCH, steps=4, seed=seed).parameters)
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize("flag", [True, False])
def test_flags_that_the_user_set_stay_set(flag: bool) -> None:
    """Restored means put back to what they were, not to torch's defaults."""
    torch.manual_seed(0)
    model, kept = mlp(), torch.get_default_dtype()
    try:
        torch.use_deterministic_algorithms(flag, warn_only=flag)
        torch.utils.deterministic.fill_uninitialized_memory = flag
        torch.backends.cudnn.benchmark = flag
        with torch.no_grad(), restored(model, tuple):
            assert gaverify.verify(model, cross_entropy, BATCH, steps=4).outcome is Outcome.EQUIVALENT
        torch.set_default_dtype(torch.float64)
        with restored(model, tuple):
            wrong = gaverify.verify(model, cross_entropy, BATCH, steps=4, weighting="none")
            assert wrong.outcome is Outcome.DIVERGENT
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.backends.cudnn.benchmark = False
        torch.set_default_dtype(kept)


SETTERS: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.bfloat16),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "cudnn": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "autocast": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "grad": lambda: torch.set_grad_enabled(True),
    "deterministic": lambda: torch.use_deterministic_algorithms(False),
    "python generator": lambda: random.seed(5),
    "numpy generator": lambda: numpy.random.seed(5),
    "torch generator": lambda: torch.manual_seed(5),
}


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("name", SETTERS)
def test_flags_that_the_loss_sets_are_restored(name: str, raises: bool) -> None:
    torch.manual_seed(0)
    model, calls = mlp(), iter(range(100))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = cross_entropy(model, batch)
        SETTERS[name]()
        if raises and next(calls) == 2:
            raise ValueError("in the middle")
        return value

    with deterministic(), isolated_generators(), torch.no_grad():
        torch.use_deterministic_algorithms(name == "deterministic", warn_only=True)
        world = picture_of_world()
        with pytest.raises(ProblemError, match="in the middle") if raises else contextlib.nullcontext():
            gaverify.verify(model, loss, BATCH, steps=4)
        assert differences(world, picture_of_world()) == []
        SETTERS[name]()
        assert name in differences(world, picture_of_world()), "the test would not have noticed"


def test_the_picture_would_have_moved() -> None:
    """One plain forward and backward changes what the tests above compare."""
    model, loss, batch, counters = prepared_problem()
    before, world, counted = picture_of_model(model), picture_of_world(), counters()
    model.train()
    loss(model, batch).backward()
    moved = set(differences(before, picture_of_model(model)))
    assert moved >= {
        "parameter embedding.weight",
        "parameter head.weight",
        "grad embedding.weight",
        "grad norm.bias",
        "buffer queue",
        "buffer replaced",
        "buffer scratch",
        "buffer norm.running_mean",
        "buffer norm.num_batches_tracked",
        "attributes ",
        "attributes dropout",
        "training ",
        "training frozen",
    }
    assert set(differences(world, picture_of_world())) == {"python generator", "numpy generator", "torch generator"}
    assert counters() != counted


# --- Whatever the loss can reach starts equal in both strategies, and is as it was afterwards ------------------------


@pytest.mark.parametrize("name", COUNTERS)
def test_state_of_the_loss_is_restored_starts_equal_and_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With K = 1 both strategies make their first call; with K = 4 the second micro-batch makes the second one."""
    monkeypatch.delattr(problems_reach, "MADE_ANEW", raising=False)  # another test may have made this global
    loss, read = COUNTERS[name]()
    model, batch = reach_batch()
    before = read()
    verdict = gaverify.verify(model, loss, batch, steps=1, diagnose=False)
    assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
    assert read() == before
    verdict = gaverify.verify(model, loss, batch, steps=4)
    assert verdict.outcome is Outcome.DIVERGENT, story(verdict)
    assert fault_codes(verdict) and fault_codes(verdict) <= {"GAV401", "GAV403"}, story(verdict)
    assert read() == before
    loss(model, batch)
    assert read() > before, "the test would not have noticed"


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_of_the_user_count_as_the_global_ones_do(name: str) -> None:
    loss, moved = GENERATORS[name]()
    model, batch = reach_batch()
    verdict = gaverify.verify(model, loss, batch, steps=4)
    assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
    assert not moved()
    loss(model, batch)
    assert moved(), "the test would not have noticed"


# Nothing stays changed when something raises in the middle, wherever that is: in a pass, a probe or a control run.


class Interrupts(TorchDispatchMode):
    """Counts operations, gaverify's own included, and raises at the n-th; not where a state is being put back."""

    def __init__(self, position: int | None = None, error: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__()
        self.count, self.raised, self._position, self._error, self._paused = 0, False, position, error, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._paused:
            self.count += 1
            if self.count == self._position:
                self.raised = True
                raise self._error("in the middle")
        return func(*args, **(kwargs or {}))


def _verified(mode: Interrupts, prepared: tuple[Any, ...], options: dict[str, Any]) -> None:
    restore = ModelState.restore

    def uninterrupted(state: ModelState) -> None:
        with mode.paused():
            restore(state)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ModelState, "restore", uninterrupted)
        try:
            with mode:
                gaverify.verify(*prepared[:3], **{"steps": 3, **options})
        except (KeyboardInterrupt, RuntimeError, ProblemError) as error:
            assert mode.raised and "in the middle" in str(error)


def normalised() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))
    model[0].weight.grad = torch.ones(8, 6)
    return model, cross_entropy, (torch.randn(12, 6), torch.randint(4, (12,))), tuple


def contrasted() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model, seen = nn.ModuleDict({"a": nn.Linear(6, 5), "b": nn.Linear(6, 5)}), []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(len(batch[0]))
        similarity = F.normalize(model["a"](batch[0])) @ F.normalize(model["b"](batch[1])).T
        return F.cross_entropy(similarity / 0.1, torch.arange(len(similarity)))

    return model, loss, (torch.randn(12, 6), torch.randn(12, 6)), lambda: list(seen)


CASES: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "busy": (prepared_problem, {}),
    "busy in bfloat16, traced": (prepared_problem, {"dtype": "bfloat16", "trace": True}),
    "statistics": (normalised, {}),
    "negatives, weights": (contrasted, {"weighting": "none", "mode": "eval"}),
    "noise floor": (normalised, {"dtype": "float64"}),
}


@functools.cache
def _operations(name: str) -> int:
    build, options = CASES[name]
    full = Interrupts()
    _verified(full, build(), options)
    assert full.count > 1000, "this verification diagnoses nothing"
    return full.count


@pytest.mark.parametrize("points", [range(4), pytest.param(range(4, 12), marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize("name", CASES)
def test_everything_is_as_it_was_wherever_it_raises(name: str, points: range) -> None:
    """Ctrl-C comes through everything; an error in a probe ends that probe alone, and the verdict goes on."""
    build, options = CASES[name]
    count = _operations(name)
    for point in points:
        prepared = build()
        position = max(1, int(0.6180339887 * point % 0.98 * count))
        mode = Interrupts(position, RuntimeError if point % 2 else KeyboardInterrupt)
        with restored(prepared[0], prepared[3], f"after operation {position} of {count}"):
            _verified(mode, prepared, options)
        assert mode.raised, point


# --- What is not the user's state is not followed, and what is large is not copied -----------------------------------


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


def test_nothing_of_a_huge_container_is_copied() -> None:
    values, size = range(2_000_001), (1 << 24) + 1
    huge: list[Any] = [list(values), dict.fromkeys(values), set(values), bytearray(size), numpy.zeros(size, bool)]
    state = ModelState([], (lambda: huge,))
    for value in huge[:3]:
        value.clear()
    huge[3][0], huge[4][0] = 1, 1
    state.restore()
    assert [len(value) for value in huge] == [0, 0, 0, size, size]
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


def test_large_tensors_outside_of_buffers_wait_for_a_write() -> None:
    torch.manual_seed(0)
    table = torch.randn((1 << 20) + 1)
    before = table.clone()
    state = ModelState([], (lambda: table,))
    copied = {tensors.storage(kept) for kept in _copies(state) if kept.numel() == table.numel()}
    assert copied <= {tensors.storage(table)}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        table[:100].mul_(0.9)
        return cross_entropy(model, batch) * table.norm()

    assert gaverify.verify(mlp(), loss, BATCH, steps=4).outcome is Outcome.DIVERGENT
    assert torch.equal(table, before)


def _copies(state: ModelState) -> list[torch.Tensor]:
    cells = [cell.cell_contents for restore in state._tensors._restorers for cell in restore.__closure__ or ()]
    return [value for value in cells if isinstance(value, torch.Tensor) and value.storage_offset() == 0]


def test_parameters_are_not_copied_unless_something_writes_to_them() -> None:
    model = nn.Linear(64, 64)
    state = ModelState([model])
    own = {tensors.storage(parameter) for parameter in model.parameters()}
    assert {tensors.storage(kept) for kept in _copies(state)} <= own
    assert state.written_tensors == ()
    state.before_write(model.weight.data[0])
    assert [tensor is model.weight for tensor in state.written_tensors] == [True]


def test_libraries_are_not_followed() -> None:
    """The function that names it, its attributes and classes, and nothing behind it."""
    for value in (random, torch, numpy, nn.functional.relu, random.random, gaverify.verify):
        assert len(_seen(value)) < 7, value


def test_whose_code_it_is() -> None:
    assert all(map(objects.is_library, ("torch.nn.modules.linear", "numpy", "random", "builtins", "collections.abc")))
    assert not any(map(objects.is_library, ("__main__", "transformers.models", "torchvision", "problems")))
    nobody, own = frozenset[str](), objects.packages_of([functools.partial(pytest.raises)])
    assert objects.is_users_function(cross_entropy, nobody)
    assert not any(objects.is_users_function(function, nobody) for function in (functools.wraps, pytest.raises))
    assert not objects.is_users_function(nn.functional.relu, frozenset({"torch"}))
    assert objects.is_users_function(pytest.raises, own), "an installed loss function is the user's all the same"
    assert objects.is_users_class(Sample, nobody) and not objects.is_users_class(nn.Linear, nobody)
    assert objects.has_own_state(Sample) and not objects.has_own_state(torch.Size)


def test_proxies_are_not_asked() -> None:
    """An object may answer `isinstance` and attributes as it likes, for example by importing something heavy."""

    class Proxy:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    proxy = Proxy()

    def loss(model: nn.Module, batch: Any, proxy: Any = proxy) -> torch.Tensor:

        return cross_entropy(model, batch)

    verdict = gaverify.verify(mlp(), loss, BATCH, steps=4, weighting="none")
    assert fault_codes(verdict) == {"GAV201"}, story(verdict)


def test_imports_inside_a_forward_stay() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        global colorsys
        import colorsys

        return cross_entropy(model, batch) * (1 + 0 * colorsys.ONE_THIRD)

    globals().pop("colorsys", None)
    gaverify.verify(mlp(), loss, BATCH, steps=4)
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
    state = ModelState([nn.BatchNorm1d(4)], (lambda: BATCH,))
    gone = weakref.ref(state._tensors)
    gc.collect()
    gc.disable()
    try:
        del state
        assert gone() is None
    finally:
        gc.enable()
