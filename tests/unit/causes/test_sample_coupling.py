"""The gradient of one sample's outputs with respect to the others: exactly zero, or not."""

from __future__ import annotations

from typing import Any

import problems_coupling
import pytest
import torch
import torch.nn.functional as F
from problems import Problem, mlp
from torch import nn

import gaverify


def _coupling(problem: Problem) -> dict[str, Any]:
    """The values of the evidence "coupling", empty where there is none."""
    verdict = gaverify.verify(problem, steps=4)
    found = [e for finding in verdict.findings for e in finding.evidence if e.probe == "coupling"]
    return dict(found[0].values) if found else {}


class Attention(nn.Module):
    """Tokens as rows of (batch, time, width), attended to as (time, batch, width): samples attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend, self.head = nn.Embedding(9, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 9)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(self.attend(x, x, x)[0])


def attended() -> Problem:
    torch.manual_seed(0)
    tokens = torch.randint(9, (2, 16, 5))
    return Problem(Attention(), lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()), tuple(tokens))


def contrasted() -> Problem:
    """Samples meet in the loss alone."""
    torch.manual_seed(0)

    def loss(model: nn.Module, pairs: torch.Tensor) -> torch.Tensor:
        a, b = (F.normalize(model(side), dim=1) for side in pairs.unbind(1))
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))

    return Problem(nn.Sequential(mlp(), nn.Dropout(0.2)), loss, torch.randn(16, 2, 6))


@pytest.mark.parametrize("build", [problems_coupling.batch_norm, attended])
def test_samples_that_meet_in_the_model_show(build: Any) -> None:
    values = _coupling(build())
    assert values["others"] == 15
    assert values["strength"] > 1e-3


def test_samples_that_meet_in_the_loss_alone_have_a_gradient_of_exactly_zero() -> None:
    assert _coupling(contrasted()) == {"sample": 8, "others": 0, "strength": 0.0}


def test_a_model_without_rows_says_nothing() -> None:
    """The outputs of this model are one number per feature, whatever the batch."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).mean(0)

    torch.manual_seed(0)
    assert _coupling(Problem(Pooled(), lambda m, x: m(x).square().sum(), torch.randn(16, 6))) == {}
