"""Gathers of trained tensors: noted where they happen, and handed their gradient back in the control."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gaverify.passes.devices import available_devices
from gaverify.ranks.gathering import watch_gathers
from gaverify.ranks.groups import joined
from gaverify.ranks.launching import run
from gaverify.remedies import all_gather

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.skipif(len(available_devices()) > 1, reason="autograd refuses to run in a fork beside an accelerator"),
]


def _into_list(value: torch.Tensor) -> torch.Tensor:
    parts = [torch.zeros_like(value) for _ in range(2)]
    dist.all_gather(tensor_list=parts, tensor=value)
    return torch.cat(parts)


def _into_one(value: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(2, dtype=value.dtype, device="cpu")
    with torch.no_grad():  # torch refuses it otherwise
        dist.all_gather_into_tensor(output_tensor=whole, input_tensor=value)
    return whole


def _gathered(folder: Path, rank: int, gather: Callable[[torch.Tensor], torch.Tensor], repaired: bool) -> list[float]:
    """Values, gradient of rank r's value in the loss (r + 1) · Σ gathered, and how many gathers were noted."""
    noted: list[int] = []
    watch_gathers(lambda: noted.append(1), with_gradient=repaired)
    with joined(rank, 2, folder / "store"):
        value = torch.full((1,), rank + 5.0, dtype=torch.float64, device="cpu", requires_grad=True)
        gather(value.detach())
        whole = gather(value)
        if whole.requires_grad:
            (whole.sum() * (rank + 1)).backward()
        gradient = 0.0 if value.grad is None else float(value.grad)
    return [*whole.tolist(), gradient, len(noted)]


def _transposed(folder: Path, rank: int) -> list[list[float]]:
    """The gradient of rank r's value in the loss Σ (weights × gathered), whose gradient comes transposed."""
    with joined(rank, 2, folder / "store"):
        value = torch.ones(2, 3, dtype=torch.float64, device="cpu", requires_grad=True)
        weights = torch.arange(12.0, dtype=torch.float64, device="cpu").reshape(3, 4) * (rank + 1)
        (torch.cat(all_gather(value)).T * weights).sum().backward()
        assert value.grad is not None
        return value.grad.tolist()  # type: ignore[no-any-return]


def test_the_remedy_brings_back_gradients_that_come_transposed(tmp_path: Path) -> None:
    found = run([(f"rank {rank}", lambda rank=rank: _transposed(tmp_path, rank)) for rank in range(2)], 60.0)
    whole = (torch.arange(12.0, device="cpu").reshape(3, 4) * 3).T  # of both losses
    assert found == [whole[:2].tolist(), whole[2:].tolist()]


@pytest.mark.parametrize(("repaired", "gradient"), [(True, 3.0), (False, 0.0)], ids=["control", "as it is"])
@pytest.mark.parametrize("gather", [_into_list, _into_one])
def test_a_gather_by_torchs_own_names(
    tmp_path: Path, gather: Callable[[torch.Tensor], torch.Tensor], repaired: bool, gradient: float
) -> None:
    ranks = [(f"rank {rank}", lambda rank=rank: _gathered(tmp_path, rank, gather, repaired)) for rank in range(2)]
    assert run(ranks, 60.0) == [[5.0, 6.0, gradient, 1]] * 2
