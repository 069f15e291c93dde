"""Which samples fed a forward: a fingerprint of every row of every input tensor.

Shapes: B rows along the batch dimension, T steps along the one after it.

Rows are compared by prefix: a row that one run pads to 20 tokens and the other to 17 has the same first 17 and a
constant tail. So the running hash after every step is kept, and where the constant tail begins; the same from the
right, for padding on the left. Rows that the script computes (the output of another model) agree only to rounding; for
floating point there are two projections beside the hash.

Boxes, edges and nodes of several samples may lie in one list, with columns that count samples (or nodes) within their
batch: the same box has another number in a smaller batch. So a tensor that may hold such numbers is fingerprinted once
more with each number replaced by the contents of that row of another input, or of all rows with the same number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from gaverify.audit.measurements import Fingerprints, ForwardInputs
from gaverify.passes.fingerprints import summaries
from gaverify.passes.nesting import leaves

_LONGEST = 4096  # steps whose running hashes are kept; longer rows are hashed whole
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio: consecutive multiples are spread evenly
_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COUNTING = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
)
_COLUMNS = 16  # of a list, each of which may count something
_INPUTS = 16  # tensors among which pointers are looked for; a longer list holds samples
_INDEX = re.compile(r"\[\d+\]")


def input_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ForwardInputs:
    """Returns the fingerprints of every input tensor of a forward by its path; empty where there is no tensor.

    Tensors that gradients flow through are the script's own results and left out. The entries of a list share one path,
    because a list may be the batch itself.
    """
    by_path: dict[str, list[Fingerprints]] = {}
    tensors = list(_tensors(args, kwargs))
    ends = _ends([tensor for _, tensor in tensors])
    hashed = [fingerprints(tensor) for _, tensor in tensors]
    pointing = [_pointing(at, tensor, hashed) for at, (_, tensor) in enumerate(tensors)]
    for (path, tensor), prints, readings in zip(tensors, hashed, pointing, strict=True):
        end, tail = ends.get(tuple(tensor.shape[:2])), prints.tail
        if end is not None and tail is not None:
            # Behind the last valid label all is padding, also where the values go on.
            tail = torch.minimum(tail, end)
        by_path.setdefault(path, []).append(replace(prints, tail=tail, readings=readings))
    return {
        path if len(parts) == 1 else f"{path} ({at})": part
        for path, parts in by_path.items()
        for at, part in enumerate(parts)
    }


def _ends(tensors: list[torch.Tensor]) -> dict[tuple[int, ...], torch.Tensor]:
    """For each shape (B, T) of labels, how many steps of each row there are up to its last valid one, shape (B,).

    What stands behind the last valid label is padding, whatever its value: the inputs of a decoder are its labels moved
    by one, and keep the last label of a row only where a longer row stands beside it. Labels that do not count are
    negative (-100), as no index of an embedding is.
    """
    last_steps: dict[tuple[int, ...], torch.Tensor] = {}
    for tensor in tensors:
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype is not torch.bool:
            values = tensor.detach().cpu()
            if not values.is_complex() and bool((values < 0).any()):
                steps = torch.arange(1, values.shape[1] + 1, device=values.device)
                last_steps[tuple(values.shape)] = torch.where(values < 0, 0, steps).amax(1)
    return last_steps


def input_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Returns the shapes of all input tensors, in order."""
    return [tuple(tensor.shape) for _, tensor in _tensors(args, kwargs, computed=True)]


def _tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], computed: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    entries = [(f"argument {at + 1}", value) for at, value in enumerate(args)] + list(kwargs.items())
    for name, value in entries:
        for path, leaf in leaves(value, name):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.dim() > 0 and leaf.numel() > 0:
                if (leaf.grad_fn is not None or isinstance(leaf, torch.nn.Parameter)) and not computed:
                    continue
                yield _INDEX.sub("[*]", path), leaf


@torch.no_grad()
def fingerprints(tensor: torch.Tensor) -> Fingerprints:
    """Returns the rows of one tensor, along its first dimension and, hashed whole, along its second."""
    values = tensor.detach().cpu()
    # The batch may be the second dimension, as of sequences in shape (T, B).
    second = _along(values.transpose(0, 1), prefixes=False) if values.dim() > 1 else None
    return replace(_along(values, prefixes=True), shape=tuple(values.shape), second=second)


@torch.no_grad()
def _pointing(at: int, tensor: torch.Tensor, inputs: list[Fingerprints]) -> dict[str, Fingerprints]:
    """Returns fingerprints of a list whose numbers are replaced by the rows of another input that they may count.

    Args:
        at: Where the tensor stands among the inputs.
        tensor: Of shape (N,), (N, C) or, as edges are, (2, N).
        inputs: The fingerprints of all inputs of the forward.
    """
    if tensor.dim() > 2 or len(inputs) > _INPUTS or tensor.dtype not in _COUNTING:
        return {}
    values = tensor.detach().cpu()
    values = values.unsqueeze(1) if values.dim() == 1 else values
    # Edges of graphs are columns of two nodes each: all their numbers count nodes, however many edges there are.
    edges = values.shape[0] == 2 < values.shape[1]
    if values.shape[1] > _COLUMNS and not edges:
        return {}
    bits = values.contiguous().view(_VIEWS[values.element_size()]).to(torch.int64)
    readings = {}
    for position, prints in enumerate(inputs):
        rows = prints.hash[:, -1]
        # Floats as well: the number of a box's image stands in one table with the coordinates of the box.
        counts = ((values >= 0) & (values < len(rows)) & (values == values.floor())).all(0)
        columns = {str(column): [column] for column in counts.nonzero().flatten().tolist() if not edges}
        if bool(counts.all()) and len(columns) != 1:
            columns["all"] = list(range(len(counts)))
        for name, picked in columns.items() if position != at else ():
            numbers = values[:, picked].long()
            for reading, contents in _meanings(numbers, rows).items():
                used = contents[numbers.unique()]
                if len(used.unique()) < len(used) and not edges:
                    continue  # rows that are all the same would make all numbers the same
                resolved = bits.clone()
                resolved[:, picked] = contents[numbers]
                if edges:  # nodes may be the same: how far apart they are counts, too
                    resolved += _mix(numbers - numbers[0])
                readings[f"{name} of {position}{reading}"] = fingerprints(resolved)
    return readings


def _meanings(numbers: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each number may stand for: a row, and all rows that have it, as the nodes of one graph do."""
    meant = {"": rows}
    if len(rows) == len(numbers) and numbers.shape[1] == 1:
        meant[" together"] = torch.zeros_like(rows).index_add(0, numbers[:, 0], rows)
    return meant


def _along(values: torch.Tensor, *, prefixes: bool) -> Fingerprints:
    steps = _steps(values)
    projections = summaries(values.reshape(values.shape[0], -1).double()) if values.is_floating_point() else None
    if not prefixes or steps.shape[1] > _LONGEST:
        return Fingerprints(_running(steps)[:, -1:], projections=projections)
    backwards = steps.flip(1)
    return Fingerprints(_running(steps), _tail(steps), _running(backwards), _tail(backwards), projections)


def _steps(values: torch.Tensor) -> torch.Tensor:
    """One hash for each step of each row, shape (B, T)."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    values = values.contiguous()
    if values.dtype is torch.bool:
        values = values.to(torch.uint8)
    bits = values.view(_VIEWS[values.element_size()]).to(torch.int64)
    # Hashes are made of bits, in which NaN equals itself.
    bits = bits.reshape(bits.shape[0], bits.shape[1] if bits.dim() > 1 else 1, -1)
    # A zero hashes to zero and would count nothing: hence bits + 1.
    return _mix((_mix(bits + 1) * _factors(bits.shape[2])).sum(2))


def _running(steps: torch.Tensor) -> torch.Tensor:
    return (steps * _factors(steps.shape[1])).cumsum(1)


def _factors(count: int) -> torch.Tensor:
    # Odd factors, because a product with an odd number modulo 2^64 loses no bits.
    return (2 * torch.arange(count, dtype=torch.int64, device="cpu") + 1) * _ODD


def _mix(values: torch.Tensor) -> torch.Tensor:
    return (values ^ (values >> 29)) * _ODD


def _tail(steps: torch.Tensor) -> torch.Tensor:
    """For each row the first step from which all steps are equal, shape (B,)."""
    tail_lengths = (steps == steps[:, -1:]).flip(1).to(torch.int64).cumprod(1).sum(1)
    return steps.shape[1] - tail_lengths
