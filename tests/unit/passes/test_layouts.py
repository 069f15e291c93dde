"""Which dimensions of a tensor hold the samples, told from shapes, and the entries that belong to some of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gaverify.passes.layouts import SampleDimension, SampleLayout, take_entries

ROWS, COLUMNS = SampleLayout((SampleDimension(0),)), SampleLayout((SampleDimension(1),))


@pytest.mark.parametrize(
    ("full", "micro", "kind", "dimensions"),
    [
        ((8, 3), (2, 3), "rows", [SampleDimension(0)]),
        ((3, 8), (3, 2), "rows", [SampleDimension(1)]),
        ((24, 3), (6, 3), "rows", [SampleDimension(0, 3)]),
        ((8, 8), (2, 2), "matrix", [SampleDimension(0), SampleDimension(1)]),
        ((8, 7), (2, 5), "mixed", [SampleDimension(0), SampleDimension(1, 0)]),
        ((24, 3), (5, 3), "selected", [SampleDimension(0, 0)]),
        ((4, 3), (4, 3), "global", []),
    ],
)
def test_dimensions_that_differ_follow_the_batch(
    full: tuple[int, ...], micro: tuple[int, ...], kind: str, dimensions: list[SampleDimension]
) -> None:
    layout = SampleLayout.find(full, micro, batch_size=8, count=2)
    assert layout is not None
    assert (layout.kind, list(layout.dimensions)) == (kind, dimensions)


def test_shapes_of_other_lengths_have_no_layout() -> None:
    assert SampleLayout.find((8, 3), (2,), 8, 2) is None


def test_no_fold_is_known_without_the_numbers_of_samples() -> None:
    assert SampleLayout.find((8, 3), (2, 3)) == SampleLayout((SampleDimension(0, 0),))


def test_a_leading_dimension_holds_the_samples() -> None:
    assert SampleLayout.find_leading((16, 3), (4, 3), 8, 2) == SampleLayout((SampleDimension(0, 2),))
    assert SampleLayout.find_leading((3, 16), (3, 16), 8, 8) == SampleLayout((SampleDimension(1, 2),))
    assert SampleLayout.find_leading((3, 3, 8), (3, 3, 2), 8, 2) is None
    assert SampleLayout.find_leading((3, 5), (3, 5), 8, 8) is None


class TestTake:
    def test_samples_are_the_outer_or_the_inner_index_of_a_folded_dimension(self) -> None:
        sample = torch.arange(4)
        layout = SampleLayout((SampleDimension(1, fold=2),))
        outer, inner = sample.repeat_interleave(2)[None], sample.repeat(2)[None]
        assert layout.take(outer, range(1, 3), batch_size=4).tolist() == [[1, 1, 2, 2]]
        assert layout.inside.take(inner, range(1, 3), batch_size=4).tolist() == [[1, 2, 1, 2]]

    def test_samples_that_lie_apart(self) -> None:
        layout = SampleLayout((SampleDimension(0, fold=2),))
        assert layout.take(torch.arange(8), (3, 0), batch_size=4).tolist() == [6, 7, 0, 1]
        assert layout.inside.take(torch.arange(8), (3, 0), batch_size=4).tolist() == [3, 0, 7, 4]
        assert layout.take(torch.arange(8), range(0, 4, 2), batch_size=4).tolist() == [0, 1, 4, 5]

    def test_arrays(self) -> None:
        array = np.arange(8).reshape(2, 4)
        assert COLUMNS.take(array, range(1, 3), batch_size=4).tolist() == [[1, 2], [5, 6]]
        assert take_entries(array, 1, [3, 0]).tolist() == [[3, 0], [7, 4]]

    def test_rows_of_sparse_and_nested_tensors(self) -> None:
        dense = torch.eye(4)
        assert torch.equal(take_entries(dense.to_sparse(), 0, range(1, 3)).to_dense(), dense[1:3])
        nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
        assert [len(part) for part in take_entries(nested, 0, [1]).unbind()] == [3]
