"""Micro-batches are dealt the full batch's draws; what cannot be dealt is said, never passed over."""

import random
from functools import partial

import pytest
import torch
from drawing import dealt, recorded
from torch import nn

from gaverify.passes.randomness import Dealer, Recomputing, draw_mode


@pytest.mark.parametrize(
    "draw",
    [
        lambda n: torch.rand(n, 3),
        lambda n: torch.randn(3, n),
        lambda n: torch.randint(0, 1000, (n,)),
        lambda n: torch.empty(n, 2).normal_(),
        lambda n: torch.empty(n, 2).uniform_(-1, 1),
        lambda n: torch.bernoulli(torch.full((n, 8), 0.5)),
        lambda n: nn.functional.dropout(torch.ones(n, 8), 0.5),
        lambda n: nn.functional.rrelu(-torch.ones(n, 8), training=True),
    ],
)
def test_each_micro_batch_gets_the_rows_of_its_samples(draw) -> None:
    whole = []
    torch.manual_seed(0)
    record = recorded(lambda: whole.append(draw(4)))
    dim = next(dim for dim, size in enumerate(whole[0].shape) if size == 4)
    for start, stop in ((0, 1), (1, 4)):
        torch.manual_seed(99)  # what the micro-batch would draw itself is something else
        part = dealt(record, lambda n=stop - start: draw(n), start, stop)
        assert torch.equal(part, whole[0].narrow(dim, start, stop - start))
    assert not record.unaligned and not record.ambiguous
    assert record.sliced


@pytest.mark.parametrize(
    ("draw", "dim", "fold"),
    [
        (lambda n: torch.rand(n, 3), 0, 1),
        (lambda n: torch.rand(2, n), 1, 1),
        (lambda n: torch.rand(3 * n, 2), 0, 3),  # three rows of each sample
    ],
)
def test_ranks_that_take_turns_get_the_rows_of_their_samples(draw, dim: int, fold: int) -> None:
    whole = []
    record = recorded(lambda: whole.append(draw(4)))
    for at, order in enumerate(((0, 2), (3, 1))):
        torch.manual_seed(99)
        part = dealt(record, lambda: draw(2), 2 * at, 2 * at + 2, order=order)
        rows = [sample * fold + row for sample in order for row in range(fold)]
        assert torch.equal(part, whole[0].index_select(dim, torch.tensor(rows)))
    assert not record.unaligned and record.ambiguous == (fold > 1)


def test_selected_rows_of_scattered_samples_cannot_be_dealt() -> None:
    record = recorded(lambda: torch.rand(3))  # of the rows of 4 samples: which ones, nobody knows
    dealt(record, lambda: torch.rand(1), 0, 2, order=(0, 2))
    assert "do not correspond" in record.unaligned["rand"]


def test_the_generator_moves_as_the_users_code_expects() -> None:
    record = recorded(lambda: torch.rand(4))
    torch.manual_seed(7)
    torch.rand(2)
    expected = torch.get_rng_state()
    torch.manual_seed(7)
    dealt(record, lambda: torch.rand(2), 0, 2)
    assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize(
    ("full", "micro", "reason"),
    [
        (lambda: torch.rand(4), lambda: [torch.rand(2), torch.rand(2)], "more draws"),
        (lambda: [torch.rand(4), torch.rand(4)], lambda: torch.rand(2), "fewer draws"),
        (lambda: torch.rand(4), lambda: torch.randn(2), "in its place"),
        (lambda: torch.randperm(4), lambda: torch.randperm(2), "permutation"),
        (lambda: torch.empty(4).normal_(0, 3.0), lambda: torch.empty(2).normal_(0, 5.0), "arguments depend"),
        (lambda: torch.rand(4), lambda: torch.rand(2, 2), "do not correspond"),
    ],
)
def test_what_cannot_be_dealt_is_said(full, micro, reason: str) -> None:
    record = recorded(full)
    dealt(record, micro, 0, 2)
    assert record.ambiguous
    assert any(reason in why for why in record.unaligned.values()), record.unaligned


def test_a_refused_draw_names_its_line() -> None:
    record = recorded(lambda: torch.rand(4))
    dealt(record, lambda: torch.randn(2), 0, 2)
    file, line = record.places["randn"]
    assert file.endswith("test_dealing.py") and line > 0


def test_the_second_reading_deals_a_loop_over_samples_by_its_place() -> None:
    whole: list[float] = []

    def loop(n: int) -> list[float]:
        whole.extend(numbers := [float(torch.rand(())) for _ in range(n)])
        return numbers

    record = recorded(partial(loop, 4))
    for start, stop in ((0, 2), (2, 4)):
        dealt(record, partial(loop, 2), start, stop)
    assert record.ambiguous, "by order, the second micro-batch was dealt the first one's numbers"
    record.rewind()
    record.inner = True
    parts = [dealt(record, partial(loop, 2), start, stop) for start, stop in ((0, 2), (2, 4))]
    assert [*parts[0], *parts[1]] == whole[:4]


def test_a_recomputation_is_dealt_the_same_rows_again() -> None:
    whole = []
    record = recorded(lambda: whole.append(torch.rand(4)))
    dealer = Dealer(record, 2, 4, 4)

    state = torch.get_rng_state()
    with draw_mode(dealer):
        first = torch.rand(2)
    torch.set_rng_state(state)  # as activation checkpointing does
    with draw_mode(Recomputing([dealer])):
        again = torch.rand(2)
    assert torch.equal(first, again) and torch.equal(first, whole[0][2:])


def test_a_constant_draw_is_the_same_for_every_sample() -> None:
    record = recorded(lambda: torch.randn(4))
    record.constant = True
    assert dealt(record, lambda: torch.randn(2), 0, 2).tolist() == [1.0, 1.0]


def test_the_second_reading_makes_pythons_draws_from_their_samples_states() -> None:
    def loop(n: int) -> list[float]:
        whole.extend(numbers := [random.random() for _ in range(n)])
        return numbers

    whole: list[float] = []
    random.seed(5)
    record = recorded(partial(loop, 4))
    for inner in (False, True):
        record.rewind()
        record.inner = inner
        parts = []
        for start, stop in ((0, 2), (2, 4)):
            random.seed(5)  # every micro-batch starts from the state that the full batch started from
            parts += dealt(record, partial(loop, 2), start, stop)
        assert (parts == whole[:4]) is inner
    assert record.sliced
