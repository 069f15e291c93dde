"""Outputs of modules in a forward: recorded row by row, or pinned, as a control for code in which samples interact.

`Outputs` records what every module returns for each row, and the gradient that comes back for it. `PinnedModules`
replaces the outputs and input gradients of some modules by those of the full-batch run. Pinned is the code of modules'
own forwards between the calls that they make, or that of the script between its models. The full-batch run keeps the
values that such code returns and the gradients that it sends back. The accumulated run is given the rows of both;
everything else computes and differentiates as it is.

Shapes: B rows of a forward; a tensor inside a model may have several entries of its leading dimension for each row. The
n rows of a micro-batch lie at n places among the N rows of a forward of the full-batch run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import nn

from gaverify.audit.recording.graph import behind, line_of, meetings
from gaverify.audit.recording.samples import input_shapes
from gaverify.audit.recording.values import paths_in, place_in_group, plain, same, tensors_in
from gaverify.passes.calls import RunningCall, listening, per_channel_affine
from gaverify.passes.layouts import SampleLayout, leaves, map_leaves, real_numbers, rebuilt, summaries
from gaverify.passes.precision import unit_roundoff
from gaverify.thresholds import COMPUTED_FLOAT32, MANY_UNITS
from gaverify.tracebacks import Place, user_place

SCRIPT = "(script)"
"""Stands for the script's own code among the paths of modules."""

_MOST = 64  # tensors of one call that are looked at


class RowSummaries(TypedDict):
    """A tensor's rows: two random projections and the norm of each row's entries."""

    shape: tuple[int, ...]
    along: list[torch.Tensor]
    """Along the first and the second dimension, shape (1 or 2 groups, entries, 3)."""


Summaries = dict[str, RowSummaries]
"""By the place of a tensor in nested containers."""


class RecordedCall(TypedDict):
    """One call of a module inside a forward."""

    path: str
    number: int
    """How many calls of this module came before in the forward."""
    under: str
    """Path of the module whose code makes the call, or `SCRIPT`."""
    kind: str
    """Name of the module's class."""
    place: Place | None
    """The user's line that makes the call."""
    meetings: list[Place]
    """Lines of the module's own code in which rows interact."""
    inputs: Summaries
    outputs: Summaries
    numbers: bool
    """Whether it returns a number with a graph, as a loss is."""
    gradients: Summaries
    """The gradients of its outputs."""
    changed: list[str]
    """Buffers that the call has written."""
    scales: bool
    """Whether it only scales and shifts its channels, as normalisation does."""


class RecordedForward(TypedDict):
    """One forward of an outermost module."""

    model: int
    rows: int
    number: int
    """From 0, in its update."""
    modules: list[str]
    """Paths of all modules."""
    calls: list[RecordedCall]
    """In the order in which they end."""
    rank: NotRequired[int]


class PinnedForward(TypedDict):
    """The record of a forward in the full-batch run, by the name of a place in pinned code."""

    rows: int
    values: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


class PinnedCalls(TypedDict):
    """Notes about the pinned code, of a run that is given the full batch's values and gradients."""

    own: dict[int, list[int]]
    """For each optimizer the positions of parameters that the pinned code reads without a call of a module."""
    values: list[str]
    """Paths of pinned code whose outputs had differed before, where the loss depends on these outputs."""
    gradients: list[str]
    """Paths of pinned code whose input gradients had differed before."""


class Outputs:
    """Listens to all modules inside the forwards of one update, in the order in which their calls end.

    Args:
        work: Surrounds the recorder's own code.
        moved: Paths of modules, or `SCRIPT`, whose calls return changed values for the second half of the rows. If the
            gradients of the first half change, too, the rows interact.
        repeated: Path of a module whose calls are given the first half of the rows in place of the second half. If
            its outputs for the first half change, the rows interact in it. Any values may be repeated, also tokens.
        small: The forwards are those of micro-batches, whose few rows may be as many as a layer has features.
    """

    def __init__(
        self,
        work: Callable[[], AbstractContextManager[None]],
        moved: Collection[str] = (),
        repeated: str | None = None,
        *,
        small: bool = False,
    ) -> None:
        self._work, self._moved, self._repeated, self._small = work, moved, repeated, small
        self.forwards: list[RecordedForward] = []
        self._model_outputs: set[Any] = set()  # operations that made the outputs of models
        self._takers: dict[Any, str] = {}  # operations that made outputs of calls → path of the code that takes them

    @contextmanager
    def listening(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Surrounds the forward of an outermost module."""
        shapes = input_shapes(args, kwargs)
        rows, number = shapes[0][0] if shapes else 0, len(self.forwards)
        # Scripted modules are listed, too, although no hook can listen to their calls.
        paths = list(paths_in(model, scripted=True).values())
        forward: RecordedForward = {"model": id(model), "rows": rows, "number": number, "modules": paths, "calls": []}
        self.forwards.append(forward)
        inner: dict[str, _Inner] = {}
        begins, ends = partial(self._begins, inner, rows), partial(self._ends, forward, inner)
        with listening(paths_in(model), begins, ends, outside=SCRIPT):
            yield

    def meetings(self, roots: Any) -> list[Place]:
        """Returns the lines of the loss, behind the models, in which rows interact."""
        with self._work():
            # sizes that tell of rows: 0, 1 and 2 are sizes of many other things
            counts = {forward["rows"] * times for forward in self.forwards for times in (1, 2)} - {0, 1, 2}
            return meetings(
                [tensor.grad_fn for tensor in tensors_in(roots)], self._model_outputs, counts, may_meet=self._small
            )

    def custom_functions(self, roots: Any) -> list[Place]:
        """Returns the lines of the loss, behind the models, that call a function with a backward of its own."""
        with self._work():
            nodes = behind((tensor.grad_fn for tensor in tensors_in(roots)), self._model_outputs)
            custom = [node for node in nodes if isinstance(node, torch.autograd.function.BackwardCFunction)]
            return [place for node in custom if (place := line_of(node)) is not None]

    def inside(self, roots: Any) -> list[str]:
        """Returns the modules whose own code makes a tensor that flows into a loss and that no call returns."""
        with self._work():
            nodes = behind((tensor.grad_fn for tensor in tensors_in(roots)), self._takers)
            under = (self._takers.get(child) for node in nodes for child, _ in node.next_functions)
            return [path for path in dict.fromkeys(under) if path is not None and path != SCRIPT]

    def _begins(
        self, inner: dict[str, _Inner], rows: int, call: RunningCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        with self._work():
            tensors = _tensors((args, kwargs))
            first = next((values for _, tensor in tensors if (values := plain(tensor)) is not None), None)
            # Only a module without inner ones is tested for scaling its input, so only its input is copied.
            is_leaf = not any(True for _ in call.module.children())
            call.kept["inputs"], call.kept["state"] = _rows(tensors), _state(call.module)
            # a copy: the module may work in place
            call.kept["first"] = first.clone() if is_leaf and first is not None else None
            # A call's own code begins at its arguments, which the code around the call has made.
            inner[call.path] = _Inner({tensor.grad_fn for _, tensor in tensors})
            if call.under in inner:
                inner[call.under].roots |= {tensor.grad_fn for _, tensor in tensors}
        if call.path != self._repeated or rows < 2:
            return None
        return map_leaves((args, dict(kwargs)), lambda _, leaf: _repeat_first_half(rows, leaf))

    def _ends(self, forward: RecordedForward, inner: dict[str, _Inner], call: RunningCall, output: Any) -> Any:
        with self._work():
            tensors, graph = _tensors(output), inner[call.path]
            nodes = {tensor.grad_fn for _, tensor in tensors}
            counts = {forward["rows"] * times for times in (1, 2)} - {0, 1, 2}
            result, first = plain(tensors[0][1]) if len(tensors) == 1 else None, call.kept["first"]
            before = call.kept["state"]
            gradients: Summaries = {}
            forward["calls"].append(
                {
                    "path": call.path,
                    "number": call.number,
                    "under": call.under,
                    "kind": type(call.module).__name__,
                    "place": user_place(),
                    "meetings": meetings(graph.roots | nodes, graph.ends, counts, may_meet=self._small),
                    "inputs": call.kept["inputs"],
                    "outputs": _rows(tensors),
                    "numbers": any(tensor.numel() == 1 and tensor.requires_grad for _, tensor in tensors),
                    "gradients": gradients,
                    "changed": [n for n, value in _state(call.module).items() if not same(before.get(n), value)],
                    "scales": first is not None and result is not None and per_channel_affine(first, result),
                }
            )
            if call.under in inner:
                inner[call.under].ends |= nodes
            if call.under == SCRIPT:
                self._model_outputs |= nodes
        # Behind the summary, which is of the module's own result.
        if call.under in self._moved and forward["rows"] > 1:
            output = rebuilt(output, partial(_move_second_half, forward["rows"]))
        return map_leaves(output, partial(self._watch_output, gradients, call.under))

    def _watch_output(self, gradients: Summaries, under: str, path: str, leaf: Any) -> Any:
        """Returns an output as a view, whose gradient comes from the caller only, not from inside the call."""
        if not isinstance(leaf, torch.Tensor) or leaf.grad_fn is None:
            return leaf
        view = leaf.view_as(leaf)
        self._takers[view.grad_fn] = under
        view.register_hook(partial(self._note_gradient, gradients, path))
        return view

    def _note_gradient(self, gradients: Summaries, path: str, gradient: torch.Tensor) -> None:
        with self._work():
            summary = _summarise(gradient)
            if summary is None:
                return
            # The hook runs once per backward pass: losses that are differentiated one by one add up.
            before = gradients.get(path)
            gradients[path] = (
                summary if before is None else {**summary, "along": _add_projections(before["along"], summary["along"])}
            )


class _Inner:
    """The operations at the borders of a module's own code.

    `ends` made the module's inputs and the outputs of the calls in it; `roots` made the inputs of those calls.
    """

    def __init__(self, inputs: set[Any]) -> None:
        self.ends, self.roots = inputs, set[Any]()


def _tensors(nested: Any) -> list[tuple[str, torch.Tensor]]:
    tensors = [(path, leaf) for path, leaf in leaves(nested, "") if isinstance(leaf, torch.Tensor)]
    return tensors[:_MOST]


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a module's own buffers: the kernel of BatchNorm moves its statistics without raising `_version`."""
    buffers = {name: plain(buffer) for name, buffer in module.named_buffers(recurse=False)}
    return {name: values.clone() for name, values in buffers.items() if values is not None}


def _rows(tensors: list[tuple[str, torch.Tensor]]) -> Summaries:
    pairs = ((path, _summarise(tensor)) for path, tensor in tensors)
    return {path: rows for path, rows in pairs if rows is not None}


def _summarise(tensor: torch.Tensor) -> RowSummaries | None:
    """The shape of a tensor, and two projections and the norm of its entries along its first and second dimension."""
    values = plain(tensor)
    if values is None or values.layout is not torch.strided or values.dim() == 0 or values.numel() == 0:
        return None
    along = []
    # The batch may be the second dimension, as of a recurrent layer's (T, B, features).
    for dim in range(min(values.dim(), 2)):
        entries = real_numbers(values.movedim(dim, 0).reshape(values.shape[dim], -1)).double()
        along.append(summaries(entries.reshape(values.shape[dim], -1)).cpu())
    return {"shape": tuple(values.shape), "along": along}


def _add_projections(before: list[torch.Tensor], more: list[torch.Tensor]) -> list[torch.Tensor]:
    """The projections of a sum are the sums of projections; its norm is not, and nobody reads that of a gradient."""
    return [a + b if a.shape == b.shape else b for a, b in zip(before, more, strict=False)]


def _move_second_half(rows: int, leaf: Any) -> Any:
    """Returns a tensor with other values in the second half of its rows, of the same sign and no larger.

    So a probability stays one, and the argument of a logarithm stays positive.
    """
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.dim() == 0 or leaf.shape[0] % rows:
        return leaf
    half = rows // 2 * (leaf.shape[0] // rows)
    second_half = leaf[half:]
    places = torch.arange(second_half.numel(), dtype=torch.float32, device=leaf.device).reshape(second_half.shape)
    # Each entry has its own factor: one factor for all cancels where the script normalises its rows.
    factors = (0.75 + 0.25 * torch.cos(places.square())).to(leaf.dtype)
    return torch.cat([leaf[:half], second_half * factors])


def _repeat_first_half(rows: int, leaf: Any) -> Any:
    """Returns a tensor with the first half of its rows in place of the second half."""
    dims = range(min(leaf.dim(), 2)) if isinstance(leaf, torch.Tensor) else ()
    dim = next((dim for dim in dims if leaf.shape[dim] and leaf.shape[dim] % rows == 0), None)
    if dim is None:
        return leaf
    half = leaf.narrow(dim, 0, rows // 2 * (leaf.shape[dim] // rows))
    missing = leaf.shape[dim] - half.shape[dim]
    return torch.cat(
        [half, *[half] * (missing // half.shape[dim]), half.narrow(dim, 0, missing % half.shape[dim])], dim
    )


PinnedRows = Sequence[Sequence[tuple[int, Sequence[int]] | None]]


class PinnedModules:
    """Pins the code of modules in one update of a run.

    Args:
        work: The guard that the recorder's own code runs in.
        paths: The paths of the modules, or `SCRIPT`.
        source: Folder of the full-batch run; None where this is it.
        rows: For each rank and forward the number of the full-batch run's and the places of its rows in that; None for
            a forward that belongs to the pinned code itself.
        factor: On the full batch's gradients before they are given back.
    """

    def __init__(
        self,
        work: Callable[[], AbstractContextManager[None]],
        paths: Sequence[str],
        source: Path | None,
        rows: PinnedRows,
        factor: float = 1.0,
    ) -> None:
        self._work, self._paths, self._rows_of_ranks, self._factor = work, paths, rows, factor
        self._full_batch: list[PinnedForward] | None = None
        if source is not None:
            self._full_batch = torch.load(source / "pinned.pt", weights_only=True)
        self.forwards: list[PinnedForward] = []  # what the full-batch run keeps
        self._ends: set[Any] = set()
        self._spent: set[tuple[int, str]] = set()  # gradients without rows that one micro-batch was given
        # By id; the tensors are kept, so that no other one gets the id of one of them.
        self._own_parameters: dict[int, torch.Tensor] = {}
        self._differing_values, self._differing_gradients = set[str](), set[str]()  # paths of pinned code

    @contextmanager
    def listening(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Surrounds the forward of an outermost module."""
        number, shapes = len(self.forwards), input_shapes(args, kwargs)
        self.forwards.append({"rows": shapes[0][0] if shapes else 0, "values": {}, "gradients": {}})
        # A forward that belongs to the pinned code runs as it is: values are replaced at the border of that code.
        if self._full_batch is not None and self._rows_of(number) is None:
            yield
            return

        # Arguments of a call are results of the code around it and inputs of its own code; outputs the other way round.
        # Results of pinned code are given the full batch's values, and its inputs the full batch's gradients.
        def begins(call: RunningCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            name, inputs = f"{call.path} {call.number}", (args, kwargs)
            inputs = self._change_tensors(call.under, self._replace_value, number, f"{name} in", inputs)
            return self._change_tensors(call.path, self._replace_gradient, number, f"{name} given", inputs)

        def ends(call: RunningCall, output: Any) -> Any:
            name = f"{call.path} {call.number}"
            output = self._change_tensors(call.path, self._replace_value, number, f"{name} out", output)
            return self._change_tensors(call.under, self._replace_gradient, number, f"{name} made", output)

        with listening(paths_in(model), begins, ends, outside=SCRIPT):
            yield

    def note_differentiation(self, roots: Any) -> None:
        """A backward pass begins: as long as there is a graph it tells what the pinned code itself trains."""
        if SCRIPT in self._paths and self._full_batch is not None:
            self._note_parameters(tensor.grad_fn for tensor in tensors_in(roots))

    def describe(self, parameters_of_optimizers: Sequence[Sequence[torch.Tensor]]) -> PinnedCalls:
        """Returns what the pins changed, and what they cannot show."""
        read_directly = {
            number: [at for at, parameter in enumerate(parameters) if id(parameter) in self._own_parameters]
            for number, parameters in enumerate(parameters_of_optimizers)
        }
        return {
            "own": read_directly,
            "values": sorted(self._differing_values),
            "gradients": sorted(self._differing_gradients),
        }

    def _change_tensors(
        self, module: str, change: Callable[..., torch.Tensor], number: int, name: str, nested: Any
    ) -> Any:
        """Returns what `change` makes of each tensor with a graph, in the same containers, if the module is pinned."""

        def change_leaf(path: str, leaf: Any) -> Any:
            follows = isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and leaf.is_floating_point()
            return change(module, number, name + path, leaf) if follows else leaf

        return map_leaves(nested, change_leaf) if module in self._paths else nested

    def _replace_value(self, module: str, number: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an output of pinned code with the full batch's values; its gradient flows into the pinned code."""
        with self._work():
            values = plain(tensor)
            if self._full_batch is None:
                if values is not None:
                    self.forwards[number]["values"][name] = values.to("cpu", copy=True)
                return tensor
            self._note_parameters([tensor.grad_fn])
            stored = self._full_batch_rows(number, name, tensor, lambda forward: forward["values"])
            if stored is None or values is None:
                return tensor
            missing, is_same = stored - values, are_same(stored, values)
        pinned_tensor = tensor + missing  # added rather than put in its place: the sum keeps the graph
        # A value that the loss does not depend on may differ without any fault.
        if not is_same and pinned_tensor.requires_grad:
            pinned_tensor.register_hook(partial(self._note_dependence, module))
        return pinned_tensor

    def _note_dependence(self, module: str, gradient: torch.Tensor) -> None:
        with self._work():
            if bool(gradient.any()):
                self._differing_values.add(module)

    def _replace_gradient(self, module: str, number: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an input of pinned code that is given back the full batch's gradient."""
        tensor = tensor.view_as(tensor)  # gradients that reach the tensor by other ways are none of the pinned code's
        with self._work():
            self._ends.add(tensor.grad_fn)
            tensor.register_hook(partial(self._give_back, module, number, name))
        return tensor

    def _give_back(self, module: str, number: int, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        with self._work():
            if self._full_batch is None:
                sums = self.forwards[number]["gradients"]
                # Several losses may be differentiated one by one through the same place.
                sums[name] = gradient.detach().to("cpu", copy=True) + sums.get(name, 0.0)
                return None
            stored = self._full_batch_rows(number, name, gradient, lambda forward: forward["gradients"], once=True)
            if stored is None:
                return None
            if not are_same(stored * self._factor, gradient):
                self._differing_gradients.add(module)
            return stored * self._factor

    def _rows_of(self, number: int) -> tuple[int, Sequence[int]] | None:
        """Where the rows of a forward of this rank lie in the full-batch run; None where that is not known."""
        rows = self._rows_of_ranks[place_in_group()[0]] if self._rows_of_ranks else ()
        return rows[number] if number < len(rows) else None

    def _full_batch_rows(
        self,
        number: int,
        name: str,
        like: torch.Tensor,
        tensors_of: Callable[[PinnedForward], dict[str, torch.Tensor]],
        *,
        once: bool = False,
    ) -> torch.Tensor | None:
        """Returns the rows of a micro-batch of what the full-batch run kept; None where it has none of them.

        Args:
            number: The number of the micro-batch's forward.
            name: The name of the place.
            like: Tensor of the micro-batch there.
            tensors_of: Chooses values or gradients.
            once: Give a tensor without rows to one micro-batch, and zeros to the others: their sum counts.
        """
        rows = self._rows_of(number)
        if rows is None or self._full_batch is None:
            return None
        forward, places = rows
        stored = tensors_of(self._full_batch[forward]).get(name)
        if stored is None:
            return None
        part = rows_at(stored, tuple(like.shape), self._full_batch[forward]["rows"], places)
        if part is None and once and stored.shape == like.shape:
            part = torch.zeros_like(stored) if (forward, name) in self._spent else stored
            self._spent.add((forward, name))
        return None if part is None else part.to(device=like.device, dtype=like.dtype)

    def _note_parameters(self, roots: Iterable[Any]) -> None:
        # Only a node that adds to a parameter's `.grad` has a `variable`.
        leaves_behind = (getattr(node, "variable", None) for node in behind(roots, self._ends))
        self._own_parameters |= {id(leaf): leaf for leaf in leaves_behind if leaf is not None}


def are_same(constant: torch.Tensor, computed: torch.Tensor) -> bool:
    """Whether two tensors agree up to rounding, relative to the largest entry."""
    constant, computed = real_numbers(constant), real_numbers(computed.detach())
    if not constant.numel() or not constant.is_floating_point():
        return torch.equal(constant, computed)
    difference, largest = (constant - computed).abs(), constant.abs()
    allowed = max(COMPUTED_FLOAT32, MANY_UNITS * unit_roundoff(constant.dtype))
    return bool(difference.max() <= allowed * largest.max())


def rows_at(tensor: torch.Tensor, shape: tuple[int, ...], rows: int, places: Sequence[int]) -> torch.Tensor | None:
    """Returns the rows of a tensor that lie at some places, in another shape; None where no dimension holds rows.

    Args:
        tensor: Its first or second dimension has one or several entries for each row.
        shape: That of the result.
        rows: How many rows it holds.
        places: The places that are wanted.
    """
    layout = SampleLayout.find_leading(tensor.shape, shape, rows, len(places))
    return None if layout is None else layout.take(tensor, places, rows)
