"""What is seen and changed at the dispatcher: calls, factories, modes, layouts, grouped products, moved weights."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaverify
from gaverify.passes.dispatch import PassMode, grouped_product
from gaverify.passes.isolation import ModelState
from gaverify.passes.precision import move_weights, rounding_share, unit_roundoff
from gaverify.passes.randomness import DrawRecorder

# --- What `PassMode` sees and changes during a forward and its backward ----------------------------------------------


def mode(*modules: nn.Module, **options: bool) -> PassMode:
    return PassMode(ModelState(list(modules)), DrawRecorder(), **options)


def test_the_divisors_of_means_are_seen() -> None:
    targets = torch.tensor([0, -100, 2, 2])
    with mode() as watching:
        F.cross_entropy(torch.randn(4, 3), targets)
        F.cross_entropy(torch.randn(4, 3), targets, reduction="sum")
        F.nll_loss(torch.randn(4, 3).log_softmax(1), targets, weight=torch.tensor([1.0, 2.0, 4.0]))
        F.mse_loss(torch.randn(4), torch.randn(4))
    counts = watching.observed.target_counts
    assert [float(count.divisor) for count in counts if count.is_mean] == [3.0, 9.0]
    assert [(float(count.valid), count.total, count.ignored) for count in counts] == [(3.0, 4, -100)] * 3
    assert [count.is_weighted for count in counts] == [False, False, True]


@pytest.mark.parametrize("lift", [torch.float64, None])
def test_casts_to_lower_precision_are_lifted_only_in_the_control(lift: torch.dtype | None) -> None:
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
    lower, low, high = torch.ones(3, 3, dtype=torch.bfloat16), torch.ones(3, 3), torch.ones(3, 3, dtype=torch.float64)
    with mode(lift=torch.float32):
        assert low.to(torch.bfloat16).dtype is torch.mm(lower, low).dtype is high.float().dtype is torch.float32
        assert low.double().dtype is torch.float64
    with mode(lift=torch.float64):
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
    with PassMode(state, DrawRecorder()), torch.no_grad():
        layer.weight.mul_(3)
    assert [tensor is layer.weight for tensor in state.written_tensors] == [True]
    state.restore()
    assert torch.equal(layer.weight, before)


def test_leaving_the_mode_with_an_exception_leaves_nothing_behind() -> None:
    with pytest.raises(ValueError), mode():
        raise ValueError
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


# --- Under `torch.set_default_device("cuda")` a factory that names no device makes its tensor there ------------------


FACTORIES = {
    "tensor",
    "as_tensor",
    "asarray",
    "zeros",
    "ones",
    "empty",
    "full",
    "eye",
    "arange",
    "linspace",
    "logspace",
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "empty_strided",
    "tril_indices",
    "triu_indices",
    "complex",
    "sparse_coo_tensor",
    "hann_window",
    "scalar_tensor",
    "from_file",
}


def unplaced(source: str) -> list[str]:
    """The factory calls of a module that name no device, as "line: call"."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        f"{call.lineno}: {ast.unparse(call)}"
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in FACTORIES
        and "device" not in {keyword.arg for keyword in call.keywords}
    ]


def test_every_factory_names_its_device() -> None:
    """But those of problems that are made up: built-in models, and the batches of models that come without one."""
    named = "torch.zeros(3, device=d); torch.zeros_like(x); x.new_zeros(3); other.zeros(3)"
    assert unplaced(f"f(torch.tensor([1.0], dtype=t)); {named}") == ["1: torch.tensor([1.0], dtype=t)"]
    root = Path(gaverify.__file__).parent
    paths = [path for path in sorted(root.rglob("*.py")) if not {"zoo", "loading"} & set(path.relative_to(root).parts)]
    assert [f"{path.relative_to(root)}:{call}" for path in paths for call in unplaced(path.read_text())] == []


# --- The product by groups against one product per group, and its place in the float64 control -----------------------


ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)


def test_products_by_groups() -> None:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64)

    a, b = random(8, 3), random(3, 3, 5)
    by_rows = torch.cat([a[:2] @ b[0], a[2:7] @ b[2], torch.zeros(1, 5, dtype=torch.float64)])
    assert torch.equal(grouped_product(a, b, ENDS), by_rows)
    a, b = random(3, 4, 3), random(3, 7)
    assert torch.equal(grouped_product(a, b, ENDS), torch.cat([a[0] @ b[:, :2], a[2] @ b[:, 2:]], dim=1)), "columns"
    a, b = random(4, 7), random(7, 5)
    summed = torch.stack([a[:, :2] @ b[:2], torch.zeros(4, 5, dtype=torch.float64), a[:, 2:] @ b[2:]])
    assert torch.equal(grouped_product(a, b, ENDS), summed)
    a, b = random(2, 4, 3), random(2, 3, 5)
    assert torch.equal(grouped_product(a, b, bias=torch.ones(5)), torch.bmm(a, b) + 1), "no groups"


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="needs torch.nn.functional.grouped_mm")
def test_it_computes_what_the_kernel_computes() -> None:
    a, b = torch.randn(8, 16), torch.randn(3, 16, 32)
    ends = torch.tensor([2, 2, 8], dtype=torch.int32)
    torch.testing.assert_close(grouped_product(a, b, ends), torch.nn.functional.grouped_mm(a, b, offs=ends))


# --- Weights move by what is written, each its own way, and come back bit for bit ------------------------------------


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_weight_moves_by_one_or_two_units_in_its_last_place(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype))
    real = torch.view_as_real(weight.data) if dtype.is_complex else weight.data
    before = real.clone()
    share = rounding_share(weight, 0.0)
    assert share == 2 * unit_roundoff(dtype)
    with move_weights([weight], [share]):
        distance = ((real - before).double() / before.double()).abs()
        part = before != 0
        assert bool((distance[part] > 0).all()), "each of them moves"
        assert float(distance[part].max()) <= 2.1 * share
        assert 0.4 < float((real > before)[part].double().mean()) < 0.6, "up or down by a coin"
    assert torch.equal(real, before)


def test_coarser_arithmetic_than_the_weights_own_counts() -> None:
    assert rounding_share(torch.zeros(1), 2.0**-8) == 2 * 2.0**-8
    assert rounding_share(torch.zeros(1, dtype=torch.bfloat16), 2.0**-24) == 2 * 2.0**-8


def test_a_share_is_that_share_by_a_seed_and_weights_come_back_after_an_error() -> None:
    weight = torch.nn.Parameter(torch.arange(1.0, 65.0))
    before, seen = weight.detach().clone(), []
    for share, seed in ((0.02, 0), (1.0, 0), (0.5, 0), (0.5, 0), (0.5, 1)):
        with pytest.raises(RuntimeError, match="stop"), move_weights([weight], [share], seed):
            seen.append(weight.detach().clone())
            torch.testing.assert_close((seen[-1] - before).abs(), share * before)
            raise RuntimeError("stop")
        assert torch.equal(weight.detach(), before)
    assert torch.equal(seen[2], seen[3]) and not torch.equal(seen[3], seen[4])
