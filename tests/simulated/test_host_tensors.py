"""What lies on the host beside a model on the device: a split's micro-batches are moved, closures' tensors named."""

import pytest
import torch
from torch import nn

import gaverify
from gaverify import Outcome, Problem, ProblemError


def test_the_micro_batches_of_a_users_split_are_moved() -> None:
    rows = torch.randn(8, 3, device="cpu")
    problem = Problem(
        nn.Linear(3, 2),
        lambda model, batch: model(batch).square().mean(),
        rows,
        split=lambda batch, start, stop: rows[start:stop],  # of the host's own rows, whatever it is given
    )
    for dtype in (None, "bfloat16"):
        assert gaverify.verify(problem, steps=4, device="cuda", dtype=dtype).outcome is Outcome.EQUIVALENT


def closure() -> Problem:
    table = torch.ones(2, device="cpu")
    return Problem(nn.Linear(3, 2), lambda model, batch: (model(batch) * table).sum(), torch.randn(8, 3, device="cpu"))


def attribute() -> Problem:
    model = nn.Linear(3, 2)
    model.table = torch.ones(2, device="cpu")  # neither parameter nor buffer
    return Problem(model, lambda model, batch: (model(batch) * model.table).sum(), torch.randn(8, 3, device="cpu"))


@pytest.mark.parametrize("build", [closure, attribute])
def test_a_tensor_that_nobody_moved_is_named(build) -> None:
    with pytest.raises(ProblemError) as raised:
        gaverify.verify(build(), device="cuda")
    assert "gaverify moves model and batch to cuda:0; move the rest yourself: `table`" in str(raised.value)


def test_on_the_host_nothing_is_left_behind() -> None:
    assert gaverify.verify(closure(), device="cpu").outcome is not None


def test_another_error_gets_no_such_hint() -> None:
    problem = Problem(nn.Linear(3, 2), lambda model, batch: model(batch[:, :1]).sum(), torch.randn(8, 3, device="cpu"))
    with pytest.raises(ProblemError) as raised:
        gaverify.verify(problem, device="cuda")
    assert "move the rest" not in str(raised.value)
