"""What micro-batches reach of a model, by which the engines wrap it, and gathers of trained tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import join_group, run_each
from torch import nn

from gaverify.collective.engines import Alone, Reach, blocks, of_all
from gaverify.collective.membership import watch_gathers
from gaverify.passes.batching import Problem
from gaverify.passes.experiment import Experiment, Placement
from gaverify.passes.isolation import ModelState
from gaverify.passes.precision import available_devices
from gaverify.remedies import all_gather


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
    experiment = Experiment(
        problem=problem,
        parameters=dict(model.named_parameters()),
        modules=[model],
        state=ModelState([model], (problem.loss,)),
        placement=Placement((torch.device("cpu"),)),
        batch_size=1,
        sizes=(1,),
    )
    alone = Alone(experiment, 2.0)
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


forks = pytest.mark.skipif(
    not dist.is_available() or len(available_devices()) > 1,
    reason="torch without torch.distributed, or autograd that refuses to run in a fork beside an accelerator",
)


def _into_list(value: torch.Tensor) -> torch.Tensor:
    parts = [torch.zeros_like(value) for _ in range(2)]
    dist.all_gather(tensor_list=parts, tensor=value)
    return torch.cat(parts)


def _into_one(value: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(2, dtype=value.dtype, device="cpu")
    with torch.no_grad():  # torch refuses it otherwise
        dist.all_gather_into_tensor(output_tensor=whole, input_tensor=value)
    return whole


def _gathered(folder: Path, rank: int, gather: Callable[[torch.Tensor], torch.Tensor], repaired: bool) -> list[float]:
    """Values, gradient of rank r's value in the loss (r + 1) · Σ gathered, and how many gathers were noted."""
    noted: list[int] = []
    watch_gathers(lambda: noted.append(1), with_gradient=repaired)
    with join_group(rank, 2, folder / "store"):
        value = torch.full((1,), rank + 5.0, dtype=torch.float64, device="cpu", requires_grad=True)
        gather(value.detach())
        whole = gather(value)
        if whole.requires_grad:
            (whole.sum() * (rank + 1)).backward()
        gradient = 0.0 if value.grad is None else float(value.grad)
    return [*whole.tolist(), gradient, len(noted)]


def _transposed(folder: Path, rank: int) -> list[list[float]]:
    """The gradient of rank r's value in the loss Σ (weights × gathered), whose gradient comes transposed."""
    with join_group(rank, 2, folder / "store"):
        value = torch.ones(2, 3, dtype=torch.float64, device="cpu", requires_grad=True)
        weights = torch.arange(12.0, dtype=torch.float64, device="cpu").reshape(3, 4) * (rank + 1)
        (torch.cat(all_gather(value)).T * weights).sum().backward()
        assert value.grad is not None
        return value.grad.tolist()  # type: ignore[no-any-return]


@forks
def test_the_remedy_brings_back_gradients_that_come_transposed(tmp_path: Path) -> None:
    found = run_each([lambda rank=rank: _transposed(tmp_path, rank) for rank in range(2)])
    whole = (torch.arange(12.0, device="cpu").reshape(3, 4) * 3).T  # of both losses
    assert found == [whole[:2].tolist(), whole[2:].tolist()]


@forks
@pytest.mark.parametrize(("repaired", "gradient"), [(True, 3.0), (False, 0.0)], ids=["control", "as it is"])
@pytest.mark.parametrize("gather", [_into_list, _into_one])
def test_a_gather_by_torchs_own_names(
    tmp_path: Path, gather: Callable[[torch.Tensor], torch.Tensor], repaired: bool, gradient: float
) -> None:
    ranks = [lambda rank=rank: _gathered(tmp_path, rank, gather, repaired) for rank in range(2)]
    assert run_each(ranks) == [[5.0, 6.0, gradient, 1]] * 2
