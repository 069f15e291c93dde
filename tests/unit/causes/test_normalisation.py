"""Whether a module scales its channels; by slopes that really differ, not by what rounding makes of equal ones."""

from __future__ import annotations

import pytest
import torch

from gaverify.causes.trace.normalisation import per_channel_affine


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("slopes", "normalises"),
    [((0.5, 1.0, 2.0), True), ((1.0, 1.0, 1.0), False), ((0.3, 0.3, 0.3), False), ((1.0, 1.0, 1.01), True)],
)
def test_slopes_of_the_channels(dtype: torch.dtype, slopes: tuple[float, ...], normalises: bool) -> None:
    for seed in range(20):  # rounding differs from draw to draw
        generator = torch.Generator().manual_seed(seed)
        before = torch.randn(16, 3, generator=generator, dtype=dtype)
        shift = torch.randn(3, generator=generator, dtype=dtype)
        after = (before - shift) / 7 * 7 * torch.tensor(slopes, dtype=dtype) + shift
        assert per_channel_affine(before, after) is normalises


def test_other_functions_of_the_input() -> None:
    before = torch.randn(16, 3)
    assert not per_channel_affine(before, before.square())
    assert not per_channel_affine(before, before[:8])
