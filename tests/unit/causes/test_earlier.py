"""A pass of the full batch that was made before is held against a repair by its sketch, and is not run again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import problems_coupling
import problems_weights
import pytest
import torch
from problems import Problem, fault_codes

import gaverify
from gaverify.causes.sketches import Earlier, kept
from gaverify.passes import gradients
from gaverify.passes.gradients import PassResult


def earlier_of(**found: torch.Tensor | None) -> Earlier:
    return kept(PassResult(dict(found), 1.0))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_same_gradient_differs_by_nothing() -> None:
    assert earlier_of(a=numbers(30, 40), b=None).difference({"a": numbers(30, 40), "b": None}) == 0.0


@pytest.mark.parametrize("relative", [1e-1, 1e-6, 1e-12])
def test_a_difference_keeps_its_size(relative: float) -> None:
    before, off = numbers(300, 400), numbers(300, 400, seed=1)
    found = earlier_of(a=before).difference({"a": before + relative * off / off.norm() * before.norm()})
    assert found == pytest.approx(relative, rel=0.1)


@pytest.mark.parametrize("element", [0, 4_095, 99_999])
def test_a_single_element_hides_nowhere(element: int) -> None:
    before = numbers(100_000)
    after = before.clone()
    after[element] += 1e-3 * float(before.norm())
    assert earlier_of(a=before).difference({"a": after}) == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("missing", [{"a": None}, {"a": torch.zeros(3), "b": torch.ones(1)}])
def test_a_gradient_on_one_side_only_is_no_rounding(missing: dict[str, torch.Tensor | None]) -> None:
    before = earlier_of(a=torch.zeros(3) if "b" in missing else numbers(3), b=None)
    assert earlier_of(a=numbers(3), b=None).comparable
    assert before.difference({"b": None, **missing}) == math.inf


def test_not_a_number_is_no_rounding() -> None:
    assert earlier_of(a=numbers(3)).difference({"a": torch.full((3,), math.nan, dtype=torch.float64)}) == math.inf


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_nothing_is_held_against_a_gradient_that_tells_nothing(value: float) -> None:
    assert not earlier_of(a=torch.full((3,), value, dtype=torch.float64)).comparable


def counted(problem: Problem, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[gaverify.Verdict, int]:
    """The verdict, and how often the full batch was run with its backward."""
    runs = []
    original = gradients._full_batch

    def full_batch(*args: Any) -> Any:
        runs.append(args)
        return original(*args)

    monkeypatch.setattr(gradients, "_full_batch", full_batch)
    return gaverify.verify(problem, steps=4, **options), len(runs)


@pytest.fixture
def unsure(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Sketches that never show that only rounding is left."""
    monkeypatch.setattr(Earlier, "difference", lambda *_: 0.5)
    return monkeypatch


def proven(verdict: gaverify.Verdict) -> set[str]:
    return {finding.code for finding in verdict.findings if finding.proven}


def test_weights_are_tried_without_another_full_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Working precision, float64 control and the second batch; weights that fit exactly show that it repeats itself."""
    verdict, runs = counted(problems_weights.mean_loss(), monkeypatch, weighting="none")
    assert fault_codes(verdict) == proven(verdict) == {"GAV201"}
    assert runs == 3


def test_what_a_sketch_does_not_settle_is_measured(unsure: pytest.MonkeyPatch) -> None:
    verdict, runs = counted(problems_weights.mean_loss(), unsure, weighting="none")
    assert fault_codes(verdict) == proven(verdict) == {"GAV201"}
    assert runs == 4


@pytest.mark.parametrize(
    ("build", "code", "runs"),
    [(problems_coupling.contrastive, "GAV103", 7), (problems_coupling.hand_written_batch_norm, "GAV101", 8)],
)
def test_a_repair_is_tried_without_another_full_batch(
    build: Callable[[], Problem], code: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, found = counted(build(), monkeypatch)
    assert fault_codes(verdict) == proven(verdict) == {code}
    assert found == runs
