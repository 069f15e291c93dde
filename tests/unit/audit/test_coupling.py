"""Where rows of micro-batches first part from themselves in the full batch: in a module, in the loss, or nowhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gaverify.audit.coupling import Pair, agree, feels_the_rest, first_module, loss_apart, writers_of
from gaverify.audit.job import SCRIPT
from gaverify.audit.recording.outputs import Outputs
from gaverify.records.audit import Record
from gaverify.records.events import Ledger
from gaverify.records.experiment import Cause, ControlKind, ControlRun
from gaverify.records.facts import facts_of_loop
from gaverify.rules import batch_coupled_loss, batch_statistics, cross_sample_operation

UNIT = 2.0**-24
SAMPLES = torch.arange(16 * 6, dtype=torch.float32, device="cpu").square().sin().reshape(16, 6)
Loss = Callable[[torch.Tensor], torch.Tensor]


class Pooling(nn.Module):
    """Every sample is given the mean of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.tanh().mean(0)


class Counting(nn.Module):
    """Does something else in each call, whatever it is given."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


def each(found: torch.Tensor) -> torch.Tensor:
    return found.tanh().square().sum()


def contrastive(found: torch.Tensor) -> torch.Tensor:
    unit = F.normalize(found, dim=1)
    return F.cross_entropy(unit @ unit.roll(1, 1).T, torch.arange(len(unit), device="cpu"))


def listened(model: nn.Module, pieces: tuple[torch.Tensor, ...], loss: Loss, moved: tuple[str, ...] = ()) -> list[Any]:
    outputs = Outputs(nullcontext, moved)
    for piece in pieces:
        with outputs.listening(model, (piece,), {}):
            result = model(piece)
        loss(result).backward()
    return outputs.forwards


def pairs(middle: nn.Module, loss: Loss = each, rest: Loss | None = None) -> list[Pair]:
    """The pairs of a full batch of 16 and 4 micro-batches; `rest` is the micro-batches' loss where that is another."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), middle, nn.ReLU(inplace=True), nn.Linear(8, 4))
    (whole,) = listened(model, (SAMPLES,), loss)
    if isinstance(middle, Counting):
        middle.calls = 0
    parts = listened(model, SAMPLES.split(4), rest or loss)
    return [(whole, part, range(4 * at, 4 * at + 4)) for at, part in enumerate(parts)]


def test_a_model_that_is_given_what_another_made_is_another_model() -> None:
    """Modules of the same path, of which the first model's agree for every micro-batch."""
    models = nn.Sequential(nn.Linear(6, 8)), nn.Sequential(Pooling())
    outputs = Outputs(nullcontext)
    for piece in (SAMPLES, *SAMPLES.split(4)):
        for model in models:
            with outputs.listening(model, (piece,), {}):
                piece = model(piece)
    whole, parts = outputs.forwards[:2], outputs.forwards[2:]
    found = first_module(
        [(whole[at % 2], part, range(4 * (at // 2), 4 * (at // 2) + 4)) for at, part in enumerate(parts)], UNIT
    )
    assert found is not None and (found.operation.name, found.samples) == ("Pooling", 16)


@pytest.mark.parametrize("middle", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False)])
def test_statistics_of_the_batch_are_found_in_their_module(middle: nn.Module) -> None:
    found = pairs(middle)
    suspect = first_module(found, UNIT)
    assert suspect is not None and suspect.operation.module == "1"
    assert (suspect.statistics, suspect.in_model, suspect.samples) == (True, True, 16)
    assert ("1" in writers_of(found)) == middle.track_running_stats
    assert not agree(found, UNIT)


def test_a_module_that_mixes_samples_keeps_no_statistics() -> None:
    suspect = first_module(pairs(Pooling()), UNIT)
    assert suspect is not None and (suspect.operation.module, suspect.statistics) == ("1", False)


@pytest.mark.parametrize("middle", [nn.GroupNorm(2, 8), nn.LayerNorm(8), nn.BatchNorm1d(8).eval()])
def test_modules_that_look_at_one_sample_agree(middle: nn.Module) -> None:
    found = pairs(middle)
    assert first_module(found, UNIT) is None
    assert agree(found, UNIT) and loss_apart(found, UNIT) == 0.0


def test_a_module_that_counts_its_calls_does_not_couple() -> None:
    """Its first call is the full batch's; the others differ by what was before them."""
    found = pairs(Counting())
    assert first_module(found, UNIT) is None and not agree(found, UNIT)


def test_a_loss_that_compares_samples_gives_back_something_else() -> None:
    found = pairs(nn.GroupNorm(2, 8), contrastive)
    assert first_module(found, UNIT) is None and agree(found, UNIT)
    assert loss_apart(found, UNIT) > 0.01


def test_a_factor_is_no_coupling() -> None:
    found = pairs(nn.GroupNorm(2, 8), each, lambda result: each(result) / 7)
    assert loss_apart(found, UNIT) == 0.0


@pytest.mark.parametrize(("loss", "feels"), [(each, False), (contrastive, True)])
def test_only_a_coupled_loss_feels_the_rest_of_the_batch(loss: Loss, feels: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    plain, moved = (listened(model, (SAMPLES,), loss, rest) for rest in ((), (SCRIPT,)))
    assert feels_the_rest(plain, moved, UNIT) == feels


def test_a_term_that_is_not_divided_parts_and_feels_nothing() -> None:
    """Two terms of different scale are no factor, and yet no sample acts on another."""

    def other(found: torch.Tensor) -> torch.Tensor:
        return each(found) + 3 * found.exp().sum()

    assert loss_apart(pairs(nn.GroupNorm(2, 8), each, other), UNIT) > 0.01
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    plain, moved = (listened(model, (SAMPLES,), other, rest) for rest in ((), (SCRIPT,)))
    assert not feels_the_rest(plain, moved, UNIT)


@pytest.mark.parametrize("left", [1e-7, 0.2])
def test_a_cause_in_a_loop_is_proven_by_its_control_alone(left: float) -> None:
    suspect = first_module(pairs(nn.BatchNorm1d(8)), UNIT)
    assert suspect is not None
    control = ControlRun("`1` in evaluation mode", left, left < 1e-6, kind=ControlKind.FROZEN)
    facts = facts_of_loop(Record((), Ledger((), ()), coupling=(Cause(suspect, control),)))
    (found,) = batch_statistics.judge(facts)
    assert (found.code, found.proven, "freeze its statistics" in found.remedy) == ("GAV101", left < 1e-6, True)
    assert not [*cross_sample_operation.judge(facts), *batch_coupled_loss.judge(facts)]


def test_what_no_control_held_is_suspected() -> None:
    suspect = first_module(pairs(Pooling()), UNIT)
    assert suspect is not None
    loss = replace(suspect, in_model=False)
    facts = facts_of_loop(Record((), Ledger((), ()), coupling=(Cause(suspect, None), Cause(loss, None))))
    found = [*cross_sample_operation.judge(facts), *batch_coupled_loss.judge(facts)]
    assert [(finding.code, finding.proven) for finding in found] == [("GAV102", False), ("GAV103", False)]
    assert not [*batch_statistics.judge(facts)]
