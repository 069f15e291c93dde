"""Sketches of gradients (temporary)."""

from __future__ import annotations

import torch

from gaverify.passes.devices import widest

SKETCH = 4096
_CHUNK_ROWS = 256
_APART = 2531


def sketch_of(gradient: torch.Tensor, place: int) -> torch.Tensor:
    """One gradient's."""
    gradient = gradient.detach()
    dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    flat = torch.view_as_real(dense.resolve_conj()).reshape(-1) if dense.is_complex() else dense.reshape(-1)
    return _buckets(flat, place).roll(place * _APART % SKETCH)


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
