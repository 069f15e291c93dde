"""What counts as rounding in a control run: less where no float64 was possible and the difference itself is small."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gaverify.causes.bench import Bench
from gaverify.passes.isolation import ModelState
from gaverify.passes.problem import Problem
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.task import Task


def bench(total: float, dtype: torch.dtype = torch.float32, *, lift: bool = False) -> Bench:
    model = nn.Linear(2, 1, dtype=dtype, device="cpu")
    problem = Problem(model, lambda m, b: m(b).mean(), torch.ones(4, 2, dtype=dtype, device="cpu"))
    task = Task(
        problem=problem,
        parameters=dict(model.named_parameters()),
        modules=[model],
        batch_size=4,
        sizes=(2, 2),
        weighting="uniform",
        device=torch.device("cpu"),
    )
    return Bench(task, ModelState([model]), DrawRecord(), lift, total=total)


@pytest.mark.parametrize(
    ("total", "rounding"),
    [(0.5, 1e-4), (3e-4, 3e-6), (1e-5, 16 * 2.0**-24)],
)
def test_an_eighth_of_a_small_difference_is_not_rounding(total: float, rounding: float) -> None:
    """A loss with a moving mean and deviation: restored, 4e-5 of 3e-4 stay, which are real."""
    assert bench(total).rounding == pytest.approx(rounding)


def test_float64_leaves_less_whatever_the_difference_is() -> None:
    assert bench(3e-4, torch.float64).rounding == bench(0.5, lift=True).rounding == 4 * 2.0**-24
    assert bench(3e-4, torch.float64).exact and not bench(1e-9).exact, "how small it is does not make it exact"
