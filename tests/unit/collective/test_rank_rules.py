"""The rules about ranks, on hand-made numbers: each fires on its own signature and stays quiet on its neighbours'."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from measured import GATHERED, fit, ranks, record

from gaverify.collective.facts import apart_by, fit_rank_weights, with_shares
from gaverify.passes.gradients import Gradients
from gaverify.passes.sketches import sketch
from gaverify.records.audit import Calls, Record
from gaverify.records.comparison import comparison_of
from gaverify.records.events import Backward, Clipping, Step
from gaverify.records.ranks import Engine, RankFacts, Share, Shares
from gaverify.records.windows import windows_of
from gaverify.rules import (
    gather_without_gradient,
    gradients_never_reduced,
    mean_over_ranks,
    rank_statistics,
    ranks_hold_different_gradients,
    shard_local_norm,
    synchronised_every_micro_batch,
    wrong_rank_scale,
)
from gaverify.rules.rule import word_shares
from gaverify.rules.shares import FittedWeights, find_share, word

RULES = (mean_over_ranks, wrong_rank_scale, gather_without_gradient)
CASES = {
    "unequal shares": (ranks(fit((0.534, 0.466)), weights_control=3e-7), {"GAV703"}),
    "factor R": (ranks(fit((0.25, 0.25), factor=2.0, left=2e-7), weights_control=2e-7), {"GAV704"}),
    "factor 1/R": (ranks(fit((1.0, 1.0), factor=0.5, left=2e-7), weights_control=2e-7), {"GAV704"}),
    "gather": (ranks(fit(residual=0.15), own=GATHERED, gather_control=1.2e-7), {"GAV705"}),
    "gather that is not the cause": (ranks(fit(residual=0.15), own=GATHERED, gather_control=0.4), set()),
    "no weights fit and nothing is gathered": (ranks(fit(residual=0.15)), set()),
    "a weight below zero is no share": (ranks(fit((1.4, -0.4))), set()),
    "one process diverges alike": (ranks(fit((0.534, 0.466)), from_one_process=1e-7), set()),
    "no difference": (ranks(fit((0.534, 0.466)), divergent=False), set()),
    "nothing to fit": (ranks(None), set()),
}


@pytest.mark.parametrize("name", CASES)
def test_each_signature_has_its_rule(name: str) -> None:
    measured, codes = CASES[name]
    found = [finding for rule in RULES for finding in rule.judge(replace(record(), ranks=measured))]
    assert {finding.code for finding in found} == codes
    assert all(finding.proven for finding in found)


def test_a_gather_that_explains_most_is_not_proven() -> None:
    measured = ranks(fit(residual=0.15), own=GATHERED, gather_control=1e-3)
    (finding,) = gather_without_gradient.judge(replace(record(), ranks=measured))
    assert not finding.proven and "gaverify ran it" not in finding.remedy


def test_a_run_without_ranks_has_no_such_finding() -> None:
    assert not [finding for rule in RULES for finding in rule.judge(record())]


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ((0.5338, 0.4662), "0.534, 0.466"),
        ((1.0, -1.12e-09), "1, 0"),
        ((3e-7, 1.5, -0.0), "0, 1.5, 0"),
        ((1e-3, 1.0), "0.001, 1"),
        ((2e-9, 1e-9), "2e-09, 1e-09"),
        ((0.0, 0.0), "0, 0"),
        ((), ""),
    ],
)
def test_a_weight_that_is_rounding_of_zero_is_shown_as_zero(weights: tuple[float, ...], text: str) -> None:
    assert word_shares(weights) == text


@pytest.mark.parametrize(
    ("factor", "steps", "count", "text"),
    [
        (4.0, 4, 1, " (= K): the loss is not divided by K"),
        (4.0, 4, 2, " (= K): the loss is not divided by K"),
        (
            2.0,
            2,
            2,
            " (= K = R): the loss is not divided by K, or gradients are summed over the ranks instead of averaged",
        ),
        (0.25, 4, 2, " (= 1/K): the loss is divided by K once too often"),
        (0.5, 2, 2, " (= 1/K = 1/R): the loss is divided by K once too often, or by the number of ranks"),
        (3.0, 4, 2, ""),
    ],
)
def test_readings_of_a_factor(factor: float, steps: int, count: int, text: str) -> None:
    facts = replace(comparison_of(Record()), ranks=replace(ranks(None), ranks=count))
    weights = FittedWeights(facts, None, 0.0, total=factor, micro_batches=steps)
    assert word(weights, find_share(weights).wrong) == text


LOOP_RULES = (
    ranks_hold_different_gradients,
    gradients_never_reduced,
    mean_over_ranks,
    wrong_rank_scale,
    shard_local_norm,
    rank_statistics,
    synchronised_every_micro_batch,
)
SHARES = (Share(1.5, 2e-7, 1.5), Share(1.34, 2e-7, 1.34))


def sharded(**changes: Any) -> RankFacts:
    return ranks(None, engine=Engine.FSDP2, apart=math.nan, **changes)


def of_targets(*targets: tuple[int, ...], left: float = 3e-7) -> RankFacts:
    tried = sharded(targets=targets).shares_of_targets[-1]
    return sharded(targets=targets, weights_control=left, shares_tried=tried)


@pytest.mark.parametrize(
    ("targets", "ways"),
    [
        (((20,), (12,)), [((1.25,), (0.75,))]),
        (((4, 4), (4, 4)), []),
        (((3, 5), (4, 4)), [((0.75, 1.25), (1.0, 1.0))]),
        (((3, 3), (1, 1)), [((1.5,), (0.5,))]),
        (((6, 2), (3, 5)), [((1.5, 0.5), (0.75, 1.25))]),
        (((9, 3), (1, 3)), [((1.5,), (0.5,)), ((2.25, 0.75), (0.25, 0.75))]),
    ],
)
def test_what_makes_means_over_valid_targets_one(targets: tuple[tuple[int, ...], ...], ways: list[Shares]) -> None:
    """A rank may average over its window, or each of its micro-batches."""
    assert list(sharded(targets=targets).shares_of_targets) == ways


def judged(facts: RankFacts) -> dict[str, Any]:
    whole = replace(comparison_of(Record()), ranks=facts)
    return {finding.code: finding for rule in LOOP_RULES for finding in rule.judge(whole)}


def test_what_clips_before_the_reduction_is_named_by_its_line() -> None:
    clip = Clipping(1, "train.py", 8, call="clip_grad_norm_")
    step = Step(1, "train.py", 10, optimizer=0)
    measured = ranks(fit(), shards=SHARES, summed_apart=1.4)
    whole = replace(comparison_of(Record(Calls(windows_of((clip, step))))), ranks=measured)
    (finding,) = shard_local_norm.judge(whole)
    assert finding.location is not None and (finding.location.file, finding.location.line) == ("train.py", 8)
    assert "before they are reduced" in finding.summary and "reduce the gradients first" in finding.remedy
    assert measured.shares_to_try == ()  # a loss that counts otherwise is clipped to the same


def test_a_gather_is_named_by_its_line_in_a_loop() -> None:
    event = Backward(1, "train.py", 9, optimizers=(0,), gathers=(("train.py", 7),))
    step = Step(1, "train.py", 10, optimizer=0)
    windows = windows_of((event, step))
    measured = ranks(fit(residual=0.15), own=GATHERED, gather_control=1.2e-7)
    whole = replace(comparison_of(Record(Calls(windows))), ranks=measured)
    (finding,) = gather_without_gradient.judge(whole)
    assert finding.location is not None and (finding.location.file, finding.location.line) == ("train.py", 7)


LOOP_CASES = {
    "not reduced": (ranks(None, apart=1.4, mean_left=1e-7), {"GAV701"}),
    "changed by one rank": (ranks(None, apart=0.7, summed_apart=0.0, mean_left=1e-7, divergent=False), {"GAV701"}),
    "never reduced, sharded": (sharded(stepped_without=True, reduced=(0, 0), sync_control=2e-7), {"GAV702"}),
    "reduced too early": (sharded(reduced=(652, 0), update_bytes=163, sync_control=2e-7), {"GAV702"}),
    "reduced in a part of the mesh": (
        sharded(stepped_without=True, reduced=(652, 652), update_bytes=163, sync_control=2e-7),
        {"GAV702", "GAV708"},
    ),
    "every time, beside activations": (
        ranks(None, divergent=False, reduced=(2252, 2252), update_bytes=163),
        {"GAV708"},
    ),
    "unequal shares": (ranks(fit((0.534, 0.466)), weights_control=3e-7), {"GAV703"}),
    "means over unequal targets, sharded": (of_targets((20,), (12,)), {"GAV703"}),
    "means over unequal targets of each micro-batch, sharded": (of_targets((11, 9), (7, 13)), {"GAV703"}),
    "one factor, sharded": (
        sharded(shards=(Share(0.5, 1e-7, 1.5), Share(0.5, 1e-7, 1.34)), weights_control=2e-7),
        {"GAV704"},
    ),
    **{
        f"divided by rank 0's targets, {times:g} times": (
            ranks(fit((0.5 / times,) * 2, factor=times, left=2e-7), targets=((4, 4), (7, 5)), weights_control=2e-7),
            {"GAV704"},
        )
        for times in (20 / 8, 20 / 8 / 2)
    },
    "norms of shards": (sharded(shards=SHARES), {"GAV706"}),
    "norms of what is then reduced by hand": (ranks(fit(), shards=SHARES, summed_apart=1.4), {"GAV706"}),
    "statistics": (ranks(None, buffers_apart=("0:1.running_mean",), evaluation_mode_control=2e-7), {"GAV707"}),
    "every time": (ranks(None, divergent=False, reduced=(652, 652), update_bytes=163), {"GAV708"}),
}
QUIET = {
    "replicas of the same bits": ranks(None, divergent=False),
    "reduced by hand": ranks(None, summed_apart=1.4, divergent=False),
    "gradients at the step": sharded(divergent=False, reduced=(0, 652), update_bytes=163),
    "reduced and yet empty": sharded(stepped_without=True, reduced=(0, 652), update_bytes=163),
    "activations in each backward pass": sharded(divergent=False, reduced=(1600, 2252), update_bytes=163),
    "reduced too early, without a difference": sharded(divergent=False, reduced=(652, 0), update_bytes=163),
    "one factor for all shards": sharded(shards=(Share(1.7, 2e-7, 1.5), Share(1.7, 2e-7, 1.34))),
    "unequal targets that are not the cause": of_targets((20,), (12,), left=0.2),
    "equal targets": sharded(targets=((16,), (16,)), weights_control=2e-7),
    "a factor that no rank's targets make": ranks(
        fit((0.3, 0.3), factor=1.7, left=2e-7), targets=((4, 4), (7, 5)), weights_control=2e-7
    ),
    "equal targets beside another factor": ranks(
        fit((0.3, 0.3), factor=1.7, left=2e-7), targets=((4, 4), (5, 3)), weights_control=2e-7
    ),
    "shards that differ in more than a factor": sharded(shards=(Share(1.5, 0.3, 1.5), Share(1.34, 0.3, 1.34))),
    "buffers that holding does not repair": ranks(None, buffers_apart=("0:1.seen",), evaluation_mode_control=0.5),
    "a count that is reduced": ranks(None, divergent=False, reduced=(8, 660), update_bytes=163),
}


@pytest.mark.parametrize("name", LOOP_CASES)
def test_each_signature_has_its_rule_and_its_proof(name: str) -> None:
    facts, codes = LOOP_CASES[name]
    found = judged(facts)
    assert set(found) == codes
    assert all(finding.proven for finding in found.values())


@pytest.mark.parametrize("name", QUIET)
def test_neighbours_stay_quiet(name: str) -> None:
    assert judged(QUIET[name]) == {}


@pytest.mark.parametrize(
    "facts",
    [
        ranks(None, apart=1.4, mean_left=0.3),
        ranks(None, started_apart=0.3),
        sharded(stepped_without=True, reduced=(0, 0)),
        sharded(stepped_without=True, reduced=(0, 0), sync_control=0.2),
        sharded(reduced=(652, 0), update_bytes=163, sync_control=0.2),
        ranks(fit((0.534, 0.466))),
        ranks(fit((0.534, 0.466)), weights_control=0.1),
        ranks(fit((0.25, 0.25), factor=2.0, left=2e-7)),
        sharded(shards=(Share(2.0, 2e-7, 1.5), Share(2.0, 2e-7, 1.34))),
        sharded(shards=(Share(1.5, 2e-7, 1.7), Share(1.34, 2e-7, 1.2))),
        ranks(None, buffers_apart=("0:1.running_mean",), evaluation_mode_control=0.1),
    ],
)
def test_without_a_control_that_came_out_nothing_is_proven(facts: RankFacts) -> None:
    (finding,) = [replace(found) for found in judged(facts).values()] or [None]
    assert finding is not None and not finding.proven
    assert "proven" not in " ".join(evidence.statement for evidence in finding.evidence).replace("not proven", "")
    assert "gaverify ran it" not in finding.remedy


def test_a_parameter_that_was_forgotten_is_named_and_no_repair_that_failed() -> None:
    found = judged(ranks(None, apart=1.4, names_apart=("head.weight",), sync_control=0.4))["GAV701"]
    assert "with different gradients of `head.weight`: they were not reduced" in found.summary
    assert "is 4e-01" in found.evidence[1].statement and "does not repair it" in found.remedy
    assert "no_sync" not in found.remedy and not found.proven


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (ranks(None, engine=None, apart=1.4), "outside `no_sync`"),
        (ranks(None, engine=Engine.FSDP2, apart=1.4), "do not let `fully_shard` ignore these"),
        (ranks(None, engine=None, apart=1.4, tensor_parallel=True), "the same rows"),
    ],
)
def test_ranks_that_are_apart_get_the_remedy_of_their_engine(facts: RankFacts, words: str) -> None:
    assert words in judged(facts)["GAV701"].remedy


OWN = (torch.tensor([1.0, 3.0, 0.0]), torch.tensor([2.0, -1.0, 1.0]))


def gradients(first: float, second: float, beside: torch.Tensor | None = None) -> Gradients:
    return {"weight": first * OWN[0] + second * OWN[1], "bias": beside}


def test_the_weights_of_ranks_are_found() -> None:
    own = [sketch(gradients(1.0, 0.0).values()), sketch(gradients(0.0, 1.0).values())]
    found = fit_rank_weights(own, gradients(0.7, 0.3), gradients(0.5, 0.5))
    assert found is not None and found.weights == pytest.approx((0.7, 0.3)) and found.used == pytest.approx((0.5, 0.5))
    assert fit_rank_weights(own, gradients(0.7, 0.3, torch.ones(2)), gradients(0.5, 0.5)) is None, "the ranks lack one"
    assert fit_rank_weights(own, gradients(0.0, 0.0), gradients(0.5, 0.5)) is None, "nothing to be fitted to"
    assert fit_rank_weights(own, gradients(0.7, 0.3), gradients(math.nan, 0.5)) is None


def test_how_far_ranks_are_apart() -> None:
    one, two, nothing = (sketch(gradients(*weights).values()) for weights in ((1.0, 0.0), (1.5, 0.0), (0.0, 0.0)))
    assert apart_by([one, one, two]) == pytest.approx(0.5)
    assert apart_by([nothing, nothing]) == 0.0 and apart_by([nothing, one]) == math.inf


def test_the_first_share_that_leaves_rounding_is_the_last_that_is_tried() -> None:
    tried: list[Shares] = []

    def left(shares: Shares) -> float:
        tried.append(shares)
        return 1e-9

    targets = ((9, 3), (1, 3))
    found = with_shares(ranks(None, targets=targets), left)
    assert len(found.shares_of_targets) == 2 and tried == [found.shares_tried] and found.weights_control == 1e-9
    assert math.isnan(with_shares(ranks(fit(residual=0.5)), left).weights_control)
