"""Fingerprints: short vectors that stand for tensors which are too large to keep.

Shapes: B samples; a tensor whose dimension d has B·m rows gives B numbers per direction.
"""

from __future__ import annotations

import torch

SKETCH = 4096
_CHUNK_ROWS = 256
_DIRECTIONS = 2


def sketch(tensors: list[torch.Tensor | None]) -> torch.Tensor:
    """Returns a linear sketch of length 4096 of all tensors laid end to end, in float64 on their device.

    Each element is added with a random sign to the bucket of its position modulo 4096, so inner products are
    preserved in expectation and linear relations exactly.

    Source: M. Charikar, K. Chen, M. Farach-Colton, Finding frequent items in data streams, 2002 (count sketch).
    """
    present = [tensor for tensor in tensors if tensor is not None]
    device = present[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros(SKETCH, dtype=wide, device=device)
    generator = torch.Generator(device="cpu").manual_seed(0)
    for tensor in present:
        dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        flat = torch.view_as_real(dense.resolve_conj()).reshape(-1) if dense.is_complex() else dense.reshape(-1)
        for start in range(0, flat.numel(), SKETCH * _CHUNK_ROWS):
            part = flat[start : start + SKETCH * _CHUNK_ROWS].to(wide)
            signs = torch.randint(0, 2, (part.numel(),), generator=generator, dtype=torch.int8).to(device) * 2 - 1
            signed = torch.nn.functional.pad(part * signs, (0, -part.numel() % SKETCH))
            total += signed.view(-1, SKETCH).sum(0)
    return total


def sample_dimension(full: tuple[int, ...], micro: tuple[int, ...], batch_size: int, count: int) -> int | None:
    """Returns the one dimension whose sizes are B·m and n·m in the two runs; None where there is none."""
    if len(full) != len(micro):
        return None
    if batch_size == count:
        return next((dim for dim, size in enumerate(full) if size and size % batch_size == 0), None)
    for dim, (whole, part) in enumerate(zip(full, micro, strict=True)):
        if whole != part:
            return dim if whole % batch_size == 0 and part == whole // batch_size * count else None
    return None


def rows(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns fingerprints of the rows along `dim`: shape (size of dim, 3), the last column the rows' largest modulus."""
    values = tensor.detach()
    values = torch.view_as_real(values.resolve_conj()).flatten(-2) if values.is_complex() else values
    matrix = values.movedim(dim, 0).reshape(values.shape[dim], -1).double()
    angles = torch.arange(1, matrix.shape[1] + 1, dtype=torch.float64, device=matrix.device)
    # Directions without structure: cos(j²) and sin(j²) follow no pattern that a layer would produce.
    directions = torch.stack([torch.cos(angles**2), torch.sin(angles**2)], dim=1)
    largest = matrix.abs().amax(1, keepdim=True) if matrix.shape[1] else matrix.new_zeros(len(matrix), 1)
    return torch.cat([matrix @ directions / max(matrix.shape[1], 1) ** 0.5, largest], dim=1)
