"""The inputs of a script's forwards: kept in the full-batch run, and put in place of the other runs' own.

This is for scripts that make their batches without a loader, in an order that hangs on the batch size. It is right only
where everything that belongs to a sample goes into the forward, its target too: a model that returns its loss.

Shapes: B rows of a forward of the full-batch run, b of a micro-batch; the batch may be any one dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gaverify.audit.recording.values import tensors_in

Key = tuple[int, bool, int]
"""A model in the order of first calls, whether it is in training mode, and how many such forwards the pass has had."""

_FILE = "inputs-{}-{}-{}-{}.pt"


class Inputs:
    """What both sides share: forwards are told apart by model, mode and their number since the last backward pass."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[int, tuple[int, Any]] = {}
        self._since: Counter[tuple[int, bool]] = Counter()

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Is told of a forward that is about to begin."""
        kind = self._models.setdefault(id(module), (len(self._models), module))[0], module.training
        key, tensors = (*kind, self._since[kind]), _given(args, kwargs)
        self._since[kind] += 1
        if tensors:
            self._at(key, tensors)

    def after_backward(self) -> None:
        """A backward pass is over."""
        self._since.clear()

    def _path(self, key: Key, at: int) -> Path:
        model, training, number = key
        return self._folder / _FILE.format(model, int(training), number, at)

    def _at(self, key: Key, tensors: list[torch.Tensor]) -> None:
        raise NotImplementedError


class KeptInputs(Inputs):
    """The full-batch run: one file for every forward."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._counts: Counter[Key] = Counter()

    def _at(self, key: Key, tensors: list[torch.Tensor]) -> None:
        torch.save([tensor.cpu() for tensor in tensors], self._path(key, self._counts[key]))
        self._counts[key] += 1


class GivenInputs(Inputs):
    """The other runs: a forward is given the next rows of the same forward of the full-batch run.

    Only the tensors that the script hands over are changed, by what they point at: data sets that they are views of
    stay as they are.
    """

    def __init__(self, source: Path) -> None:
        super().__init__(source)
        self._place: dict[Key, tuple[int, int]] = {}

    def _at(self, key: Key, tensors: list[torch.Tensor]) -> None:
        at, start = self._place.get(key, (0, 0))
        path = self._path(key, at)
        whole: list[torch.Tensor] = torch.load(path, weights_only=True) if path.exists() else []
        cuts = cuts_of([tuple(tensor.shape) for tensor in tensors], [tuple(tensor.shape) for tensor in whole])
        if cuts is None:
            return  # lists of boxes, say: the comparison of the rows says what came of it
        dims, rows, total = cuts
        if start + rows > total:
            return
        for tensor, full, dim in zip(tensors, whole, dims, strict=True):
            part = full if dim is None else full.narrow(dim, start, rows)
            tensor.data = part.to(tensor.device, tensor.dtype).clone()
        self._place[key] = (at, start + rows) if start + rows < total else (at + 1, 0)


def cuts_of(own: list[tuple[int, ...]], full: list[tuple[int, ...]]) -> tuple[list[int | None], int, int] | None:
    """Returns along which dimension each tensor is cut, None for one that is not, with b and B.

    Where nothing is cut, because the run repeats the full-batch run, b and B are 1. Where one dimension of a tensor
    follows the batch and another its padding, the batch is the first.

    Args:
        own: The shapes of a forward's inputs.
        full: Those of the full-batch run's.

    Returns:
        None where the shapes do not fit together.
    """
    if len(own) != len(full) or any(len(a) != len(b) for a, b in zip(own, full, strict=True)):
        return None
    dims = [
        next((at for at, (rows, total) in enumerate(zip(a, b, strict=True)) if rows != total), None)
        for a, b in zip(own, full, strict=True)
    ]
    sizes = {(a[dim], b[dim]) for a, b, dim in zip(own, full, dims, strict=True) if dim is not None}
    if not sizes:
        return dims, 1, 1
    if len(sizes) > 1 or any(rows > total for rows, total in sizes):
        return None
    ((rows, total),) = sizes
    return dims, rows, total


def has_loss(output: Any) -> bool:
    """Whether a forward returns a single number that can be differentiated: its loss."""
    return any(result.dim() == 0 and result.requires_grad for result in tensors_in(output))


def _given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that the script hands over, without those that gradients flow through."""
    found = tensors_in((args, dict(kwargs)))
    return [tensor for tensor in found if type(tensor) is torch.Tensor and tensor.grad_fn is None and tensor.dim() > 0]
