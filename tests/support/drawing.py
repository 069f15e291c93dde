"""Work under gaverify's handlers of random draws, in a loss function but without a pass around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from gaverify import Problem
from gaverify.passes.randomness import Dealer, DrawRecord, Recorder, draw_mode
from gaverify.passes.task import TimeLimit, loss_of


def recorded(work: Callable[[], Any], size: int = 4) -> DrawRecord:
    """The draws of `work`, which is the full batch of `size` samples."""
    recorder = Recorder()
    with recorder.watching(), draw_mode(recorder):
        _in_a_loss(work)
    return recorder.record


def dealt(
    record: DrawRecord,
    work: Callable[[], Any],
    start: int,
    stop: int,
    size: int = 4,
    order: tuple[int, ...] | None = None,
) -> Any:
    """What `work` returns when every draw is dealt the rows `start` to `stop - 1` of the record's, or `order`."""
    dealer = Dealer(record, start, stop, size, order)
    with dealer.watching(), draw_mode(dealer):
        result = _in_a_loss(work)
    dealer.finish()
    return result


def _in_a_loss(work: Callable[[], Any]) -> Any:
    """Draws are told apart by their place below the call of the user's loss."""
    results = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        results.append(work())
        return torch.ones((), requires_grad=True)

    task: Any = SimpleNamespace(problem=Problem(nn.Identity(), loss, None), autocasting=nullcontext, limit=TimeLimit())
    loss_of(task, None, "the batch")
    return results[0]
