"""Calls of a script's own code, traced in this process in both runs, and where their values first differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gaverify.audit.recording.calls import BackwardCall
from gaverify.audit.recording.script_calls import PinnedArguments, PlacesOfPart, Trace, TracedCalls, locate_rows
from gaverify.audit.script_trace import Agreement, TraceComparison, describe_value
from gaverify.thresholds import COMPUTED_FLOAT32

N, COUNT = 12, 3
"""Rows of the full batch, and micro-batches."""
PARTS: list[PlacesOfPart] = [(N, tuple(range(at, at + N // COUNT))) for at in range(0, N, N // COUNT)]
OUTPUTS = torch.randn(N, generator=torch.Generator().manual_seed(0)).requires_grad_()
REWARDS = torch.randn(N, generator=torch.Generator().manual_seed(1))

Loss = Callable[[torch.Tensor, slice, int], torch.Tensor]
"""A loss of the outputs of some rows, of where these lie, and of the micro-batch's number."""


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what following a script's calls leaves in a process that is not a script's."""
    for name in ("from_numpy", "frombuffer"):
        monkeypatch.setattr(torch, name, getattr(torch, name))


@contextmanager
def following(kind: Any, *args: Any) -> Iterator[Any]:
    guard = SimpleNamespace(off=False, work=nullcontext)
    job, journal = SimpleNamespace(updates=1, source=None), SimpleNamespace(update=1)
    calls = kind(SimpleNamespace(guard=guard, job=job, journal=journal, is_last_update=True), (), *args)
    try:
        yield calls
    finally:
        calls.mode.__exit__(None, None, None)


def traced(loss: Loss, count: int) -> Trace:
    with following(TracedCalls) as calls:
        run(loss, count, lambda root: calls.note_loss(BackwardCall(roots=root, place=None)))
    trace: Trace = calls.trace
    return trace


def run(loss: Loss, count: int, differentiate: Callable[[torch.Tensor], None]) -> None:
    REWARDS.clone()  # read once before the micro-batches, by both runs
    for k in range(count):
        at = slice(k * N // count, (k + 1) * N // count)
        differentiate(loss(OUTPUTS[at], at, k) / count)


def compared(loss: Loss) -> TraceComparison:
    return TraceComparison(traced(loss, 1), traced(loss, COUNT), PARTS, COMPUTED_FLOAT32)


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


@pytest.mark.parametrize("loss", [of_others, of_numpy, of_numbers, zero_in_value, one_in_value, of_a_line_of_its_own])
def test_values_of_other_rows_differ_and_no_rows_act_on_each_other(loss: Loss) -> None:
    comparison = compared(loss)
    assert comparison.origins
    assert comparison.handed
    assert not any(map(comparison.acts_on_rows, comparison.origins))


@pytest.mark.parametrize("loss", [whitened, whitened_by_a_number, ranked])
def test_rows_that_agree_and_give_values_that_differ_act_on_each_other(loss: Loss) -> None:
    comparison = compared(loss)
    assert comparison.origins
    assert all(map(comparison.acts_on_rows, comparison.origins))


def test_where_all_values_agree_no_call_is_an_origin() -> None:
    comparison = compared(right)
    assert not comparison.origins
    assert not comparison.handed
    assert Agreement.DIFFERS not in set(map(comparison.agreement, comparison.reached))


def test_a_value_is_described_by_its_variable_its_lines_and_what_it_holds() -> None:
    comparison = compared(of_others)
    suspect = describe_value(comparison, comparison.origins[0])
    assert suspect.value is not None
    assert (suspect.kind, suspect.value.name, suspect.value.is_reordered, suspect.samples) == (
        "values",
        "part",
        True,
        8,
    )
    assert suspect.operation.source == "part = REWARDS.roll(k)[at]"
    assert suspect.value.reader.source == "return (outputs * part).mean()"
    alone = compared(of_a_line_of_its_own)
    suspect = describe_value(alone, alone.origins[0])
    assert suspect.operation.source == "part = REWARDS.flip(0)[at]"
    assert suspect.value is not None
    assert not suspect.value.is_reordered, "no rows were compared"
    numbers = compared(of_numbers)
    value = describe_value(numbers, numbers.origins[0]).value
    assert value is not None
    assert value.made_with is not None
    assert (value.name, value.made_with.full, value.made_with.micro_batches) == ("scale", 1.0, (1.0, 2.0, 3.0))


@pytest.mark.parametrize("loss", [of_others, of_numpy, of_numbers])
def test_the_full_batch_s_values_repair_the_gradient(loss: Loss) -> None:
    comparison = compared(loss)
    pinned = comparison.pinned(comparison.handed)
    gradients = []
    differed = list[bool]()
    with following(PinnedArguments, pinned, PARTS, differed.append) as full:
        run(loss, 1, lambda root: gradients.append(torch.autograd.grad(root, OUTPUTS)[0]))
    assert not differed
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
