"""Which rows of the full batch's draw are a micro-batch's: by their place, by their contents."""

import pytest
import torch

from gaverify.passes.randomness.contents import LOOSE, differ, fingerprint, matching_rows, tolerance
from gaverify.passes.randomness.draws import Draw
from gaverify.passes.randomness.selection import (
    Rows,
    by_contents,
    by_position,
    doubtful,
    hand_out,
    taken_from,
    withdraw,
)


def drawn(*shape: int, source: torch.Tensor | None = None) -> Draw:
    value = torch.arange(torch.Size(shape).numel()).view(shape)
    return Draw("rand", value, (), None, fingerprint(source) if source is not None else None)


def rows(micro_batch: tuple[int, int], size: int, *shape: int, source: torch.Tensor | None = None) -> Rows:
    prints = fingerprint(source) if source is not None else None
    return Rows(micro_batch, size, torch.Size(shape), prints, 1e-4)


def taken(draw: Draw, wanted: Rows, inner: bool = False) -> list | None:
    selection, _ = by_position(draw, wanted, inner)
    return None if selection is None else taken_from(draw.value, selection).tolist()


def test_a_row_per_sample_lies_at_the_samples_place() -> None:
    assert taken(drawn(6), rows((2, 4), 6, 2)) == [2, 3]
    assert taken(drawn(3, 6), rows((2, 4), 6, 3, 2)) == [[2, 3], [8, 9], [14, 15]]


def test_a_draw_of_the_same_shape_is_repeated() -> None:
    assert taken(drawn(5), rows((2, 4), 6, 5)) == [0, 1, 2, 3, 4]


def test_folded_rows_are_read_with_the_batch_outside_or_inside() -> None:
    draw = drawn(12)
    assert [taken(draw, rows((start, start + 2), 6, 4)) for start in (0, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert taken(drawn(12), rows((2, 4), 6, 4), inner=True) == [2, 3, 8, 9]
    assert by_position(drawn(12), rows((2, 4), 6, 4), False)[1], "without contents the fold's order is a guess"


@pytest.mark.parametrize("inner", [True, False])
def test_contents_tell_how_rows_are_folded(inner: bool) -> None:
    samples = torch.randn(6, 2, 7, generator=torch.Generator().manual_seed(0))  # two heads per sample
    order = (lambda t: t.transpose(0, 1).reshape(-1, 7)) if inner else (lambda t: t.reshape(-1, 7))
    draw = drawn(12, 7, source=order(samples))
    wanted = rows((2, 4), 6, 4, 7, source=order(samples[2:4]))
    by_position(draw, rows((0, 2), 6, 4, 7, source=order(samples[:2])), not inner)  # the micro-batches come in order
    selection, guessed = by_position(draw, wanted, not inner)
    assert not guessed
    assert doubtful(draw, wanted, selection).item() is False


def test_shapes_that_do_not_correspond_have_no_rows() -> None:
    assert by_position(drawn(6, 2), rows((2, 4), 6, 2), False)[0] is None
    assert by_position(drawn(6), rows((2, 4), 6, 9), False)[0] is None


def test_selected_rows_follow_each_other_and_can_be_withdrawn() -> None:
    """Five of six samples passed a mask: the micro-batches' rows lie one behind the other."""
    draw = drawn(5)
    first, second = rows((0, 3), 6, 2), rows((3, 6), 6, 3)
    assert taken(draw, first) == [0, 1]
    assert taken(draw, second) == [2, 3, 4]
    assert draw.dealt == 5
    withdraw(draw, second)
    assert draw.dealt == 2


def test_rows_are_found_by_contents_wherever_they_lie() -> None:
    source = torch.randn(6, 9)
    draw = drawn(6, 9, source=source)
    order = torch.tensor([5, 1, 3])
    selection = by_contents(draw, rows((0, 3), 6, 3, 9, source=source[order]))
    assert selection is not None and selection[0][1].tolist() == [5, 1, 3]
    assert by_contents(draw, rows((0, 3), 6, 3, 9, source=torch.randn(3, 9))) is None
    assert by_contents(drawn(6, 9), rows((0, 3), 6, 3, 9, source=source[order])) is None


def test_equal_rows_are_handed_out_once_each() -> None:
    source = torch.ones(4, 5)
    draw = drawn(4, 5, source=source)
    found = []
    for micro_batch in ((0, 2), (2, 4)):
        selection = by_contents(draw, rows(micro_batch, 4, 2, 5, source=source[:2]))
        assert selection is not None
        hand_out(draw, selection)
        found += selection[0][1].tolist()
    assert found == [0, 1, 2, 3]


def test_rows_at_the_wrong_place_are_in_doubt() -> None:
    source = torch.randn(6, 9)
    draw = drawn(6, 9, source=source)
    here = [(0, slice(2, 4))]
    assert not doubtful(draw, rows((2, 4), 6, 2, 9, source=source[2:4]), here)
    assert doubtful(draw, rows((2, 4), 6, 2, 9, source=source[:2]), here)
    assert doubtful(draw, rows((2, 4), 6, 2, 9), here) is None


def test_rows_that_rounding_changed_are_the_same_and_others_are_not() -> None:
    source = torch.randn(50, 30)
    noisy = source * (1 + 1e-6 * torch.randn_like(source))
    assert not differ(fingerprint(noisy), fingerprint(source), tolerance(source))
    assert differ(fingerprint(noisy.flip(0)), fingerprint(source), tolerance(source))
    found = matching_rows(fingerprint(source), fingerprint(noisy[[7, 3]]), 0, [], tolerance(source))
    assert found is not None and found.tolist() == [7, 3]


def test_a_loose_match_has_to_stand_out() -> None:
    """Under the tolerance of lower precision, a row that two others are about as near to belongs to neither."""
    full = torch.tensor([[1.0], [1.04], [9.0]])
    assert matching_rows(full, torch.tensor([[1.02]]), 0, [], LOOSE) is None
    found = matching_rows(full, torch.tensor([[8.9]]), 0, [], LOOSE)
    assert found is not None and found.tolist() == [2]
