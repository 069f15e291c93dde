"""The table of weights: its rows, and a row more, judged in a run and in a training loop alike."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from measured import LINE, cause, divergent, fitted, row
from updates import update_of

from gaverify import Outcome
from gaverify.records.audit import Record, RowCheck
from gaverify.records.comparison import Comparison, comparison_of
from gaverify.records.experiment import WeightFit
from gaverify.rules.shares import (
    SHARES,
    FittedWeights,
    ShareKind,
    find_share,
    find_shares,
    finding_of_shares,
    mean_of_means,
)

SIZES = (4, 1, 9)
ROOTS = ShareKind(
    "square roots",
    "GAV202",
    amounts=lambda weights: [math.sqrt(size) for size in weights.window.sizes],
    wrong="micro-batches are not weighted by the roots of their sizes",
    meaning="these are the shares of the square roots of the sizes",
    repair="weight each micro-batch by the root of its size",
)
RIGHT = (2 / 6, 1 / 6, 3 / 6)


def run() -> Comparison:
    return divergent(sizes=SIZES, weights=(1 / 3,) * 3, steps=3, **fitted(*RIGHT))


OF_ROOTS = WeightFit(RIGHT, 1e-8, used=(1 / 3,) * 3, factor=1.0, factor_residual=0.4)


def loop(fit: WeightFit = OF_ROOTS) -> Comparison:
    update = update_of(
        1,
        outcome=Outcome.DIVERGENT,
        judged=True,
        parameters=(row(difference=1.0),),
        data=RowCheck(14, 14),
        fit=fit,
        sizes=SIZES,
        steps=3,
    )
    return comparison_of(Record(updates=(update,)))


@pytest.mark.parametrize("comparison", [run(), loop()], ids=["run", "loop"])
def test_a_row_more_is_judged_and_worded_as_the_others_are(comparison: Comparison) -> None:
    weights = find_shares(comparison)
    assert weights is not None and find_share(weights).name != ROOTS.name
    share = find_share(weights, (ROOTS, *SHARES))
    finding = finding_of_shares(weights, share, weights.trial)
    assert share is ROOTS and finding.summary.startswith(ROOTS.wrong)
    assert ROOTS.meaning in finding.evidence[1].statement and ROOTS.repair in finding.remedy


def test_the_repair_of_a_scripts_weights_has_no_number_among_causes_that_were_tried_without_it() -> None:
    comparison = loop()
    beside = replace(comparison, forward=replace(comparison.forward, causes=(cause(), cause(LINE))), cleared=True)
    (finding,) = mean_of_means.judge(beside)
    assert finding.remedy.startswith("weight each micro-batch by its share")


@pytest.mark.parametrize(
    ("total", "name"), [(4 / 24, "K/B"), (6.0, "B/K"), (24.0, "B"), (4.0, "K"), (5.0, "another factor")]
)
def test_a_sum_of_a_runs_weights_is_named(total: float, name: str) -> None:
    comparison = divergent(batch_size=24)
    assert find_share(FittedWeights(comparison, None, 0.0, total=total, micro_batches=4)).name == name
    # by how many samples a script's loss is divided is not known
    in_loop = find_share(FittedWeights(loop(), None, 0.0, total=total, micro_batches=4)).name
    assert in_loop == ("K" if name == "K" else "another factor")


def test_a_divisor_that_moves_is_suspected() -> None:
    """The multipliers are no shares of a mean: with 1.1 in all, neither 1/K, n_k/N nor any count explains them."""
    moving = loop(fit=WeightFit((0.5, 0.2, 0.4), 1e-8, used=(1.0,) * 3, factor=1.0, factor_residual=0.4))
    (finding,) = mean_of_means.judge(moving)
    assert finding.summary.startswith("micro-batches have other weights than in the full batch") and not finding.proven
    assert "a moving average must be updated once per optimizer step" in finding.remedy


def test_every_row_asks_one_question_of_the_weights() -> None:
    assert len({share.name for share in SHARES}) == len(SHARES)
    for share in SHARES:
        questions = (share.amounts, share.total, share.applies)
        assert sum(question is not None for question in questions) == 1, share.name
