"""Where the rows of a micro-batch lie in the full batch, told by their contents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gaverify.audit.recording.rows import input_rows
from gaverify.audit.same_data import Matcher, Spot, check_rows

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


def test_tensors_of_other_dimensions_are_other_samples() -> None:
    assert not check_rows([prints(SAMPLES[:, 0])], [prints(SAMPLES)]).same
    assert not check_rows([prints(SAMPLES)], [prints(SAMPLES[:, 0])]).same


def boxes(start: int, stop: int, each: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """The images from `start` to `stop`, and their boxes, of which each begins with the number of its image."""
    count = (stop - start) * each
    numbers = torch.arange(stop - start).repeat_interleave(each)
    box = torch.arange(start * each * 2.0, start * each * 2.0 + count * 2).view(count, 2).cos()
    return SAMPLES[start:stop], torch.cat([numbers[:, None].float(), box], 1)


class TestNumbersWithinABatch:
    """What counts rows of its own batch is read as what it counts."""

    @pytest.mark.parametrize("each", [1, 2])
    @pytest.mark.parametrize("apart", [False, True])
    def test_boxes_belong_to_the_same_images(self, each: int, apart: bool) -> None:
        def fed(start: int, stop: int) -> dict[str, Any]:
            images, table = boxes(start, stop, each)
            return prints(images, table[:, 0].long(), table[:, 1:]) if apart else prints(images, table)

        assert check_rows([fed(0, 8)], [fed(0, 3), fed(3, 8)]).same
        assert Matcher([fed(0, 8)]).find([0], fed(4, 6)) == Spot(0, (4, 5))

    def test_boxes_of_other_images_are_other_samples(self) -> None:
        images, table = boxes(2, 8)
        assert not check_rows([prints(*boxes(0, 8))], [prints(*boxes(0, 2)), prints(images, table + 0.01)]).same
        table[:, 0] = 5 - table[:, 0]
        assert not check_rows([prints(*boxes(0, 8))], [prints(*boxes(0, 2)), prints(images, table)]).same

    def test_places_of_boxes_are_no_places_of_images(self) -> None:
        images, table = boxes(4, 6)
        assert Matcher([prints(*boxes(0, 8))]).find([0], prints(images + 1, table[:, 1:])) is None
        assert Matcher([prints(*reversed(boxes(0, 8, 1)))]).find([0], prints(*reversed(boxes(4, 6, 1)))) == Spot(
            0, (4, 5)
        )
        for numbers in (torch.arange(8), torch.tensor([0, 2, 1, 3, 4, 5, 6, 7])):
            micro_batch = prints(torch.arange(2), SAMPLES[4:6])
            assert Matcher([prints(numbers, SAMPLES)]).find([0], micro_batch) == Spot(0, (4, 5))

    def test_rows_that_are_all_the_same_are_not_counted(self) -> None:
        ones, labels = torch.ones(8, 1), torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
        fed = [prints(SAMPLES[:4], ones[:4], labels[:4]), prints(SAMPLES[4:], ones[4:], 1 - labels[4:])]
        assert not check_rows([prints(SAMPLES, ones, 0 * labels)], fed).same

    def test_numbers_that_count_in_one_run_alone_are_other_samples(self) -> None:
        labels = torch.arange(4)
        assert not check_rows([prints(SAMPLES[:4], labels)], [prints(SAMPLES[4:], labels + 10)]).same

    def test_numbers_that_count_nothing_are_compared_as_they_are(self) -> None:
        labels = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
        assert not check_rows([prints(labels)], [prints(labels[:4]), prints(labels[4:] - 1)]).same
        fed = [prints(SAMPLES[:4], labels[:4]), prints(SAMPLES[4:], labels[4:].flip(0))]
        assert not check_rows([prints(SAMPLES, labels + 100)], fed).same

    @pytest.mark.parametrize("alike", [False, True])
    def test_a_graph_s_edges_and_nodes(self, alike: bool) -> None:
        nodes = torch.arange(36.0).view(12, 3).sin().mul(not alike) + torch.arange(4.0).repeat_interleave(3)[:, None]
        ring = torch.tensor([[0, 1, 2], [1, 2, 0]])

        def graphs(start: int, stop: int) -> dict[str, Any]:
            edges = torch.cat([ring + 3 * at for at in range(stop - start)], 1)
            return prints(nodes[3 * start : 3 * stop], edges, torch.arange(stop - start).repeat_interleave(3))

        assert check_rows([graphs(0, 4)], [graphs(0, 2), graphs(2, 4)]).same
        whole = prints(nodes, torch.cat([ring + 3 * at for at in (0, 1, 3, 2)], 1).flip(0), torch.arange(4).repeat(3))
        assert not check_rows([whole], [graphs(0, 2), graphs(2, 4)]).same
        ring[1, 2] = 1
        assert not check_rows([graphs(0, 4)], [whole]).same
