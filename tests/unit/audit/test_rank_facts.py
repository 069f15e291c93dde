"""What is read from the records of several ranks: who was reduced, who was changed alone, who stepped otherwise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import NAMES, numbers, run_of, together

from gaverify.audit.judgement import farthest_change, settings_apart
from gaverify.audit.processes import check_parameters
from gaverify.audit.rank_facts import rank_facts
from gaverify.audit.ranks import RankedRun
from gaverify.audit.reading import Run
from gaverify.errors import ProblemError
from gaverify.records.audit import RowCheck, UpdateComparison
from gaverify.records.comparison import Outcome
from gaverify.records.ranks import Collective, RankFacts

FULL = numbers(2.0, 0.0, 1.0, -1.0, 3.0)
OWN = (numbers(1.0, 0.0, 2.0, -1.0, 3.0), numbers(3.0, 0.0, 0.0, -1.0, 3.0))  # their mean is the full batch's
UPDATE = UpdateComparison(1, Outcome.EQUIVALENT, True, (), RowCheck(4, 4))


def ranks_of(folder: Path, finals: tuple[torch.Tensor, torch.Tensor], *others: dict[str, Any]) -> RankedRun:
    changes = others or ({}, {})
    return together(
        [
            run_of(folder / f"rank-{rank}", finals[rank], OWN[rank], rank=rank, ranks=2, **changes[rank])
            for rank in range(2)
        ]
    )


def full_run(folder: Path) -> Run:
    return run_of(folder / "full", FULL, FULL, role="full")


def facts(folder: Path, finals: tuple[torch.Tensor, torch.Tensor], *others: dict[str, Any]) -> RankFacts:
    return rank_facts(full_run(folder), ranks_of(folder, finals, *others), UPDATE, 2.0**-24)


def test_ranks_that_a_script_reduces_by_hand_step_with_the_same_gradients(tmp_path: Path) -> None:
    """Its backward passes leave each rank its own gradient; what the optimizers see is what counts."""
    found = facts(tmp_path, (FULL, FULL), {"summed": OWN[0]}, {"summed": OWN[1]})
    assert found.apart == 0.0
    assert found.summed_apart > 0.1
    assert found.weights is not None and found.weights.used == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize("factors", [(0.5, 0.25), (0.5, 0.5)])
def test_what_each_rank_scales_before_a_reduction_by_hand(tmp_path: Path, factors: tuple[float, ...]) -> None:
    reduced = sum((factor * own for factor, own in zip(factors, OWN, strict=True)), torch.zeros_like(FULL)) / 2
    found = facts(tmp_path, (reduced, reduced), {"summed": OWN[0]}, {"summed": OWN[1]})
    assert [part.factor for part in found.shards] == pytest.approx(factors)
    assert all(part.residual < 1e-6 for part in found.shards)


def test_ranks_that_are_not_reduced_are_apart_at_both_moments(tmp_path: Path) -> None:
    found = facts(tmp_path, OWN)
    assert min(found.apart, found.summed_apart) > 0.1
    assert found.mean_left == pytest.approx(0.0)


@pytest.mark.parametrize(("moved", "names"), [((0.0, 1.0), ("bias",)), ((1.0, 1.0), ()), ((0.0, 0.0), ())])
def test_which_parameters_are_apart(tmp_path: Path, moved: tuple[float, float], names: tuple[str, ...]) -> None:
    other = FULL + torch.tensor([moved[0]] * 4 + [moved[1]], dtype=FULL.dtype, device="cpu")
    assert facts(tmp_path, (FULL, other)).names_apart == names


def test_a_gradient_that_one_rank_changes_after_the_reduction(tmp_path: Path) -> None:
    found = facts(tmp_path, (FULL, FULL / 2), {}, {"summed": FULL})
    assert found.apart == pytest.approx(0.5) and found.summed_apart == 0.0


@pytest.mark.parametrize(("factor", "apart"), [(1.0, 0.0), (2.0, 1.0)])
def test_weights_before_the_first_step(tmp_path: Path, factor: float, apart: float) -> None:
    found = facts(tmp_path, (FULL, FULL), {}, {"before": torch.ones_like(FULL) * factor})
    assert found.started_apart == pytest.approx(apart)


def test_gathers_of_trained_tensors_are_counted(tmp_path: Path) -> None:
    gathered = {"backward": {"gathers": [["train.py", 7]]}}
    assert facts(tmp_path, (FULL, FULL), gathered, gathered).own.count(Collective.GATHER) == 1


@pytest.mark.parametrize(("moved", "alike"), [(0.0, True), (1.0, False)])
def test_ranks_that_are_fed_the_same_rows(tmp_path: Path, moved: float, alike: bool) -> None:
    fed = torch.arange(6.0, device="cpu").reshape(2, 3)
    assert facts(tmp_path, (FULL, FULL), {"fed": fed}, {"fed": fed + moved}).fed_alike is alike


def test_no_gather_is_none(tmp_path: Path) -> None:
    assert not facts(tmp_path, (FULL, FULL)).gathers


def test_a_setting_of_another_rank(tmp_path: Path) -> None:
    full, runs = full_run(tmp_path), ranks_of(tmp_path, (FULL, FULL), {}, {"settings": [{"lr": 0.2}]})
    round_ = ((0, 1),)
    (difference,) = settings_apart(full.samples(round_), runs.each(round_))
    assert (difference.rank, difference.name, difference.full, difference.accumulated) == (1, "lr", 0.1, 0.2)
    assert settings_apart(full.samples(round_), runs.each(round_)[:1]) == ()


def test_a_step_of_another_rank_that_makes_something_else(tmp_path: Path) -> None:
    full = full_run(tmp_path)
    runs = ranks_of(tmp_path, (FULL, FULL), {}, {"weights": torch.ones_like(FULL) - 0.2})
    round_ = ((0, 1),)
    worst = farthest_change(full.samples(round_), runs.each(round_), 2.0**-24)
    alone = farthest_change(full.samples(round_), runs.each(round_)[:1], 2.0**-24)
    assert worst is not None and alone is not None
    assert (worst.outcome, alone.outcome) == (Outcome.DIVERGENT, Outcome.EQUIVALENT)
    assert math.isclose(worst.norm_ratio, 2.0)


def test_ranks_that_train_other_parameters_are_refused(tmp_path: Path) -> None:
    runs = ranks_of(tmp_path, (FULL, FULL), {}, {"parameters": NAMES[:1]})
    with pytest.raises(ProblemError, match=r"train different parameters: `bias` .* ranks 0 and 1"):
        check_parameters(runs.ranks)


def test_flat_pieces_are_refused_by_name(tmp_path: Path) -> None:
    runs = ranks_of(tmp_path, (FULL, FULL))
    for run in runs.ranks:
        run.meta["flattened"] = True  # type: ignore[index]
    with pytest.raises(ProblemError, match="FullyShardedDataParallel cuts the model into flat pieces"):
        check_parameters(runs.ranks)


def test_ranks_that_train_the_same_parameters_are_not(tmp_path: Path) -> None:
    check_parameters(ranks_of(tmp_path, (FULL, FULL)).ranks)
