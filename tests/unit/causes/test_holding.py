"""Which rows of a full-batch value a micro-batch is given.

Shapes: B = 4 samples of two tokens.
"""

from __future__ import annotations

import pytest
import torch

from gaverify.causes.rows import rows_for


@pytest.mark.parametrize(("order", "expected"), [(0, [0.0, 0, 0, 1]), (1, [0.0, 0, 1, 1])])
def test_a_known_order_decides_and_not_the_nearer_values(order: int, expected: list[float]) -> None:
    whole = torch.tensor([0.0, 0, 0, 1, 1, 1, 1, 1], device="cpu")
    for own in (0.0, 1.0):
        part = torch.full((4,), own, device="cpu")
        assert rows_for(whole, part, 0, 2, 4, order=order).tolist() == expected
