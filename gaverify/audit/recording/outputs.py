"""What every module of a forward gives for each row, and what the backward brings back for it.

Shapes: B rows of a forward; a tensor inside a model may have several entries of its leading dimension for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from gaverify.audit.recording.names import plain_name
from gaverify.audit.recording.places import user_place
from gaverify.audit.recording.rows import input_shapes
from gaverify.audit.recording.values import plain
from gaverify.passes.channels import per_channel_affine
from gaverify.passes.fingerprints import real_numbers, summaries
from gaverify.passes.nesting import leaves, rebuilt

_MOST = 64  # tensors of one call that are looked at


class Outputs:
    """Listens to all modules inside the forwards of one update, in the order in which their calls end.

    Args:
        work: What to run the recorder's own code in.
        rest_moved: Give the loss other values of the second half of the rows, to see whether the first half feels it.
    """

    def __init__(self, work: Callable[[], AbstractContextManager[None]], rest_moved: bool) -> None:
        self._work, self._rest_moved = work, rest_moved
        self.forwards: list[dict[str, Any]] = []

    @contextmanager
    def listening(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Surrounds the forward of an outermost module."""
        shapes = input_shapes(args, kwargs)
        rows = shapes[0][0] if shapes else 0
        forward: dict[str, Any] = {"rows": rows, "calls": [], "gradients": {}}
        self.forwards.append(forward)
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                call = _Call(self._work, plain_name(name), forward["calls"])
                hooks.callback(module.register_forward_pre_hook(call.begins, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(call.ends).remove)
            if not isinstance(model, torch.jit.ScriptModule):
                hooks.callback(model.register_forward_hook(partial(self._handed_out, forward)).remove)
            yield

    def _handed_out(self, forward: dict[str, Any], model: nn.Module, args: Any, output: Any) -> Any:
        """Listens for the gradients of what a model hands out."""
        if self._rest_moved and forward["rows"] > 1:
            output = rebuilt(output, partial(_moved, forward["rows"]))
        for path, tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._came_back, forward["gradients"], path))
        return output

    def _came_back(self, gradients: dict[str, Any], path: str, gradient: torch.Tensor) -> None:
        with self._work():
            found = _summarised(gradient)
            if found is None:
                return
            before = gradients.get(path)
            gradients[path] = found if before is None else {**found, "along": _added(before["along"], found["along"])}


class _Call:
    """The calls of one module."""

    def __init__(
        self, work: Callable[[], AbstractContextManager[None]], path: str, calls: list[dict[str, Any]]
    ) -> None:
        self._work, self._path, self._calls = work, path, calls
        self._open: list[tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor | None]] = []

    def begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a call: its inputs, which it may change, and the state that it holds."""
        with self._work():
            tensors = _tensors((args, kwargs))
            first = next((values for _, tensor in tensors if (values := plain(tensor)) is not None), None)
            alone = not any(True for _ in module.children())
            self._open.append((_rows(tensors), _state(module), first.clone() if alone and first is not None else None))

    def ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """After a call."""
        with self._work():
            inputs, before, first = self._open.pop()
            tensors = _tensors(output)
            result = plain(tensors[0][1]) if len(tensors) == 1 else None
            changed = [name for name, value in _state(module).items() if not _same(value, before.get(name))]
            self._calls.append(
                {
                    "path": self._path,
                    "kind": type(module).__name__,
                    "place": user_place(),
                    "inputs": inputs,
                    "outputs": _rows(tensors),
                    "changed": changed,
                    "scales": first is not None and result is not None and per_channel_affine(first, result),
                }
            )


def _tensors(nested: Any) -> list[tuple[str, torch.Tensor]]:
    found = [(path, leaf) for path, leaf in leaves(nested, "") if isinstance(leaf, torch.Tensor)]
    return found[:_MOST]


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a module's own buffers: the kernel of BatchNorm moves its statistics without raising `_version`."""
    buffers = {name: plain(buffer) for name, buffer in module.named_buffers(recurse=False)}
    return {name: values.clone() for name, values in buffers.items() if values is not None}


def _same(value: torch.Tensor, before: torch.Tensor | None) -> bool:
    return before is not None and before.shape == value.shape and torch.equal(before, value)


def _rows(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    found = ((path, _summarised(tensor)) for path, tensor in tensors)
    return {path: rows for path, rows in found if rows is not None}


def _summarised(tensor: torch.Tensor) -> dict[str, Any] | None:
    """The shape of a tensor, and two projections and the norm of its entries along its first and second dimension."""
    values = plain(tensor)
    if values is None or values.layout is not torch.strided or values.dim() == 0 or values.numel() == 0:
        return None
    along = []
    for dim in range(min(values.dim(), 2)):
        entries = real_numbers(values.movedim(dim, 0).reshape(values.shape[dim], -1)).double()
        along.append(summaries(entries.reshape(values.shape[dim], -1)).cpu())
    return {"shape": tuple(values.shape), "along": along}


def _added(before: list[torch.Tensor], more: list[torch.Tensor]) -> list[torch.Tensor]:
    """The projections of a sum are the sums of projections; its norm is not, and nobody reads that of a gradient."""
    return [a + b if a.shape == b.shape else b for a, b in zip(before, more, strict=False)]


def _moved(rows: int, leaf: Any) -> Any:
    """Other values in the second half of the rows: of the same sign and no larger, as what they mean may ask for."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.dim() == 0 or leaf.shape[0] % rows:
        return leaf
    half = rows // 2 * (leaf.shape[0] // rows)
    rest = leaf[half:]
    places = torch.arange(rest.numel(), dtype=torch.float32, device=leaf.device).reshape(rest.shape)
    factors = (0.75 + 0.25 * torch.cos(places.square())).to(leaf.dtype)
    return torch.cat([leaf[:half], rest * factors])
