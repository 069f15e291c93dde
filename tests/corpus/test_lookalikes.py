"""No false alarms: what may not be flagged, and look-alikes of every fault."""

from __future__ import annotations

import os
import subprocess
import sys

import problems_layouts
import problems_lookalikes
import problems_quiet
import problems_random
import problems_recipes
import pytest
import torch
from problems import Case, fault_codes, story

import gaverify
from gaverify import Outcome

# The layouts and recipes add to the lists of the modules that they import `replayed` and `lookalike` from.
CASES = [*problems_quiet.ROWS, *problems_lookalikes.LOOKALIKES, *problems_random.RANDOM]


def test_every_module_of_the_corpus_adds_its_cases() -> None:
    """Each has its own; one that is only imported would be tested nowhere."""
    named = {case.id for case in CASES}
    for module in (problems_layouts, problems_recipes, problems_lookalikes):
        defined = {name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
        assert named & defined, module.__name__


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
