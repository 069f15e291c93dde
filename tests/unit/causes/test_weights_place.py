"""Which line counts: the loss, and never what is the same for every batch; none where the recipe itself is wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gaverify
from gaverify import Finding, Problem

GIVEN = [0.2575, 0.25, 0.25, 0.25]


class Positions(nn.Module):
    """Embedded positions are the same in every micro-batch, and so add up with weights whose sum is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(12, 8), nn.Embedding(5, 8), nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(tokens) + self.places(torch.arange(5)))


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())  # planted here


def found(ignored: bool, weighting: Any) -> Finding:
    torch.manual_seed(0)
    tokens = torch.randint(12, (8, 5))
    labels = tokens.masked_fill(torch.arange(5) > torch.arange(8)[:, None] // 2, -100) if ignored else tokens
    verdict = gaverify.verify(Problem(Positions(), loss, (tokens, labels)), steps=4, weighting=weighting)
    (finding,) = verdict.findings
    assert (finding.code, finding.proven) == ("GAV202", True)
    return finding


def test_weights_given_for_micro_batches_that_are_alike_are_no_matter_of_the_model() -> None:
    finding = found(False, GIVEN)
    assert finding.location is None
    assert "the weights that were given" in finding.summary


def test_the_loss_counts_whatever_the_weights_add_up_to() -> None:
    with open(__file__, encoding="utf-8") as lines:
        line = next(at for at, text in enumerate(lines, 1) if text.rstrip().endswith("# planted here"))
    for weighting in (GIVEN, "none", "uniform"):
        location = found(True, weighting).location
        assert location is not None and location.line == line
