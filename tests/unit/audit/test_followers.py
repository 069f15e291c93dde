"""What is seen of a run beside its calls: buffers, the arithmetic that carries gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import join_group, run_each
from torch import nn

import gaverify
from gaverify.audit.job import Command, Job
from gaverify.audit.recording.calls import BackwardCall, ForwardCall
from gaverify.audit.recording.carried import CarriedState, ContentSketch
from gaverify.audit.recording.draws import draw_mode
from gaverify.audit.recording.recorder import Recorder
from gaverify.audit.recording.storage import Storage
from gaverify.audit.recording.values import Names, Roundoff
from gaverify.collective.membership import TrafficMeter
from gaverify.passes.precision import coarsest_unit, unit_roundoff
from gaverify.passes.randomness import DrawRecorder as RecordedDraws
from gaverify.preparation import place_experiment
from gaverify.records.events import CarriedValue
from gaverify.verdict.measurement import working_unit


class Served(nn.Module):
    """Has running statistics, which forwards move, and values that the script moves between forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.register_buffer("bias", torch.zeros(2))
        self.temperature, self.recent = 1.0, deque([0.0], maxlen=4)


class TestCarriedState:
    """The state before an update: what forwards leave is the full-batch run's, what the script makes is compared."""

    def run(
        self, folder: Path, source: Path | None, *, scale: float, factor: float = 1.0, aligned: tuple[str, ...] = ()
    ) -> tuple[Served, tuple[str, ...]]:
        """Makes an update: a forward, and what the script makes of its state. Returns what differed before the next."""
        torch.manual_seed(0)
        model, names = Served(), Names()
        names.add(model)
        state = CarriedState(names, Storage(folder), source, nullcontext)
        state.aligned = aligned
        for update in (1, 2):
            state.begin_call()
            state.begin_forward(model, trains=True, update=update, unit=6e-8)
            if update == 1:
                model.norm(scale * torch.randn(8, 3, device="cpu"))
                state.end_call()
                with torch.no_grad():
                    model.bias.add_(factor)
                model.temperature, model.recent = 2.0 * factor, deque([factor], maxlen=4)
                state.end_step("0-1")
        return model, tuple(value.name for value in state.describe())

    def both(self, folder: Path, **accumulated: Any) -> tuple[Served, Served, tuple[str, ...]]:
        """The model of a full-batch run, that of another run after it, and what differed."""
        for name in ("full", "accumulated"):
            (folder / name).mkdir()
        reference = self.run(folder / "full", None, scale=1.0)[0]
        return reference, *self.run(folder / "accumulated", folder / "full", **{"scale": 1.0, **accumulated})

    def test_running_statistics_become_those_of_the_full_batch(self, tmp_path: Path) -> None:
        reference, model, differing = self.both(tmp_path, scale=3.0)
        assert torch.equal(model.norm.running_var, reference.norm.running_var) and not differing

    def test_what_the_script_makes_is_compared_and_stays(self, tmp_path: Path) -> None:
        _, model, differing = self.both(tmp_path, factor=3.0)
        assert differing == ("bias", "temperature", "recent")
        assert model.bias.tolist() == [3.0, 3.0] and model.temperature == 6.0

    def test_a_control_sets_what_it_names(self, tmp_path: Path) -> None:
        _, model, differing = self.both(tmp_path, factor=3.0, aligned=("bias", "recent"))
        assert model.bias.tolist() == [1.0, 1.0] and model.temperature == 6.0
        assert model.recent == deque([1.0], maxlen=4) and model.recent.maxlen == 4
        assert len(differing) == 3

    def test_only_what_changes_is_written(self, tmp_path: Path) -> None:
        self.run(tmp_path, None, scale=1.0)
        changed, by_script = torch.load(tmp_path / "state-0-1.pt", weights_only=True)
        assert "0:norm.running_mean" in changed and "0:norm.weight" not in changed
        assert by_script == ["0:bias", "0:recent", "0:temperature"]


@pytest.mark.parametrize("moved", [(0.0, 0.0), (1e-3, 1e-3), (0.0, 1e-3), (1e-3, 0.0), (1e-9, 0.0)])
def test_a_large_frozen_weight_is_compared_without_a_copy(tmp_path: Path, moved: tuple[float, float]) -> None:
    """A model may be frozen but for an adapter; the script moves its weights in one run, in both, or by rounding."""
    differing: tuple[CarriedValue, ...] = ()
    for role, factor in zip(("full", "accumulated"), moved, strict=True):
        (tmp_path / role).mkdir()
        model, names = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 1)), Names()
        with torch.no_grad():
            model[0].weight.copy_(torch.linspace(-1, 1, 6400).view(80, 80))
        model[0].requires_grad_(False)
        names.add(model)
        state = CarriedState(
            names, Storage(tmp_path / role), tmp_path / "full" if role == "accumulated" else None, nullcontext
        )
        for update in (1, 2):
            state.begin_forward(model, trains=True, update=update, unit=6e-8)
            if update == 1:
                kept = state._before_update["0:0.weight"]
                assert isinstance(kept, ContentSketch)
                with torch.no_grad():
                    model[0].weight.add_(factor)
                state.end_step("0-1")
        differing = state.describe()
    assert (tmp_path / "full" / "state-0-1.pt").exists() is bool(moved[0])
    is_apart = abs(moved[0] - moved[1]) > 1e-6
    assert [value.name for value in differing] == (["0.weight"] if is_apart else [])


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
    recorder.steps.note_optimizer(torch.optim.SGD(model.parameters()))  # else the lines of steps are looked for
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
