"""What every module of a forward gives for each row, and what the backward brings back for it.

Shapes: B rows of a forward; a tensor inside a model may have several entries of its leading dimension for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from gaverify.audit.job import SCRIPT
from gaverify.audit.recording.graph import meetings
from gaverify.audit.recording.names import paths_in
from gaverify.audit.recording.rows import input_shapes
from gaverify.audit.recording.values import plain, same, tensors_in
from gaverify.passes.calls import Call, listening, per_channel_affine
from gaverify.passes.fingerprints import real_numbers, summaries
from gaverify.passes.nesting import changed, leaves, rebuilt
from gaverify.tracebacks import Place, user_place

_MOST = 64  # tensors of one call that are looked at


class Outputs:
    """Listens to all modules inside the forwards of one update, in the order in which their calls end.

    Args:
        work: What to run the recorder's own code in.
        moved: Paths of modules, or `SCRIPT`: what the calls that these make hand them gets other values in the second
            half of the rows, to see whether the first half feels it.
        small: The forwards are those of micro-batches, whose few rows may be as many as a layer has features.
    """

    def __init__(
        self, work: Callable[[], AbstractContextManager[None]], moved: Collection[str] = (), *, small: bool = False
    ) -> None:
        self._work, self._moved, self._small = work, moved, small
        self.forwards: list[dict[str, Any]] = []
        self._handed_out: set[Any] = set()  # the operations that made what models hand the script

    @contextmanager
    def listening(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Surrounds the forward of an outermost module."""
        shapes = input_shapes(args, kwargs)
        rows, number = shapes[0][0] if shapes else 0, len(self.forwards)
        paths = list(paths_in(model, scripted=True).values())
        forward: dict[str, Any] = {"model": id(model), "rows": rows, "number": number, "modules": paths, "calls": []}
        self.forwards.append(forward)
        inner: dict[str, _Inner] = {}
        begins, ends = partial(self._begins, inner), partial(self._ends, forward, inner)
        with listening(paths_in(model), begins, ends, outside=SCRIPT):
            yield

    def meetings(self, roots: Any) -> list[Place]:
        """Returns the lines between the models and what is differentiated in which rows meet."""
        with self._work():
            counts = {forward["rows"] * times for forward in self.forwards for times in (1, 2)} - {0, 1, 2}
            return meetings(
                [tensor.grad_fn for tensor in tensors_in(roots)], self._handed_out, counts, may_meet=self._small
            )

    def _begins(self, inner: dict[str, _Inner], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._work():
            tensors = _tensors((args, kwargs))
            first = next((values for _, tensor in tensors if (values := plain(tensor)) is not None), None)
            alone = not any(True for _ in call.module.children())
            call.kept["inputs"], call.kept["state"] = _rows(tensors), _state(call.module)
            call.kept["first"] = first.clone() if alone and first is not None else None
            inner[call.path] = _Inner({tensor.grad_fn for _, tensor in tensors})
            if call.under in inner:
                inner[call.under].roots |= {tensor.grad_fn for _, tensor in tensors}

    def _ends(self, forward: dict[str, Any], inner: dict[str, _Inner], call: Call, output: Any) -> Any:
        with self._work():
            tensors, graph = _tensors(output), inner[call.path]
            made = {tensor.grad_fn for _, tensor in tensors}
            counts = {forward["rows"] * times for times in (1, 2)} - {0, 1, 2}
            result, first = plain(tensors[0][1]) if len(tensors) == 1 else None, call.kept["first"]
            before = call.kept["state"]
            gradients: dict[str, Any] = {}
            forward["calls"].append(
                {
                    "path": call.path,
                    "under": call.under,
                    "kind": type(call.module).__name__,
                    "place": user_place(),
                    "meetings": meetings(graph.roots | made, graph.ends, counts, may_meet=self._small),
                    "inputs": call.kept["inputs"],
                    "outputs": _rows(tensors),
                    "numbers": any(tensor.numel() == 1 and tensor.requires_grad for _, tensor in tensors),
                    "gradients": gradients,
                    "changed": [n for n, value in _state(call.module).items() if not same(before.get(n), value)],
                    "scales": first is not None and result is not None and per_channel_affine(first, result),
                }
            )
            if call.under in inner:
                inner[call.under].ends |= made
            if call.under == SCRIPT:
                self._handed_out |= made
        if call.under in self._moved and forward["rows"] > 1:
            output = rebuilt(output, partial(_moved, forward["rows"]))
        return changed(output, partial(self._listened, gradients))

    def _listened(self, gradients: dict[str, Any], path: str, leaf: Any) -> Any:
        """Returns what a call gives as a view: what flows back to it from inside the call is not the caller's."""
        if not isinstance(leaf, torch.Tensor) or leaf.grad_fn is None:
            return leaf
        view = leaf.view_as(leaf)
        view.register_hook(partial(self._came_back, gradients, path))
        return view

    def _came_back(self, gradients: dict[str, Any], path: str, gradient: torch.Tensor) -> None:
        with self._work():
            found = _summarised(gradient)
            if found is None:
                return
            before = gradients.get(path)
            gradients[path] = found if before is None else {**found, "along": _added(before["along"], found["along"])}


class _Inner:
    """The operations at the borders of a module's own code: what it is given, and what the calls in it are given."""

    def __init__(self, given: set[Any]) -> None:
        self.ends, self.roots = given, set[Any]()


def _tensors(nested: Any) -> list[tuple[str, torch.Tensor]]:
    found = [(path, leaf) for path, leaf in leaves(nested, "") if isinstance(leaf, torch.Tensor)]
    return found[:_MOST]


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a module's own buffers: the kernel of BatchNorm moves its statistics without raising `_version`."""
    buffers = {name: plain(buffer) for name, buffer in module.named_buffers(recurse=False)}
    return {name: values.clone() for name, values in buffers.items() if values is not None}


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
