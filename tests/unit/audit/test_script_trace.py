"""Calls of a script's own code, traced in this process in both runs, and where their values first differ."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable

import pytest
import torch
from followed import following

from gaverify.audit.first_difference import Found, Walk
from gaverify.audit.recording.calls import BackwardCall
from gaverify.audit.recording.script_calls import (
    PinnedArguments,
    PlacesOfPart,
    ScriptTrace,
    TracedCalls,
    locate_rows,
    names_in,
)
from gaverify.audit.script_trace import TraceComparison
from gaverify.records.experiment import DifferenceKind
from gaverify.thresholds import COMPUTED_FLOAT32

N, COUNT = 12, 3
"""Rows of the full batch, and micro-batches."""
PARTS: list[PlacesOfPart] = [(N, tuple(range(at, at + N // COUNT))) for at in range(0, N, N // COUNT)]
OUTPUTS = torch.randn(N, generator=torch.Generator().manual_seed(0)).requires_grad_()
REWARDS = torch.randn(N, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(4, (N,), generator=torch.Generator().manual_seed(2))

Loss = Callable[[torch.Tensor, slice, int], torch.Tensor]
"""A loss of the outputs of some rows, of where these lie, and of the micro-batch's number."""


def traced(loss: Loss, count: int) -> ScriptTrace:
    with following(TracedCalls) as calls:
        run(loss, count, lambda root: calls.note_loss(BackwardCall(roots=root, place=None)))
    trace: ScriptTrace = calls.trace
    return trace


def run(loss: Loss, count: int, differentiate: Callable[[torch.Tensor], None]) -> None:
    REWARDS.clone()  # read once before the micro-batches, by both runs
    for k in range(count):
        at = slice(k * N // count, (k + 1) * N // count)
        differentiate(loss(OUTPUTS[at], at, k) / count)


def walk_of(loss: Loss) -> Walk:
    return Walk(TraceComparison(traced(loss, 1), traced(loss, COUNT), PARTS, COMPUTED_FLOAT32))


def found_in(loss: Loss) -> tuple[Walk, Found]:
    walk = walk_of(loss)
    found = walk.find()
    assert found is not None
    return walk, found


def of_others(outputs: torch.Tensor, at: slice, k: int) -> torch.Tensor:
    part = REWARDS.roll(k)[at]
    return (outputs * part).mean()


def of_numbers(outputs: torch.Tensor, at: slice, k: int) -> torch.Tensor:
    scale = 1.0 + k
    return (outputs * scale).exp().mean()


def of_numpy(outputs: torch.Tensor, at: slice, k: int) -> torch.Tensor:
    part = torch.from_numpy(REWARDS.numpy()[: at.stop - at.start].copy())
    return (outputs * part).mean()


def whitened(outputs: torch.Tensor, at: slice, k: int) -> torch.Tensor:
    own = REWARDS[at]
    return (outputs * ((own - own.mean()) / own.std())).mean()


def whitened_by_a_number(outputs: torch.Tensor, at: slice, k: int) -> torch.Tensor:
    own = REWARDS[at]
    return (outputs * (own - float(own.mean()))).mean()


def ranked(outputs: torch.Tensor, at: slice, k: int) -> torch.Tensor:
    return (outputs * REWARDS[at].argsort().argsort()).mean()


def ranked_by_share(outputs: torch.Tensor, at: slice, k: int) -> torch.Tensor:
    gained = REWARDS[at].argsort().argsort() * (N / len(outputs))
    return (outputs * gained).mean()


def of_labels(outputs: torch.Tensor, at: slice, k: int) -> torch.Tensor:
    """Integers that are no places: those of other rows."""
    wanted = LABELS.roll(k)[at]
    return (outputs * wanted).mean()


def handed_twice(outputs: torch.Tensor, at: slice, k: int) -> torch.Tensor:
    """One call reads two values of other rows."""
    moved = REWARDS.roll(k)[at]
    return torch.addcmul(outputs, moved, moved.exp() * outputs.detach()).exp().mean()


def right(outputs: torch.Tensor, at: slice, k: int) -> torch.Tensor:
    return (outputs * ((REWARDS - REWARDS.mean()) / REWARDS.std())[at]).mean()


def zero_in_value(outputs: torch.Tensor, at: slice, k: int) -> torch.Tensor:
    """Rows of zeros in both runs hide by what they are multiplied, and their gradient does not."""
    return ((outputs - outputs.detach()) * REWARDS.roll(k)[at]).mean()


def one_in_value(outputs: torch.Tensor, at: slice, k: int) -> torch.Tensor:
    """A ratio is 1 before the first step: the losses add up to the full batch's whatever the rows are."""
    part = REWARDS.reshape(-1, N // (at.stop - at.start)).T[k]
    return ((outputs - outputs.detach()).exp() * part).mean()


def of_a_line_of_its_own(outputs: torch.Tensor, at: slice, k: int) -> torch.Tensor:
    part = REWARDS[at]
    if len(outputs) < N:
        part = REWARDS.flip(0)[at]
    return (outputs * part).mean()


@pytest.mark.parametrize("loss", [of_others, of_numpy, of_numbers, of_labels, zero_in_value, one_in_value])
def test_values_of_other_rows_differ_and_no_rows_act_on_each_other(loss: Loss) -> None:
    walk, found = found_in(loss)
    assert found.difference.kind is DifferenceKind.VALUES
    assert not walk.acts_on_rows(found)


@pytest.mark.parametrize("loss", [whitened, whitened_by_a_number, ranked])
def test_rows_that_agree_and_give_values_that_differ_act_on_each_other(loss: Loss) -> None:
    walk, found = found_in(loss)
    assert walk.acts_on_rows(found)


def test_integers_are_found_where_they_are_moved_and_not_where_they_are_places() -> None:
    walk, found = found_in(of_labels)
    value = walk.value_of(found)
    assert value is not None and value.name == "wanted"
    assert found.difference.operation.source == "wanted = LABELS.roll(k)[at]"


def test_a_line_that_micro_batches_alone_run_is_a_branch() -> None:
    _, found = found_in(of_a_line_of_its_own)
    assert found.difference.kind is DifferenceKind.BRANCH
    assert found.difference.operation.source == "if len(outputs) < N:"


def test_where_all_values_agree_nothing_is_found() -> None:
    assert walk_of(right).find() is None


def test_a_value_is_described_by_its_variable_its_lines_and_what_it_holds() -> None:
    walk, found = found_in(of_others)
    value = walk.value_of(found)
    assert value is not None
    assert (value.name, value.is_reordered, found.difference.samples) == ("part", True, 8)
    assert found.difference.operation.source == "part = REWARDS.roll(k)[at]"
    assert value.reader.source == "return (outputs * part).mean()"
    numbers, found = found_in(of_numbers)
    assert numbers.value_of(found) is None, "no tensor is handed"
    number = found.difference.number
    assert number is not None
    assert (number.name, number.full, number.micro_batches) == ("scale", 1.0, (1.0, 2.0, 3.0))


def test_values_that_are_computed_are_not_those_of_other_rows() -> None:
    """Ranks of a micro-batch, times what it lacks, are among those of the full batch."""
    walk, found = found_in(ranked_by_share)
    value = walk.value_of(found)
    assert value is not None and value.name == "gained"
    assert not value.is_reordered


@pytest.mark.parametrize("loss", [of_others, of_numpy, of_numbers, of_labels, whitened, handed_twice])
def test_the_full_batch_s_values_repair_the_gradient(loss: Loss) -> None:
    walk, found = found_in(loss)
    pinned = walk.pins_of(found)
    gradients: list[torch.Tensor] = []
    differed: list[bool] = []
    with following(PinnedArguments, pinned, PARTS, differed.append) as full:
        run(loss, 1, lambda root: gradients.append(torch.autograd.grad(root, OUTPUTS)[0]))
    with following(PinnedArguments, pinned, PARTS, differed.append) as calls:
        calls.take(full.kept)
        run(loss, COUNT, lambda root: gradients.append(torch.autograd.grad(root, OUTPUTS)[0]))
    torch.testing.assert_close(sum(gradients[1:]), gradients[0])
    assert any(differed)


def test_rows_of_forwards_with_several_of_each_sample_are_found_in_tensors_of_samples() -> None:
    beside, behind = (8, (2, 3, 6, 7)), (8, (1, 3, 5, 7))
    found = [locate_rows((4, 5), (2, 5), part) for part in (beside, behind)]
    assert [each and each[1] for each in found] == [(4, (1, 3)), (4, (1, 3))]
    assert locate_rows((4, 5), (2, 5), (8, (0, 1, 2, 5))) is None


def test_a_number_is_named_as_in_the_line_that_reads_it_and_not_as_another_variable_of_its_value() -> None:
    step, options = 4, Namespace(accumulation=4)
    names, _ = names_in(sys._getframe(), {}, {"divisor": options.accumulation})
    assert names == {"divisor": ["options.accumulation"]}
    names, _ = names_in(sys._getframe(), {}, {"divisor": 3 + 1})
    assert names == {"divisor": ["step"]} and step == 4
