"""The way that the full batch is run where the device's memory is short."""

from __future__ import annotations

import pytest
import torch
from forwards import experiment_of
from torch import nn

from gaverify.errors import NoMemory
from gaverify.passes.batching import Problem
from gaverify.passes.experiment import Experiment, Placement
from gaverify.passes.gradients import Fitting
from gaverify.records.outcomes import Reference


def short_of_memory(way: Reference, device: str, failures: int) -> Experiment:
    """A experiment whose first forwards run out of memory; its tensors stay on the CPU, whatever `device` says."""
    model, batch = nn.Linear(8, 2), torch.randn(4, 8, device="cpu")
    left = iter(range(failures))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if next(left, None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(batch).square().mean()

    placement = Placement((torch.device(device),))
    return experiment_of(model, problem=Problem(model, loss, batch), placement=placement, fitting=Fitting(way))


def run(experiment: Experiment) -> float:
    return experiment.full_batch().loss


def test_auto_offloads_where_the_full_batch_does_not_fit() -> None:
    experiment = short_of_memory(Reference.AUTO, "cuda:0", 1)
    assert run(experiment) > 0
    assert (experiment.fitting.way, experiment.fitting.failed) == (Reference.OFFLOAD, [Reference.FULL])


@pytest.mark.parametrize(
    ("way", "device", "advice"),
    [
        (Reference.FULL, "cuda:0", True),
        (Reference.OFFLOAD, "cuda:0", False),
        (Reference.AUTO, "cuda:0", False),  # both were tried
        (Reference.FULL, "cpu", False),  # offloading would change nothing
        (Reference.AUTO, "cpu", False),
    ],
)
def test_advice_names_offloading_where_it_needs_less(way: Reference, device: str, advice: bool) -> None:
    experiment = short_of_memory(way, device, 2)
    with pytest.raises(NoMemory, match=f"out of memory on {device}") as caught:
        run(experiment)
    assert ("`--reference offload` needs less" in str(caught.value)) is advice
    assert bool(experiment.fitting.failed) is (way is Reference.AUTO and device != "cpu")
