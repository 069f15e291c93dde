"""No false alarms: what may not be flagged, look-alikes of every fault, and models as people have them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import numpy
import problems_architectures
import problems_lookalikes
import problems_quiet
import problems_random
import problems_transformers
import pytest
import torch
from problems import Case, fault_codes, story

import gaverify
from gaverify import Outcome

CASES = [*problems_quiet.ROWS, *problems_lookalikes.LOOKALIKES, *problems_random.RANDOM]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
def test_is_not_flagged(case: Case) -> None:
    case.check()


ZERO = {case.id: case for case in CASES if case.id in ("key_bias", "bias_before_instance_norm", "listwise_ranking")}
PRECISIONS = [
    {"dtype": "float32"},
    {"dtype": "float64"},
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"autocast": "bfloat16"},
]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("name", sorted(ZERO))
def test_gradient_that_is_zero_in_exact_arithmetic(name: str, precision: dict[str, str], seed: int) -> None:
    """Nothing but rounding is left of it, in every precision and on any data; a relative difference means nothing."""
    problem = ZERO[name].build()
    torch.manual_seed(seed)
    inputs, classes = problem.batch
    problem.batch = (torch.randn_like(inputs), classes)
    verdict = gaverify.verify(problem, steps=4, **precision)
    assert verdict.outcome is Outcome.EQUIVALENT, story(verdict)
    verdict = gaverify.verify(problem, steps=4, weighting="none", **precision)
    assert verdict.outcome is Outcome.DIVERGENT and fault_codes(verdict) == {"GAV201"}, story(verdict)


COMPILED = """
import gaverify, torch
from problems_weights import mean_loss
from problems_random import noisy
from torch import nn

for problem in (mean_loss(), noisy(nn.Dropout(0.5), nn.Dropout(0.5))):
    problem.model = torch.compile(problem.model, backend="aot_eager")
    problem.loss(problem.model, problem.batch)  # compiled before it is verified
    print(gaverify.verify(problem, steps=4).outcome.value)
    print(gaverify.verify(problem, steps=4, weighting="none").outcome.value)
"""


@pytest.mark.slow
def test_compiled_models() -> None:
    """In a process of its own, because the compiler leaves settings of its own behind."""
    paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["equivalent", "divergent"] * 2


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


@pytest.mark.parametrize("name", sorted(problems_architectures.FOREIGN))
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
