from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gaverify import Problem, ProblemError
from gaverify.passes.dispatch import Observed
from gaverify.passes.weighting import Weighing, check_weighting, micro_batch_weight, targets_of, valid_targets

BATCH = {"x": torch.zeros(6, 2), "labels": torch.tensor([1, -100, 2, 2, -100, -100])}


def weight(weighting, k: int = 1, *, sizes=(4, 2), batch=BATCH, observed=None, full=None) -> float:
    problem = Problem(nn.Identity(), lambda model, batch: None, batch)
    task = Weighing(problem=problem, batch_size=sum(sizes), sizes=sizes, weighting=weighting)
    start = sum(sizes[:k])
    micro = {key: value[start : start + sizes[k]] for key, value in batch.items()}
    return micro_batch_weight(task, k, micro, observed or Observed(), full or Observed())


def counted(*counts: tuple[float, int]) -> Observed:
    """What a pass shows whose losses divided by these numbers, of so many targets."""
    return Observed(target_counts=[(torch.tensor(total), numel, -100) for total, numel in counts])


@pytest.mark.parametrize(
    ("weighting", "k", "expected"),
    [
        ("uniform", 0, 1 / 2),
        ("none", 0, 1.0),
        ("samples", 0, 4 / 6),
        ("samples", 1, 2 / 6),
        ("tokens", 0, 1.0),  # three valid targets, all in the first micro-batch
        ("tokens", 1, 0.0),
        ([0.3, 0.7], 1, 0.7),
        (lambda micro: len(micro["x"]) / 10, 1, 0.2),
        (lambda micro, batch: len(micro["x"]) / len(batch["x"]), 0, 4 / 6),
        (lambda micro: torch.tensor(0.25), 0, 0.25),
    ],
)
def test_weights(weighting, k: int, expected: float) -> None:
    assert weight(weighting, k) == pytest.approx(expected)


def test_what_the_loss_divided_by_counts_before_the_targets_of_the_batch() -> None:
    assert weight("tokens", observed=counted((5.0, 8)), full=counted((20.0, 32))) == 0.25
    assert weight("tokens", observed=counted((2.0, 2), (6.0, 8)), full=counted((3.0, 3), (24.0, 32))) == 0.25


def test_an_argument_with_a_default_is_not_asked_for_the_batch() -> None:
    assert weight(lambda micro, scale=2.0: scale) == 2.0


@pytest.mark.parametrize(
    ("weighting", "sentence"),
    [
        ("even", "unknown weighting `even`"),
        ([0.5], "1 numbers for steps = 2"),
        (["a", "b"], "neither a word, numbers nor a callable"),
        (3, "neither a word, numbers nor a callable"),
    ],
)
def test_what_is_no_weighting_says_so(weighting, sentence: str) -> None:
    with pytest.raises(ProblemError, match=sentence):
        check_weighting(weighting, 2)


@pytest.mark.parametrize("weighting", ["uniform", "samples", "tokens", "none", [0.5, 0.5], (1, 2), lambda micro: 1.0])
def test_weightings_are_known(weighting) -> None:
    check_weighting(weighting, 2)


def test_a_function_without_a_number_says_so() -> None:
    with pytest.raises(ProblemError, match="returned None"):
        weight(lambda micro: None)


def test_tokens_need_targets() -> None:
    with pytest.raises(ProblemError, match="no integer targets"):
        weight("tokens", batch={"x": torch.zeros(6, 2)})
    with pytest.raises(ProblemError, match="no valid target at all"):
        weight("tokens", batch={"labels": torch.full((6,), -100)})


def test_valid_targets_are_those_of_the_largest_loss() -> None:
    assert valid_targets(Observed()) is None
    assert valid_targets(counted((2.0, 4), (9.0, 16))) == 9.0


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"labels": torch.tensor([1]), "z": torch.tensor([2])}, 1),
        ({"a": torch.tensor([1]), "b": torch.tensor([2])}, 2),
        ((torch.zeros(1), torch.tensor([3])), 3),
        (SimpleNamespace(x=torch.zeros(1), y=torch.tensor([4])), 4),
        ((torch.zeros(1),), None),
    ],
)
def test_targets_are_found_by_name_then_by_type(batch, expected) -> None:
    targets = targets_of(batch)
    assert (None if targets is None else int(targets)) == expected
