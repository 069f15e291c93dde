from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from gaverify import ProblemError
from gaverify.passes.batching import batch_size_of, fresh, micro_batch_sizes, other_reading, take
from gaverify.passes.nesting import leaves, rebuilt

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
    assert "if it holds 2, say batch_size=2" in other_reading(batch, 6)
    assert other_reading(T(6), 6) == ""
    assert batch_size_of(batch, batch_size=2) == 2


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


@pytest.mark.parametrize(
    ("size", "steps", "sizes"),
    [(8, 4, (2, 2, 2, 2)), (10, 4, (3, 3, 3, 1)), (9, 4, (3, 2, 2, 2)), (5, 5, (1,) * 5), (7, 1, (7,))],
)
def test_micro_batches_are_cut_as_a_loader_would(size: int, steps: int, sizes: tuple[int, ...]) -> None:
    assert micro_batch_sizes(size, steps) == sizes


@pytest.mark.parametrize(("size", "steps"), [(4, 5), (4, 0), (0, 1)])
def test_what_cannot_be_cut_says_so(size: int, steps: int) -> None:
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


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_samples_of_sparse_tensors(layout: torch.layout) -> None:
    part = take(torch.eye(6).to_sparse(layout=layout), 2, 4, 6)
    assert part.layout is layout
    assert torch.equal(part.to_dense(), torch.eye(6)[2:4])


def test_a_list_of_samples_is_sliced() -> None:
    samples = [T(2), T(5), T(3)]
    assert take(samples, 1, 3, 3) == samples[1:3]


def test_a_users_split_is_asked_instead() -> None:
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
