"""Two gloo ranks: planted faults raise their code and only that one, right code stays quiet, under DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import problems_ranks as ranks
import pytest
import torch

import gaverify
from gaverify import Outcome, Problem, ProblemError
from gaverify.records.outcomes import Method
from gaverify.records.ranks import Collective
from gaverify.spec import Spec
from gaverify.verification import verify_spec

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")


class Case(NamedTuple):
    """A problem, K, and the codes of its faults on two ranks."""

    make: Callable[[], Problem]
    steps: int
    codes: frozenset[str]
    weighting: str = "uniform"
    quick: bool = False


CASES = (
    Case(ranks.global_count, 1, frozenset(), quick=True),
    Case(ranks.forgotten_ranks, 1, frozenset({"GAV704"}), quick=True),
    Case(ranks.forgotten_ranks, 2, frozenset({"GAV704", "GAV202"})),
    Case(ranks.summed_by_hand, 2, frozenset({"GAV704"})),
    Case(ranks.own_count, 1, frozenset({"GAV703"}), quick=True),
    Case(ranks.fixed_total, 2, frozenset({"GAV704"}), "none", quick=True),
    Case(ranks.fixed_total, 2, frozenset({"GAV201"})),
    Case(ranks.plain_mean, 1, frozenset(), "none"),
    Case(ranks.plain_mean, 2, frozenset({"GAV201"}), "none"),
    Case(ranks.own_count_equal, 2, frozenset()),
    Case(ranks.gathered_values, 1, frozenset({"GAV705"}), quick=True),
    Case(ranks.gathered_values, 2, frozenset({"GAV705", "GAV103"})),
    Case(ranks.gathered_with_gradient, 1, frozenset()),
    Case(ranks.gathered_with_gradient, 2, frozenset({"GAV103"})),
    Case(ranks.gathered_with_gradient_of_others, 1, frozenset(), quick=True),
    Case(ranks.gathered_with_gradient_of_others, 2, frozenset({"GAV103"})),
    Case(ranks.gathered_values_of_others, 1, frozenset({"GAV705"}), quick=True),
    Case(ranks.gathered_values_of_others, 2, frozenset({"GAV705", "GAV103"})),
    Case(ranks.centred_through_the_store, 1, frozenset(), quick=True),
    Case(ranks.noisy_on_ranks, 2, frozenset(), quick=True),
    Case(ranks.drawing_per_sample, 2, frozenset()),
    Case(ranks.tied_on_ranks, 2, frozenset()),
    Case(ranks.reading_its_rank, 1, frozenset({"GAV703"})),
    Case(ranks.routed_experts, 2, frozenset()),
    Case(ranks.routed_experts_with_forgotten_ranks, 2, frozenset({"GAV704"})),
)
QUICK = [case for case in CASES if case.quick]


def on_ranks(make: Callable[[], Problem], **options: Any) -> gaverify.Verdict:
    """What `gaverify run --ranks 2` finds; every rank makes the problem for itself."""
    return verify_spec(Spec(**{"model": f"problems_ranks:{make.__name__}", "ranks": 2, "device": "cpu", **options}))


def verified(case: Case, engine: str, count: int = 2) -> gaverify.Verdict:
    return on_ranks(case.make, steps=case.steps, ranks=count, engine=engine, weighting=case.weighting)


def check(case: Case, verdict: gaverify.Verdict) -> None:
    faults = [finding for finding in verdict.findings if finding.severity == "fault"]
    assert {finding.code for finding in faults} == case.codes
    assert all(finding.proven for finding in faults)
    assert verdict.outcome is (Outcome.DIVERGENT if case.codes else Outcome.EQUIVALENT)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case.make.__name__}-{case.steps}")
def test_under_ddp(case: Case) -> None:
    verdict = verified(case, "ddp")
    check(case, verdict)
    assert verdict.ranks is not None and verdict.ranks.replicas.difference == 0.0
    traffic = verdict.ranks.traffic
    assert traffic.window.count(Collective.REDUCE) - traffic.own.count(Collective.REDUCE) == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if not case.quick], ids=lambda case: case.make.__name__)
def test_of_several_micro_batches_under_ddp(case: Case) -> None:
    check(case, verified(case, "ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.make.__name__}-{case.steps}")
def test_under_fsdp2(case: Case) -> None:
    verdict = verified(case, "fsdp2")
    check(case, verdict)
    assert verdict.ranks is not None and verdict.ranks.traffic.window.count(Collective.SCATTER) >= 1


def test_a_gather_has_ended_when_it_is_looked_at() -> None:
    """It writes beside what runs: read too early it seemed to mix samples itself, from run to run."""
    case = Case(ranks.gathered_with_gradient, 2, frozenset({"GAV103"}))
    (found,) = {verified(case, "ddp").findings[0].summary for _ in range(2)}
    assert found == "the loss compares the samples of a batch with each other"


def test_a_factor_is_told_by_what_was_forgotten() -> None:
    """K and K · R are told apart: what plain losses of the ranks lack is a division by K alone."""
    lines = {
        case.make: verified(case, "ddp").findings[0].summary
        for case in CASES
        if case.steps == 2 and case.codes == {"GAV201"}
    }
    assert "is 0.25 times the full batch's (= 1/(K · R))" in lines[ranks.fixed_total]
    assert "is 2 times the full batch's (= K): the loss is not divided by K" in lines[ranks.plain_mean]


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK[:3], ids=lambda case: case.make.__name__)
def test_on_four_ranks(case: Case) -> None:
    check(case, verified(case, "ddp", 4))


def test_ranks_that_run_other_experts() -> None:
    """DDP would wait for their gradients, FSDP2 for their parameters: one is told, the other cannot be."""
    verdict = on_ranks(ranks.experts_in_turn, steps=2, engine="fsdp2", timeout=60)
    assert (verdict.outcome, verdict.findings) == (Outcome.EQUIVALENT, ())
    assert on_ranks(ranks.experts_of_ranks, steps=2, timeout=60).outcome is Outcome.EQUIVALENT
    words = "no gradient to `experts.0.weight`, `experts.0.bias`, `experts.1.weight`, `experts.1.bias`, and FSDP2 needs"
    with pytest.raises(ProblemError, match=words):
        on_ranks(ranks.experts_of_ranks, steps=2, engine="fsdp2", timeout=60)


def test_exact_asks_float64_of_the_ranks_as_well_and_nothing_of_the_group_is_left() -> None:
    found = [on_ranks(ranks.own_count_equal, steps=1, exact=exact).method for exact in (False, True)]
    assert found == [Method.WORKING_PRECISION, Method.FLOAT64_CONTROL]
    assert not torch.distributed.is_initialized(), "in the user's process"


@pytest.mark.parametrize(
    ("make", "outcome"),
    [(ranks.counted_right, Outcome.EQUIVALENT), (ranks.counted_too_much, Outcome.DIVERGENT)],
    ids=["right", "5 % too much"],
)
def test_a_fault_below_the_rounding_of_bfloat16_is_seen(make: Callable[[], Problem], outcome: Outcome) -> None:
    verdict = on_ranks(make, steps=1, dtype="bfloat16")
    assert (verdict.outcome, verdict.method) == (outcome, Method.FLOAT64_CONTROL)


def test_exact_decides_as_the_default_on_ranks_where_float64_is_impossible() -> None:
    verdict = on_ranks(ranks.without_float64, steps=1, exact=True)
    assert verdict.is_equivalent and "no kernel" in verdict.control_failure


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "summed-loss"}, "cannot be combined with ranks"),
        ({"rtol": 1e-3, "atol": 0.0}, "cannot be combined with ranks"),
        ({"trace": True}, "cannot be combined with ranks"),
        ({"ranks": 9, "steps": 1}, "9 ranks need a batch of at least 18 samples, it has 16"),
        ({"ranks": 4, "steps": 8}, "4 ranks with 8 micro-batches each are 32 parts, which cannot be cut"),
        ({"ranks": 17, "steps": 1}, "17 ranks with 1 micro-batch each are 17 parts, which cannot be cut"),
    ],
)
def test_bad_input_is_a_sentence(options: dict[str, object], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        on_ranks(ranks.noisy_on_ranks, **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (ranks.raising_on_one_rank, r"rank 1: .*not on this rank"),
        (ranks.indexed_too_high, r"^the model or loss raised on the full batch: IndexError: index out of"),
    ],
)
def test_code_that_raises_is_no_fault_of_ours(make: Callable[[], Problem], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        on_ranks(make, steps=1)
