"""Tells whether two processes hold the same numbers, by digests of all their bits."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gaverify.passes.nesting import is_array, leaves
from gaverify.passes.problem import Problem

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


def digest_of(named: Iterator[tuple[str, Any]] | Mapping[str, torch.Tensor | None]) -> str:
    """Returns a digest of tensors, arrays and plain values with their names; what else there is counts by its name."""
    digest = hashlib.sha256()
    for name, value in named.items() if isinstance(named, Mapping) else named:
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            _update(digest, value)
        elif value is not None and is_array(value):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode() + value.tobytes())
        elif isinstance(value, _PLAIN):
            digest.update(repr(value).encode())
    return digest.hexdigest()


def _update(digest: Any, tensor: torch.Tensor) -> None:
    """Takes the tensor's own memory on the host, without a copy where it lies there, and without NumPy."""
    dense = tensor.detach()
    if dense.is_nested:
        dense = dense.values()
    dense = (dense.to_dense() if dense.layout is not torch.strided else dense).cpu().contiguous()
    if dense.numel():
        digest.update((ctypes.c_char * dense.nbytes).from_address(dense.data_ptr()))


def digests_of(problem: Problem) -> dict[str, str]:
    """Returns digests of a problem's parameters, its buffers and its batch, as its factory made them."""
    modules = [module for module in (problem.model, problem.loss) if isinstance(module, nn.Module)]
    return {
        "parameters": digest_of(entry for module in modules for entry in module.named_parameters()),
        "buffers": digest_of(entry for module in modules for entry in module.named_buffers()),
        "batch": digest_of(leaves(problem.batch)),
    }
