"""What `PassMode` sees and changes during a forward and its backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gaverify.passes.dispatch import PassMode
from gaverify.passes.isolation import ModelState
from gaverify.passes.randomness import Recorder


def mode(*modules: nn.Module, **options: bool) -> PassMode:
    return PassMode(ModelState(list(modules)), Recorder(), **options)


def test_the_divisors_of_means_are_seen() -> None:
    targets = torch.tensor([0, -100, 2, 2])
    with mode() as watching:
        F.cross_entropy(torch.randn(4, 3), targets)
        F.cross_entropy(torch.randn(4, 3), targets, reduction="sum")
        F.nll_loss(torch.randn(4, 3).log_softmax(1), targets, weight=torch.tensor([1.0, 2.0, 4.0]))
        F.mse_loss(torch.randn(4), torch.randn(4))
    assert [(float(total), numel) for total, numel, _ in watching.observed.target_counts] == [(3.0, 4), (9.0, 4)]


@pytest.mark.parametrize("lift", [True, False])
def test_casts_to_lower_precision_are_lifted_only_in_the_control(lift: bool) -> None:
    x = torch.randn(3, dtype=torch.float64)
    with mode(lift=lift):
        cast, made, mixed = x.to(torch.float32), torch.zeros(3, dtype=torch.bfloat16), x * 3
        whole = x.to(torch.int64)
    expected = torch.float64 if lift else torch.float32
    assert cast.dtype is expected
    assert made.dtype is (torch.float64 if lift else torch.bfloat16)
    assert mixed.dtype is torch.float64 and whole.dtype is torch.int64
    assert x.float().dtype is torch.float32  # the mode is over


def test_mixed_inputs_are_lifted_and_what_is_written_to_stays() -> None:
    low, high = torch.ones(3, 3), torch.ones(3, 3, dtype=torch.float64)
    with mode(lift=True):
        assert torch.mm(low, high).dtype is torch.float64
        low.add_(high)
    assert low.dtype is torch.float32 and low.sum() == 18
    with pytest.raises(RuntimeError), mode():
        torch.mm(low, high)


def test_a_bias_gradients_terms_are_measured() -> None:
    layer = nn.Linear(5, 3)
    inputs = torch.randn(4, 5)
    with mode(layer, observe_terms=True) as watching:
        (layer(inputs) * torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])).sum().backward()
    assert layer.bias.grad is not None and layer.bias.grad.abs().max() == 0
    terms = watching.observed.terms.of(layer.bias.grad)
    assert terms is not None and terms.plain
    assert float(terms.scale) == pytest.approx((3 * 4.0**2) ** 0.5)  # four terms of 1 in each of three elements


def test_terms_are_not_measured_unless_asked_nor_in_the_forward() -> None:
    bias = nn.Parameter(torch.zeros(3))
    with mode() as watching:
        (torch.ones(4, 3) + bias).sum().backward()
    assert watching.observed.terms.of(bias.grad) is None
    with mode(observe_terms=True) as watching:
        total = torch.ones(4, 3).sum(0)
    assert watching.observed.terms.of(total) is None


def test_a_parameter_that_the_forward_writes_to_is_kept_before() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    state = ModelState([layer])
    with PassMode(state, Recorder()), torch.no_grad():
        layer.weight.mul_(3)
    assert [tensor is layer.weight for tensor in state.written] == [True]
    state.restore()
    assert torch.equal(layer.weight, before)


def test_leaving_the_mode_with_an_exception_leaves_nothing_behind() -> None:
    with pytest.raises(ValueError), mode():
        raise ValueError
    with mode() as watching:
        torch.ones(2) + 1
    assert watching.observed.target_counts == []
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
