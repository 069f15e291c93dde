"""The simulated device behaves as a real one in what the other tests rest on."""

import os

import pytest
import torch
from torch import nn

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
