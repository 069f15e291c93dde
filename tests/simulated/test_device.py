"""The simulated device behaves as a real one: rounded products, and how often the host waits for it, too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gaverify
from gaverify import Outcome, Problem, Verdict
from gaverify.report import render
from gaverify.verdict.comparison import measure

DEVICE = torch.ops.simulated


def test_devices_do_not_mix() -> None:
    there = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3)
    assert (there + torch.tensor(2.0)).tolist() == [3.0] * 3  # a number may come from the host
    assert there[torch.tensor([0, 2])].device.type == "cuda"  # and so may indices


def test_one_seed_gives_each_device_numbers_of_its_own() -> None:
    torch.manual_seed(3)
    here, there = torch.rand(8), torch.rand(8, device="cuda")
    assert not torch.equal(here, there.cpu())
    torch.manual_seed(3)
    assert torch.equal(there, torch.rand(8, device="cuda")), "the device's generator does not depend on the host's"
    assert torch.cuda.initial_seed() == 3


def test_only_what_the_host_waits_for_is_counted() -> None:
    x = torch.randn(40, 40, device="cuda", requires_grad=True)
    DEVICE.reset_counters()
    (x @ x).relu().mean().backward()
    assert DEVICE.synchronisations() == 0 and DEVICE.operations() > 4
    float(x.detach().sum())
    x.detach().cpu()
    x.detach()[x.detach() > 0]
    assert DEVICE.synchronised_by() == "_local_scalar_dense=1; copy to host=1; index with a mask=1"


def test_a_capture_refuses_what_the_host_waits_for() -> None:
    x = torch.ones(3, device="cuda")
    with torch.cuda.graph(None):
        x.add_(1)
        assert torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(None):
        x.cpu()
    assert not torch.cuda.is_current_stream_capturing()


def test_memory_is_counted() -> None:
    before = DEVICE.live_bytes()
    x = torch.empty(1000, device="cuda")
    assert DEVICE.live_bytes() - before == 4000
    DEVICE.reset_peak()
    del x
    assert DEVICE.live_bytes() == before and torch.cuda.max_memory_allocated() >= before + 4000


def test_views_writes_and_saved_tensors_share_memory(tmp_path) -> None:
    x = torch.zeros(2, 3, device="cuda")
    x[1].add_(5)
    x.t()[0] = 7
    assert x.tolist() == [[7, 0, 0], [7, 5, 5]]
    torch.save(x, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt"), x)


@pytest.mark.parametrize(
    "module", [nn.LSTM(3, 4), nn.Conv1d(3, 4, 2), nn.BatchNorm1d(3), nn.TransformerEncoderLayer(4, 2)]
)
def test_gradients_are_the_hosts(module: nn.Module) -> None:
    module = module.double().eval()
    width = 4 if isinstance(module, nn.TransformerEncoderLayer) else 3
    shape = (5, 2, width) if not isinstance(module, nn.Conv1d | nn.BatchNorm1d) else (5, width, 6)
    inputs = torch.randn(shape, dtype=torch.float64)
    found = []
    for device in ("cpu", "cuda"):
        module.zero_grad()
        module.to(device)
        output = module(inputs.to(device))
        (output[0] if isinstance(output, tuple) else output).square().sum().backward()
        found.append([parameter.grad.cpu() for parameter in module.parameters()])
    for host, device in zip(*found, strict=True):
        torch.testing.assert_close(device, host, rtol=1e-12, atol=1e-12)


def test_tf32_rounds_where_the_switch_says_so() -> None:
    a, b = torch.randn(2, 64, 64, device="cuda")
    exact = a.double() @ b.double()
    errors = []
    for precision in ("ieee", "tf32"):
        torch.backends.cuda.matmul.fp32_precision = precision
        errors.append(float(((a @ b).double() - exact).norm() / exact.norm()))
    torch.backends.cuda.matmul.fp32_precision = "none"
    assert errors[0] < 1e-6 < 1e-4 < errors[1] < 1e-3


def test_convolutions_round_by_the_batchs_shape_where_the_switch_says_so() -> None:
    layer, x = nn.Conv2d(2, 4, 3).cuda(), torch.randn(5, 2, 8, 8, device="cuda")
    apart = []
    for precision in ("ieee", "tf32"):
        torch.backends.cudnn.conv.fp32_precision = precision
        apart.append(float((layer(x)[:2] - layer(x[:2])).detach().norm()))
    torch.backends.cudnn.conv.fp32_precision = "none"
    assert apart[0] < 1e-5 < 1e-4 < apart[1] < 1e-1


def test_fused_kernels_write_past_lazy_clones() -> None:
    x = torch.ones(3, device="cuda")
    clone = torch._lazy_clone(x)
    torch._foreach_mul_([x], 2.0)
    assert clone.tolist() == [2.0] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_context_does_not_survive_a_fork() -> None:
    torch.ones(1, device="cuda")
    child = os.fork()
    if child == 0:
        try:
            torch.cuda.current_device()
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.cuda.current_device() == 0


U32, U_TF32 = 2.0**-24, 2.0**-11


@pytest.fixture(params=["none", "tf32"])
def precision(request: pytest.FixtureRequest):
    torch.backends.cuda.matmul.fp32_precision = request.param
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = "none"


def verified(reduction: str = "mean", device: str = "cuda", **options) -> Verdict:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, device="cpu"), nn.Tanh(), nn.Linear(64, 4, device="cpu"))
    batch = torch.randn(16, 64, device="cpu"), torch.randint(0, 4, (16,), device="cpu")
    problem = Problem(model, lambda m, rows: cross_entropy(m(rows[0]), rows[1], reduction=reduction), batch)
    return gaverify.verify(problem, device=device, **options)


def test_it_is_said_in_text_and_json(precision: str) -> None:
    verdict = verified()
    said = precision == "tf32"
    assert verdict.outcome is Outcome.EQUIVALENT
    assert ("float32 (matmul tf32)" in render([verdict], "text")) is said
    document = json.loads(render([verdict], "json"))
    assert (json.dumps(["matmul tf32"]) in json.dumps(document)) is said
    assert verdict.run.rounded == (("matmul tf32",) if said else ())


def test_the_host_is_not_rounded_by_the_devices_switch(precision: str) -> None:
    assert verified(device="cpu").run.rounded == ()


def test_a_fault_is_proven_under_it(precision: str) -> None:
    verdict = verified("sum")
    assert [(f.code, f.proven) for f in verdict.findings if f.severity == "fault"] == [("GAV201", True)]


class InFloat32(nn.Linear):
    """A layer whose kernel knows no float64, so that the noise floor decides, in working precision's own roundoff."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the products.

        Raises:
            RuntimeError: They were asked for in float64.
        """
        if x.dtype is torch.float64:
            raise RuntimeError("no kernel for float64")
        return super().forward(x)


def test_the_unit_roundoff_follows(precision: str) -> None:
    torch.manual_seed(0)
    problem = Problem(
        InFloat32(64, 4, device="cpu"),
        lambda model, rows: model(rows).square().mean(),
        torch.randn(16, 64, device="cpu"),
    )
    verdict = gaverify.verify(problem, device="cuda", exact=True)
    assert verdict.outcome is Outcome.EQUIVALENT  # without float64 `exact` decides as the default does
    # where nothing differs, float32's own bound decides at once, and the rounding of TF32 is never asked for
    by_floor = all(row.method == "noise-floor" for row in verdict.parameters)
    unit = U_TF32 if precision == "tf32" and by_floor else U32
    for row in verdict.parameters:
        assert 16 * unit * row.reference_norm <= row.allowed < 0.1 * row.reference_norm
        assert precision == "tf32" or row.allowed < 16 * U_TF32 * row.reference_norm


def waits(work: Callable[[], object]) -> int:
    DEVICE.reset_counters()
    work()
    return int(DEVICE.synchronisations())


class Branches(nn.Module):
    """Layers beside each other: more of them change neither the depth nor what has to be decided.

    All values are quarters and small, so that float32 rounds nothing and working precision decides on every processor.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 2) for _ in range(count))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-1, 2, parameter.shape) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers]).relu().sum(0)


def problem(branches: int) -> Problem:
    """A model and a batch that are on the device already."""
    torch.manual_seed(0)
    batch = tuple(torch.randint(-2, 3, (8, width), device="cuda").float() for width in (6, 2))
    return Problem(
        Branches(branches).to("cuda"), lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), batch
    )


def counted(branches: int, **options: str) -> tuple[int, gaverify.Verdict]:
    task, found = problem(branches), []
    count = waits(lambda: found.append(gaverify.verify(task, steps=4, **options)))
    return count, found[0]


SIZES = [[(3, 4)], [(300, 300)] * 3, [(2000, 2000)], [(5,)] * 400, [(n % 40 + 1, 8) for n in range(400)]]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)} of {sizes[-1]}")
def test_comparing_gradients_waits_once(sizes: list[tuple[int, ...]]) -> None:
    """One transfer of the numbers; the lengths of small parameters of odd shapes are copied to the device before."""
    gradients = {str(n): torch.randn(size, device="cuda") for n, size in enumerate(sizes)}
    assert waits(lambda: measure(gradients, gradients)) <= 2


def test_an_equivalent_run_waits_as_often_with_many_parameters_as_with_few() -> None:
    (few, first), (many, second) = counted(3), counted(100)
    assert first.outcome is second.outcome is Outcome.EQUIVALENT
    assert many <= few <= 10, DEVICE.synchronised_by()


def test_a_diagnosis_waits_as_often_with_many_parameters_as_with_few() -> None:
    (few, first), (many, second) = (counted(branches, weighting="none") for branches in (3, 100))
    for verdict in (first, second):
        assert [finding.code for finding in verdict.findings if finding.severity == "fault"] == ["GAV201"]
    # Weights that fit fewer numbers than there are micro-batches are fitted again at moved parameters: 18 waits.
    assert many <= few <= 80, DEVICE.synchronised_by()
