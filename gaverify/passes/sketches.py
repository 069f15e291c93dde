"""Sketches: 4,096 numbers that stand for all gradients, add as they do, and keep their inner products.

Linear relations of gradients hold of their sketches exactly; lengths and angles are kept to 1/sqrt(4096), 2 %, in the
mean. So what holds of all micro-batches' gradients is read from kilobytes, and there is never a second set of them.

Source: W. Johnson, J. Lindenstrauss, Extensions of Lipschitz mappings into a Hilbert space, 1984.
"""

from __future__ import annotations

from functools import cache

import torch

from gaverify.passes.devices import widest
from gaverify.passes.shards import Sum, local, over_ranks, shard_number, share_of

SKETCH = 4096
_CHUNK_ROWS, _TILE = 256, 16
_APART = 2531  # 4096 times the golden section: the starts of successive tensors divide the buckets most evenly


def sketch(tensors: list[torch.Tensor | None]) -> torch.Tensor:
    """Returns a linear sketch of length 4096 of all tensors, in float64, where they are; on the CPU of several devices.

    Each element is added with a random sign to a bucket, that of its position modulo 4096 from where its tensor starts,
    so inner products are preserved in expectation and linear relations exactly. Start and signs depend on a tensor's
    place in the list, whether or not those before it are None: a parameter that one micro-batch leaves out changes
    nothing for the others. Starts lie far apart, so that the elements of a small model each have a bucket of their own.

    Source: M. Charikar, K. Chen, M. Farach-Colton, Finding frequent items in data streams, 2002 (count sketch).
    """
    ranks = over_ranks()
    if ranks is not None:
        return _of_all_ranks(tensors, *ranks)
    totals: dict[torch.device, torch.Tensor] = {}
    for place, tensor in enumerate(tensors):
        if tensor is None:
            continue
        found = sketch_of(tensor, place)
        totals[found.device] = totals[found.device].add_(found) if found.device in totals else found
    if len(totals) == 1:
        return next(iter(totals.values()))
    on_host = torch.zeros(SKETCH, dtype=torch.float64, device="cpu")
    return sum((total.to("cpu", torch.float64) for total in totals.values()), start=on_host)


def _of_all_ranks(tensors: list[torch.Tensor | None], count: int, total: Sum) -> torch.Tensor:
    """The sketch of what all ranks hold, on each one's host: shards have signs of their own, replicas are averaged."""
    held = torch.zeros(SKETCH, dtype=torch.float64, device="cpu")
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            found = sketch_of(local(tensor), place + len(tensors) * shard_number(tensor))
            held += found.to("cpu", torch.float64) * share_of(tensor, count)
    return total(held)


def sketch_of(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Returns the sketch of one tensor of the list, shape (4096,), where it is: those of all of them add up."""
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    flat = torch.view_as_real(dense.resolve_conj()).reshape(-1) if dense.is_complex() else dense.reshape(-1)
    return _buckets(flat, place).roll(place * _APART % SKETCH)


def _buckets(flat: torch.Tensor, place: int) -> torch.Tensor:
    """The buckets of one tensor. The signs are drawn on its device, so that nothing waits for a copy of them.

    A sign is the product of one that all tiles of 16 rows share and one of its tile: it costs less to draw than to
    use, and is independent of any other one.
    """
    total = torch.zeros(SKETCH, dtype=widest(flat.device), device=flat.device)
    generator = torch.Generator(flat.device).manual_seed(place)
    # Half a precision's products and sums of 16 are exact to its own roundoff in float32, at half the price.
    shared = _shared_signs(flat.device, torch.float32 if flat.dtype.itemsize == 2 else total.dtype)
    for start in range(0, flat.numel(), SKETCH * _CHUNK_ROWS):
        part = flat[start : start + SKETCH * _CHUNK_ROWS].to(shared.dtype)
        if part.numel() % SKETCH:
            part = torch.nn.functional.pad(part, (0, -part.numel() % SKETCH))
        rows = part.view(-1, SKETCH)
        tiles = len(rows) // _TILE * _TILE
        sums = (rows[:tiles].view(-1, _TILE, SKETCH) * shared).sum(1)
        if tiles < len(rows):
            sums = torch.cat([sums, (rows[tiles:] * shared[: len(rows) - tiles]).sum(0, keepdim=True)])
        total += (sums.to(total.dtype) * _signs(sums.numel(), generator).view(-1, SKETCH)).sum(0)
    return total


@cache
def _shared_signs(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The signs of a tile, shape (16, 4096), drawn once for each device."""
    return _signs(_TILE * SKETCH, torch.Generator(device).manual_seed(_TILE)).view(_TILE, SKETCH).to(dtype)


def _signs(count: int, generator: torch.Generator) -> torch.Tensor:
    """Draws -1 or 1 `count` times: the lowest bit of each byte of a random word, as a draw costs more than its use."""
    bound = 1 << 31
    size = (-(-count // 4),)
    words = torch.randint(-bound, bound, size, generator=generator, dtype=torch.int32, device=generator.device)
    return words.view(torch.int8)[:count].bitwise_and_(1).mul_(2).sub_(1)
