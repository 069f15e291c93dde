"""How far each module's outputs are apart between the full batch and the micro-batches."""

from __future__ import annotations

import torch
from torch import nn

from gaverify import Problem, verify


def differences(model: nn.Module, **options: object) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)
    problem = Problem(model, lambda net, batch: nn.functional.mse_loss(net(batch[0]), batch[1]), (inputs, targets))
    verdict = verify(problem, steps=4, **options)  # type: ignore[arg-type]
    return {module.module: module.difference for module in verdict.modules}


def net(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), middle, nn.ReLU(), nn.Linear(5, 1))


def test_values_part_at_the_batch_norm_and_stay_apart() -> None:
    found = differences(net(nn.BatchNorm1d(5)))
    assert list(found) == ["0", "1", "2", "3"]
    assert found["0"] == 0 and min(found["1"], found["2"], found["3"]) > 1e-3


def test_forwards_that_agree_differ_nowhere() -> None:
    model = net(nn.Identity())
    model[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    found = differences(model)
    assert found and set(found.values()) == {0.0}


def test_no_search_no_modules() -> None:
    assert differences(net(nn.LayerNorm(5))) == {}
    assert differences(net(nn.BatchNorm1d(5)), diagnose=False) == {}
