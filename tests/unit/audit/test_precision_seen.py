"""The coarsest arithmetic of a run: parameters that a wrapper casts for a forward, gradients that are compressed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gaverify.audit.recording.precision import Roundoff
from gaverify.passes.precision import unit_roundoff
from gaverify.ranks.forking import run_forked
from gaverify.ranks.groups import joined
from gaverify.ranks.traffic import TrafficMeter


def test_parameters_that_are_cast_for_the_forward_count() -> None:
    roundoff, module = Roundoff(), nn.Linear(2, 2, device="cpu")
    roundoff.add(nn.Sequential(module))
    assert roundoff.unit == unit_roundoff(torch.float32)
    roundoff.look_inside(module.to(torch.bfloat16))
    assert roundoff.unit == unit_roundoff(torch.bfloat16)


@pytest.mark.parametrize(("dtype", "coarsest"), [(torch.float16, torch.float16), (torch.int64, torch.float32)])
def test_the_type_of_a_reduction_counts_where_it_is_one_of_gradients(dtype: torch.dtype, coarsest: torch.dtype) -> None:
    roundoff = Roundoff()
    for known in (torch.float32, dtype):
        roundoff.know(known)
    assert roundoff.unit == unit_roundoff(coarsest)


def _reduced(folder: Path) -> list[str]:
    meter = TrafficMeter()
    with joined(0, 1, folder / "store"), meter.counting():
        dist.all_reduce(torch.ones(2, dtype=torch.float16, device="cpu"))
        dist.broadcast(torch.ones(2, dtype=torch.float64, device="cpu"), 0)
    return [str(dtype) for dtype in meter.reduced_in]


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_the_meter_sees_in_which_type_gradients_are_reduced(tmp_path: Path) -> None:
    assert run_forked([("rank 0 of 1", lambda: _reduced(tmp_path))], 60.0) == [["torch.float16"]]
