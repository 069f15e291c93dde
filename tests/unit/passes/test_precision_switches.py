"""Torch's two generations of precision switches: read, restored, and never an error, on a CPU as well."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import gaverify
from gaverify import Outcome
from gaverify.passes.isolation.flags import PRECISION, flag_states
from gaverify.passes.precision import rounded_products, rounded_unit
from gaverify.report import render

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
    with kept():
        yield


@contextmanager
def kept():
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
def test_a_narrow_switch_inherits_again_after_it_was_restored() -> None:
    restore = flag_states(PRECISION)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    restore()
    torch.backends.fp32_precision = "tf32"
    assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"


@newer
def test_rounded_products_are_said_and_their_unit_roundoff_followed() -> None:
    device = torch.device("cuda", 0)
    assert rounded_products(device, {"matmul"}) == {}
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert rounded_products(device, {"matmul"}) == {"matmul": "tf32"}
    assert rounded_products(device, set()) == {}, "no product ran"
    assert rounded_unit({"matmul": "tf32"}) == 2.0**-11 and rounded_unit({}) == 0.0
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    verdict = gaverify.verify(_problem())
    assert verdict.run.rounded == ("matmul bf16",)
    assert "float32 (matmul bf16)" in render([verdict], "text")


@newer
def test_nothing_is_said_where_nothing_is_rounded() -> None:
    verdict = gaverify.verify(_problem())
    assert verdict.run.rounded == ()
    assert "float32, autocast" in render([verdict], "text")
