"""Sketches of gradients, and which micro-batch weights would have given that of the full batch.

Shapes: K micro-batches; sketches of length S = 4096 stand for the gradients, so no more than one is ever held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from gaverify.passes.devices import widest
from gaverify.passes.gradients import PassProbe, PassResult, accumulated_gradients
from gaverify.passes.isolation import ModelState
from gaverify.passes.randomness import DrawRecord
from gaverify.passes.task import Task
from gaverify.passes.weight_fit import SINGULAR_FLOAT64, fit_weights, gradient_noise
from gaverify.records.weights import WeightFit
from gaverify.thresholds import TINY

SKETCH = 4096
_CHUNK_ROWS = 256
_APART = 2531  # 4096 times the golden section: the starts of successive tensors divide the buckets most evenly


def sketch(tensors: list[torch.Tensor | None]) -> torch.Tensor:
    """Returns a linear sketch of length 4096 of all tensors, in float64, where they are; on the CPU of several devices.

    Each element is added with a random sign to a bucket, that of its position modulo 4096 from where its tensor starts,
    so inner products are preserved in expectation and linear relations exactly. Start and signs depend on a tensor's
    place in the list, whether or not those before it are None: a parameter that one micro-batch leaves out changes
    nothing for the others. Starts lie far apart, so that the elements of a small model each have a bucket of their own.

    Source: M. Charikar, K. Chen, M. Farach-Colton, Finding frequent items in data streams, 2002 (count sketch).
    """
    totals: dict[torch.device, torch.Tensor] = {}
    for place, tensor in enumerate(tensors):
        if tensor is None:
            continue
        dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        flat = torch.view_as_real(dense.resolve_conj()).reshape(-1) if dense.is_complex() else dense.reshape(-1)
        buckets = _buckets(flat, place).roll(place * _APART % SKETCH)
        totals[flat.device] = totals[flat.device].add_(buckets) if flat.device in totals else buckets
    if len(totals) == 1:
        return next(iter(totals.values()))
    on_host = torch.zeros(SKETCH, dtype=torch.float64, device="cpu")
    return sum((total.to("cpu", torch.float64) for total in totals.values()), start=on_host)


def _buckets(flat: torch.Tensor, place: int) -> torch.Tensor:
    """The buckets of one tensor. The signs are drawn on its device, so that nothing waits for a copy of them."""
    total = torch.zeros(SKETCH, dtype=widest(flat.device), device=flat.device)
    generator = torch.Generator(flat.device).manual_seed(place)
    for start in range(0, flat.numel(), SKETCH * _CHUNK_ROWS):
        part = flat[start : start + SKETCH * _CHUNK_ROWS].to(total.dtype)
        signed = part * _signs(part.numel(), generator)
        if part.numel() % SKETCH:
            signed = torch.nn.functional.pad(signed, (0, -part.numel() % SKETCH))
        total += signed.view(-1, SKETCH).sum(0)
    return total


def _signs(count: int, generator: torch.Generator) -> torch.Tensor:
    """Draws -1 or 1 `count` times: the lowest bit of each byte of a random word, as a draw costs more than its use."""
    bound = 1 << 31
    size = (-(-count // 4),)
    words = torch.randint(-bound, bound, size, generator=generator, dtype=torch.int32, device=generator.device)
    return words.view(torch.int8)[:count].bitwise_and_(1).mul_(2).sub_(1)


@dataclass
class Sketches:
    """One accumulated run in sketches: g_k as `columns` (S, K), g_full as `target` (S,), the weights that were used."""

    columns: torch.Tensor
    target: torch.Tensor
    used: torch.Tensor
    elements: int


def sketched(
    task: Task,
    state: ModelState,
    record: DrawRecord,
    full: PassResult,
    *,
    lift: bool,
    probe: PassProbe | None = None,
    release: bool = False,
    target: torch.Tensor | None = None,
) -> tuple[Sketches, PassResult]:
    """Accumulates once more and sketches every micro-batch's gradient on the way.

    The gradients accumulate in `.grad`; the sketch is linear, so the difference of two sketches is the sketch of one
    micro-batch's share. `release` frees the full batch's gradients once they are sketched; `target` is that sketch
    where there is one already.
    """
    elements = sum(gradient.numel() for gradient in full.gradients.values() if gradient is not None)
    target = sketch(list(full.gradients.values())) if target is None else target
    if release:
        full.gradients = dict.fromkeys(full.gradients)
    sums: list[torch.Tensor] = []

    def note(_: int) -> None:
        sums.append(sketch([parameter.grad for parameter in task.parameters.values()]))

    task = replace(task, strategy="accumulate")  # one backward over the sum would not tell the shares apart
    accumulated = accumulated_gradients(task, state, record, full, lift=lift, after_backward=note, probe=probe)
    return shares_of(sums, target, accumulated.weights, elements), accumulated


def shares_of(sums: Sequence[torch.Tensor], target: torch.Tensor, used: Sequence[float], elements: int) -> Sketches:
    """Returns the micro-batches' own gradients from the sketches of what had accumulated after each of them.

    Args:
        sums: One sketch per micro-batch.
        target: The sketch of the full batch's gradient.
        used: The micro-batch weights.
        elements: How many the gradient has.
    """
    if len({part.device for part in (target, *sums)}) > 1:  # some micro-batch reached the parameters of one device only
        target, sums = target.cpu().double(), [part.cpu().double() for part in sums]
    steps = torch.stack([sums[0], *(b - a for a, b in pairwise(sums))], dim=1)
    weights = torch.tensor(used, dtype=steps.dtype, device=steps.device)
    columns = steps / torch.where(weights == 0, torch.ones_like(weights), weights)
    return Sketches(columns, target, weights, elements)


def fitted(runs: Sequence[Sketches]) -> WeightFit:
    """Returns the least-squares weights that explain all runs at once; each run counts relative to its own gradient.

        min ‖g_full − Σ c_k g_k‖

    Where c is not unique, the one nearest to the weights that were used is returned.
    """
    norms = [torch.linalg.vector_norm(run.target).clamp_min(TINY) for run in runs]
    columns = torch.cat([run.columns / norm for run, norm in zip(runs, norms, strict=True)])
    target = torch.cat([run.target / norm for run, norm in zip(runs, norms, strict=True)])
    equations = sum(run.elements for run in runs)
    fit = fit_weights(columns, target, weights=runs[0].used, singular=SINGULAR_FLOAT64, equations=equations)
    shares = runs[0].columns / norms[0] * torch.tensor(fit.weights, dtype=columns.dtype, device=columns.device)
    return replace(fit, noise=gradient_noise(shares))
