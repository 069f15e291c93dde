"""This process as one of R ranks: what they tell each other, which collectives they run, how they end together.

Words go through the store of the process group, which outlives broken connections: each rank lays down what it has
to say under its own number, so that a rank which is missing can be named. Where a rank fails, the others may be
waiting for it in a collective that no exception ends. A thread on each rank watches the store, and ends the process
with the sentence of the rank that failed where its main thread does not come back. A collective that a rank never joins
ends by the timeout of its process group, which is that of the verification.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gaverify.errors import Agreed, GaverifyError, ProblemError, text_of
from gaverify.launched import leave, note_first, read_launcher, this_process
from gaverify.passes.calls import OperationMode
from gaverify.passes.precision import RANKED, backend_of, devices_of_ranks, resolve_device, select_device, with_number
from gaverify.records.ranks import Collective, Traffic
from gaverify.remedies import all_gather
from gaverify.torch_internals import group_timeouts
from gaverify.tracebacks import is_own_fault

# The collectives of `torch.distributed` that run in this process: counted, with the bytes of their tensors.
#
# Gathers of what is trained are noted besides, and a control lets them hand the gradient back.


NAMESPACES = ("c10d", "_c10d_functional")
"""The namespaces of the operators of `torch.distributed`."""

_KINDS = (  # of the names that the operators have in these namespaces
    ("reduce_scatter", Collective.SCATTER),
    ("allreduce", Collective.REDUCE),
    ("all_reduce", Collective.REDUCE),
    ("allgather", Collective.GATHER),
    ("all_gather", Collective.GATHER),
    ("broadcast", Collective.BROADCAST),
)
_WAITING = ("wait_tensor", "barrier", "monitored_barrier_")
_INTO_ONE = ("all_gather_into_tensor", "all_gather_single")  # the same under its old and its new name
_NAMES = ("all_gather", *_INTO_ONE)
Gather = Callable[..., Any]


class TrafficMeter:
    """Counts every collective while `counting()` is open; `traffic` is what was seen so far."""

    def __init__(self) -> None:
        self._counts: Counter[Collective] = Counter()
        self.sizes: Counter[Collective] = Counter()
        """Bytes of each kind."""
        self.reduced_in: set[torch.dtype] = set()
        """The types of what was reduced: a policy or a hook may compress gradients for it."""

    @property
    def traffic(self) -> Traffic:
        """The collectives up to now."""
        return Traffic(dict(self._counts), sum(self.sizes.values()))

    def counting(self) -> OperationMode:
        """Returns what counts while it is entered."""
        return OperationMode(self._handle)

    def _handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace in NAMESPACES:
            self._note(func, args)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Any) -> None:
        name = func._schema.name.partition("::")[2].lstrip("_")
        if name in _WAITING:
            return
        kind = next((kind for part, kind in _KINDS if part in name), Collective.OTHER)
        self._counts[kind] += 1
        if kind in (Collective.REDUCE, Collective.SCATTER):
            self.reduced_in.update(_types(args))
        self.sizes[kind] += max((_size(arg) for arg in args), default=0)


def _types(argument: Any) -> set[torch.dtype]:
    """The types of the tensors in an argument."""
    if isinstance(argument, torch.Tensor):
        return {argument.dtype}
    return set[torch.dtype]().union(*map(_types, argument)) if isinstance(argument, list | tuple) else set()


def _size(argument: Any) -> int:
    """The bytes of the tensors in an argument; the larger side of a gather or scatter is what crosses the ranks."""
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.element_size()
    return sum(map(_size, argument)) if isinstance(argument, list | tuple) else 0


@contextmanager
def gathers_with_gradient() -> Iterator[None]:
    """Lets `all_gather` and `all_gather_into_tensor` hand gradients back to the ranks that the parts came from.

    Gathered tensors keep their values; only the backward changes. Tensors that need no gradient are gathered as before.
    """
    plain = _find_gathers()
    try:
        _put(_with_gradient(plain))
        yield
    finally:
        _put(plain)


def watch_gathers(note: Callable[[], None], *, with_gradient: bool) -> None:
    """Calls `note` before every gather of a tensor that needs a gradient, for as long as this process lives.

    Args:
        note: Told that a gather begins, on the stack of its caller.
        with_gradient: Let them hand gradients back, as `gathers_with_gradient` does.
    """
    plain, running = _find_gathers(), [False]
    inner = _with_gradient(plain) if with_gradient else plain

    def wrap_gather(name: str) -> Gather:
        @functools.wraps(plain[name])
        def gather(*args: Any, **kwargs: Any) -> Any:
            tensors = [*args[1:2], *(kwargs.get(key) for key in ("tensor", "input_tensor"))]
            outermost = not running[0]  # the old name calls the new one
            if outermost and any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in tensors):
                note()
            running[0] = True
            try:
                return inner[name](*args, **kwargs)
            finally:
                running[0] = not outermost

        return gather

    _put({name: wrap_gather(name) for name in plain})


def _find_gathers() -> dict[str, Gather]:
    return {name: getattr(dist, name) for name in _NAMES if hasattr(dist, name)}


def _put(functions: Mapping[str, Gather]) -> None:
    for name, function in functions.items():
        for home in (dist, dist.distributed_c10d):
            setattr(home, name, function)


def _with_gradient(plain: Mapping[str, Gather]) -> dict[str, Gather]:
    """The remedy in place of each gather, with torch's own names for what they are given."""

    def into_list(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or not tensor.requires_grad:
            return plain["all_gather"](tensor_list, tensor, group, async_op)
        with torch.enable_grad():  # the user's code may gather under `no_grad`, which is the same fault
            tensor_list[:] = all_gather(tensor, group)
        return None

    def into_one(name: str) -> Gather:
        def gather(
            output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
        ) -> Any:
            if async_op or not input_tensor.requires_grad:
                return plain[name](output_tensor, input_tensor, group, async_op)
            with torch.enable_grad():
                output_tensor.copy_(torch.stack(all_gather(input_tensor, group)).reshape(output_tensor.shape))
            return None

        return gather

    return {"all_gather": into_list} | {name: into_one(name) for name in _INTO_ONE if name in plain}


# This process as one of R ranks: what they tell each other apart from numbers, and how they end together.


_POLL = 0.05
_LINGER = 3.0  # seconds: how long a rank that failed waits for the others to say what happened to them
_LOST = ("Connection closed by peer", "Connection reset", "gloo/transport", "Timed out waiting", "NCCL", "Broken pipe")
"""Words of backends where another rank has gone: whoever says so knows nothing about the reason."""
_SAME_PASSES = "every rank has to call this, and run the same forward and backward passes"
_MOST_OF_TEXT = 400  # characters of a backend's error, which ends with a stack of C++
_calls = 0


class Said(NamedTuple):
    """The sentence of a rank that cannot go on: "" where it knows nothing; `about_itself`: it is about itself."""

    sentence: str
    about_itself: bool
    error: str = ""
    """The text of an error that says no more than that others are gone: shown where nobody knows more."""


@dataclass
class Member:
    """This process among the ranks.

    Args:
        rank: From 0.
        count: R.
        store: Where words are laid down, of this verification alone.
        timeout: Seconds that one rank waits for another.
        tell_end: Is told why this process is ended from outside its main thread; None: rank 0 prints it.
    """

    rank: int
    count: int
    store: Any
    timeout: float
    tell_end: Callable[[str], None] | None = None
    _stages: int = 0
    _over: threading.Event = field(default_factory=threading.Event)
    _heard: dict[int, Said] = field(default_factory=dict)
    _failing: threading.Event = field(default_factory=threading.Event)

    def everyones(self, stage: str, value: Any, within: float | None = None, alone: str = "") -> list[Any]:
        """Returns what each rank has to say at a stage, by rank.

        Args:
            stage: Its name.
            value: The value that this rank has to say; picklable.
            within: Seconds to wait for the others; None: as long as ranks wait for each other.
            alone: The reason where the others do not come: this rank does not take part in what they wait for.

        Raises:
            Agreed: A rank failed, or did not arrive in time; the sentence names it.
        """
        self._stages += 1
        keys = [f"{self._stages} {stage}/{rank}" for rank in range(self.count)]
        self.store.set(keys[self.rank], pickle.dumps(value))
        limit = time.monotonic() + (self.timeout if within is None else within)
        while not self.store.check(keys):
            if self._failures_of_ranks():
                raise self.report_failure(Said("", about_itself=False, error="waited for the others"))
            if time.monotonic() > limit:
                late = self._late([rank for rank, key in enumerate(keys) if not self.store.check([key])])
                raise self.report_failure(Said(alone or late, about_itself=bool(alone)))
            time.sleep(_POLL)
        return [pickle.loads(self.store.get(key)) for key in keys]

    def window_ended(self) -> None:
        """Waits until every rank has ended its window: who still waits there must not meet a collective of gaverify's.

        Raises:
            Agreed: A rank does not end it.
        """
        self.everyones("window", None)

    def _late(self, missing: Sequence[int]) -> str:
        return f"{_ranks(missing)} did not come as far as the others within {self.timeout:g} s: {_SAME_PASSES}"

    @property
    def device(self) -> torch.device:
        """Where the group's backend takes tensors from: the CPU where it can."""
        kinds = dist.distributed_c10d._get_default_group()._device_types
        kind = "cpu" if any(kind.type == "cpu" for kind in kinds) else kinds[0].type
        return with_number(torch.device(kind))

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the sum of some numbers over the ranks, the same bits on each, on the CPU."""
        # NCCL reduces tensors on its own devices only.
        summed = numbers.to(self.device)
        dist.all_reduce(summed)
        return summed.to("cpu")

    def agree(self, stage: str, problem: str) -> None:
        """Raises on every rank what any of them found wrong; "" where nothing is.

        Raises:
            Agreed: With the ranks' sentences.
        """
        said = self.everyones(stage, problem)
        if any(said):
            raise Agreed(join_sentences(dict(enumerate(said)), self.count))

    def report_failure(self, said: Said) -> GaverifyError:
        """Returns what every rank raises where this one cannot go on: the reason, from the rank that knows it."""
        self._failing.set()
        self.store.set(f"failed/{self.rank}", pickle.dumps(said))
        limit = time.monotonic() + _LINGER
        while len(self._failures_of_ranks()) < self.count and time.monotonic() < limit:
            time.sleep(_POLL)
        self._over.set()
        return Agreed(self._reason())

    def _failures_of_ranks(self) -> dict[int, Said]:
        """The sentences of the ranks that failed."""
        with suppress(RuntimeError):  # whoever holds the store may have ended already
            for rank in range(self.count):
                # Kept, because the store may be gone at the next question.
                if rank not in self._heard and self.store.check([f"failed/{rank}"]):
                    self._heard[rank] = pickle.loads(self.store.get(f"failed/{rank}"))
        return dict(self._heard)

    def _leave(self) -> None:
        """Lets the others read what is in the store, which rank 0 may hold, before this process ends."""
        limit = time.monotonic() + _LINGER
        with suppress(RuntimeError):
            if self.rank and self.store.check(["first"]):
                note_first(self.store.get("first").decode())
            self.store.set(f"left/{self.rank}", "")
            keys = [f"left/{rank}" for rank in range(self.count)]
            while self.rank == 0 and not self.store.check(keys) and time.monotonic() < limit:
                time.sleep(_POLL)

    def _reason(self) -> str:
        said = self._failures_of_ranks()
        hearsay = [words.sentence for words in said.values() if words.sentence and not words.about_itself]
        by_rank = {rank: words.sentence for rank, words in said.items() if words.about_itself}
        if any(by_rank.values()) or hearsay:
            return join_sentences(by_rank, self.count) or hearsay[0]
        missing = [rank for rank in range(self.count) if rank not in said]
        if missing:
            return f"{_ranks(missing)} ended before there was a verdict"
        # Who waits for others hears of their end; a rank that hears of nothing computes, or hangs.
        silent = [rank for rank, words in said.items() if not words.error]
        lost = self._late(silent) if silent else f"the ranks lost their connection: {_SAME_PASSES}"
        errors = join_sentences({rank: words.error for rank, words in said.items()}, self.count)
        return f"{lost}; {errors}" if errors else lost

    @contextmanager
    def together(self) -> Iterator[None]:
        """Ends what runs inside in the same way on every rank.

        Raises:
            GaverifyError: On every rank, where one of them raised; `Agreed` where they agreed about it.
        """
        if self.rank == 0:
            self.store.set("first", this_process())
        watcher = threading.Thread(target=self._watch, daemon=True)
        watcher.start()
        with ExitStack() as stack:
            stack.callback(self._leave)
            # a thread that is in the store when Python ends aborts the process
            stack.callback(watcher.join, 10 * _LINGER)
            stack.callback(self._over.set)
            stack.enter_context(_terminations_raised(self._failing))
            try:
                yield
            except Agreed:
                raise
            except Exception as error:
                lost = is_lost(error)
                said = Said("" if lost else str(error), about_itself=True, error=_first_lines(error) if lost else "")
                agreed_error = self.report_failure(said)
                if is_own_fault(error) and not is_lost(error):
                    raise
                raise agreed_error from error

    def _watch(self) -> None:
        """Ends the process where others have failed and its main thread does not come back."""
        while not self._over.wait(_LINGER / 10):
            with suppress(Exception):
                if self._failures_of_ranks() and not self._over.wait(_LINGER / 2):
                    if self.store.check([f"failed/{self.rank}"]):
                        continue
                    self.store.set(f"failed/{self.rank}", pickle.dumps(Said("", about_itself=False)))
                    if self.tell_end is not None:
                        self.tell_end(self._reason())
                    elif self.rank == 0:
                        print(f"gaverify: error: {self._reason()}", file=sys.__stderr__, flush=True)
                    self._leave()
                    leave(GaverifyError.exit_code)


@contextmanager
def _terminations_raised(failing: threading.Event) -> Iterator[None]:
    """Turns the signal by which launchers end the ranks that are left into an exception, which is told like others.

    Args:
        failing: This rank is about to say what happened, and ends then.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def raise_termination(number: int, frame: FrameType | None) -> None:
        if not failing.is_set():
            raise ProblemError("Connection closed by peer: the launcher ended this rank")

    signal.signal(signal.SIGTERM, raise_termination)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_lost(error: BaseException | None) -> bool:
    """Returns whether an error says no more than that another rank is gone."""
    while error is not None:
        if any(words in str(error) for words in _LOST):
            return True
        error = error.__cause__
    return False


def _first_lines(error: BaseException) -> str:
    """The class of an error and the beginning of its text, on one line."""
    text = " ".join(text_of(error).split())
    return f"{type(error).__name__}: {text[:_MOST_OF_TEXT]}{'…' if len(text) > _MOST_OF_TEXT else ''}"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def join_sentences(said: dict[int, str], count: int) -> str:
    """One sentence of each kind, with the ranks that say it; without them where all do."""
    sentences = dict.fromkeys(filter(None, said.values()))
    sentence_parts = []
    for sentence in sentences:
        who = [rank for rank, words in said.items() if words == sentence]
        sentence_parts.append(sentence if len(who) == count else f"{_ranks(who)}: {sentence}")
    return "; ".join(sentence_parts)


@contextmanager
def membership(timeout: float | None, tell_end: Callable[[str], None] | None = None) -> Iterator[Member | None]:
    """Gives this process's place among several ranks; None where it is alone. Joins them where nobody has yet.

    Args:
        timeout: Seconds that one rank waits for another; None: torch's own limit for collectives.
        tell_end: As `Member` has it.
    """
    if not dist.is_available() or not (dist.is_initialized() or read_launcher()):
        yield None
        return
    with ExitStack() as stack:
        limit = timeout or dist.constants.default_pg_timeout.total_seconds()
        if not dist.is_initialized():
            _join(limit)
            stack.callback(_leave)
        if timeout is not None:
            # Longer than ranks wait in the store, where the one that is missing is known by its number.
            stack.enter_context(group_timeouts(timeout + _LINGER))
        if dist.get_world_size() == 1:
            yield None
            return
        # Every rank makes the same calls in the same order: the number is a name that all of them know.
        global _calls
        _calls += 1
        store = dist.distributed_c10d.PrefixStore(f"gaverify/{_calls}", dist.distributed_c10d._get_default_store())
        yield Member(dist.get_rank(), dist.get_world_size(), store, limit, tell_end)


def devices_beside(kind: str, variables: Mapping[str, str]) -> tuple[list[torch.device], torch.device]:
    """Returns the devices of all ranks of this machine, as far as its launcher tells of them, and of this rank.

    All of them are needed to choose a backend: from its own device no rank sees that another one shares it.
    """
    local_rank = int(variables.get("LOCAL_RANK", "0"))
    devices = devices_of_ranks(kind, max(int(variables.get("LOCAL_WORLD_SIZE", "0")), local_rank + 1))
    return devices, devices[local_rank]


def _join(limit: float) -> None:
    rank_device = resolve_device("auto") or torch.device("cpu")
    devices = [rank_device]
    if rank_device.type in RANKED:
        devices, rank_device = devices_beside(rank_device.type, os.environ)
        select_device(rank_device)
    try:
        dist.init_process_group(backend_of(devices), timeout=timedelta(seconds=limit))
    except Exception as error:
        rank, count = read_launcher() or (0, 1)
        raise ProblemError(f"rank {rank} of {count} cannot join the others: {str(error).splitlines()[0]}") from error


def _leave() -> None:
    with suppress(Exception):  # a group that broke cannot be left in order
        dist.destroy_process_group()
