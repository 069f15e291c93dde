"""The control for code in which samples meet: it gives, and gives back, what it did for the full batch.

What is held is the code of some modules' own forwards between the calls that they make, or that of the script between
its models. The full-batch run keeps the values that such code hands on and the gradients that it sends back. The
accumulated run is given the rows of both: everything else computes and differentiates as it is.

Shapes: n rows of a micro-batch, which lie at n places among the N rows of a forward of the full-batch run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gaverify.audit.job import SCRIPT
from gaverify.audit.recording.graph import parameters_behind
from gaverify.audit.recording.names import paths_in
from gaverify.audit.recording.rows import input_shapes
from gaverify.audit.recording.values import plain, tensors_in
from gaverify.passes.calls import Call, listening
from gaverify.passes.nesting import changed

Spots = Sequence[tuple[int, Sequence[int]] | None]
_FILE = "held"


class Holding:
    """Holds code in one update of a run.

    Args:
        work: What to run the recorder's own code in.
        held: Paths of the modules, or `SCRIPT`.
        source: Folder of the full-batch run; None where this is it.
        spots: For each forward the number of the full-batch run's and the places of its rows in that; None for a
            forward that belongs to the held code itself.
    """

    def __init__(
        self, work: Callable[[], AbstractContextManager[None]], held: Sequence[str], source: Path | None, spots: Spots
    ) -> None:
        self._work, self._held, self._spots = work, held, spots
        self._source: list[dict[str, Any]] | None = None
        if source is not None:
            self._source = torch.load(source / f"{_FILE}.pt", weights_only=True)
        self._forwards: list[dict[str, Any]] = []
        self._ends: set[Any] = set()
        self._given: set[tuple[int, str]] = set()
        self._own: dict[int, torch.Tensor] = {}

    @contextmanager
    def listening(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Surrounds the forward of an outermost module."""
        number, shapes = len(self._forwards), input_shapes(args, kwargs)
        self._forwards.append({"rows": shapes[0][0] if shapes else 0, "values": {}, "gradients": {}})
        if self._source is not None and (number >= len(self._spots) or self._spots[number] is None):
            yield
            return

        def begins(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = args, kwargs
            if call.under in self._held:
                given = self._changed(partial(self._handed_on, number, f"{call.path} {call.number} in"), given)
            if call.path in self._held:
                given = self._changed(partial(self._taken_in, number, f"{call.path} {call.number} given"), given)
            return given

        def ends(call: Call, output: Any) -> Any:
            if call.path in self._held:
                output = self._changed(partial(self._handed_on, number, f"{call.path} {call.number} out"), output)
            if call.under in self._held:
                output = self._changed(partial(self._taken_in, number, f"{call.path} {call.number} made"), output)
            return output

        with listening(paths_in(model), begins, ends, outside=SCRIPT):
            yield

    def differentiated(self, roots: Any) -> None:
        """A backward pass begins: what the held code itself trains is known while there is a graph."""
        if SCRIPT in self._held and self._source is not None:
            self._know(tensor.grad_fn for tensor in tensors_in(roots))

    def own(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Returns the positions of those parameters that the held code reads without a call of a module."""
        return [at for at, parameter in enumerate(parameters) if id(parameter) in self._own]

    def kept(self) -> list[dict[str, Any]]:
        """Returns what the full-batch run kept."""
        return self._forwards

    def _changed(self, change: Callable[[str, torch.Tensor], torch.Tensor], nested: Any) -> Any:
        """Returns the same nested containers around what `change` makes of each tensor that has a graph."""

        def followed(path: str, leaf: Any) -> Any:
            follows = isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and leaf.is_floating_point()
            return change(path, leaf) if follows else leaf

        return changed(nested, followed)

    def _handed_on(self, number: int, name: str, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """What held code hands on has the full batch's values; its gradient flows into the held code."""
        name += path
        with self._work():
            values = plain(tensor)
            if self._source is None:
                if values is not None:
                    self._forwards[number]["values"][name] = values.to("cpu", copy=True)
                return tensor
            self._know([tensor.grad_fn])
            rows = self._rows(number, "values", name, tensor)
            missing = None if rows is None or values is None else rows - values
        return tensor if missing is None else tensor + missing

    def _taken_in(self, number: int, name: str, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """What held code takes in is given back the full batch's gradient."""
        tensor = tensor.view_as(tensor)  # what flows back by other ways is no matter of the held code
        with self._work():
            self._ends.add(tensor.grad_fn)
            tensor.register_hook(partial(self._given_back, number, name + path))
        return tensor

    def _given_back(self, number: int, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        with self._work():
            if self._source is None:
                kept = self._forwards[number]["gradients"]
                kept[name] = gradient.detach().to("cpu", copy=True) + kept.get(name, 0.0)
                return None
            return self._rows(number, "gradients", name, gradient)

    def _rows(self, number: int, what: str, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """Returns the part of what the full-batch run kept that belongs to a micro-batch; None where none does."""
        spot = self._spots[number]
        if spot is None or self._source is None:
            return None
        forward, places = spot
        whole: torch.Tensor | None = self._source[forward][what].get(name)
        if whole is None:
            return None
        part = rows_at(whole, tuple(like.shape), self._source[forward]["rows"], places)
        if part is None and what == "gradients" and whole.shape == like.shape:  # it has no rows: all of it, once
            part = torch.zeros_like(whole) if (forward, name) in self._given else whole
            self._given.add((forward, name))
        return None if part is None else part.to(device=like.device, dtype=like.dtype)

    def _know(self, roots: Iterable[Any]) -> None:
        self._own |= {id(leaf): leaf for leaf in parameters_behind(roots, self._ends)}


def rows_at(whole: torch.Tensor, shape: tuple[int, ...], rows: int, places: Sequence[int]) -> torch.Tensor | None:
    """Returns the rows of a tensor that lie at some places, in another shape; None where no dimension holds rows.

    Args:
        whole: Its first or second dimension has one or several entries for each row.
        shape: That of the result.
        rows: How many rows it holds.
        places: Those that are wanted.
    """
    if whole.dim() != len(shape):
        return None
    for dim in range(min(whole.dim(), 2)):
        entries = whole.shape[dim] // rows if rows else 0
        wanted = (*whole.shape[:dim], entries * len(places), *whole.shape[dim + 1 :])
        if entries and whole.shape[dim] == entries * rows and wanted == shape:
            split = whole.unflatten(dim, (rows, entries))
            index = torch.tensor(places, dtype=torch.int64, device=whole.device)
            found: torch.Tensor = split.index_select(dim, index).flatten(dim, dim + 1)
            return found
    return None
