"""When forwards are repeated at the end of a search: a schedule of theirs looks like samples that interact."""

from __future__ import annotations

import problems_state
import pytest
import torch
from torch import nn

import gaverify
from gaverify.search import state


def faults(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], int]:
    """The codes of the faults, and how often the search repeated forwards."""
    repeat, repeated = state.measure_repetition, []
    monkeypatch.setattr(state, "measure_repetition", lambda *given: (repeated.append(0), repeat(*given))[1])
    torch.manual_seed(0)
    batch = torch.randn(16, 6), torch.randint(4, (16,))
    verdict = gaverify.verify(model, nn.CrossEntropyLoss(), batch, steps=4)
    return {finding.code for finding in verdict.findings if finding.severity == "fault"}, len(repeated)


def test_frozen_layers_of_a_library_need_no_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    assert faults(model, monkeypatch) == ({"GAV101"}, 0)


def test_a_layer_that_follows_a_schedule_while_it_trains_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation mode takes its schedule away together with its statistics."""
    assert faults(problems_state.scheduled_norm().model, monkeypatch) == ({"GAV403"}, 1)
