"""Nothing stays changed: neither after a verdict nor after the loss raised in the middle of one.

The model of `problems_busy` changes everything that a forward can change. The tests take a picture of it, of the
generators and of torch's flags before and after, and compare both. The last test shows that it would have moved.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from problems import cross_entropy, mlp
from problems_busy import differences, frozen_copy, picture_of_model, picture_of_world, prepared_problem
from torch import nn

import gaverify
from gaverify import Outcome, ProblemError
from gaverify.passes.isolation import deterministic, isolated_generators

OPTIONS: list[dict[str, Any]] = [
    {},
    {"dtype": "float64"},
    {"dtype": "bfloat16"},
    {"autocast": "bfloat16"},
    {"mode": "eval"},
    {"mode": None},
    {"trace": True, "optimizer": "adam"},
    {"rtol": 1e-3, "atol": 1e-5},
    {"diagnose": False},
    {"seed": 7, "weighting": "none"},
]


def _name(options: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in options.items()) or "defaults"


@pytest.fixture
def prepared() -> Any:
    return prepared_problem


@pytest.mark.parametrize("options", OPTIONS, ids=_name)
def test_everything_is_as_it_was(prepared: Any, options: dict[str, Any]) -> None:
    model, loss, batch, counters = prepared()
    inputs = frozen_copy(batch)
    before, world, counted = picture_of_model(model), picture_of_world(), counters()
    verdict = gaverify.verify(model, loss, batch, steps=4, **options)
    assert verdict.outcome is not None
    assert differences(before, picture_of_model(model)) == []
    assert differences(world, picture_of_world()) == []
    assert counters() == counted
    assert frozen_copy(batch) == inputs
    assert model.head.weight is model.embedding.weight
    assert not hasattr(model, "new_attribute")


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"trace": True}, {"mode": "eval"}], ids=_name)
@pytest.mark.parametrize("fail_at", [1, 2, 3, 5, 6, 7, 11, 12, 16])
def test_everything_is_as_it_was_after_an_exception(prepared: Any, fail_at: int, options: dict[str, Any]) -> None:
    """Calls 1 to 5 are the working-precision runs; later ones the control, the probes and the trace."""
    model, loss, batch, counters = prepared(fail_at)
    before, world, counted = picture_of_model(model), picture_of_world(), counters()
    try:
        gaverify.verify(model, loss, batch, steps=4, **options)
    except ProblemError as error:
        assert "in the middle" in str(error)
        assert "problems_busy.py" in str(error)
    else:
        assert fail_at > 5, "a loss that raises in the first five calls cannot be verified"
    assert differences(before, picture_of_model(model)) == []
    assert differences(world, picture_of_world()) == []
    assert counters() == counted
    assert model.head.weight is model.embedding.weight


def test_everything_is_as_it_was_after_a_backward_that_raised(prepared: Any) -> None:
    """One backward over all losses cannot run: each forward writes to the weight that the last one has saved."""
    model, loss, batch, counters = prepared()
    before, world, counted = picture_of_model(model), picture_of_world(), counters()
    with pytest.raises(ProblemError, match=r"the summed loss.*inplace"):
        gaverify.verify(model, loss, batch, steps=4, strategy="summed-loss")
    assert differences(before, picture_of_model(model)) == []
    assert differences(world, picture_of_world()) == []
    assert counters() == counted


class Interrupts(mlp().__class__):
    """Raises KeyboardInterrupt at its second call."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.calls = iter(range(1, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if next(self.calls) == 2:
            raise KeyboardInterrupt
        return super().forward(x)


def test_everything_is_as_it_was_after_ctrl_c() -> None:
    torch.manual_seed(0)
    model, batch = Interrupts(), (torch.randn(8, 6), torch.randint(4, (8,)))
    model.calls = iter(range(1, 100))
    world, flags = picture_of_world(), [p.grad for p in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        gaverify.verify(model, cross_entropy, batch, steps=4, dtype="bfloat16", mode="eval")
    assert differences(world, picture_of_world()) == []
    assert [p.grad for p in model.parameters()] == flags
    assert model.training and all(p.dtype is torch.float32 for p in model.parameters())


def _scaling(model: nn.Module, batch: Any) -> torch.Tensor:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    return cross_entropy(model, batch)


def _clamping(model: nn.Module, batch: Any) -> torch.Tensor:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)
    return cross_entropy(model, batch)


def _replaced_data(model: nn.Module, batch: Any) -> torch.Tensor:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9
    return cross_entropy(model, batch)


def _replaced_parameter(model: nn.Module, batch: Any) -> torch.Tensor:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 0.9)
    return cross_entropy(model, batch)


def _out(model: nn.Module, batch: Any) -> torch.Tensor:
    for parameter in model.parameters():
        torch.mul(parameter.data, 0.9, out=parameter.data)
    return cross_entropy(model, batch)


def _foreach(model: nn.Module, batch: Any) -> torch.Tensor:
    torch._foreach_mul_([parameter.data for parameter in model.parameters()], 0.9)
    return cross_entropy(model, batch)


def _stepping(model: nn.Module, batch: Any) -> torch.Tensor:
    """An optimizer of its own, that steps on gradients of its own."""
    copies = [nn.Parameter(parameter.data) for parameter in model.parameters()]
    for copy in copies:
        copy.grad = torch.ones_like(copy)
    torch.optim.Adam(copies, fused=True).step()
    return cross_entropy(model, batch)


WRITES = [_scaling, _clamping, _foreach, _stepping, _replaced_data, _replaced_parameter, _out]


@pytest.mark.parametrize("loss", WRITES)
def test_parameters_that_the_loss_writes_to_are_restored(loss: Callable) -> None:
    torch.manual_seed(0)
    model, batch = mlp(), (torch.randn(8, 6), torch.randint(4, (8,)))
    before = picture_of_model(model)
    gaverify.verify(model, loss, batch, steps=4)
    assert differences(before, picture_of_model(model)) == []


class Slotted:
    """An object without `__dict__`."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = 0


class Foreign(nn.Module):
    """State that is neither a tensor nor a plain container."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.array = numpy.zeros(3)
        self.generator, self.older = numpy.random.default_rng(1), numpy.random.RandomState(2)
        self.python, self.slotted, self.bytes = random.Random(3), Slotted(), bytearray(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.array += 1
        self.slotted.seen += 1
        self.bytes[0] += 1
        self.generator.random(), self.older.rand(), self.python.random()
        return self.inner(x)

    def picture(self) -> dict[str, Any]:
        return {
            "array": self.array.tolist(),
            "numpy Generator": str(self.generator.bit_generator.state),
            "numpy RandomState": str(self.older.get_state()),
            "python Random": self.python.getstate(),
            "slots": self.slotted.seen,
            "bytearray": bytes(self.bytes),
        }


def test_attributes_of_every_kind_are_restored() -> None:
    torch.manual_seed(0)
    model, batch = Foreign(), (torch.randn(8, 6), torch.randint(4, (8,)))
    before = model.picture()
    assert gaverify.verify(model, cross_entropy, batch, steps=4).outcome is Outcome.EQUIVALENT
    assert differences(before, model.picture()) == []
    model(batch[0])
    assert differences(before, model.picture()) == sorted(before)


class Counting:
    """A loss with state of its own, called directly, by a method, or through `functools.partial`."""

    def __init__(self) -> None:
        self.calls, self.history, self.total = 0, [], torch.zeros(1)

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.total += 1
        return cross_entropy(model, batch) * min(1.0, self.calls / 10)

    def method(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self(model, batch)


def _through(model: nn.Module, batch: Any, counting: Counting) -> torch.Tensor:
    return counting(model, batch)


def _with_default(counting: Counting) -> Callable:
    def loss(model: nn.Module, batch: Any, counting: Counting = counting) -> torch.Tensor:
        return counting(model, batch)

    return loss


@pytest.mark.parametrize(
    "wrap",
    [
        lambda counting: counting,
        lambda counting: counting.method,
        lambda counting: lambda model, batch: counting(model, batch),
        lambda counting: functools.partial(_through, counting=counting),
        _with_default,
    ],
    ids=["callable", "method", "closure", "partial", "default"],
)
def test_state_of_the_loss_is_restored_and_starts_equal(wrap: Callable) -> None:
    """With K = 1 both strategies make their first call: they agree only where the counter started equal."""
    torch.manual_seed(0)
    counting, model, batch = Counting(), mlp(), (torch.randn(8, 6), torch.randint(4, (8,)))
    assert gaverify.verify(model, wrap(counting), batch, steps=1).outcome is Outcome.EQUIVALENT
    assert gaverify.verify(model, wrap(counting), batch, steps=4).outcome is Outcome.DIVERGENT
    assert (counting.calls, counting.history, float(counting.total)) == (0, [], 0.0)


@pytest.mark.parametrize("steps", [2, 4])
def test_verdict_is_the_same_twice(prepared: Any, steps: int) -> None:
    """What is restored is restored well enough to run again, digit for digit."""
    model, loss, batch, _ = prepared()
    first = gaverify.verify(model, loss, batch, steps=steps)
    second = gaverify.verify(model, loss, batch, steps=steps)
    assert first.outcome is second.outcome
    assert first.parameters == second.parameters
    assert first.findings == second.findings


def test_state_of_the_generators_does_not_change_the_verdict() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    batch = (torch.randn(8, 6), torch.randint(4, (8,)))
    rows = []
    for state in (1, 2):
        torch.manual_seed(state), random.seed(state), numpy.random.seed(state)
        rows.append(gaverify.verify(model, cross_entropy, batch, steps=4).parameters)
    other = gaverify.verify(model, cross_entropy, batch, steps=4, seed=1).parameters
    assert rows[0] == rows[1]
    assert rows[0] != other


def test_accumulated_gradients_are_the_very_same_tensors() -> None:
    torch.manual_seed(0)
    model, batch = mlp(), (torch.randn(8, 6), torch.randint(4, (8,)))
    cross_entropy(model, batch).backward()
    kept = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    verdict = gaverify.verify(model, cross_entropy, batch, steps=4)
    assert verdict.outcome is Outcome.EQUIVALENT
    for parameter, (gradient, value) in zip(model.parameters(), kept, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)


@pytest.mark.parametrize("flag", [True, False])
def test_flags_that_the_user_set_stay_set(flag: bool) -> None:
    """Restored means put back to what they were, not to torch's defaults."""
    torch.manual_seed(0)
    model, batch = mlp(), (torch.randn(8, 6), torch.randint(4, (8,)))
    kept = torch.get_default_dtype()
    try:
        torch.use_deterministic_algorithms(flag, warn_only=flag)
        torch.utils.deterministic.fill_uninitialized_memory = flag
        torch.backends.cudnn.benchmark = flag
        with torch.no_grad():
            world = picture_of_world()
            assert gaverify.verify(model, cross_entropy, batch, steps=4).outcome is Outcome.EQUIVALENT
            assert differences(world, picture_of_world()) == []
        torch.set_default_dtype(torch.float64)
        world = picture_of_world()
        assert gaverify.verify(model, cross_entropy, batch, steps=4, weighting="none").outcome is Outcome.DIVERGENT
        assert differences(world, picture_of_world()) == []
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
    model, batch = mlp(), (torch.randn(8, 6), torch.randint(4, (8,)))
    calls = iter(range(100))

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
            gaverify.verify(model, loss, batch, steps=4)
        assert differences(world, picture_of_world()) == []
        SETTERS[name]()
        assert name in differences(world, picture_of_world()), "the test would not have noticed"


def test_a_training_step_after_a_verification_is_the_same_as_without() -> None:
    """The proof by use: an optimizer that holds the parameters takes the same steps, bit for bit."""

    def trained(verify: bool) -> OrderedDict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        batch = (torch.randn(8, 6), torch.randint(4, (8,)))
        for _ in range(3):
            if verify:
                assert gaverify.verify(model, cross_entropy, batch, steps=2).outcome is Outcome.DIVERGENT
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            optimizer.step()
        return OrderedDict((name, value.clone()) for name, value in model.state_dict().items())

    with_it, without = trained(True), trained(False)
    assert all(torch.equal(with_it[name], without[name]) for name in without)


def test_the_picture_would_have_moved(prepared: Any) -> None:
    """One plain forward and backward changes what the tests above compare."""
    model, loss, batch, counters = prepared()
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
