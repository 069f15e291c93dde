"""Precision and devices: switches that are read and restored, weights that are lifted, and no device by its name."""

from __future__ import annotations

import ast
import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forwards import experiment_of as on_the_cpu
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaverify
from gaverify import Outcome, Problem, ProblemError
from gaverify.passes.calls import OperationMode
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import PassProbe
from gaverify.passes.isolation import ModelState, exact_products
from gaverify.passes.isolation.globals import PRECISION, flag_states
from gaverify.passes.lifting import LiftedWeights, lift_weights
from gaverify.passes.precision import (
    Arithmetic,
    buffers_differ,
    convert_weights,
    dtype_like,
    product_of,
    rounded_products,
    rounded_unit,
    short_name,
    unit_roundoff,
)
from gaverify.report import render


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_plus_a_unit_roundoff_rounds_to_one_and_a_little_more_does_not(dtype: torch.dtype) -> None:
    u = unit_roundoff(dtype)
    one = torch.ones((), dtype=dtype)
    assert torch.tensor(1.0 + u, dtype=torch.float64).to(dtype) == one
    assert torch.tensor(1.0 + 1.01 * u, dtype=torch.float64).to(dtype) > one
    assert short_name(dtype) == str(dtype).split(".")[1]


def test_what_a_dtype_becomes() -> None:
    for current, wanted, result in (
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.float64, torch.float64),
        (torch.complex64, torch.float64, torch.complex128),
        (torch.complex128, torch.bfloat16, torch.complex64),
        (torch.int64, torch.float64, torch.int64),
        (torch.bool, torch.float64, torch.bool),
        (torch.float32, None, torch.float32),
    ):
        assert dtype_like(current, wanted) is result, (current, wanted)


def test_a_model_is_converted_in_place_and_comes_back_bit_for_bit() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight  # tied
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = [(parameter, parameter.data_ptr()) for parameter in model.parameters()]
    with convert_weights([model], dtype=torch.float64):
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        assert model[1].num_batches_tracked.dtype is torch.int64
        assert model[2].weight is model[0].weight
        model(torch.randn(4, 3, dtype=torch.float64)).sum().backward()
        with torch.no_grad():
            model[0].weight.mul_(2)
    for parameter, pointer in parameters:
        assert parameter.data_ptr() == pointer and parameter.dtype is torch.float32 and parameter.grad is None
    running = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for name, value in model.state_dict().items():
        if name not in running:
            assert torch.equal(value, before[name]), name
    assert torch.equal(model[1].running_mean, before["1.running_mean"])  # the converted copy was updated


def test_a_model_comes_back_after_an_error_and_what_needs_no_conversion_is_not_touched() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError), convert_weights([model], dtype=torch.float64):
        raise ValueError
    assert model.weight.dtype is torch.float32
    gradient = model.weight.grad = torch.ones(2, 2)
    with convert_weights([model], dtype=torch.float32):
        assert model.weight.grad is gradient
    assert model.weight.grad is gradient


def test_buffers_differ_by_more_than_the_rounding_of_a_running_average() -> None:
    full, u = torch.ones(4), unit_roundoff(torch.float32)
    for units, differ in ((0, False), (32, False), (128, True)):
        assert buffers_differ(full * (1 + units * u), full, u) is differ
        assert not buffers_differ(full * (1 + units * u), full, unit_roundoff(torch.bfloat16))
    assert buffers_differ(full.to_sparse() * 2, full.to_sparse(), u)
    assert buffers_differ(full[:3], full, u) and not buffers_differ(torch.zeros(4), torch.zeros(4), u)


SWITCHES = [(backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")]
newer = pytest.mark.skipif(not hasattr(torch._C, "_get_fp32_precision_getter"), reason="torch before 2.9")

SETTINGS = {
    "older": lambda: torch.set_float32_matmul_precision("high"),
    "older, on cuda": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "older, cudnn": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "newer": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "newer, convolutions": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "newer, everywhere": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "newer, on the host": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
}


def state() -> tuple:
    """What holds, whichever generation says it; the older switches cannot always be read."""
    read = torch._C._get_fp32_precision_getter
    older = []
    for ask in (torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32):
        try:
            older.append(ask())
        except RuntimeError:
            older.append("unreadable")
    return (read("generic", "all"), *(read(*switch) for switch in SWITCHES), *older)


@pytest.fixture(autouse=True)
def _as_it_was():
    """Puts back what torch starts with, by hand."""
    before = state()
    yield
    write = torch._C._set_fp32_precision_setter
    for switch in [("generic", "all"), *SWITCHES]:
        write(*switch, "none")
    write("cuda", "conv", "tf32")
    write("cuda", "rnn", "tf32")
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")
    write("cuda", "matmul", "none")
    write("mkldnn", "matmul", "none")
    assert state() == before


def _problem(forward=lambda: None) -> gaverify.Problem:
    torch.manual_seed(0)

    def loss(model, batch):
        forward()
        return model(batch).square().mean()

    return gaverify.Problem(nn.Linear(3, 2), loss, torch.randn(8, 3))


@newer
@pytest.mark.parametrize("setting", SETTINGS)
def test_verify_runs_under_every_switch_and_leaves_it(setting: str) -> None:
    SETTINGS[setting]()
    before = state()
    assert gaverify.verify(_problem()).outcome is Outcome.EQUIVALENT
    assert state() == before


@newer
@pytest.mark.parametrize("first", [None, *SETTINGS])
@pytest.mark.parametrize("then", SETTINGS)
def test_what_a_forward_switches_is_put_back(first: str | None, then: str) -> None:
    if first is not None:
        SETTINGS[first]()
    before = state()
    gaverify.verify(_problem(SETTINGS[then]))
    # what an older switch says behind newer ones that contradict it decides nothing, and nobody can read it
    assert all(now == was for now, was in zip(state(), before, strict=True) if was != "unreadable")


@newer
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_control_multiplies_exactly_under_every_switch(setting: str) -> None:
    SETTINGS[setting]()
    before = state()
    with exact_products():
        assert all(rounded_products(torch.device(kind), ["matmul", "conv", "rnn"]) == {} for kind in ("cpu", "cuda"))
        assert "unreadable" not in state(), "an older switch that a forward reads"
    assert state() == before


@newer
def test_a_narrow_switch_inherits_again_after_it_was_restored() -> None:
    restore = flag_states(PRECISION)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    restore()
    torch.backends.fp32_precision = "tf32"
    assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"


@newer
def test_rounded_products_are_said_and_their_unit_roundoff_followed() -> None:
    device = torch.device("cuda", 0)
    exact = gaverify.verify(_problem())
    assert exact.run.rounded == () and "float32, autocast" in render([exact], "text")
    assert rounded_products(device, {"matmul"}) == {}
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert rounded_products(device, {"matmul"}) == {"matmul": "tf32"}
    assert rounded_products(device, set()) == {}, "no product ran"
    assert rounded_unit({"matmul": "tf32"}) == 2.0**-11 and rounded_unit({}) == 0.0
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    verdict = gaverify.verify(_problem())
    assert verdict.run.rounded == ("matmul bf16",)
    assert "float32 (matmul bf16)" in render([verdict], "text")


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Linear(100, 7), (5, 100), 5 * 7 * 100),
        (nn.Linear(8, 7), (5, 8), 5 * 7 * 64),
        (nn.Conv2d(8, 16, 3, stride=2, padding=1), (2, 8, 10, 10), 2 * 16 * 5 * 5 * 8 * 9),
        (nn.Conv2d(8, 8, 3, groups=8, padding=1), (2, 8, 10, 10), 2 * 8 * 10 * 10 * 64),
        (nn.ConvTranspose2d(8, 4, 2, stride=2), (2, 8, 10, 10), 2 * 8 * 10 * 10 * 4 * 4),
    ],
    ids=str,
)
def test_the_work_of_products_is_counted_by_their_shapes(
    layer: nn.Module, shape: tuple[int, ...], expected: int
) -> None:
    """No less than 64 multiplications an element: writing it takes as long."""
    arithmetic, names = Arithmetic(), []

    def note(func: Any, args: Any, kwargs: Any) -> Any:
        names.append(func)
        arithmetic.note(product_of(func), args)
        return func(*args, **kwargs)

    inputs = torch.randn(shape)
    with OperationMode(note):
        layer(inputs).sum().backward()
    assert arithmetic.work == expected, "of the forward alone"
    assert arithmetic.operations == len(names)


# Where a name is part of torch's own switches, of a released document, or of the list of kinds.
NAMED = {
    "spec/options.py": "the word that is meant by `--device gpu`",
    "passes/isolation/globals.py": "torch's precision and attention switches, which carry the name",
    "records/profile.py": "a released word of the document",
    "profiling/workload.py": "a released word of the document",
    "passes/precision.py": "the backends of torch's precision switches",
    "pytest_plugin.py": "the names of pytest's marks",
    "audit/recording/values.py": "graphs that are captured, which torch asks of CUDA",
    "audit/recording/samples.py": "whether torch pins memory is asked of CUDA alone",
    "spec/values.py": "the words of an option, which completion offers",
    "audit/memory.py": "memory of a device, of which `torch.accelerator` does not tell before torch 2.9",
}


def names_of_devices(source: str) -> list[str]:
    """Uses of `torch.cuda`, and strings that begin with an accelerator's name; prose does not begin with it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("cuda", "xpu", "mps") and isinstance(node.value, ast.Name):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if text.partition(":")[0].partition("-")[0] in ("cuda", "xpu", "mps"):
            found.append(f"{node.lineno}: {text!r}")
    return found


def test_names_are_found() -> None:
    for source in ("torch.cuda.synchronize()", "x.to('cuda:0')", "device.type == 'mps'", "x.cuda()"):
        assert len(names_of_devices(source)) == 1, source
    for source in ("'write cuda, or cpu'", "torch.get_device_module(device).synchronize()"):
        assert names_of_devices(source) == []


def test_devices_are_not_asked_for_by_name() -> None:
    root = Path(gaverify.__file__).parent
    found = {
        str(path.relative_to(root)): names
        for path in sorted(root.rglob("*.py"))
        if "zoo" not in path.parts and (names := names_of_devices(path.read_text()))
    }
    assert {path: names for path, names in found.items() if path not in NAMED} == {}
    assert NAMED.keys() <= found.keys(), "an exception that is no longer needed"


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_model_without_numbers_gets_a_sentence(device: str | None) -> None:
    model = torch.nn.Linear(4, 2, device="meta")
    with pytest.raises(gaverify.ProblemError, match="`meta` device, where tensors have no values"):
        gaverify.verify(model, lambda m, x: m(x).sum(), torch.randn(4, 4), steps=2, device=device)


class Sequence(nn.Module):
    """Tied embeddings, a recurrence, attention, a weight that is computed, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.out.weight = self.embed.weight
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.frozen(self.normed(self.block(self.lstm(self.embed(x))[0])))).mean(1)


class Image(nn.Module):
    """Convolutions, a norm in a checkpoint that is run again, and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.up = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 4, 3)
        self.scale, self.out = nn.Parameter(torch.rand(4, 1, 1)), nn.Linear(4, 5)
        self.register_buffer("shift", torch.rand(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda y: torch.relu(self.norm(self.first(y))), x, use_reentrant=False)
        return self.out((self.up(hidden) * self.scale + self.shift).to(self.scale.dtype).mean((2, 3)))


class Spectral(nn.Module):
    """Complex numbers that share the memory of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = torch.fft.fft(x, norm="forward") * torch.view_as_complex(self.weight)[:, :1]
        return torch.view_as_real(waves).pow(2)


KINDS = {
    Sequence: lambda: torch.randint(20, (4, 6)),
    Image: lambda: torch.randn(4, 3, 6, 6, dtype=torch.bfloat16),
    Spectral: lambda: torch.randn(4, 3, 6, 6),
}


def experiment_of(kind: type[nn.Module]) -> Experiment:
    torch.manual_seed(0)
    return squares(kind() if kind is Spectral else kind().to(torch.bfloat16), KINDS[kind]())


def squares(model: nn.Module, x: torch.Tensor) -> Experiment:
    problem = Problem(model, lambda model, x: model(x).square().mean(), x)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    state = ModelState([model], (problem.loss,))
    return on_the_cpu(model, problem=problem, parameters=trained, modules=[model], state=state)


def gradients(experiment: Experiment, weights: bool, probe: Callable[[Experiment], PassProbe | None]) -> dict[str, Any]:
    recorded, full = experiment.record()
    with recorded.in_float64(weights=weights) as exact:
        probes = [each for each in [probe(exact)] if each is not None]
        return dict(exact.micro_batches(full, *probes).gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_are_those_of_a_model_in_float64(kind: type[nn.Module]) -> None:
    experiment = experiment_of(kind)
    copied = gradients(experiment, True, lambda _: None)
    names, seen = list(experiment.parameters), {}

    def listen(place: int, gradient: torch.Tensor) -> None:
        assert gradient.dtype is torch.float64
        seen[names[place]] = seen.get(names[place], 0.0) + gradient

    before = {name: value.clone() for name, value in experiment.problem.model.state_dict().items()}
    formed = gradients(experiment, False, lambda lifted: LiftedWeights(lifted, listen))
    assert all(gradient is None for gradient in formed.values()), "no set of them is held"
    assert seen.keys() == copied.keys()
    for name, gradient in seen.items():
        torch.testing.assert_close(gradient, copied[name], rtol=1e-12, atol=1e-14)
    for name, value in experiment.problem.model.state_dict().items():
        assert value.dtype is before[name].dtype and torch.equal(value, before[name])
    assert {type(weight) for weight in experiment.parameters.values()} == {nn.Parameter}


def test_what_an_operation_saves_is_the_weight_itself() -> None:
    """Between the forward and the backward nothing of a weight is in float64."""
    experiment = experiment_of(Image)
    probe = LiftedWeights(experiment, lambda *_: None)
    with probe.around(None):
        out = torch.nn.functional.linear(torch.ones(2, 4, dtype=torch.float64), experiment.problem.model.out.weight)
        assert out.dtype is torch.float64
        assert probe._live and all(lifted() is None for lifted, _ in probe._live.values())
        out.sum().backward()


@pytest.mark.parametrize("how", ["hook", "class"])
def test_weights_that_are_more_than_parameters_are_refused(how: str) -> None:
    class Own(nn.Parameter):
        pass

    experiment = experiment_of(Image)
    if how == "hook":
        experiment.problem.model.scale.register_hook(lambda gradient: gradient)
    else:
        experiment.problem.model.scale = Own(experiment.problem.model.scale.data)
    with pytest.raises(ProblemError, match="a weight"):
        LiftedWeights(experiment, lambda *_: None)


@pytest.mark.parametrize("kind", KINDS)
def test_lifted_weights_leave_one_set_of_gradients_as_converted_ones_do(kind: type[nn.Module]) -> None:
    experiment = experiment_of(kind)
    copied = gradients(experiment, True, lambda _: None)
    recorded, full = experiment.record()
    with lift_weights(recorded, torch.float64) as lifted:
        collected = lifted.micro_batches(full).gradients
        assert not any(gradient is not None for gradient in lifted.store.take().values()), "the pass holds no other"
    assert collected.keys() == copied.keys()
    for name, gradient in copied.items():
        torch.testing.assert_close(collected[name], gradient, rtol=1e-12, atol=1e-14)


class Own(nn.Module):
    """A weight that the forward does something to, beside using it."""

    def __init__(self, does: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.weight, self.does = nn.Parameter(torch.rand(6, 4)), does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.does(self.weight)
        return x @ self.weight


def write(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def lifted_pass(does: Callable[[nn.Parameter], Any]) -> None:
    recorded, full = squares(Own(does), torch.randn(4, 6)).record()
    with lift_weights(recorded, torch.float64) as lifted:
        lifted.micro_batches(full)


@pytest.mark.parametrize(
    "does",
    [
        write,
        lambda weight: weight.data.mul_(0.5),
        lambda weight: weight.detach().mul_(0.5),
        lambda weight: nn.functional.embedding(torch.tensor([1]), weight, max_norm=0.1),
        lambda weight: setattr(weight, "grad", None),
        lambda weight: weight.grad,
        lambda weight: torch.autograd.grad(weight.sum(), weight, allow_unused=True),
        lambda weight: copy.deepcopy(weight).sum(),
    ],
)
def test_a_forward_that_would_see_other_weights_or_gradients_is_refused(does: Callable[[nn.Parameter], Any]) -> None:
    with pytest.raises(ProblemError, match="writes to a weight, looks at its gradient"):
        lifted_pass(does)


@pytest.mark.parametrize("does", [lambda weight: weight.detach() * 0.5, lambda weight: weight.numel(), lambda _: None])
def test_a_forward_that_only_reads_its_weights_is_not_refused(does: Callable[[nn.Parameter], Any]) -> None:
    lifted_pass(does)


def test_a_forward_without_a_backward_leaves_nothing_behind() -> None:
    """A node that saves its own result would keep itself alive, and all results before it."""
    recorded, _ = squares(nn.Sequential(nn.Linear(6, 13), nn.Softmax(-1)), torch.randn(4, 6)).record()
    with lift_weights(recorded, torch.float64) as lifted:
        lifted.forward(None).detach()
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
        assert not [each for each in tensors if each.shape == (4, 13) and each.dtype is torch.float64]
