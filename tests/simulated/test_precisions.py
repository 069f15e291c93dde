"""What decides where a device rounds the products of float32, and how little it has to run for that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

import gaverify
from gaverify import Outcome, Problem
from gaverify.report import render


@pytest.fixture(autouse=True)
def rounded_convolutions() -> Iterator[None]:
    """TF32 in convolutions, as torch has it from the start; the test may ask for more."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    yield
    torch.backends.cudnn.conv.fp32_precision = before
    torch.backends.cuda.matmul.fp32_precision = "none"


class Block(nn.Module):
    """Two convolutions beside what they change."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(32, 32, 3, padding=1), norm, nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds them up."""
        return x + self.last(self.norm(self.first(x)).relu())


def convolutions(*norms: nn.Module) -> Problem:
    """Blocks, on 32 images."""
    torch.manual_seed(0)
    last = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *map(Block, norms), *last).to("cuda")
    batch = torch.randn(32, 3, 4, 4, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    return Problem(model, lambda m, rows: cross_entropy(m(rows[0]).float(), rows[1]), batch)


@pytest.mark.parametrize("options", [{"autocast": "bfloat16"}, {"dtype": "bfloat16"}], ids=str)
def test_few_samples_in_float32_are_not_rounded(options: dict[str, str]) -> None:
    """Else the rounding of TF32, 2⁻¹¹, is taken for a fault of structure, and float64 of all of the batch follows."""
    verdict = gaverify.verify(convolutions(*(nn.GroupNorm(4, 32) for _ in range(4))), steps=16, **options)
    assert (verdict.outcome, verdict.method) == (Outcome.EQUIVALENT, "few-samples")


@pytest.mark.parametrize("options", [{"autocast": "bfloat16"}, {"dtype": "bfloat16"}], ids=str)
def test_float32_decides_in_the_place_of_few_samples_where_the_host_is_the_limit(options: dict[str, str]) -> None:
    verdict = gaverify.verify(group_norms(), steps=4, **options)
    assert (verdict.outcome, verdict.method) == (Outcome.EQUIVALENT, "float32-runs")
    assert verdict.resolution < 1e-3, "float32's"
    assert (verdict.run.dtype, verdict.run.autocast) == (options.get("dtype", "float32"), options.get("autocast"))
    assert "decided by the same runs in float32" in render([verdict], "text")
    off = gaverify.verify(group_norms(), steps=4, weighting=[0.2575, 0.25, 0.25, 0.25], **options)
    assert [(f.code, f.proven) for f in off.findings if f.severity == "fault"] == [("GAV202", True)]


def test_few_samples_decide_where_float32_has_more_to_multiply_than_the_host_to_launch() -> None:
    """Two matrices of 4,096 columns: 1e9 multiplications in each product."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.Tanh(), nn.Linear(4096, 1024), nn.Linear(1024, 10)).to("cuda")
    batch = torch.randn(256, 1024, device="cuda"), torch.randint(0, 10, (256,), device="cuda")
    made = Problem(model, lambda m, rows: cross_entropy(m(rows[0]).float(), rows[1]), batch)
    verdict = gaverify.verify(made, steps=4, autocast="bfloat16")
    assert (verdict.outcome, verdict.method) == (Outcome.EQUIVALENT, "few-samples")


def group_norms() -> Problem:
    """Convolutions that do not couple their samples."""
    return convolutions(*(nn.GroupNorm(4, 32) for _ in range(6)))


def test_float32_without_rounded_products_decides_what_these_leave_open() -> None:
    """For the bare passes twice over: no sketches, no few samples, nothing in float64."""
    before = torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision
    verdict = gaverify.verify(group_norms(), steps=4)
    assert (verdict.outcome, verdict.method) == (Outcome.EQUIVALENT, "float32-runs")
    assert verdict.resolution < 1e-3, "float32's, not that of the rounding"
    assert verdict.run.rounded == ("conv tf32",), "the user's own runs"
    assert "decided by the same runs in float32" in render([verdict], "text")
    assert "there no product was rounded to tf32" in render([verdict], "text")
    assert (torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision) == before


def test_a_weight_that_is_off_by_less_than_products_round_is_found() -> None:
    """3 % of one of four weights are 0.75 % of the gradient; the rounding of few samples hid up to 6 %."""
    verdict = gaverify.verify(group_norms(), steps=4, weighting=[0.2575, 0.25, 0.25, 0.25])
    assert verdict.outcome is Outcome.DIVERGENT
    assert [(f.code, f.proven) for f in verdict.findings if f.severity == "fault"] == [("GAV202", True)]


@pytest.mark.parametrize("options", [{}, {"autocast": "bfloat16"}, {"dtype": "bfloat16"}], ids=str)
def test_a_fault_of_structure_is_searched_on_the_first_samples(options: dict[str, str]) -> None:
    """Few samples show it in float32, also where half precision rounds them by more than a tenth of the gradient."""
    verdict = gaverify.verify(convolutions(*(nn.BatchNorm2d(32) for _ in range(6))), steps=4, **options)
    assert (verdict.outcome, verdict.method) == (Outcome.DIVERGENT, "float64-part")
    assert [(f.code, f.proven) for f in verdict.findings if f.severity == "fault"] == [("GAV101", True)]


class Patches(nn.Module):
    """Two layers of attention on the patches of an image, with a dropout at the end.

    In that one the samples stand in the order of their sums, where that is asked.
    """

    def __init__(self, is_sorted: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 4, 4)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True) for _ in range(2))
        self.last, self.is_sorted = nn.Linear(64, 10), is_sorted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ten classes."""
        order = x.flatten(1).sum(1).argsort() if self.is_sorted else None
        x = self.first(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        x = x.mean(1)
        return self.last(dropout(x, 0.5) if order is None else dropout(x[order], 0.5)[order.argsort()])


def patches(is_sorted: bool) -> Problem:
    """Attention, on 32 images."""
    torch.manual_seed(0)
    batch = torch.randn(32, 3, 16, 16, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    return Problem(Patches(is_sorted).to("cuda"), lambda m, rows: cross_entropy(m(rows[0]).float(), rows[1]), batch)


@pytest.mark.parametrize("options", [{}, {"autocast": "bfloat16"}, {"dtype": "bfloat16"}], ids=str)
def test_rounding_alone_lets_no_draw_be_looked_for_elsewhere(options: dict[str, str]) -> None:
    """Each row of each draw that is looked for is waited for."""
    problem = patches(is_sorted=False)
    torch.ops.simulated.reset_counters()
    verdict = gaverify.verify(problem, steps=4, **options)
    assert verdict.outcome is Outcome.EQUIVALENT
    assert torch.ops.simulated.synchronisations() <= 100, torch.ops.simulated.synchronised_by()


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}], ids=str)
def test_draws_of_samples_in_another_order_are_found_under_rounding(options: dict[str, str]) -> None:
    verdict = gaverify.verify(patches(is_sorted=True), steps=4, **options)
    assert verdict.outcome is Outcome.EQUIVALENT
