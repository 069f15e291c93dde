"""What a forward may do to modules, parameters and buffers: all of it is undone, and was done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import cross_entropy, fault_codes, mlp, story
from torch import nn

import gaverify
from gaverify import Outcome, ProblemError

CALLS = 0
BATCH = (torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 3, 1, 0, 2]))


class Changing(nn.Module):
    """Does one more thing in its forward."""

    shared = 0

    def __init__(self, what: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.inner, self.spare, self.what = mlp(), nn.Linear(2, 2), what
        self.register_buffer("buffer", torch.zeros(3))
        self.register_buffer("expanded", torch.zeros(1).expand(3))
        self.register_buffer("sparse", torch.zeros(3).to_sparse())
        with torch.inference_mode():
            self.inferred = torch.zeros(3)
        self.register_parameter("empty", None)
        self.hooks: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.what(self)
        return self.inner(x)


def clamp(model: nn.Module) -> None:
    for parameter in model.inner.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def set_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.inner[0].weight.set_(model.inner[0].weight * 0.9)


def step_an_optimizer(model: nn.Module) -> None:
    copy = nn.Parameter(model.inner[0].weight.data)
    copy.grad = torch.ones_like(copy)
    torch.optim.Adam([copy], fused=True).step()


def write_to_inference_tensor(model: nn.Module) -> None:
    with torch.inference_mode():
        model.inferred.add_(1)


def count_age(weight: nn.Parameter) -> None:
    weight.age = getattr(weight, "age", 0) + 1


def count_in_class(kind: Any) -> None:
    kind.shared += 1


def count_in_global(model: nn.Module) -> None:
    global CALLS
    CALLS += 1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "data of a parameter": lambda m: setattr(m.inner[0].weight, "data", m.inner[0].weight.data * 0.9),
    "data of a buffer": lambda m: setattr(m.buffer, "data", torch.ones(5)),
    "set": set_weight,
    "clamp": clamp,
    "out": lambda m: torch.mul(m.inner[0].weight.data, 0.9, out=m.inner[0].weight.data),
    "foreach": lambda m: torch._foreach_mul_([parameter.data for parameter in m.inner.parameters()], 0.9),
    "optimizer": step_an_optimizer,
    "new parameter": lambda m: setattr(m.spare, "weight", nn.Parameter(torch.ones(2, 2))),
    "empty parameter": lambda m: setattr(m, "empty", nn.Parameter(torch.ones(1))),
    "added parameter": lambda m: m.spare.register_parameter("added", nn.Parameter(torch.ones(1))),
    "added buffer": lambda m: m.register_buffer("added", torch.ones(1), persistent=False),
    "added submodule": lambda m: m.inner.add_module("added", nn.Dropout(0.0)),
    "removed submodule": lambda m: m._modules.pop("spare", None),
    "exchanged submodule": lambda m: setattr(m, "spare", nn.Linear(3, 3)),
    "removed buffer": lambda m: m._buffers.pop("buffer", None),
    "resized buffer": lambda m: m.buffer.resize_(7).fill_(1.0),
    "buffer with a graph": lambda m: m.buffer.add_(m.spare.weight.sum()),
    "expanded buffer": lambda m: m.expanded[:1].add_(1),
    "sparse buffer": lambda m: m.sparse.add_(torch.ones(3).to_sparse()),
    "inference tensor": write_to_inference_tensor,
    "gradient of a buffer": lambda m: m.buffer.requires_grad_(),
    "mode": lambda m: m.spare.train(not m.spare.training),
    "hook": lambda m: m.hooks.append(m.inner[2].register_forward_hook(lambda *_: None)),
    "hook on a parameter": lambda m: m.hooks.append(m.inner[0].weight.register_hook(lambda gradient: gradient * 1.0)),
    "hook after accumulation": lambda m: m.inner[0].weight.register_post_accumulate_grad_hook(lambda _: None),
    "attribute of a parameter": lambda m: count_age(m.inner[0].weight),
    "class": lambda m: count_in_class(type(m)),
    "global": count_in_global,
}


def _value(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    address = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
    return id(tensor), address, tensor.requires_grad, tensor.grad_fn is None, tensor.detach().to_dense().tolist()


def _hooks(module: nn.Module) -> list[int]:
    found = [len(module._forward_hooks)]
    for parameter in module.parameters(recurse=False):
        hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        found += [len(registered or ()) for registered in hooks]
    return found


def picture(model: nn.Module) -> Any:
    modules = {name: (id(module), module.training, _hooks(module)) for name, module in model.named_modules()}
    registered = {
        (name, entry): (_value(tensor), dict(vars(tensor)) if tensor is not None else None)
        for name, module in model.named_modules()
        for entry, tensor in [*module._parameters.items(), *module._buffers.items()]
    }
    others = (sorted(vars(model)), sorted(model._non_persistent_buffers_set), list(model._modules), len(model.hooks))
    return modules, registered, others, _value(model.inferred), type(model).shared, CALLS


@pytest.mark.parametrize("options", [{}, {"weighting": "none"}], ids=["equivalent", "diagnosed"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_forward_does_to_its_modules_is_undone(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Changing(CHANGES[name])
    before = picture(model)
    gaverify.verify(model, cross_entropy, BATCH, steps=4, **options)
    assert picture(model) == before
    model(BATCH[0])
    assert picture(model) != before, "the test would not have noticed"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    names=st.lists(st.sampled_from(sorted(CHANGES)), min_size=2, max_size=6),
    fail_at=st.integers(1, 12),
    dtype=st.sampled_from([None, "float64", "bfloat16"]),
)
def test_any_changes_in_any_order_are_undone(names: list[str], fail_at: int, dtype: str | None) -> None:
    """Some of them do not go together and raise of themselves; every example raises in the end."""
    torch.manual_seed(0)
    calls = iter(range(1, 1000))

    def changes(model: nn.Module) -> None:
        for name in names:
            CHANGES[name](model)
        if next(calls) >= fail_at:
            raise ValueError("in the middle")

    model = Changing(changes)
    before = picture(model)
    with contextlib.suppress(ProblemError):
        gaverify.verify(model, cross_entropy, BATCH, steps=2, dtype=dtype)
    assert picture(model) == before


def test_a_mode_that_the_forward_changes_starts_equal() -> None:
    """The first forward freezes the statistics for good: each strategy must meet them unfrozen."""

    class Freezing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = self.head(self.norm(x))
            self.norm.eval()
            return result

    assert gaverify.verify(Freezing(), cross_entropy, BATCH, steps=1).outcome is Outcome.EQUIVALENT
    verdict = gaverify.verify(Freezing(), cross_entropy, BATCH, steps=4)
    assert verdict.outcome is Outcome.DIVERGENT and fault_codes(verdict), story(verdict)


def test_several_parameters_in_one_storage_are_restored() -> None:
    flat, model = torch.randn(28, generator=torch.Generator().manual_seed(0)), nn.Linear(6, 4)
    model.weight, model.bias = nn.Parameter(flat[:24].view(4, 6)), nn.Parameter(flat[24:])
    before = flat.clone()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
        return cross_entropy(model, batch)

    gaverify.verify(model, loss, BATCH, steps=4)
    assert torch.equal(flat, before)


def test_what_only_the_loss_knows_is_restored() -> None:
    """A teacher that follows the model, a trainable head, a leaf tensor and an optimizer, all in the loss's closure."""
    torch.manual_seed(0)
    model, teacher, head = mlp(), mlp(), nn.Linear(4, 4)
    temperature = torch.ones((), requires_grad=True)
    head.weight.grad = torch.full_like(head.weight, 0.5)
    optimizer = torch.optim.Adam(head.parameters())

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
            goal = teacher(batch[0])
        optimizer.step()
        return F.mse_loss(head(model(batch[0])) * temperature, goal)

    def held() -> Any:
        tensors = [*teacher.parameters(), *head.parameters(), head.weight.grad, temperature]
        gradients = [p.grad is None for p in (*teacher.parameters(), *head.parameters(), temperature)]
        return [(id(t), t.tolist()) for t in tensors], gradients, len(optimizer.state), optimizer.param_groups

    before = held()
    verdict = gaverify.verify(model, loss, BATCH, steps=4)
    assert verdict.outcome is Outcome.DIVERGENT
    assert fault_codes(verdict) <= {"GAV401", "GAV403"}, story(verdict)
    assert held() == before
    loss(model, BATCH).backward()
    assert held() != before, "the test would not have noticed"


def test_lazy_modules_must_have_seen_an_input() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4))
    for options in ({}, {"dtype": "float64"}, {"mode": None}):
        with pytest.raises(ProblemError, match=r"2 of .* have no shape yet.*Run one forward first"):
            gaverify.verify(model, cross_entropy, BATCH, steps=4, **options)
    model(BATCH[0])
    assert gaverify.verify(model, cross_entropy, BATCH, steps=4).outcome is Outcome.EQUIVALENT


class Growing(nn.Module):
    """Makes a part of itself when it first sees an input, without a lazy module."""

    def __init__(self, part: str, *, trained: bool = True) -> None:
        super().__init__()
        self.inner, self.part, self.trained = nn.Linear(6, 4), part, trained

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.part == "scale":
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.ones(4))
            return x * (self.scale if self.trained else self.scale.detach())
        if not hasattr(self, "head"):
            self.head = nn.Linear(4, 4)
        return self.head(x)


@pytest.mark.parametrize(
    ("part", "told"), [("scale", "the parameter `scale`"), ("head", "parameters `head.weight`, `head.bias`")]
)
def test_parameters_that_the_forward_adds_are_named(part: str, told: str) -> None:
    model = Growing(part)
    with pytest.raises(ProblemError, match=f"the forward adds {told}.*run one forward first"):
        gaverify.verify(model, cross_entropy, BATCH, steps=4)
    assert not hasattr(model, part), "nothing of the model is changed"
    model(BATCH[0])
    verdict = gaverify.verify(model, cross_entropy, BATCH, steps=4)
    assert verdict.outcome is Outcome.EQUIVALENT and any(part in row.name for row in verdict.parameters)


def test_a_parameter_that_nothing_trains_may_be_added() -> None:
    model = Growing("scale", trained=False)
    assert gaverify.verify(model, cross_entropy, BATCH, steps=4).outcome is Outcome.EQUIVALENT


class Scripted(nn.Module):
    """Keeps state of every kind that TorchScript knows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.seen, self.plain = nn.Linear(6, 4), 0, [1], torch.zeros(1)
        self.register_buffer("buffer", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(1)
        self.plain = self.plain + 1
        self.buffer.add_(1)
        self.buffer = self.buffer + 1
        return self.inner(x) * min(1.0, self.calls / 10)


Scripted.__annotations__ = {"seen": list[int]}  # TorchScript cannot read it as the text that this file makes of it


def test_attributes_of_scripted_modules_are_restored() -> None:
    model = torch.jit.script(Scripted()).eval()

    def held() -> list[Any]:
        tensors = [(id(t), t.dtype, t.tolist()) for t in (model.buffer, model.plain)]
        return [model.calls, list(model.seen), tensors, model.training]

    before = held()
    verdict = gaverify.verify(model, cross_entropy, BATCH, steps=4)
    assert verdict.outcome is Outcome.DIVERGENT
    assert fault_codes(verdict) and fault_codes(verdict) <= {"GAV401", "GAV403"}, story(verdict)
    assert held() == before
    model(BATCH[0])
    assert all(one != other for one, other in zip(held()[:3], before[:3], strict=True))
