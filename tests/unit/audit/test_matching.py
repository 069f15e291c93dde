"""Which steps of two runs belong together, and where the rows of a micro-batch lie in the full batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from gaverify.audit.flow import possible_orders
from gaverify.audit.recording.graph import ends_in_parameters
from gaverify.audit.recording.samples import input_rows
from gaverify.audit.recording.values import Names
from gaverify.audit.same_data import Matcher, Spot, check_rows

SAMPLES = torch.arange(48.0).reshape(8, 6).sin()


def prints(*tensors: torch.Tensor) -> dict[str, Any]:
    return input_rows(tensors, {})


def test_rows_of_equal_contents_are_given_once() -> None:
    twice = torch.cat([SAMPLES[:3], SAMPLES[:3]])
    matcher = Matcher([prints(twice)])
    assert matcher.find([0], prints(SAMPLES[[2, 1]])) == Spot(0, (2, 1))
    assert matcher.find([0], prints(SAMPLES[[2, 1]])) == Spot(0, (5, 4))
    matcher = Matcher([prints(twice)])
    assert [matcher.find([0], prints(SAMPLES[:2])) for _ in "ab"] == [Spot(0, (0, 1)), Spot(0, (3, 4))]


def test_a_mask_that_lies_anywhere_does_not_decide() -> None:
    mask = torch.ones(8, 6)
    matcher = Matcher([prints(mask, SAMPLES)])
    assert matcher.find([0], prints(mask[:4], SAMPLES[::2])) == Spot(0, (0, 2, 4, 6))
    matcher = Matcher([prints(mask / 2, SAMPLES)])
    assert matcher.find([0], prints(mask[:2] / 2, SAMPLES[4:6])) == Spot(0, (4, 5))


def test_rows_that_are_not_there_have_no_spot() -> None:
    matcher = Matcher([prints(SAMPLES)])
    assert matcher.find([0], prints(SAMPLES[[0, 3]] + 1)) is None
    assert matcher.find([0], prints(torch.stack([SAMPLES[0], SAMPLES[3] + 1]))) is None


def test_one_row_is_not_two_that_are_near_it() -> None:
    near = torch.cat([SAMPLES[:1] * (1 + 3e-7), SAMPLES[:1] * (1 - 3e-7)])
    assert [check_rows([prints(near)], [prints(SAMPLES[:1])]).differing for near in (near[:1], near)] == [0, 1]


@pytest.mark.parametrize("other", [0.0, 1.0])
def test_padding_hides_no_other_samples(other: float) -> None:
    padded, parts = torch.cat([SAMPLES, torch.zeros(8, 2)], 1), (SAMPLES + other).split(4)
    assert check_rows([prints(padded)], [prints(part) for part in parts]).same is (other == 0.0)


@pytest.mark.parametrize("side", [1, -1], ids=["right", "left"])
def test_the_shift_of_a_next_token_loss_takes_a_token_from_the_longest_row_alone(side: int) -> None:
    """`ids[:, :-1]`, padded on the right, or `ids[:, 1:]`, padded on the left."""

    def fed(*rows: list[int], longest: int) -> dict[str, Any]:
        return prints(torch.tensor([(row + [0] * (longest - len(row)))[: longest - 1][::side] for row in rows]))

    ann, anne, other = [5, 6, 6], [5, 6, 6, 7], [5, 6, 8, 9, 4, 3]
    full = fed(anne, ann, other, longest=6)
    parts = [fed(anne, longest=4), fed(ann, other, longest=6)]
    assert check_rows([full], parts).same
    assert Matcher([full]).find([0], parts[0]) is not None
    # whichever comes first, a row that has lost nothing is paired with its own
    assert check_rows([full], [fed(ann, longest=4), fed(anne, longest=5), fed(other, longest=6)]).same
    # one sample twice, the other not at all; a row that is short of two tokens
    assert not check_rows([full], [fed(ann, longest=3), fed(ann, other, longest=6)]).same
    assert not check_rows([full], [fed(anne[:3], longest=3), fed(ann, other, longest=6)]).same


@pytest.mark.parametrize("turn", [1, -1])
def test_padding_of_one_input_is_told_beside_another(turn: int) -> None:
    fed = torch.cat([SAMPLES, torch.zeros(8, 2)], 1), SAMPLES
    parts = [prints(*pair[::turn]) for pair in ((SAMPLES[:4], SAMPLES[:4]), (SAMPLES[4:], SAMPLES[4:]))]
    assert check_rows([prints(*fed[::turn])], parts).padded


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


@dataclass
class Fed:
    """A run that fed these rows, and the runs of its ranks."""

    forwards: list[torch.Tensor]
    ranks: tuple[Any, ...] = ()

    def rows(self, update: int) -> list[dict[str, Any]]:
        return [input_rows((rows,), {}) for rows in self.forwards]


@pytest.mark.parametrize(
    ("second", "order"),
    [(SAMPLES[1:4:2], ("turns",)), (SAMPLES[2:4], ("blocks",)), (SAMPLES[2:4] + 1, ())],
)
def test_rows_tell_the_order(second: torch.Tensor, order: tuple[str, ...]) -> None:
    ranks = Fed([SAMPLES[:2]]), Fed([second])
    assert possible_orders(Fed([SAMPLES]), Fed([], ranks), has_same_rows=True) == order  # type: ignore[arg-type]


def test_rows_with_draws_among_them_tell_it_once_they_are_replayed() -> None:
    assert possible_orders(Fed([]), Fed([]), has_same_rows=False) == ("turns", "blocks")  # type: ignore[arg-type]


class TestEndsInParameters:
    INPUTS = torch.ones(3, 2, device="cpu", requires_grad=True)

    def test_parameters_and_what_hides_them_do(self) -> None:
        assert ends_in_parameters([nn.Linear(2, 1)(self.INPUTS.detach()).sum() * 0.0])  # one that counts nothing
        assert ends_in_parameters((nn.Parameter(torch.ones((), device="cpu")),))
        assert ends_in_parameters(checkpoint(nn.Linear(2, 1), self.INPUTS, use_reentrant=True).sum())

    def test_inputs_do_not(self) -> None:
        assert not ends_in_parameters(nn.Linear(2, 1).requires_grad_(False)(self.INPUTS).sum())

    @pytest.mark.parametrize("made_of_parameters", [True, False])
    def test_weights_that_a_call_is_given_do_where_they_are_made_of_parameters(self, made_of_parameters: bool) -> None:
        model = nn.Linear(2, 1)
        weights = {
            name: weight - 0.1 if made_of_parameters else weight.detach().requires_grad_()
            for name, weight in model.named_parameters()
        }
        result = functional_call(model, weights, (self.INPUTS.detach(),)).sum()
        assert ends_in_parameters(result) is made_of_parameters


class TestNames:
    def test_a_call_with_other_weights_leaves_the_names_to_the_model_itself(self) -> None:
        names, model, found = Names(), nn.Linear(2, 1), []

        class Noted(nn.Module):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                found.append(names.add(self))
                return inputs

        outer = Noted()
        outer.inner = model
        weights = {name: weight.detach().clone().requires_grad_() for name, weight in outer.named_parameters()}
        functional_call(outer, weights, (torch.ones(1, 2, device="cpu"),))
        outer(torch.ones(1, 2, device="cpu"))
        assert found == [True, True]
        assert names.models == [outer]
        assert names.key(model.weight, 0, 0) == "0:inner.weight"
