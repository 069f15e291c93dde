"""How often the host waits for the device: a number per pass, whatever the number of parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import gaverify
from gaverify import Outcome, Problem
from gaverify.verdict.comparison import measure

DEVICE = torch.ops.simulated


def waits(work: Callable[[], object]) -> int:
    DEVICE.reset_counters()
    work()
    return int(DEVICE.synchronisations())


class Branches(nn.Module):
    """Layers beside each other: more of them change neither the depth nor what has to be decided.

    All values are quarters and small, so that float32 rounds nothing and working precision decides on every processor.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 2) for _ in range(count))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers]).relu().sum(0)


def problem(branches: int) -> Problem:
    """A model and a batch that are on the device already."""
    torch.manual_seed(0)
    batch = tuple(torch.randint(-2, 3, (8, width), device="cuda").float() for width in (6, 2))
    return Problem(
        Branches(branches).to("cuda"), lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), batch
    )


def verified(branches: int, **options: str) -> tuple[int, gaverify.Verdict]:
    task, found = problem(branches), []
    count = waits(lambda: found.append(gaverify.verify(task, steps=4, **options)))
    return count, found[0]


SIZES = [[(3, 4)], [(300, 300)] * 3, [(2000, 2000)], [(5,)] * 400, [(n % 40 + 1, 8) for n in range(400)]]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)} of {sizes[-1]}")
def test_comparing_gradients_waits_once(sizes: list[tuple[int, ...]]) -> None:
    """One transfer of the numbers; the lengths of small parameters of odd shapes are copied to the device before."""
    gradients = {str(n): torch.randn(size, device="cuda") for n, size in enumerate(sizes)}
    assert waits(lambda: measure(gradients, gradients)) <= 2


def test_an_equivalent_run_waits_as_often_with_many_parameters_as_with_few() -> None:
    (few, first), (many, second) = verified(3), verified(100)
    assert first.outcome is second.outcome is Outcome.EQUIVALENT
    assert many <= few <= 10, DEVICE.synchronised_by()


def test_a_diagnosis_waits_as_often_with_many_parameters_as_with_few() -> None:
    (few, first), (many, second) = (verified(branches, weighting="none") for branches in (3, 100))
    for verdict in (first, second):
        assert [finding.code for finding in verdict.findings if finding.severity == "fault"] == ["GAV201"]
    assert many <= few <= 60, DEVICE.synchronised_by()
