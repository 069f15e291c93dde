"""What a script divides its loss by, read from the gradients behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from gaverify.audit.recording.losses import Weight

STEPS, VALID, ROWS, KINDS = 4, 5, 8, 3


def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.tensor([0, 2, -100, 1, -100, 2, 0, -100], device="cpu")
    return torch.randn(ROWS, KINDS, device="cpu", requires_grad=True), labels


def gathered(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mask = labels != -100
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return -(chosen * mask).sum() / mask.sum()


def selected(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mask = labels != -100
    return -logits.log_softmax(-1)[mask].gather(-1, labels[mask][:, None]).mean()


def in_parts(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0] * (labels != -100)
    return -sum(part.sum() for part in chosen.chunk(2)) / (labels != -100).sum()


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mask = labels != -100
    chosen = logits.log_softmax(-1)
    uniform = -(chosen.mean(-1) * mask).sum() / mask.sum()
    return gathered(logits, labels) + 0.1 * uniform


def each(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits, labels, reduction="none").sum() / (labels != -100).sum()


@pytest.mark.parametrize("loss", [gathered, selected, in_parts, smoothed, each])
def test_a_mean_over_valid_targets_tells_how_many_they_are(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """The factor K is in all micro-batches alike."""
    weight = Weight()
    root = loss(*logits_and_labels()) / STEPS
    weight.begin(root)
    root.backward()
    weight.end()
    assert weight.counted == pytest.approx(STEPS * VALID)


@pytest.mark.parametrize("loss, divided", [(each, True), (gathered, True), (functional.cross_entropy, False)])
def test_a_sum_that_the_script_divides_is_told_from_a_mean(loss: Callable[..., torch.Tensor], divided: bool) -> None:
    weight = Weight()
    root = loss(*logits_and_labels()) / STEPS
    weight.begin(root)
    root.backward()
    weight.end()
    assert weight.of_a_sum is divided


def test_a_sum_counts_one() -> None:
    weight = Weight()
    root = logits_and_labels()[0].log_softmax(-1)[:, 0].sum()
    weight.begin(root)
    root.backward()
    assert weight.end() == 1.0
    assert weight.counted == pytest.approx(1.0)


def test_nothing_is_told_of_several_roots() -> None:
    weight = Weight()
    weight.begin([torch.zeros((), device="cpu")])
    weight.end()
    assert weight.counted is None
