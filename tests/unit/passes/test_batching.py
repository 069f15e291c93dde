"""How a batch is cut, and the terms of which a loss is the sum."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from gaverify import ProblemError
from gaverify.passes.batching import batch_size_of, fresh, micro_batch_sizes, other_reading, take
from gaverify.passes.calls import OperationMode
from gaverify.passes.dispatch import SUMMING, TermSums, _magnitudes
from gaverify.passes.layouts import leaves, rebuilt

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    y: int = 3


T = torch.arange


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (T(6), 6),
        ((T(6), T(6)), 6),
        ({"x": T(12).view(6, 2), "name": "train", "scale": torch.tensor(2.0)}, 6),
        (Pair(T(6), T(6)), 6),
        (Record(T(6)), 6),
        ([T(2), T(5), T(3)], 3),  # sequences of their own lengths: samples
        ([(T(2), 0), (T(2), 1), (T(2), 1)], 3),  # records: samples
        ([T(6), T(6)], 6),  # one length: what a loader yields
        (torch.eye(6).to_sparse(), 6),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_samples_are_counted(batch, size: int) -> None:
    assert batch_size_of(batch) == size


def test_the_reading_with_enough_samples_wins() -> None:
    batch = [T(6), T(6)]
    assert batch_size_of(batch, steps=2) == 6
    assert "if it holds 2, give batch_size=2" in other_reading(batch, 6)
    assert other_reading(T(6), 6) == ""
    assert batch_size_of(batch, batch_size=2) == 2
    for count in (0, 1):  # two fields of one sample, or of none, are no two samples
        assert batch_size_of((T(count), torch.zeros(count, dtype=torch.long)), steps=2) == count


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ((T(6), T(5)), "disagree"),
        ({"x": T(6), "y": T(5)}, "disagree"),
        ({"x": torch.tensor(1.0)}, "no tensor with a leading batch dimension"),
        ("text", "no tensor with a leading batch dimension"),
    ],
)
def test_what_has_no_number_of_samples_says_so(batch, sentence: str) -> None:
    with pytest.raises(ProblemError, match=sentence):
        batch_size_of(batch)


def test_micro_batches_are_cut_as_a_loader_would() -> None:
    cuts = {(8, 4): (2, 2, 2, 2), (10, 4): (3, 3, 3, 1), (9, 4): (3, 2, 2, 2), (5, 5): (1,) * 5, (7, 1): (7,)}
    assert {(size, steps): micro_batch_sizes(size, steps) for size, steps in cuts} == cuts
    for size, steps in ((4, 5), (4, 0), (0, 1)):
        with pytest.raises(ProblemError):
            micro_batch_sizes(size, steps)


def test_samples_are_taken_and_the_rest_passes_through() -> None:
    batch = {"x": T(6), "table": T(4), "names": list("abcdef"), "pair": Pair(T(6), 1), "record": Record(T(6))}
    part = take(batch, 2, 4, 6)
    assert part["x"].tolist() == [2, 3] and part["table"].tolist() == [0, 1, 2, 3]
    assert part["names"] == ["c", "d"]
    assert part["pair"].x.tolist() == [2, 3] and part["pair"].y == 1
    assert part["record"].x.tolist() == [2, 3] and part["record"].y == 3
    assert batch["x"].tolist() == list(range(6))


def test_samples_of_sparse_tensors_of_lists_and_by_a_users_split() -> None:
    for layout in (torch.sparse_coo, torch.sparse_csr):
        part = take(torch.eye(6).to_sparse(layout=layout), 2, 4, 6)
        assert part.layout is layout and torch.equal(part.to_dense(), torch.eye(6)[2:4])
    samples = [T(2), T(5), T(3)]
    assert take(samples, 1, 3, 3) == samples[1:3]
    assert take("batch", 1, 3, 8, lambda batch, start, stop: (batch, start, stop)) == ("batch", 1, 3)


def test_a_fresh_batch_shares_nothing_and_keeps_what_stands_twice_together() -> None:
    x = torch.ones(3, requires_grad=True)
    batch = {"a": x, "b": [x, torch.tensor([1])], "c": torch.ones(1, dtype=torch.complex64)}
    copy = fresh(batch, dtype=torch.float64)
    assert copy["a"] is copy["b"][0] is not x
    assert copy["a"].dtype is torch.float64 and copy["a"].requires_grad and copy["a"].is_leaf
    assert copy["b"][1].dtype is torch.int64
    assert copy["c"].dtype is torch.complex128
    with torch.no_grad():
        copy["a"].zero_()
    assert x.sum() == 3


@pytest.mark.parametrize(
    "batch", [{"a": 1}, [1, 2], (1, 2), Pair(1, 2), UserDict(a=1), Record(T(2))], ids=lambda value: type(value).__name__
)
def test_containers_keep_their_type_and_are_not_changed(batch) -> None:
    before = list(leaves(batch))
    changed = rebuilt(batch, lambda leaf: 7)
    assert type(changed) is type(batch)
    assert [leaf for _, leaf in leaves(changed)] == [7] * len(before)
    assert [path for path, _ in leaves(changed)] == [path for path, _ in before]
    assert [leaf is old for (_, leaf), (_, old) in zip(leaves(batch), before, strict=True)] == [True] * len(before)


# --- Σ|terms| of every sum that a backward forms, against sums made by hand; freed memory is credited to nobody ------


aten = torch.ops.aten


class Broadcast(nn.Module):
    """Adds a row to every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


def summed(module: nn.Module, x: torch.Tensor) -> tuple[TermSums, torch.Tensor]:
    """The sums of one backward, and the gradient that reached the module's output."""
    sums = TermSums()

    def handle(func, args, kwargs):  # type: ignore[no-untyped-def]
        result = func(*args, **kwargs)
        if func in SUMMING:
            sums.note(func, args, result)
        return result

    output = module(x)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    with OperationMode(handle):
        output.backward(upstream)
    return sums, upstream


IMAGES, ROWS = (3, 4, 5, 6), (3, 7, 4)


@pytest.mark.parametrize(
    ("make", "shape", "over"),
    [
        (lambda: nn.Linear(4, 4), ROWS, (0, 1)),
        (Broadcast, (3, 4), (0,)),
        (lambda: nn.LayerNorm(4), ROWS, (0, 1)),
        (lambda: nn.LayerNorm((7, 4)), ROWS, (0,)),
        (lambda: nn.GroupNorm(2, 4), IMAGES, (0, 2, 3)),
        (lambda: nn.BatchNorm2d(4), IMAGES, (0, 2, 3)),
        (lambda: nn.Conv2d(4, 4, 3), IMAGES, (0, 2, 3)),
        (lambda: nn.Conv1d(7, 2, 1), ROWS, (0, 2)),
        (lambda: nn.ConvTranspose2d(4, 4, 3), IMAGES, (0, 2, 3)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_terms_of_a_bias(make: Callable[[], nn.Module], shape: tuple[int, ...], over: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = make()
    sums, upstream = summed(module, torch.randn(shape))
    found = sums.of(module.bias.grad)
    assert found is not None
    assert float(found.scale) == pytest.approx(float(upstream.abs().sum(over).norm()), rel=1e-5)
    assert sums.of(torch.zeros(4)) is None


def test_terms_of_an_embedding() -> None:
    table, looked_up = nn.Embedding(5, 3), torch.tensor([[0, 1, 1], [1, 4, 0]])
    sums, upstream = summed(table, looked_up)
    by_hand = torch.zeros(5, 3)
    for row, gradient in zip(looked_up.flatten(), upstream.flatten(0, 1), strict=True):
        by_hand[row] += gradient.abs()
    found = sums.of(table.weight.grad)
    assert found is not None and float(found.scale) == pytest.approx(float(by_hand.norm()))


def test_a_sum_of_sums_counts_the_outer_terms_alone_which_are_less() -> None:
    module = nn.InstanceNorm2d(4, affine=True)
    sums, upstream = summed(module, torch.randn(IMAGES))
    found = sums.of(module.bias.grad)
    assert found is not None
    assert float(found.scale) == pytest.approx(float(upstream.sum((2, 3)).abs().sum(0).norm()), rel=1e-5)
    weighted = nn.Linear(4, 4)
    assert summed(weighted, torch.randn(3, 4))[0].of(weighted.weight.grad) is None, "weights are no such sums"


def test_half_precision_does_not_overflow_and_slices_add_up() -> None:
    found = _magnitudes(torch.full((70000, 2), 10.0, dtype=torch.float16), [0])
    assert torch.equal(found, torch.full((2,), 700000.0))
    terms = torch.randn(3, 1 << 20, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(_magnitudes(terms, [1]), terms.abs().sum(1))
    torch.testing.assert_close(_magnitudes(terms, [0, 1]), terms.abs().sum())


def test_memory_that_was_freed_and_given_to_another_gradient_is_not_credited() -> None:
    sums = TermSums()
    terms = torch.randn(8, 4)
    total = terms.sum([0])
    sums.note(aten.sum.dim_IntList, (terms, [0]), total)
    assert sums.of(total) is not None
    assert sums.of(total.view(2, 2)) is not None, "a view lies in the same memory"
    address = total.data_ptr()
    del total
    for other in [torch.empty(4) for _ in range(100)]:
        if other.data_ptr() == address:
            assert sums.of(other) is None
