import pytest
import torch

from gaverify.passes.devices import widest
from gaverify.passes.fingerprints import projected, real_numbers, summaries


@pytest.mark.parametrize("length", [1, 7, 1000, (1 << 16) + 5])
def test_rows_that_differ_in_one_number_are_told_apart(length: int) -> None:
    torch.manual_seed(0)
    row = torch.randn(length, dtype=torch.float64)
    for at in {0, length // 2, length - 1}:
        other = row.clone()
        other[at] += 0.01
        assert (summaries(row) - summaries(other)).abs().max() > 1e-4


def test_rows_are_projected_one_by_one_whatever_lies_around_them() -> None:
    torch.manual_seed(1)
    rows = torch.randn(6, 3, 40, dtype=torch.float64)
    torch.testing.assert_close(summaries(rows[2:4]), summaries(rows)[2:4], rtol=1e-14, atol=1e-14)
    assert summaries(rows).shape == (6, 3, 3)
    assert projected(rows, 1).shape == (6, 3, 1)


@pytest.mark.parametrize(
    "rows", [torch.randn(5, 64).softmax(1), torch.nn.functional.layer_norm(torch.randn(5, 64), (64,))]
)
def test_normalised_rows_keep_apart(rows: torch.Tensor) -> None:
    """The sum of a row behind a softmax or a LayerNorm is the same for all of them."""
    torch.testing.assert_close(rows.sum(1), rows.sum(1)[:1].expand(5), atol=1e-4, rtol=1e-4)
    distances = torch.cdist(projected(rows), projected(rows)) + torch.eye(5)
    assert distances.min() > 1e-3


def test_pieces_of_a_long_row_do_not_cancel_each_other() -> None:
    """The directions start again after 65,536 numbers: exchanged pieces must not give the same projections."""
    pieces = torch.randn(2, 1 << 16, dtype=torch.float64)
    exchanged = projected(pieces.flip(0).reshape(-1)) - projected(pieces.reshape(-1))
    assert exchanged.abs().max() > 1


@pytest.mark.parametrize(
    ("shape", "pairs"), [((), (2,)), ((4,), (4, 2)), ((4, 3), (4, 6)), ((2, 4, 3), (2, 4, 6))], ids=str
)
def test_complex_numbers_stay_in_their_rows(shape: tuple[int, ...], pairs: tuple[int, ...]) -> None:
    values = torch.randn(shape, dtype=torch.complex64, requires_grad=True)
    assert real_numbers(values).shape == pairs
    assert not real_numbers(values).requires_grad
    assert not torch.equal(real_numbers(values.conj()), real_numbers(values))


def test_real_numbers_are_not_copied() -> None:
    values = torch.randn(3, 2)
    assert real_numbers(values).data_ptr() == values.data_ptr()


def test_the_widest_dtype_of_a_device() -> None:
    assert widest(torch.device("cpu")) is torch.float64
    assert widest(torch.device("cuda", 0)) is torch.float64
    assert widest(torch.device("mps")) is torch.float32
