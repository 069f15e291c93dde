"""Calls of torch that a script makes: traced one by one, or given other arguments.

Calls are followed as functions and not as operations of the dispatcher: a function is called by a line, with numbers
that variables hold, and what it is given can be replaced above autograd. Everything is followed, also inside models
and in the hooks that a backward pass runs.

`TracedCalls` notes each call with what it reads and fingerprints of its results. `PinnedArguments` replaces some
arguments by those of the full-batch run, so that the gradient is that of the replaced values.

Shapes: n rows of a micro-batch lie at n places among the N rows of the full batch.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn, optim
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import resolve_name

import gaverify
from gaverify.audit.recording.bus import replace_function
from gaverify.audit.recording.calls import Differentiation, ForwardCall, Recording, StepCall
from gaverify.audit.recording.outputs import SCRIPT, are_same
from gaverify.audit.recording.values import paths_in, plain, tensors_in
from gaverify.passes import calls
from gaverify.passes.calls import FunctionMode, RunningCall, listening
from gaverify.passes.layouts import SampleLayout, leaves, map_leaves, real_numbers, summaries
from gaverify.torch_internals import DispatcherOperation, surround_engine, version_of
from gaverify.tracebacks import Owner, Place, hands_over, owner_of

_LARGEST = 1 << 24  # elements of a tensor that is described; comparing goes on behind a larger one
_MOST_ENTRIES = 1 << 14  # of a dimension that are described one by one: 400 kB for a result
_MOST_CALLS = 200_000  # of an update: about 1 kB each; behind them nothing is noted, and nothing compared
_MOST_VARIABLES = 64  # of a function, or entries of a value, that are looked at for the name of an argument
_MOST_NAMES = 8  # of one argument
_DEEPEST = 2  # levels behind variables: `self.scale`, `self.scales[0]`
_NAN, _INFINITE = 0.7368, 1e9  # stand for these in fingerprints
_READS = frozenset({"__bool__", "__int__", "__index__", "item", "is_nonzero", "equal", "allclose"})
INPUT = "input"
"""Name of a call that stands for a tensor which no call made: it comes from a loader, a file or NumPy."""
PARAMETER = "parameter"
"""Name of a call that stands for what is trained: both runs begin an update with the same weights."""


class Description(TypedDict):
    """Fingerprints of one tensor: two projections and a norm."""

    shape: tuple[int, ...]
    along: list[torch.Tensor]
    """The fingerprints of each entry of the first and of the second dimension, shape (entries, 3)."""
    whole: torch.Tensor
    """The fingerprint of all numbers in their order, shape (3,)."""
    is_integer: bool
    """Whether it holds integers, such as places of rows."""


class TracedCall(TypedDict):
    """One call of a torch function, or of a model."""

    name: str
    place: Place
    """The line that makes it: the user's, or a library's."""
    lines: list[Place]
    """The user's lines that lead to it, innermost first."""
    module: str | None
    """Path of the innermost module around it; None outside of all."""
    passes: int
    """How many backward passes of the update came before."""
    in_backward: bool
    """Whether a hook or a function with a backward of its own makes it during a backward pass."""
    changes_gradient: bool
    """Whether it writes to the gradient of a parameter."""
    is_gradient: bool
    """Whether it stands for the gradient of a parameter as backward passes left it."""
    number: int
    """How many calls of this name and line came before in the update."""
    arguments: dict[str, int]
    """Tensors among the arguments, by their path → position of the call that made them."""
    numbers: dict[str, float]
    """Python numbers among the arguments, by their path."""
    value: float | None
    """The number that it read out of a tensor; None where its result is no number."""
    read: list[int]
    """Positions of the calls that read such a number out of a tensor."""
    names: dict[str, list[str]]
    """Variables of the script that hold an argument, by its path; of a number those that are equal to it."""
    held: dict[str, float]
    """Numbers that attributes and entries hold there; empty unless it is given a number that no variable holds."""
    graded: bool
    """Whether gradients flow through it."""
    results: list[Description | None]
    """None for a tensor that cannot be described."""


class ScriptTrace(TypedDict):
    """The calls of one update, in order."""

    passes: int
    """How many backward passes it had."""

    calls: list[TracedCall]
    roots: list[int]
    """Positions of the calls that made what was differentiated."""


class CallKey(NamedTuple):
    """Finds a call again in another run, together with the number of such calls before it in the update."""

    name: str
    place: Place
    module: str | None = None


class ScriptCalls:
    """Gives the calls of a script's last update to a subclass.

    Args:
        recording: The objects that listeners share.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording, self._guard = recording, recording.guard
        self._is_active = recording.is_last_update
        self._counts: Counter[CallKey] = Counter()
        self._passes = 0
        self._is_in_backward = False
        self._running: Sequence[RunningCall] = ()
        self._process = os.getpid()
        # Below every mode of the script's, and never left: modes are taken off in the order of a stack.
        self.mode = FunctionMode(self._handle)
        self.mode.__enter__()
        # Torch takes a mode off while a function runs that it was told of, such as `backward`, which runs hooks.
        surround_engine(lambda: FunctionMode(self._handle))
        # Modes do not see these.
        for name in ("from_numpy", "frombuffer"):
            replace_function(torch, name, lambda original, *args, **kwargs: self._handle(original, args, kwargs))

    @contextmanager
    def differentiate(self, _: Differentiation) -> Iterator[None]:
        """Surrounds a backward pass, in which hooks may run."""
        before, self._is_in_backward = self._is_in_backward, True
        try:
            yield
        finally:
            self._is_in_backward = before
        self._passes += 1

    @contextmanager
    def run_forward(self, call: ForwardCall) -> Iterator[None]:
        """Surrounds a forward; a module without parameters is a part of the script's code, as a criterion is."""
        if next(call.module.parameters(), None) is None:
            yield
            return
        before = self._running
        try:
            with listening(paths_in(call.module), outside=SCRIPT) as self._running:
                yield
        finally:
            self._running = before

    def end_step(self, _: StepCall) -> None:
        """A step has ended: what follows it belongs to the next update."""
        updates_left = self._recording.job.updates - self._recording.journal.update
        if updates_left > 0:
            self._clear()
            self._is_active = updates_left == 1  # the next update begins here, long before its first forward
        else:
            self._end_update()

    def _clear(self) -> None:
        self._counts.clear()
        self._passes = 0

    def _end_update(self) -> None:
        """The last update has stepped, perhaps not for the last time."""

    def note_loss(self, call: Differentiation) -> None:
        """Notes what a backward pass differentiates."""

    @hands_over
    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_active or os.getpid() != self._process or self._guard.off:
            return func(*args, **kwargs)
        # modes of the dispatcher, which deal draws out, call operations themselves
        is_operation = isinstance(func, DispatcherOperation)
        frame = None if is_operation else _frame_of_script(in_backward=self._is_in_backward)
        if frame is None:
            return func(*args, **kwargs)
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        key = CallKey(name, _place_of(frame), self._running[-1].path if self._running else None)
        return self._run(key, self._count(key), frame, func, args, kwargs)

    def _count(self, key: CallKey) -> int:
        self._counts[key] += 1
        return self._counts[key] - 1

    @hands_over
    def _run(
        self, key: CallKey, number: int, frame: FrameType, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        raise NotImplementedError


class TracedCalls(ScriptCalls):
    """Notes the calls, what they read, and fingerprints of their results."""

    def __init__(self, recording: Recording) -> None:
        self._calls: list[TracedCall] = []
        # A loop may make the values of the next update before the forward that begins it.
        self._count_until_step: int | None = None
        self._roots: list[int] = []
        self._makers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._memory = _Memory()
        self._gradients = _Memory()
        self._numbers: dict[float, int] = {}  # read out of tensors
        self._is_full = False
        super().__init__(recording)

    @property
    def trace(self) -> ScriptTrace:
        """The noted calls, on the host; none where they are too many."""
        calls = self._calls[: self._count_until_step] if not self._is_full else []
        for call in calls:
            call["results"] = [described and _to_host(described) for described in call["results"]]
        return {"calls": calls, "roots": self._roots if calls else [], "passes": self._passes}

    def note_loss(self, call: Differentiation) -> None:
        """Notes what a backward pass differentiates."""
        makers = [self._maker_of(tensor) for tensor in tensors_in(call.roots)]
        self._roots += [maker for maker in makers if maker is not None]

    def _clear(self) -> None:
        super()._clear()
        self._calls, self._roots, self._is_full = [], [], False
        for memory in (self._makers, self._numbers, self._memory, self._gradients):
            memory.clear()

    def _end_update(self) -> None:
        self._count_until_step = len(self._calls)

    @hands_over
    def _run(
        self, key: CallKey, number: int, frame: FrameType, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tensors_given = tensors_in((args, kwargs)) if not self._is_full else []
        versions = [_count_writes(tensor) for tensor in tensors_given]
        result = func(*args, **kwargs)
        if self._is_full:
            return result
        with self._guard.work():
            written = [
                tensor
                for tensor, version in zip(tensors_given, versions, strict=True)
                if _count_writes(tensor) != version
            ]
            if key.name.endswith("_norm") and _moves_statistics(args, kwargs):
                written += [tensor for tensor in tensors_given if not tensor.requires_grad and tensor.dim() == 1]
            if key.name.endswith("grad.__set__"):
                written += tensors_in(args[1:])
                for tensor in tensors_in(args[1:]):
                    self._gradients.note(tensor, self._passes)
            if key.name.endswith("grad.__get__") and isinstance(result, torch.Tensor):
                if self._gradients.find(result) != self._passes:  # a backward pass has added to it since
                    self._makers.pop(id(result), None)
                    self._memory.forget(result)
                self._gradients.note(result, self._passes)
            elif isinstance(result, float) or _reads_number(key) or written or tensors_in(result):
                self._add(key, number, frame, (args, kwargs), result, written)
        return result

    def _add(
        self,
        key: CallKey,
        number: int,
        frame: FrameType,
        arguments: Any,
        result: Any,
        written: Sequence[torch.Tensor],
    ) -> None:
        if len(self._calls) >= _MOST_CALLS:
            self._is_full = True
            return
        tensors, numbers = _arguments_of(arguments)
        makers = {path: self._make_known(tensor, key) for path, tensor in tensors.items()}
        results = tensors_in(result)
        results += [tensor for tensor in written if not any(tensor is each for each in results)]
        value = float(result) if isinstance(result, float) or _reads_number(key) else None
        names, held_numbers = names_in(frame, tensors, numbers)
        at = len(self._calls)
        self._calls.append(
            {
                **self._new_call(key, number, frame),
                "changes_gradient": any(self._gradients.find(tensor) is not None for tensor in written),
                "arguments": makers,
                "numbers": numbers,
                "value": value,
                "read": [self._numbers[number] for number in numbers.values() if number in self._numbers],
                "names": names,
                "held": held_numbers,
                "graded": any(each.requires_grad for each in results),
                "results": [_describe(each) for each in results],
            }
        )
        own_results = [each for each in results if not _shares_memory(each, tensors.values())]
        for each in results:
            self._makers[id(each)] = weakref.ref(each), at
        # a view is made by its own call, and has the memory of another one's result
        for each in (*own_results, *written):
            self._memory.note(each, at)
        if isinstance(result, float):
            self._numbers[result] = at

    def _new_call(self, key: CallKey, number: int, frame: FrameType | None) -> TracedCall:
        return {
            "name": key.name,
            "place": key.place,
            "lines": _lines_above(frame),
            "module": key.module,
            "passes": self._passes,
            "in_backward": self._is_in_backward,
            "changes_gradient": False,
            "is_gradient": False,
            "number": number,
            "arguments": {},
            "numbers": {},
            "value": None,
            "read": [],
            "names": {},
            "held": {},
            "graded": False,
            "results": [],
        }

    def _make_known(self, tensor: torch.Tensor, reader: CallKey) -> int:
        """Returns the call that made a tensor; one that no call made becomes a call of its own."""
        maker = self._maker_of(tensor)
        if maker is not None:
            return maker
        is_trained = tensor.is_leaf and tensor.requires_grad
        key, at = reader._replace(name=PARAMETER if is_trained else INPUT), len(self._calls)
        self._calls.append(
            {
                **self._new_call(key, self._count(key), None),
                "is_gradient": self._gradients.find(tensor) is not None,
                "graded": tensor.requires_grad,
                "results": [] if is_trained else [_describe(tensor)],
            }
        )
        self._makers[id(tensor)] = weakref.ref(tensor), at
        if self._memory.find(tensor) is None:
            self._memory.note(tensor, at)
        return at

    def _maker_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the last call that made a tensor, or wrote to its memory."""
        reference, at = self._makers.get(id(tensor), (None, -1))
        if reference is None or reference() is not tensor:
            at = -1
        at = max(at, -1 if (writer := self._memory.find(tensor)) is None else writer)
        return at if at >= 0 else None


class _Memory:
    """Numbers that are kept by the memory of tensors: views of one tensor have the same."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def clear(self) -> None:
        """Forgets everything."""
        self._known.clear()

    def forget(self, tensor: torch.Tensor) -> None:
        """Drops the number of a tensor's memory."""
        with suppress(NotImplementedError, RuntimeError):
            self._known.pop(tensor.untyped_storage()._cdata, None)

    def note(self, tensor: torch.Tensor, number: int) -> None:
        """Keeps a number for the memory of a tensor."""
        with suppress(NotImplementedError, RuntimeError):  # a sparse tensor, say, has none of its own
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = StorageWeakRef(storage), number

    def find(self, tensor: torch.Tensor) -> int | None:
        """Returns the number; None where there is none."""
        with suppress(NotImplementedError, RuntimeError):
            reference, number = self._known.get(tensor.untyped_storage()._cdata, (None, None))
            # the memory of a tensor that is gone may be given to another one
            return number if reference is not None and not reference.expired() else None
        return None


def _reads_number(key: CallKey) -> bool:
    """Whether a call reads a number out of a tensor, by which the script may decide what it does."""
    return key.name.rpartition(".")[2] in _READS


def _count_writes(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


def _shares_memory(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    with suppress(NotImplementedError, RuntimeError):
        storage_id = tensor.untyped_storage()._cdata
        return any(storage_id == each.untyped_storage()._cdata for each in others)
    return False


def _moves_statistics(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a normalisation may update running statistics: it does so without counting that as a write."""
    return any(each is True for each in (*args, *kwargs.values()))


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
    """The arguments; `RESULT` stands for a number that it returns."""
    module: str | None = None
    """The path of the module that makes it."""
    once: int = 0
    """How many calls of its name and line both runs make once per update, before those of micro-batches."""

    @property
    def key(self) -> CallKey:
        """The key by which it is found."""
        return CallKey(self.name, (self.file, self.line), self.module)


RESULT = "result"
"""Stands for the result of a call among the paths of its arguments."""

PlacesOfPart = tuple[int, tuple[int, ...]]
"""N, and the places of the rows of a micro-batch."""


class PinnedArguments(ScriptCalls):
    """Replaces arguments of some calls by those of the full-batch run; that run itself keeps them.

    Args:
        recording: The objects that listeners share.
        pinned: The calls.
        parts: Which rows of the full batch each micro-batch holds.
        note_replacement: Called for each replaced value with whether it had been different.
    """

    def __init__(
        self,
        recording: Recording,
        pinned: Sequence[PinnedCall],
        parts: Sequence[PlacesOfPart],
        note_replacement: Callable[[bool], None],
    ) -> None:
        self._note_replacement = note_replacement
        source = recording.job.source
        self._parts, self._is_full = parts, True
        calls = [PinnedCall(*each) for each in pinned]  # as plain tuples they came from the audit
        self._pinned = {(each.key, each.number): (at, each) for at, each in enumerate(calls)}
        self._in_full = {key: (each.in_full, each.once) for (key, _), (_, each) in self._pinned.items()}
        self.kept: dict[str, Any] = {}
        """Arguments that the full-batch run keeps, by the position of the call and the path of the argument."""
        if source is not None:
            self.take(torch.load(source / "arguments.pt", weights_only=True))
        super().__init__(recording)

    @hands_over
    def _run(
        self, key: CallKey, number: int, frame: FrameType, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        in_full, calls_before = self._in_full.get(key, (0, 0))
        if in_full:
            part, position = 0, number
            if number >= calls_before < in_full and not self._is_full:
                part, position = divmod(number - calls_before, in_full - calls_before)
                position += calls_before
            pinned = self._pinned.get((key, position))
            if pinned is not None and part < max(len(self._parts), 1):
                args, kwargs = map_leaves((args, kwargs), lambda path, leaf: self._replace(*pinned, part, path, leaf))
                result = func(*args, **kwargs)
                return result if isinstance(result, torch.Tensor) else self._replace(*pinned, part, RESULT, result)
        return func(*args, **kwargs)

    def take(self, kept: dict[str, Any]) -> None:
        """Takes what the full-batch run has kept: arguments are replaced by it."""
        self.kept, self._is_full = kept, False

    def _replace(self, at: int, pinned: PinnedCall, part: int, path: str, leaf: Any) -> Any:
        if path not in pinned.paths:
            return leaf
        with self._guard.work():
            name = f"{at} {path}"
            if self._is_full:
                self.kept[name] = leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf
                return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
            stored = self.kept.get(name)
            if not isinstance(leaf, torch.Tensor) or not isinstance(stored, torch.Tensor):
                has_tensor = isinstance(leaf, torch.Tensor) or isinstance(stored, torch.Tensor)
                self._note_replacement(stored is not None and (has_tensor or stored != leaf))
                return leaf if stored is None else stored
            if stored.shape != leaf.shape:
                located = locate_rows(stored.shape, leaf.shape, self._parts[part])
                if located is None:
                    return leaf
                layout, (rows, places) = located
                stored = layout.take(stored, places, rows)
            stored = stored.to(leaf.device, leaf.dtype)
            self._note_replacement(not are_same(stored, leaf))
            return stored


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
    in_blocks = tuple(place // count for place in places[::count])  # all rows of a sample, then those of the next
    in_turns = places[:size]  # one row of each sample, then the next of each
    if places == tuple(sample * count + at for sample in in_blocks for at in range(count)):
        return samples, in_blocks
    if places == tuple(at * samples + sample for at in range(count) for sample in in_turns):
        return samples, in_turns
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


def names_in(
    frame: FrameType, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, float]
) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Returns what holds an argument in a function, by the path of the argument; and numbers that objects hold there.

    A variable holds it, or an attribute or an entry of a variable's value: `scale`, `self.scale`, `running[0]`. The
    other numbers are looked at only where no variable holds a number: one of them may be what it is computed from.
    """
    space = frame.f_globals
    variables = {name: space[name] for name in frame.f_code.co_names if name in space} | dict(frame.f_locals)
    named = list(islice(variables.items(), _MOST_VARIABLES))
    names = {path: [name for name, value in named if value is tensor] for path, tensor in tensors.items()}
    names |= {path: [name for name, value in named if _is_number(value, each)] for path, each in numbers.items()}
    if numbers and owner_of(frame.f_code.co_filename) is Owner.USER:
        # equal numbers may stand in many variables: one that the line reads comes before one that it does not
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        read = [(name, value) for name, value in [*named, *_held_values(named)] if _is_in(name, line)]
        names_read = {path: [name for name, value in read if _is_number(value, each)] for path, each in numbers.items()}
        names |= {path: matches for path, matches in names_read.items() if matches}
    without = [
        path for path, matches in names.items() if not matches and (path in numbers or not tensors[path].is_leaf)
    ]
    without += [path for path, tensor in tensors.items() if not names[path] and not tensor.requires_grad]
    by_name = dict(_held_values(named)) if without and owner_of(frame.f_code.co_filename) is Owner.USER else {}
    for path in without:
        wanted: Any = numbers[path] if path in numbers else tensors[path]
        names[path] = [name for name, value in by_name.items() if value is wanted or _is_number(value, wanted)]
    amounts = {name: float(value) for name, value in by_name.items() if type(value) in (int, float)} if numbers else {}
    return {path: matches[:_MOST_NAMES] for path, matches in names.items() if matches}, amounts


def _is_in(name: str, line: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", line) is not None


def _is_number(value: Any, number: Any) -> bool:
    return type(value) in (int, float) and type(number) in (int, float) and value == number


def _held_values(named: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields tensors and numbers that the values of variables hold, by their names."""
    for _ in range(_DEEPEST):
        named = [entry for name, value in named for entry in islice(_members(name, value), _MOST_VARIABLES)]
        yield from ((name, value) for name, value in named if isinstance(value, float | int | torch.Tensor))


def _members(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, str | float | int | torch.Tensor | type | ModuleType | FunctionType | type(None)):
        return
    if isinstance(value, list | tuple | deque):
        yield from ((f"{name}[{at}]", each) for at, each in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", each) for key, each in list(value.items()) if isinstance(key, str | int))
    elif not type(value).__module__.startswith("torch"):
        # a class may hold what its objects have not set yet
        spaces = [*map(vars, reversed(type(value).__mro__[:-1])), getattr(value, "__dict__", {})]
        spaces = spaces[-1:] if isinstance(value, nn.Module) else spaces
        members = {key: each for space in spaces if isinstance(space, Mapping) for key, each in list(space.items())}
        yield from ((f"{name}.{key}", each) for key, each in members.items() if not key.startswith("__"))


def _frame_of_script(*, in_backward: bool) -> FrameType | None:
    """Returns the innermost frame of the user's or a library's code; None where gaverify's own code makes the call.

    In a forward gaverify surrounds calls of modules, and in a backward pass only its own hooks call anything.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and owner_of(frame.f_code.co_filename) is Owner.MACHINERY:
        file = frame.f_code.co_filename
        if file.startswith(_OPTIMIZERS) or (in_backward and file.startswith(_OWN) and file not in _MODES):
            return None
        frame = frame.f_back
    return frame


_OPTIMIZERS = os.path.dirname(os.path.abspath(optim.__file__)) + os.sep
_OWN = os.path.dirname(os.path.abspath(gaverify.__file__)) + os.sep
_MODES = frozenset({__file__, calls.__file__})


def _lines_above(frame: FrameType | None) -> list[Place]:
    """Returns the user's lines that lead to a frame, innermost first."""
    lines = []
    while frame is not None:
        if owner_of(frame.f_code.co_filename) is Owner.USER:
            lines.append(_place_of(frame))
        frame = frame.f_back
    return lines


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
        if values.shape[dimension] <= _MOST_ENTRIES
    ]
    along = along if len(along) == min(values.dim(), 2) else []
    summary, is_integer = summaries(real.reshape(1, -1))[0], not (values.is_floating_point() or values.is_complex())
    return {
        "shape": tuple(values.shape),
        "along": along,
        "whole": summary,
        "is_integer": is_integer and values.dtype is not torch.bool,
    }


def _to_host(described: Description) -> Description:
    along = [entries.cpu() for entries in described["along"]]
    return {**described, "along": along, "whole": described["whole"].cpu()}
