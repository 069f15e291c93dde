"""The bus between torch and the listeners: patches announce calls of torch, listeners subscribe to kinds of calls.

A call is announced once and in three phases: handlers *before* it, contexts *around* it, handlers *after* it. Within a
phase they run in the order in which they subscribed. A call that raises has no third phase.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gaverify.audit.folders import note_fault
from gaverify.audit.recording.storage import Storage, leave
from gaverify.audit.recording.values import out_of_sight, suspend_modes

# Keeps the recorder's own code apart from the script's: what is recorded, and what a failure of the recorder ends.


class Guard:
    """Decides which calls are recorded, and runs the code that records them.

    Args:
        storage: Ends the process where that code fails.
    """

    def __init__(self, storage: Storage) -> None:
        self.lock = threading.RLock()
        """Held while anything is recorded: the script may train in several threads."""
        self.closed = False
        """Whether the closing record has been written: nothing is recorded any more."""
        self.searching: Any = None
        """The optimizer whose step evaluates its closure again, as a line search does; None elsewhere."""
        self.left_out: dict[str, int] = {}
        """Calls that could not be recorded, by what hid the values of their tensors."""
        self._storage = storage
        self._is_busy = False

    @property
    def off(self) -> bool:
        """Whether a call is not to be recorded: the recorder's own, a line search's, or one in a worker process.

        Nor can a call be recorded whose tensors have no values; it is counted in `left_out`.
        """
        # A forked worker has a copy of the recorder, whose files belong to the process that opened them.
        if self._is_busy or self.searching is not None or os.getpid() != self._storage.process:
            return True
        why = out_of_sight()
        if why:  # the report says what was not seen
            self.leave_out(why)
        return bool(why)

    def leave_out(self, why: str) -> None:
        """Counts a call that cannot be recorded."""
        self.left_out[why] = self.left_out.get(why, 0) + 1

    @contextmanager
    def work(self) -> Iterator[None]:
        """Runs the recorder's own code: one thread at a time, unrecorded, its failures never the script's."""
        with self.lock:
            before, self._is_busy = self._is_busy, True  # a handler may run inside another one's work
            try:
                with suspend_modes():
                    yield
            except Exception as error:  # the script must not catch it: it would go on unrecorded
                leave(note_fault(error, self._storage.folder))
            finally:
                self._is_busy = before or self.closed


# The bus between torch and the listeners: patches announce calls of torch, listeners subscribe to kinds of calls.


@dataclass
class Call:
    """A call of torch that is announced; each kind is a class with fields for what listeners ask about."""


C = TypeVar("C", bound=Call)


class Bus:
    """Tells listeners of the calls of one process.

    Args:
        guard: Runs the handlers.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self._outside: dict[type[Call], list[Callable[[Any], AbstractContextManager[None]]]] = defaultdict(list)
        self._before: dict[type[Call], list[Callable[[Any], None]]] = defaultdict(list)
        self._around: dict[type[Call], list[Callable[[Any], AbstractContextManager[None]]]] = defaultdict(list)
        self._after: dict[type[Call], list[Callable[[Any], None]]] = defaultdict(list)

    def outside(self, kind: type[C], *contexts: Callable[[C], AbstractContextManager[None]]) -> None:
        """Subscribes contexts in which calls of a kind run together with all their handlers."""
        self._outside[kind] += contexts

    def before(self, kind: type[C], *handlers: Callable[[C], None]) -> None:
        """Subscribes handlers that run before calls of a kind."""
        self._before[kind] += handlers

    def around(self, kind: type[C], *contexts: Callable[[C], AbstractContextManager[None]]) -> None:
        """Subscribes contexts in which calls of a kind run, as the script's own code."""
        self._around[kind] += contexts

    def after(self, kind: type[C], *handlers: Callable[[C], None]) -> None:
        """Subscribes handlers that run after calls of a kind that did not raise."""
        self._after[kind] += handlers

    @contextmanager
    def announce(self, call: Call) -> Iterator[None]:
        """Surrounds a call with everything that is subscribed to its kind."""
        kind = type(call)  # a subclass is another kind: handlers of its base would run twice
        with ExitStack() as outside:
            for context in self._outside[kind]:
                outside.enter_context(context(call))
            self.begin(call)
            with ExitStack() as around:
                for context in self._around[kind]:
                    around.enter_context(context(call))
                yield
            self.end(call)

    def begin(self, call: Call) -> None:
        """Runs what is subscribed before a call, for calls that torch's own hooks announce in two halves."""
        self._run(self._before[type(call)], call)

    def end(self, call: Call) -> None:
        """Runs what is subscribed after a call."""
        self._run(self._after[type(call)], call)

    def _run(self, handlers: list[Callable[[Any], None]], call: Call) -> None:
        if handlers:  # entering the guard takes longer than most handlers
            with self.guard.work():
                for handler in handlers:
                    handler(call)


@dataclass
class FunctionCall(Call):
    """A call of a function; `result` is there after it."""

    result: Any = None


def replace_function(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replaces a function by `call`, which is given that function and the arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(owner, name, wrapper)


class Nesting:
    """Shared by functions that call each other: the outermost call of them is announced, those inside it are not."""

    def __init__(self) -> None:
        self.is_running = False


def announce_calls(
    bus: Bus, owner: Any, name: str, describe: Callable[..., FunctionCall | None], nesting: Nesting | None = None
) -> None:
    """Replaces a function by one that announces its calls.

    Args:
        bus: Where to.
        owner: The class or module that holds the function.
        name: Its name there.
        describe: Makes the call from the function's arguments; None for a call that is not announced.
        nesting: That of the functions which this one calls, or is called by.
    """
    nesting = Nesting() if nesting is None else nesting

    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        # A function that is being compiled is traced, not run: there is nothing to announce, and nothing to trace here.
        aside = torch.compiler.is_compiling() or nesting.is_running or bus.guard.off
        call = None if aside else describe(*args, **kwargs)
        if call is None:
            return original(*args, **kwargs)
        nesting.is_running = True
        try:
            with bus.announce(call):
                call.result = original(*args, **kwargs)
            return call.result
        finally:  # also where the script catches what the function raises
            nesting.is_running = False

    replace_function(owner, name, run)
