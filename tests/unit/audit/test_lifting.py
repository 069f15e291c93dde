"""A script that trains below float32 computes in float32 where the audit asks for that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.overrides import _pop_mode

from gaverify.audit.recording.control import compute_in_float32


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.autocast, "__init__", torch.autocast.__init__)
    monkeypatch.setattr(torch, "set_default_dtype", torch.set_default_dtype)
    compute_in_float32()
    yield
    _pop_mode()


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_call_makes_half_a_precision(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    made = [
        torch.ones(2),
        torch.ones(2, dtype=dtype),
        torch.ones(2).to(dtype),
        torch.ones(2).to("cpu", dtype),
        torch.ones(2).type(dtype),
        torch.ones(2).half(),
        torch.ones(2).bfloat16(),
        nn.Linear(2, 2, dtype=dtype).weight,
        nn.Linear(2, 2).to(dtype).weight,
        nn.Linear(2, 2).half().weight,
        nn.Linear(2, 2).bfloat16().bias,
    ]
    assert {tensor.dtype for tensor in made} == {torch.float32}
    assert torch.ones(2, dtype=torch.float64).dtype is torch.float64 and torch.ones(2).long().dtype is torch.int64


@pytest.mark.usefixtures("in_float32")
def test_nothing_is_autocast() -> None:
    @torch.autocast("cpu", torch.bfloat16)
    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with torch.autocast("cpu", torch.bfloat16, enabled=True), torch.amp.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.is_autocast_enabled("cpu") and product(torch.eye(2)).dtype is torch.float32


@pytest.mark.usefixtures("in_float32")
def test_what_a_backward_pass_computes_anew_is_float32() -> None:
    layer = nn.Linear(3, 3)

    def lowered(x: torch.Tensor) -> torch.Tensor:
        return layer(x.to(torch.bfloat16).float() * 1.001)

    x = torch.randn(2, 3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(lowered, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, layer.weight.sum(0).expand(2, 3) * 1.001)
