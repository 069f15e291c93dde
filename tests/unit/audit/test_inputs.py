"""Inputs of forwards that are put in place of a script's own."""

from pathlib import Path

import torch
from torch import nn

from gaverify.audit.recording.inputs import GivenInputs, KeptInputs, cuts_of, has_loss


class TestCuts:
    def test_rows_of_the_first_dimension(self) -> None:
        assert cuts_of([(2, 4), (2,)], [(8, 4), (8,)]) == ([0, 0], 2, 8)

    def test_columns_and_a_table_that_all_share(self) -> None:
        assert cuts_of([(5, 2), (5, 5)], [(5, 8), (5, 5)]) == ([1, None], 2, 8)

    def test_padding_follows_the_batch(self) -> None:
        assert cuts_of([(2, 17)], [(8, 20)]) == ([0], 2, 8)

    def test_a_repetition_is_not_cut(self) -> None:
        assert cuts_of([(8, 4)], [(8, 4)]) == ([None], 1, 1)

    def test_shapes_that_do_not_fit(self) -> None:
        assert cuts_of([(2, 4)], [(8, 4), (8,)]) is None
        assert cuts_of([(2, 4), (3,)], [(8, 4), (8,)]) is None
        assert cuts_of([(9, 4)], [(8, 4)]) is None


class TestGiven:
    def test_micro_batches_get_the_rows_one_behind_the_other(self, tmp_path: Path) -> None:
        model, kept = nn.Linear(1, 1), KeptInputs(tmp_path)
        whole = torch.arange(8.0, device="cpu").view(8, 1)
        for part in whole.split(4):
            kept.forward(model, (part,), {})
            kept.after_backward()
        given, rows = GivenInputs(tmp_path), torch.zeros(8, 1, device="cpu")
        seen = []
        for part in rows.split(2):
            given.forward(model, (part,), {})
            given.after_backward()
            seen.append(part.flatten().tolist())
        assert seen == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
        assert not rows.any(), "the data set that they are views of was changed"

    def test_two_forwards_of_a_pass_are_told_apart(self, tmp_path: Path) -> None:
        model, kept = nn.Linear(1, 1), KeptInputs(tmp_path)
        for start in (0.0, 10.0):
            kept.forward(model, (torch.arange(start, start + 4, device="cpu").view(4, 1),), {})
        kept.after_backward()
        given, seen = GivenInputs(tmp_path), []
        for _ in range(2):
            for _ in range(2):
                part = torch.zeros(2, 1, device="cpu")
                given.forward(model, (), {"x": part})
                seen.append(part.flatten().tolist())
            given.after_backward()
        assert seen == [[0.0, 1.0], [10.0, 11.0], [2.0, 3.0], [12.0, 13.0]]

    def test_what_has_no_counterpart_is_left_alone(self, tmp_path: Path) -> None:
        given, part = GivenInputs(tmp_path), torch.ones(2, 1, device="cpu")
        given.forward(nn.Linear(1, 1), (part,), {})
        assert part.tolist() == [[1.0], [1.0]]


def test_a_loss_is_a_single_number_that_can_be_differentiated() -> None:
    weight = torch.ones(3, device="cpu", requires_grad=True)
    assert has_loss({"loss": weight.sum(), "logits": weight * 2})
    assert not has_loss((weight * 2, torch.zeros((), device="cpu")))
