"""What is read from the records of several ranks: what they share, who was reduced, changed alone, stepped otherwise.

What the recorder adds to them: no collective of its own, and of replicas no gradient but rank 0's on disk.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import NAMES, numbers, run_of, together
from recorded_ranks import trained

from gaverify.audit.judgement import differing_settings, farthest_change
from gaverify.audit.processes import check_parameters
from gaverify.audit.ranks import RankedRun, distance_between_ranks, rank_facts
from gaverify.audit.reading import RecordedRun
from gaverify.audit.recording.samples import input_rows
from gaverify.audit.recording.watching import IncomingGradients, Watch
from gaverify.audit.same_data import check_rows
from gaverify.errors import ProblemError
from gaverify.records.audit import RowCheck, UpdateComparison
from gaverify.records.events import Forward, ModelSummary, Shard, TrainedGroup, TrainedParameter
from gaverify.records.outcomes import Outcome
from gaverify.records.ranks import Collective, Engine, RankFacts

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


def full_run(folder: Path) -> RecordedRun:
    return run_of(folder / "full", FULL, FULL, role="full")


def facts(folder: Path, finals: tuple[torch.Tensor, torch.Tensor], *others: dict[str, Any]) -> RankFacts:
    return rank_facts(full_run(folder), ranks_of(folder, finals, *others), UPDATE, 2.0**-24)


def test_ranks_that_a_script_reduces_by_hand_step_with_the_same_gradients(tmp_path: Path) -> None:
    """Its backward passes leave each rank its own gradient; what the optimizers see is what counts."""
    found = facts(tmp_path, (FULL, FULL), {"summed": OWN[0]}, {"summed": OWN[1]})
    assert found.replicas.difference == 0.0
    assert found.replicas.summed_difference > 0.1
    assert found.shares.fit is not None and found.shares.fit.used == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize("factors", [(0.5, 0.25), (0.5, 0.5)])
def test_what_each_rank_scales_before_a_reduction_by_hand(tmp_path: Path, factors: tuple[float, ...]) -> None:
    reduced = sum((factor * own for factor, own in zip(factors, OWN, strict=True)), torch.zeros_like(FULL)) / 2
    found = facts(tmp_path, (reduced, reduced), {"summed": OWN[0]}, {"summed": OWN[1]})
    assert [part.factor for part in found.shares.shards] == pytest.approx(factors)
    assert all(part.residual < 1e-6 for part in found.shares.shards)


def test_ranks_that_are_not_reduced_are_apart_at_both_moments(tmp_path: Path) -> None:
    found = facts(tmp_path, OWN)
    assert min(found.replicas.difference, found.replicas.summed_difference) > 0.1
    assert found.shares.mean_left == pytest.approx(0.0)


@pytest.mark.parametrize(("moved", "names"), [((0.0, 1.0), ("bias",)), ((1.0, 1.0), ()), ((0.0, 0.0), ())])
def test_which_parameters_are_apart(tmp_path: Path, moved: tuple[float, float], names: tuple[str, ...]) -> None:
    other = FULL + torch.tensor([moved[0]] * 4 + [moved[1]], dtype=FULL.dtype, device="cpu")
    assert facts(tmp_path, (FULL, other)).replicas.parameters == names


def test_a_gradient_that_one_rank_changes_after_the_reduction(tmp_path: Path) -> None:
    found = facts(tmp_path, (FULL, FULL / 2), {}, {"summed": FULL})
    assert found.replicas.difference == pytest.approx(0.5) and found.replicas.summed_difference == 0.0


@pytest.mark.parametrize(("factor", "apart"), [(1.0, 0.0), (2.0, 1.0)])
def test_weights_before_the_first_step(tmp_path: Path, factor: float, apart: float) -> None:
    found = facts(tmp_path, (FULL, FULL), {}, {"before": torch.ones_like(FULL) * factor})
    assert found.replicas.starting_difference == pytest.approx(apart)


def test_gathers_of_trained_tensors_are_counted(tmp_path: Path) -> None:
    gathered = {"backward": {"gathers": (("train.py", 7),)}}
    assert facts(tmp_path, (FULL, FULL), gathered, gathered).traffic.own.count(Collective.GATHER) == 1


@pytest.mark.parametrize(("moved", "alike"), [(0.0, True), (1.0, False)])
def test_ranks_that_are_fed_the_same_rows(tmp_path: Path, moved: float, alike: bool) -> None:
    fed = torch.arange(6.0, device="cpu").reshape(2, 3)
    assert facts(tmp_path, (FULL, FULL), {"fed": fed}, {"fed": fed + moved}).replicas.fed_alike is alike


def test_a_setting_of_another_rank(tmp_path: Path) -> None:
    full, runs = full_run(tmp_path), ranks_of(tmp_path, (FULL, FULL), {}, {"settings": [{"lr": 0.2}]})
    round_ = ((0, 1),)
    (difference,) = differing_settings(full.samples(round_), runs.each(round_))
    assert (difference.rank, difference.name, difference.full, difference.accumulated) == (1, "lr", 0.1, 0.2)
    assert differing_settings(full.samples(round_), runs.each(round_)[:1]) == ()


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
        vars(run)["closing"] = replace(run.closing, models=ModelSummary(is_flattened=True))
    with pytest.raises(ProblemError, match=r"FullyShardedDataParallel \(FSDP1\) cuts the model into flat pieces"):
        check_parameters(runs.ranks)


ROUND = ((0, 1),)
ROWS = torch.arange(12.0, device="cpu").reshape(4, 3)


def shard(offset: int, addends: int = 0) -> dict[str, Any]:
    """What a rank tells that holds a piece of the weight from `offset` on, and the bias whole."""
    weight = TrainedParameter("0:weight", (4,), Shard((offset,), (4,)), addends or None)
    return {"groups": (TrainedGroup((weight, NAMES[1]), (0,)),)}


def shared_by(
    folder: Path,
    told: tuple[dict[str, Any], ...] = ({}, {}),
    finals: tuple[torch.Tensor, ...] = (FULL, FULL),
    **fed: torch.Tensor,
) -> RankedRun:
    """Two ranks; `fed` are the rows of `rank_0` and `rank_1`, one for each of their forwards."""
    runs = []
    for rank, own in enumerate(told):
        name = f"rank_{rank}"
        runs.append(run_of(folder / name, finals[rank], OWN[rank], rank=rank, ranks=2, told=own, fed=fed.get(name)))
        if name in fed:
            torch.save([input_rows((row,), {}) for row in fed[name].split(1)], folder / name / "rows-1.pt")
    return together(runs)


def shared_facts(folder: Path, runs: RankedRun) -> RankFacts:
    return rank_facts(run_of(folder / "full", FULL, FULL, role="full"), runs, UPDATE, 2.0**-24)


PARALLEL = ({"models": ModelSummary(is_tensor_parallel=True)},) * 2


@pytest.mark.parametrize(
    ("told", "other", "counted"),
    [(PARALLEL, ROWS[:2], 2), (({}, {}), ROWS[:2], 4), (PARALLEL, ROWS[:2].flip(0), 4), (PARALLEL, ROWS[2:], 4)],
    ids=["shared", "without tensor parallelism", "in another order", "divided"],
)
def test_ranks_that_share_their_rows_count_once(
    tmp_path: Path, told: tuple[dict[str, Any], ...], other: torch.Tensor, counted: int
) -> None:
    full = run_of(tmp_path / "alone", FULL, FULL, role="full", fed=ROWS[:2])
    runs = shared_by(tmp_path, told, rank_0=ROWS[:2], rank_1=other).beside(full)
    forward = next(event for event in runs.events if isinstance(event, Forward))
    rows = runs.rows_of(runs.samples(ROUND), reached=False)
    assert forward.rows == counted
    assert check_rows(full.rows_of(full.samples(ROUND), reached=False), rows).same is (counted == 2)


def test_rows_that_the_full_batch_holds_as_often_count_as_often(tmp_path: Path) -> None:
    full = run_of(tmp_path / "alone", FULL, FULL, role="full", fed=torch.cat([ROWS[:2], ROWS[:2]]))
    assert shared_by(tmp_path, PARALLEL, rank_0=ROWS[:2], rank_1=ROWS[:2]).beside(full).feeding == ()


def test_a_batch_of_which_every_rank_is_fed_a_part_of_the_same_size_is_not_the_full_one(tmp_path: Path) -> None:
    full = run_of(tmp_path / "alone", FULL, FULL, role="full", fed=ROWS)
    runs = shared_by(tmp_path, PARALLEL, rank_0=ROWS[:2], rank_1=ROWS[:2]).beside(full)
    assert runs.feeding == () and shared_facts(tmp_path, runs).replicas.fed_alike


@pytest.mark.parametrize(("copies", "weight"), [(1, FULL[:4] * 2), (2, FULL[:4])])
def test_addends_of_a_gradient_are_added_up(tmp_path: Path, copies: int, weight: torch.Tensor) -> None:
    runs = shared_by(tmp_path, (shard(0, copies), shard(0, copies)))
    assert torch.equal(runs.gradients(ROUND)[0, 0], weight)
    assert torch.equal(runs.gradients(ROUND)[0, 1], FULL[4:])  # held whole by both


@pytest.mark.parametrize("summed", [None, FULL])
def test_gradients_that_nothing_changed_before_the_step_are_one_stage(
    tmp_path: Path, summed: torch.Tensor | None
) -> None:
    """Two stages that differ alike would cost the control runs of clipping by hand."""
    runs = [run_of(tmp_path / str(at), FULL, FULL, rank=at, ranks=2, told=shard(0), summed=summed) for at in range(2)]
    assert (together(runs).samples(ROUND).of("summed") == {}) is (summed is None)


def test_copies_of_a_shard_have_to_hold_the_same(tmp_path: Path) -> None:
    """A mesh of replicas of shards: ranks of one column hold the same piece."""
    runs = shared_by(tmp_path, (shard(0), shard(0)), (FULL, FULL * 2))
    assert distance_between_ranks(runs, ROUND, "final") == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("told", "bias", "expected"),
    [
        ((shard(0), shard(4)), 3.0, 0.0),
        ((shard(0), shard(4)), 6.0, 1.0),
        ((shard(0, 1), shard(0, 1)), 3.0, 0.0),
    ],
    ids=["other shards", "a bias of its own", "addends"],
)
def test_pieces_are_no_copies(
    tmp_path: Path, told: tuple[dict[str, Any], dict[str, Any]], bias: float, expected: float
) -> None:
    other = torch.cat([FULL[:4] * 7, numbers(bias)])
    assert distance_between_ranks(shared_by(tmp_path, told, (FULL, other)), ROUND, "final") == pytest.approx(expected)


def test_where_no_two_ranks_hold_the_same_nothing_is_known(tmp_path: Path) -> None:
    pieces = [tuple(replace(name, shard=Shard((at,), name.shape)) for name in NAMES) for at in (0, 4)]
    told = tuple({"groups": (TrainedGroup(parameters, (0,)),)} for parameters in pieces)
    assert math.isnan(distance_between_ranks(shared_by(tmp_path, told, (FULL, FULL * 2)), ROUND, "final"))


@pytest.mark.parametrize(("used", "part"), [(FULL, 0.0), (FULL.sign(), 0.4)])
def test_what_is_no_sum_of_the_ranks_own_gradients(tmp_path: Path, used: torch.Tensor, part: float) -> None:
    assert shared_facts(tmp_path, shared_by(tmp_path, finals=(used, used))).reduction.altered == pytest.approx(
        part, abs=0.1
    )


def test_what_no_backward_pass_computed_alters_nothing(tmp_path: Path) -> None:
    """A gradient that a script puts in place itself is not known to the ranks' backward passes."""
    nothing = [(1, torch.cat([FULL[:4], numbers(0.0)]))]
    runs = [run_of(tmp_path / str(rank), FULL, FULL, rank=rank, ranks=2, increments=nothing) for rank in range(2)]
    assert shared_facts(tmp_path, together(runs)).reduction.altered == pytest.approx(0.0, abs=1e-9)


def test_a_parameter_of_two_optimizers_is_listened_to_for_both() -> None:
    """`ZeroRedundancyOptimizer` holds all parameters, and the one inside it this rank's."""
    weight = torch.nn.Parameter(torch.ones(3, device="cpu"))
    incoming, watch = IncomingGradients(always=True), Watch()
    for _ in range(2):
        watch.add(torch.optim.SGD([weight], lr=0.1))
    for entry in watch:
        incoming.listen(entry)
    (weight * numbers(1.0, 2.0, 3.0)).sum().backward()
    for index in range(2):
        taken = incoming.take(index)
        assert taken is not None and taken.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("moved", ["always", "later", "never"])
def test_what_a_hook_moves_out_of_a_gradient_is_known_all_the_same(moved: str) -> None:
    """Where `.grad` shows what a pass gave, nothing more is read; a hook that may move it later is listened to."""
    weight, watch, kept = torch.nn.Parameter(torch.ones(3, device="cpu")), Watch(), []
    watch.add(torch.optim.SGD([weight], lr=0.1))

    def move(parameter: torch.Tensor) -> None:
        if moved == "always" or (moved == "later" and kept):
            parameter.grad = None
        kept.append(parameter)

    if moved != "never":
        weight.register_post_accumulate_grad_hook(move)
    incoming, taken = IncomingGradients(always=False), []
    for _ in range(2):
        (entry,) = watch
        incoming.listen(entry)
        (weight * numbers(1.0, 2.0, 3.0)).sum().backward()
        found = incoming.take_moved(entry, watch.look())
        taken.append(None if found is None else found.tolist())
    given = [1.0, 2.0, 3.0]
    assert taken == {"always": [given, given], "later": [None, given], "never": [None, None]}[moved]
    assert incoming.take(0) is None if moved == "never" else incoming.take(0) is not None


@pytest.mark.parametrize(("updates", "told"), [(1, True), (0, False)])
def test_ranks_with_fewer_batches_are_refused_with_the_updates_that_all_make(
    tmp_path: Path, updates: int, told: bool
) -> None:
    """Where a rank joins the others' collectives (DDP's `join`), the updates that all make can be compared."""
    runs = [run_of(tmp_path / str(at), FULL, FULL, rank=at, ranks=2) for at in range(2)]
    for run, made in zip(runs, (2, updates), strict=True):
        vars(run)["closing"] = replace(run.closing, updates=made)
    more = (runs[0].folder / "events.jsonl").read_text(encoding="utf-8")
    (runs[0].folder / "events.jsonl").write_text(more * 2, encoding="utf-8")
    with pytest.raises(ProblemError, match="give every rank the same number of batches") as refused:
        together(runs).events  # noqa: B018
    assert ("`--updates 1` to compare those that all ranks make" in str(refused.value)) is told


WIDTH = 768
GRADIENT = 4 * 2 * (WIDTH * WIDTH + WIDTH)  # bytes of the whole model's


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.slow
@pytest.mark.parametrize("engine", list(Engine))
def test_the_recorder_sends_nothing_between_ranks(tmp_path: Path, engine: Engine) -> None:
    for name in ("bare", "recorded"):
        (tmp_path / name).mkdir()
    bare = trained(tmp_path / "bare", engine, WIDTH, recorded=False)
    recorded = trained(tmp_path / "recorded", engine, WIDTH, recorded=True)
    assert [rank.collectives for rank in recorded] == [rank.collectives for rank in bare]
    assert [rank.traffic for rank in recorded] == [rank.traffic for rank in bare]
    assert min(rank.collectives for rank in bare) > 0 and min(rank.traffic.bytes_moved for rank in bare) > GRADIENT
    stored = [rank.stored for rank in recorded]
    assert max(stored) < GRADIENT / 2  # of two updates: sketches, samples and rows
