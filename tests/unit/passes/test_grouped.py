"""The product by groups against one product per group, and its place in the float64 control."""

from __future__ import annotations

import pytest
import torch

from gaverify.passes.grouped import grouped_product

ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)


def test_rows_by_groups() -> None:
    a, b = torch.randn(8, 3, dtype=torch.float64), torch.randn(3, 3, 5, dtype=torch.float64)
    result = grouped_product(a, b, ENDS)
    assert torch.equal(result, torch.cat([a[:2] @ b[0], a[2:7] @ b[2], torch.zeros(1, 5, dtype=torch.float64)]))


def test_columns_by_groups() -> None:
    a, b = torch.randn(3, 4, 3, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    assert torch.equal(grouped_product(a, b, ENDS), torch.cat([a[0] @ b[:, :2], a[2] @ b[:, 2:]], dim=1))


def test_groups_that_are_summed_over() -> None:
    a, b = torch.randn(4, 7, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    zero = torch.zeros(4, 5, dtype=torch.float64)
    assert torch.equal(grouped_product(a, b, ENDS), torch.stack([a[:, :2] @ b[:2], zero, a[:, 2:] @ b[2:]]))


def test_without_groups_and_with_a_bias() -> None:
    a, b = torch.randn(2, 4, 3), torch.randn(2, 3, 5)
    assert torch.equal(grouped_product(a, b, bias=torch.ones(5)), torch.bmm(a, b) + 1)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="needs torch.nn.functional.grouped_mm")
def test_it_computes_what_the_kernel_computes() -> None:
    a, b = torch.randn(8, 16), torch.randn(3, 16, 32)
    ends = torch.tensor([2, 2, 8], dtype=torch.int32)
    torch.testing.assert_close(grouped_product(a, b, ends), torch.nn.functional.grouped_mm(a, b, offs=ends))
