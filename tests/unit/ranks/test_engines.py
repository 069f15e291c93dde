"""What micro-batches reach of a model, by which the engines wrap it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gaverify.passes.problem import Problem
from gaverify.passes.task import Task
from gaverify.ranks.engines import Alone, Reach, blocks, of_all


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(2, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        always: torch.Tensor = self.branches[0](x)
        return always + self.branches[1](x) if (x > 0).all() else always


def reach(*micro_batches: torch.Tensor) -> Reach:
    model = _Branches()
    problem = Problem(model, lambda m, b: m(b).sum(), micro_batches[0])
    task = Task(
        problem=problem,
        parameters=dict(model.named_parameters()),
        modules=[model],
        device=torch.device("cpu"),
        batch_size=1,
        sizes=(1,),
        weighting="uniform",
    )
    alone = Alone(task, ranks=2)
    for k, micro_batch in enumerate(micro_batches):
        with alone.around(k):
            alone.backward(k, model(micro_batch).sum(), 1.0)
    return alone.reach


def test_a_branch_that_a_micro_batch_leaves_out_is_noted() -> None:
    right, left = torch.ones(1, 2), -torch.ones(1, 2)
    assert reach(right, right) == Reach(False, ((1, 1), (1, 1)))
    assert reach(right, left) == Reach(True, ((1, 1), (1, 0)))
    assert reach(left).left_out == {"branches.1.weight", "branches.1.bias"}


def test_only_what_all_ranks_run_alike_is_agreed() -> None:
    both = Reach(False, ((1, 1), (2, 2)))
    assert of_all([both, both]) == both
    assert of_all([both, Reach(True, ((1, 1), (2, 1)))]) == Reach(True, ((1, 1), (0,)))


def test_a_parameter_that_every_rank_leaves_out_is_no_trouble() -> None:
    some, none = Reach(True, (), frozenset({"a", "b"})), Reach(True, (), frozenset({"b"}))
    assert of_all([some, some]).left_out == frozenset()
    assert of_all([some, none]).left_out == {"a"}


@pytest.mark.parametrize(("shared", "count"), [(False, 2), (True, 0)])
def test_blocks_that_share_a_parameter_have_no_owner(shared: bool, count: int) -> None:
    model = _Branches()
    if shared:
        model.branches[1].weight = model.branches[0].weight
    assert len(list(blocks(model))) == count
