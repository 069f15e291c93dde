"""What is seen of a run beside its calls: buffers, the arithmetic that carries gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import join_group, run_each
from torch import nn

import gaverify
from gaverify.audit.job import Command, Job
from gaverify.audit.recording.calls import BackwardCall, ForwardCall
from gaverify.audit.recording.control import Buffers
from gaverify.audit.recording.draws import draw_mode
from gaverify.audit.recording.recorder import Recorder
from gaverify.audit.recording.storage import Storage
from gaverify.audit.recording.values import Roundoff
from gaverify.collective.membership import TrafficMeter
from gaverify.passes.precision import coarsest_unit, unit_roundoff
from gaverify.passes.randomness import Recorder as RecordedDraws
from gaverify.preparation import place_experiment
from gaverify.verdict.measurement import working_unit


class TestBuffers:
    def run_of(self, folder: Path, scale: float) -> tuple[Buffers, nn.Module, Storage]:
        torch.manual_seed(0)
        model = nn.BatchNorm1d(3)
        model.register_buffer("still", torch.ones(2, device="cpu"))
        kept = Buffers(None)
        kept.remember(dict(model.named_buffers()))
        model(scale * torch.randn(8, 3, device="cpu"))
        return kept, model, Storage(folder)

    def test_running_statistics_become_those_of_the_full_batch(self, tmp_path: Path) -> None:
        kept, full, storage = self.run_of(tmp_path, 1.0)
        kept.store(storage, "0-1", dict(full.named_buffers()))
        other = self.run_of(tmp_path, 3.0)[1]
        assert not torch.equal(other.running_var, full.running_var)
        Buffers(tmp_path).load("0-1", dict(other.named_buffers()))
        assert torch.equal(other.running_var, full.running_var)

    def test_what_never_changes_is_not_written(self, tmp_path: Path) -> None:
        kept, full, storage = self.run_of(tmp_path, 1.0)
        kept.store(storage, "0-1", dict(full.named_buffers()))
        assert "still" not in torch.load(tmp_path / "buffers-0-1.pt", weights_only=True)
        kept.store(storage, "0-2", dict(full.named_buffers()))
        assert not (tmp_path / "buffers-0-2.pt").exists()

    def test_buffers_of_another_shape_are_left_alone(self, tmp_path: Path) -> None:
        kept, full, storage = self.run_of(tmp_path, 1.0)
        kept.store(storage, "0-1", dict(full.named_buffers()))
        other = nn.BatchNorm1d(5)
        Buffers(tmp_path).load("0-1", dict(other.named_buffers()))
        assert torch.equal(other.running_var, torch.ones(5, device="cpu"))


BF16 = torch.bfloat16


class Adapted(nn.Module):
    """A trained adapter of low rank beside a frozen layer in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).to(BF16).requires_grad_(False)
        self.adapter = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.to(BF16)).float() + self.adapter(x)


class Taught(nn.Module):
    """A float32 student beside a frozen teacher in bfloat16 that it holds itself; `through` its gradients go or not."""

    def __init__(self, *, through: bool = False) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).to(BF16).requires_grad_(False)
        self.through = through

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.student(x)
        with torch.set_grad_enabled(self.through):
            seen = self.teacher((out if self.through else x).to(BF16)).float()
        return seen if self.through else out - seen


class Inner(nn.Linear):
    """A layer that computes under autocast of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return super().forward(x).float()


class As(nn.Module):
    """A module that is given its input in another type."""

    def __init__(self, dtype: torch.dtype, module: nn.Module) -> None:
        super().__init__()
        self.dtype, self.module = dtype, module.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x.to(self.dtype)).float()


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


MIXED: dict[str, tuple[Callable[[], nn.Module], torch.dtype]] = {
    "float32": (linear, torch.float32),
    "a bfloat16 trunk, a float32 head": (lambda: nn.Sequential(As(BF16, linear()), linear()), BF16),
    "a float32 trunk, a bfloat16 head": (lambda: nn.Sequential(linear(), As(BF16, linear())), BF16),
    "bfloat16 weights, float32 norms": (
        lambda: nn.Sequential(As(BF16, linear()), nn.LayerNorm(4), As(BF16, linear())),
        BF16,
    ),
    "a frozen teacher beside it": (Taught, torch.float32),
    "a frozen network behind it": (lambda: Taught(through=True), BF16),
    "adapters on a bfloat16 base": (lambda: nn.Sequential(Adapted(), Adapted()), BF16),
    "one adapter, whose base no gradient passes": (Adapted, torch.float32),
    "autocast inside": (lambda: nn.Sequential(linear(), Inner(4, 4)), BF16),
}


def by_verify(model: nn.Module, x: torch.Tensor, autocast: torch.dtype | None) -> float:
    problem = gaverify.Problem(model, lambda model, x: model(x).square().mean(), x)
    with ExitStack() as stack:
        experiment = place_experiment(stack, problem, 2, "cpu", None, autocast)
        return working_unit(experiment, experiment.full_batch())


def by_audit(model: nn.Module, x: torch.Tensor, autocast: torch.dtype | None, folder: Path) -> float:
    recorder = Recorder(Job(Command(""), "full", 1, folder=str(folder)), Storage(folder))
    call = ForwardCall(module=model, args=(x,), kwargs={}, is_graded=True)
    with torch.autocast("cpu", autocast, enabled=autocast is not None), recorder.bus.announce(call):
        loss = call.result = model(x).square().mean()
    with recorder.bus.announce(BackwardCall(roots=loss, place=None)):
        loss.backward()
    return recorder.recording.roundoff.unit


@pytest.mark.parametrize("case", MIXED)
def test_both_witnesses_see_one_unit(case: str, tmp_path: Path) -> None:
    make, coarsest = MIXED[case]
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 4)
    assert by_verify(model, x, None) == by_audit(model, x, None, tmp_path) == unit_roundoff(coarsest)


def test_autocast_around_what_is_trained_counts_for_both(tmp_path: Path) -> None:
    model, x = linear(), torch.randn(4, 4)
    assert by_verify(model, x, BF16) == by_audit(model, x, BF16, tmp_path) == unit_roundoff(BF16)


def test_what_runs_without_gradients_tells_an_audit_nothing() -> None:
    roundoff = Roundoff()
    roundoff.add(linear())
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        roundoff.look_at_autocast()
    assert roundoff.unit == unit_roundoff(torch.float32)


@pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="torch before 2.9")
def test_products_that_carry_gradients_count_as_torch_rounds_them() -> None:
    trained, beside = Roundoff(), Roundoff()
    with draw_mode(RecordedDraws(), trained.arithmetic):
        linear()(torch.ones(1, 4)).sum().backward()
    with torch.no_grad(), draw_mode(RecordedDraws(), beside.arithmetic):
        linear()(torch.ones(1, 4))
    for roundoff in (trained, beside):
        roundoff.add(linear())
    torch._C._set_fp32_precision_setter("mkldnn", "matmul", "bf16")
    try:
        assert (trained.unit, beside.unit) == (unit_roundoff(BF16), unit_roundoff(torch.float32))
    finally:
        torch._C._set_fp32_precision_setter("mkldnn", "matmul", "none")


def test_types_without_roundoff_do_not_count() -> None:
    assert coarsest_unit([torch.int64, None]) == 0.0
    assert coarsest_unit([torch.complex64, torch.float16, torch.bool]) == unit_roundoff(torch.float16)


def _reduced(folder: Path) -> list[str]:
    meter = TrafficMeter()
    with join_group(0, 1, folder / "store"), meter.counting():
        dist.all_reduce(torch.ones(2, dtype=torch.float16, device="cpu"))
        dist.broadcast(torch.ones(2, dtype=torch.float64, device="cpu"), 0)
    return [str(dtype) for dtype in meter.reduced_in]


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_the_meter_sees_in_which_type_gradients_are_reduced(tmp_path: Path) -> None:
    assert run_each([lambda: _reduced(tmp_path)]) == [["torch.float16"]]
