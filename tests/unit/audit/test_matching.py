"""Where the rows of a micro-batch lie in the full batch, told by their contents."""

from __future__ import annotations

from typing import Any

import torch

from gaverify.audit.recording.rows import input_rows
from gaverify.audit.same_data import Matcher, Spot

SAMPLES = torch.arange(48.0).reshape(8, 6).sin()


def prints(*tensors: torch.Tensor) -> dict[str, Any]:
    return input_rows(tensors, {})


def test_rows_one_behind_the_other() -> None:
    matcher = Matcher([prints(SAMPLES)])
    assert matcher.find([0], prints(SAMPLES[4:6])) == Spot(0, (4, 5))
    assert not Spot(0, (4, 5)).scattered


def test_ranks_that_take_turns_are_scattered() -> None:
    matcher = Matcher([prints(SAMPLES)])
    spot = matcher.find([0], prints(SAMPLES[1::2]))
    assert spot == Spot(0, (1, 3, 5, 7)) and spot.scattered


def test_rows_of_equal_contents_are_given_once() -> None:
    twice = torch.cat([SAMPLES[:3], SAMPLES[:3]])
    matcher = Matcher([prints(twice)])
    assert matcher.find([0], prints(SAMPLES[[2, 1]])) == Spot(0, (2, 1))
    assert matcher.find([0], prints(SAMPLES[[2, 1]])) == Spot(0, (5, 4))


def test_a_mask_that_lies_anywhere_does_not_decide() -> None:
    mask = torch.ones(8, 6)
    matcher = Matcher([prints(mask, SAMPLES)])
    assert matcher.find([0], prints(mask[:4], SAMPLES[::2])) == Spot(0, (0, 2, 4, 6))


def test_rows_that_are_not_there_have_no_spot() -> None:
    matcher = Matcher([prints(SAMPLES)])
    assert matcher.find([0], prints(SAMPLES[[0, 3]] + 1)) is None
    assert matcher.find([0], prints(torch.stack([SAMPLES[0], SAMPLES[3] + 1]))) is None
