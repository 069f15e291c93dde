"""Calls of torch that a script's own code makes outside of its models: traced one by one, or given other arguments.

A model is one call: what happens inside is not looked at, but for modules that are named, such as one that returns a
loss. `TracedCalls` notes each call with what it reads and fingerprints of its results. `PinnedArguments` replaces some
arguments by those of the full-batch run, above autograd, so that the gradient is that of the replaced values.

Shapes: n rows of a micro-batch lie at n places among the N rows of the full batch.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn
from torch.overrides import resolve_name

from gaverify.audit.recording.bus import replace_function
from gaverify.audit.recording.calls import BackwardCall, Differentiation, ForwardCall, Recording, StepCall
from gaverify.audit.recording.outputs import SCRIPT
from gaverify.audit.recording.values import paths_in, plain, tensors_in
from gaverify.passes.calls import Call, FunctionMode, listening
from gaverify.passes.layouts import SampleLayout, leaves, map_leaves, real_numbers, summaries
from gaverify.tracebacks import Place, running_frame

_LARGEST = 1 << 24  # elements of a tensor that is described; comparing goes on behind a larger one
_NAN, _INFINITE = 0.7368, 1e9  # stand for these in fingerprints
INPUT = "input"
"""Name of a call that stands for a tensor which no call made: it comes from a loader, a file or NumPy."""


class Description(TypedDict):
    """Fingerprints of one tensor: two projections and a norm."""

    shape: tuple[int, ...]
    along: list[torch.Tensor]
    """Of each entry of the first and of the second dimension, shape (entries, 3)."""
    whole: torch.Tensor
    """Of all numbers in their order, shape (3,)."""


class TracedCall(TypedDict):
    """One call of a torch function, or of a model."""

    name: str
    place: Place
    """The line that makes it: the user's, or a library's."""
    number: int
    """How many calls of this name and line came before in the update."""
    arguments: dict[str, int]
    """Tensors among the arguments, by their path → position of the call that made them."""
    numbers: dict[str, float]
    """Python numbers among the arguments, by their path."""
    read: list[int]
    """Positions of the calls that read such a number out of a tensor."""
    names: dict[str, list[str]]
    """Variables of the script that hold an argument, by its path; of a number those that are equal to it."""
    graded: bool
    """Whether gradients flow through it."""
    results: list[Description | None]
    """None for a tensor that cannot be described."""


class Trace(TypedDict):
    """The calls of one update, in order."""

    calls: list[TracedCall]
    roots: list[int]
    """Positions of the calls that made what was differentiated."""


class CallKey(NamedTuple):
    """By what a call is found again in another run: how often it came before in the update counts as well."""

    name: str
    place: Place


class ScriptCalls:
    """Gives the calls of the script's own code in its last update to a subclass.

    Args:
        recording: What listeners share.
        inside: Paths of modules whose own code counts as the script's.
    """

    def __init__(self, recording: Recording, inside: Collection[str]) -> None:
        self._recording, self._guard, self._inside = recording, recording.guard, inside
        self._is_active = recording.is_last_update
        self._counts: Counter[CallKey] = Counter()
        self._pauses = 0
        self._process = os.getpid()
        # Below every mode of the script's, and never left: modes are taken off in the order of a stack.
        self.mode = FunctionMode(self._handle)
        self.mode.__enter__()
        # Modes do not see these.
        for name in ("from_numpy", "frombuffer"):
            replace_function(torch, name, lambda original, *args, **kwargs: self._handle(original, args, kwargs))

    @contextmanager
    def pause(self, _: Differentiation | None = None) -> Iterator[None]:
        """Surrounds what is not the script's own code."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    @contextmanager
    def run_forward(self, call: ForwardCall) -> Iterator[None]:
        """Surrounds a forward; a module without parameters is a part of the script's code, as a criterion is."""
        module = call.module
        if next(module.parameters(), None) is None:
            yield
        elif "" not in self._inside:
            with self.pause():
                yield
        else:
            with listening(paths_in(module), self._enter_module, self._leave_module, outside=SCRIPT):
                yield

    def begin_step(self, _: StepCall) -> None:
        """An optimizer's step begins, whose calls are torch's."""
        self._pauses += 1

    def end_step(self, _: StepCall) -> None:
        """A step has ended: what follows it belongs to the next update."""
        self._pauses -= 1
        updates_left = self._recording.job.updates - self._recording.journal.update
        if updates_left > 0:
            self._clear()
            self._is_active = updates_left == 1  # the next update begins here, long before its first forward
        else:
            self._end_update()

    def _clear(self) -> None:
        self._counts.clear()

    def _end_update(self) -> None:
        """The last update has stepped, perhaps not for the last time."""

    def _enter_module(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if call.path not in self._inside:
            self._pauses += 1

    def _leave_module(self, call: Call, output: Any) -> None:
        if call.path not in self._inside:
            self._pauses -= 1
            if self._is_active and not self._pauses:
                self.note_model(call.module, (call.args, {}), output)

    def note_forward(self, call: ForwardCall) -> None:
        """Notes a model that was called as one call."""
        if self._is_active and not self._pauses and next(call.module.parameters(), None) is not None:
            self.note_model(call.module, (call.args, dict(call.kwargs)), call.result)

    def note_loss(self, call: BackwardCall) -> None:
        """Notes what a backward pass differentiates."""

    def note_model(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Notes the call of a module whose own code was not looked at."""

    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._pauses or not self._is_active or os.getpid() != self._process or self._guard.off:
            return func(*args, **kwargs)
        frame = running_frame()
        if frame is None:
            return func(*args, **kwargs)
        key = CallKey(resolve_name(func) or getattr(func, "__name__", str(func)), _place_of(frame))
        return self._run(key, self._count(key), frame, func, args, kwargs)

    def _count(self, key: CallKey) -> int:
        self._counts[key] += 1
        return self._counts[key] - 1

    def _run(
        self, key: CallKey, number: int, frame: FrameType, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        raise NotImplementedError


class TracedCalls(ScriptCalls):
    """Notes the calls, what they read, and fingerprints of their results."""

    def __init__(self, recording: Recording, inside: Collection[str]) -> None:
        self._calls: list[TracedCall] = []
        # A loop may make the values of the next update before the forward that begins it.
        self._count_until_step: int | None = None
        self._roots: list[int] = []
        self._makers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._numbers: dict[float, int] = {}  # read out of tensors
        super().__init__(recording, inside)

    @property
    def trace(self) -> Trace:
        """What was noted, on the host."""
        calls = self._calls[: self._count_until_step]
        for call in calls:
            call["results"] = [described and _to_host(described) for described in call["results"]]
        return {"calls": calls, "roots": self._roots}

    def note_loss(self, call: BackwardCall) -> None:
        """Notes what a backward pass differentiates."""
        makers = [self._maker_of(tensor) for tensor in tensors_in(call.roots)]
        self._roots += [maker for maker in makers if maker is not None]

    def note_model(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Notes the call of a module whose own code was not looked at."""
        frame = running_frame()
        if frame is not None:
            key = CallKey(type(module).__name__, _place_of(frame))
            self._add(key, self._count(key), frame, arguments, output)

    def _clear(self) -> None:
        super()._clear()
        self._calls, self._roots = [], []
        self._makers.clear()
        self._numbers.clear()

    def _end_update(self) -> None:
        self._count_until_step = len(self._calls)

    def _run(
        self, key: CallKey, number: int, frame: FrameType, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = func(*args, **kwargs)
        with self._guard.work():
            written = args[0] if result is None and key.name.endswith("__setitem__") else result
            if isinstance(written, float) or tensors_in(written):
                self._add(key, number, frame, (args, kwargs), written)
        return result

    def _add(self, key: CallKey, number: int, frame: FrameType, arguments: Any, written: Any) -> None:
        tensors, numbers = _arguments_of(arguments)
        makers = {path: self._make_known(tensor, key.place) for path, tensor in tensors.items()}
        results, at = tensors_in(written), len(self._calls)
        self._calls.append(
            {
                "name": key.name,
                "place": key.place,
                "number": number,
                "arguments": makers,
                "numbers": numbers,
                "read": [self._numbers[value] for value in numbers.values() if value in self._numbers],
                "names": _names_in(frame, tensors, numbers),
                "graded": any(result.requires_grad for result in results),
                "results": [_describe(result) for result in results],
            }
        )
        for result in results:
            self._remember(result, at)
        if isinstance(written, float):
            self._numbers[written] = at

    def _make_known(self, tensor: torch.Tensor, place: Place) -> int:
        """Returns the call that made a tensor; one that no call made becomes a call of its own."""
        maker = self._maker_of(tensor)
        if maker is not None:
            return maker
        key, at = CallKey(INPUT, place), len(self._calls)
        self._calls.append(
            {
                "name": INPUT,
                "place": place,
                "number": self._count(key),
                "arguments": {},
                "numbers": {},
                "read": [],
                "names": {},
                "graded": tensor.requires_grad,
                "results": [_describe(tensor)],
            }
        )
        self._remember(tensor, at)
        return at

    def _maker_of(self, tensor: torch.Tensor) -> int | None:
        reference, at = self._makers.get(id(tensor), (None, 0))
        return at if reference is not None and reference() is tensor else None

    def _remember(self, tensor: torch.Tensor, at: int) -> None:
        self._makers[id(tensor)] = weakref.ref(tensor), at


class PinnedCall(NamedTuple):
    """A call whose arguments are replaced in each micro-batch by those of the full-batch run."""

    name: str
    file: str
    line: int
    in_full: int
    """How often the full-batch run makes it in an update."""
    number: int
    """Which of these it is, from 0."""
    paths: tuple[str, ...]
    """The arguments."""

    @property
    def key(self) -> CallKey:
        """Its name and its line."""
        return CallKey(self.name, (self.file, self.line))


PlacesOfPart = tuple[int, tuple[int, ...]]
"""N, and the places of the rows of a micro-batch."""


class PinnedArguments(ScriptCalls):
    """Replaces arguments of some calls by those of the full-batch run; that run itself keeps them.

    Args:
        recording: What listeners share.
        inside: Paths of modules whose own code counts as the script's.
        pinned: The calls.
        parts: Which rows of the full batch each micro-batch holds.
    """

    def __init__(
        self,
        recording: Recording,
        inside: Collection[str],
        pinned: Sequence[PinnedCall],
        parts: Sequence[PlacesOfPart],
    ) -> None:
        source = recording.job.source
        self._parts, self._is_full = parts, True
        calls = [PinnedCall(*each) for each in pinned]  # as plain tuples they came from the audit
        self._pinned = {(each.key, each.number): (at, each) for at, each in enumerate(calls)}
        self._in_full = {key: each.in_full for (key, _), (_, each) in self._pinned.items()}
        self.kept: dict[str, Any] = {}
        """What the full-batch run keeps, by the position of the call and the path of the argument."""
        if source is not None:
            self.take(torch.load(source / "arguments.pt", weights_only=True))
        super().__init__(recording, inside)

    def _run(
        self, key: CallKey, number: int, frame: FrameType, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        in_full = self._in_full.get(key)
        if in_full is not None:
            part, position = (0, number) if self._is_full else divmod(number, in_full)
            found = self._pinned.get((key, position))
            if found is not None and part < max(len(self._parts), 1):
                with self._guard.work():
                    args, kwargs = map_leaves(
                        (args, kwargs), lambda path, leaf: self._replace(*found, part, path, leaf)
                    )
        return func(*args, **kwargs)

    def take(self, kept: dict[str, Any]) -> None:
        """Takes what the full-batch run has kept: arguments are replaced by it."""
        self.kept, self._is_full = kept, False

    def _replace(self, at: int, pinned: PinnedCall, part: int, path: str, leaf: Any) -> Any:
        if path not in pinned.paths:
            return leaf
        name = f"{at} {path}"
        if self._is_full:
            self.kept[name] = leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf
            return leaf
        stored = self.kept.get(name)
        if not isinstance(leaf, torch.Tensor) or not isinstance(stored, torch.Tensor):
            return leaf if stored is None else stored
        if stored.shape == leaf.shape:
            return stored.to(leaf.device, leaf.dtype)
        located = locate_rows(stored.shape, leaf.shape, self._parts[part])
        if located is None:
            return leaf
        layout, (rows, places) = located
        return layout.take(stored, places, rows).to(leaf.device, leaf.dtype)


def locate_rows(
    full: Sequence[int], micro: Sequence[int], part: PlacesOfPart
) -> tuple[SampleLayout, PlacesOfPart] | None:
    """Returns where the rows of a micro-batch lie in tensors of two shapes; None where no dimension holds rows.

    A forward may be given several rows of each sample, as of pairs of answers: the part is then given in samples.
    """
    sizes = [size for size in full[:2] if size and part[0] % size == 0]
    for each in (part, *(_join_rows(part, part[0] // size) for size in sizes)):
        layout = SampleLayout.find_leading(full, micro, each[0], len(each[1])) if each is not None else None
        if layout is not None and each is not None:
            return layout, each
    return None


def _join_rows(part: PlacesOfPart, count: int) -> PlacesOfPart | None:
    """Returns the samples of a part whose rows are `count` to each; None where they do not lie like that."""
    rows, places = part
    size, samples = len(places) // count, rows // count
    beside = tuple(place // count for place in places[::count])  # all rows of a sample, then those of the next
    behind = places[:size]  # one row of each sample, then the next of each
    if places == tuple(sample * count + at for sample in beside for at in range(count)):
        return samples, beside
    if places == tuple(at * samples + sample for at in range(count) for sample in behind):
        return samples, behind
    return None


def _arguments_of(arguments: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Returns the tensors and the numbers among arguments, by their paths."""
    tensors, numbers = {}, {}
    for path, leaf in leaves(arguments, ""):
        if isinstance(leaf, torch.Tensor):
            tensors[path] = leaf
        elif isinstance(leaf, int | float) and not isinstance(leaf, bool):
            numbers[path] = float(leaf)
    return tensors, numbers


def _names_in(
    frame: FrameType, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, float]
) -> dict[str, list[str]]:
    """Returns all variables of a function that hold an argument, by the path of the argument."""
    variables = dict(frame.f_locals)
    names = {path: [name for name, value in variables.items() if value is each] for path, each in tensors.items()}
    plain_numbers = {name: value for name, value in variables.items() if type(value) in (int, float)}
    for path, number in numbers.items():
        names[path] = [name for name, value in plain_numbers.items() if value == number]
    return {path: found for path, found in names.items() if found}


def _place_of(frame: FrameType) -> Place:
    return os.path.abspath(frame.f_code.co_filename), frame.f_lineno


def _describe(tensor: torch.Tensor) -> Description | None:
    """Returns the fingerprints, on the tensor's device: nothing waits for it."""
    values = plain(tensor)
    if values is None or values.layout is not torch.strided or not 0 < values.numel() <= _LARGEST:
        return None
    real = real_numbers(values).double().nan_to_num(_NAN, _INFINITE, -_INFINITE)
    along = [
        summaries(real.movedim(dimension, 0).reshape(values.shape[dimension], -1))
        for dimension in range(min(values.dim(), 2))
    ]
    return {"shape": tuple(values.shape), "along": along, "whole": summaries(real.reshape(1, -1))[0]}


def _to_host(described: Description) -> Description:
    along = [entries.cpu() for entries in described["along"]]
    return {"shape": described["shape"], "along": along, "whole": described["whole"].cpu()}
