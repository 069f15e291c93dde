"""Models as people have them: no false alarms, whatever the order in which they draw."""

from __future__ import annotations

import random
from typing import Any

import numpy
import problems_architectures
import problems_foreign
import problems_transformers
import pytest
import torch
from problems import Case

import gaverify


def _cases(*cases: Case) -> list[Any]:
    return [pytest.param(case, id=case.id) for case in cases]


@pytest.mark.parametrize("case", _cases(*problems_architectures.ARCHITECTURES, *problems_architectures.FAULTY))
def test_a_model_is_equivalent_or_its_fault_is_named(case: Case) -> None:
    case.check()


@pytest.mark.hf
@pytest.mark.parametrize("case", _cases(*problems_transformers.HEALTHY, *problems_transformers.FAULTY))
def test_a_model_of_transformers_is_equivalent_or_its_fault_is_named(case: Case) -> None:
    pytest.importorskip("transformers")
    case.check()


@pytest.mark.parametrize("name", sorted(problems_foreign.FOREIGN))
def test_global_generators_are_as_they_were(name: str) -> None:
    """Their functions are wrapped for the length of a pass only, and no draw of ours is left in them."""
    functions = {**vars(random)}, {**vars(numpy.random)}
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    case = next(case for case in problems_architectures.ARCHITECTURES if case.id == name)
    gaverify.verify(case.build(), steps=4)
    assert {**vars(random)} == functions[0]
    assert all(vars(numpy.random)[key] is value for key, value in functions[1].items())
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states


def test_functions_come_back_when_the_loss_raises() -> None:
    before = random.random
    problem = problems_architectures.loop_over_samples()

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        raise ValueError(random.random())

    with pytest.raises(gaverify.ProblemError):
        gaverify.verify(problem.model, loss, problem.batch)
    assert random.random is before
