"""How ranks share the samples of a batch, told by the rows that they fed where those hold no draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gaverify.audit.recording.rows import input_rows
from gaverify.audit.replay import orders

SAMPLES = torch.arange(48.0, device="cpu").reshape(8, 6).sin()


@dataclass
class Fed:
    """A run that fed these rows, and the runs of its ranks."""

    forwards: list[torch.Tensor]
    ranks: tuple[Any, ...] = ()

    def rows(self, update: int) -> list[dict[str, Any]]:
        return [input_rows((rows,), {}) for rows in self.forwards]


@pytest.mark.parametrize(
    ("second", "order"), [(SAMPLES[1:4:2], ("turns",)), (SAMPLES[2:4], ("blocks",)), (SAMPLES[2:4] + 1, ())]
)
def test_rows_tell_the_order(second: torch.Tensor, order: tuple[str, ...]) -> None:
    ranks = Fed([SAMPLES[:2]]), Fed([second])
    assert orders(Fed([SAMPLES]), Fed([], ranks), same=True) == order  # type: ignore[arg-type]


def test_rows_with_draws_among_them_tell_it_once_they_are_replayed() -> None:
    assert orders(Fed([]), Fed([]), same=False) == ("turns", "blocks")  # type: ignore[arg-type]
