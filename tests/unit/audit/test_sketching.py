"""Gradients as a run stores them: values of small parameters, sketches of others, which all processes share."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from gaverify.audit.recording.sketching import KeptGradients, sketch_piece
from gaverify.audit.recording.values import Sample, places_in_shard
from gaverify.passes.sketches import sum_by_bucket
from gaverify.records.events import Shard
from gaverify.thresholds import KEPT_ELEMENTS, SKETCH_WIDTHS

WIDTH = SKETCH_WIDTHS[0]


def kept(*gradients: torch.Tensor | None) -> KeptGradients:
    parameters = []
    for gradient in gradients:
        parameter = torch.zeros_like(gradient) if gradient is not None else torch.zeros(3)
        parameter.grad = gradient
        parameters.append(parameter)
    sample = Sample(parameters)
    return KeptGradients(0, sample, sample.gradients())


def test_a_small_parameter_keeps_its_values_and_a_large_one_a_sketch() -> None:
    small, large = torch.randn(64, 64), torch.randn(65, 64)
    stored = kept(small, None, large).to_storage(2.0, [])
    assert torch.equal(stored.values[0], small / 2) and stored.values.keys() == {0}
    assert stored.sketches[2].shape == (WIDTH,) and stored.sketches[2].dtype is torch.float64
    assert stored.norms == {2: pytest.approx(float(large.double().norm()) / 2)}
    assert small.numel() == KEPT_ELEMENTS


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "sparse", "complex"])
def test_a_change_of_one_element_is_seen_and_nan_that_stays_is_none(kind: str) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(100, 100)
    if kind == "bfloat16":
        gradient = gradient.bfloat16()
    elif kind == "complex":
        gradient = torch.complex(gradient, gradient.T.contiguous())
    gradient[7, 3] = math.nan
    changed = gradient.clone()
    changed[50, 51] *= 1.01
    sides = [side.to_sparse() if kind == "sparse" else side for side in (gradient, gradient.clone(), changed)]
    before, same, other = (kept(side) for side in sides)
    before.sampled = same.sampled = other.sampled = torch.zeros(1)  # the sampled elements may hold the changed one
    assert not before.differs(same) and before.differs(other)


@pytest.mark.parametrize("width", SKETCH_WIDTHS)
@pytest.mark.parametrize("kind", ["normal", "ones", "one column", "few"])
def test_a_printed_norm_is_off_by_less_than_a_fifth(width: int, kind: str) -> None:
    """Over many seeds, and where elements are alike, or all in one column of a matrix."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(60):
        gradient = torch.zeros(100, 1024)
        if kind == "normal":
            gradient.normal_(generator=generator)
        elif kind == "ones":
            gradient += 1
        elif kind == "one column":
            gradient[:, seed] = torch.randn(100, generator=generator)
        else:
            gradient.view(-1)[torch.randperm(gradient.numel(), generator=generator)[:7]] = 1.0
        sketch = sketch_piece(gradient, f"0.{seed}", width, gradient.shape)
        assert float(sketch.norm()) == pytest.approx(float(gradient.norm()), rel=0.2)


def test_rounding_and_a_small_difference_are_told_apart() -> None:
    """What is linear is exact: a difference of 1e-5 beside one of 1e-7, both far below the sketch's own error."""
    torch.manual_seed(0)
    gradient, direction = torch.randn(2, 300, 300, dtype=torch.float64)
    one = sketch_piece(gradient, "0.0", WIDTH, (300, 300))
    for size in (1e-7, 1e-5):
        other = sketch_piece(gradient + size * direction, "0.0", WIDTH, (300, 300))
        assert float((other - one).norm()) == pytest.approx(size * float(direction.norm()), rel=0.2)


PROCESS = """
import torch
from gaverify.audit.recording.sketching import sketch_piece
gradient = torch.linspace(-1, 1, 70_000).view(70, 1000)
print(*(number.hex() for number in sketch_piece(gradient, "1.2", 1021, gradient.shape).tolist()))
"""


def test_two_processes_make_the_same_sketch() -> None:
    other = subprocess.run([sys.executable, "-c", PROCESS], check=True, capture_output=True, text=True).stdout
    gradient = torch.linspace(-1, 1, 70_000).view(70, 1000)
    ours = sketch_piece(gradient, "1.2", WIDTH, gradient.shape)
    assert other == " ".join(number.hex() for number in ours.tolist()) + "\n"


SHARDS: dict[str, list[Shard]] = {
    "rows": [Shard((0, 0, 0), (3, 30, 40)), Shard((3, 0, 0), (4, 30, 40)), Shard((7, 0, 0), (0, 30, 40))],
    "columns": [Shard((0, 0, 0), (7, 11, 40)), Shard((0, 11, 0), (7, 19, 40))],
    "both": [Shard((a, b, 0), (size, 15, 40)) for a, size in ((0, 4), (4, 3)) for b in (0, 15)],
}


@pytest.mark.parametrize("cut", SHARDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_sketches_of_shards_add_up(cut: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = torch.randn(7, 30, 40, dtype=dtype)
    parts = [sketch_piece(whole[each.slices], "0.0", WIDTH, whole.shape, each) for each in SHARDS[cut]]
    torch.testing.assert_close(sum(parts), sketch_piece(whole, "0.0", WIDTH, whole.shape))


@pytest.mark.parametrize("cut", [5, 16 * WIDTH * 3, 222_222])
def test_a_part_may_begin_anywhere(cut: int) -> None:
    """Also where a tile begins whose signs do not begin with a word."""
    torch.manual_seed(0)
    whole = torch.randn(300_000, dtype=torch.float64)
    parts = sum_by_bucket(whole[:cut], "0.0", WIDTH) + sum_by_bucket(whole[cut:], "0.0", WIDTH, cut)
    torch.testing.assert_close(parts, sum_by_bucket(whole, "0.0", WIDTH))


@pytest.mark.parametrize("cut", SHARDS)
def test_sampled_elements_are_found_in_their_shards(cut: str) -> None:
    whole = torch.arange(7 * 30 * 40).view(7, 30, 40)
    chosen = torch.arange(0, whole.numel(), 17)
    found = torch.zeros_like(chosen)
    for shard in SHARDS[cut]:
        is_held, places = places_in_shard(chosen, whole.shape, shard)
        found[is_held] += whole[shard.slices].reshape(-1)[places]
    assert torch.equal(found, chosen)


def test_replicas_of_another_rank_are_not_stored() -> None:
    stored = kept(torch.ones(2), torch.ones(5000), torch.ones(1)).to_storage(1.0, [0, 1])
    assert stored.values.keys() == {2} and not stored.sketches and not stored.norms
