"""Starts a child process behind a keeper, or forks one, talks with it, and ends it with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from gaverify.children import keeper

# The child gets this process's own search path; `-P` keeps the current folder from shadowing the standard library.
_START = "import sys; sys.path[:] = sys.argv[1:]; from {} import main; main()"
_PATIENCE = 10.0  # seconds; the keeper itself needs two at most, for a child that ignores SIGTERM
_alive_ends: set[int] = set()
"""The ends of pipes that this process holds for as long as its children shall live."""


class Kept:
    """A child process that ends with gaverify.

    Args:
        process: The keeper, whose streams and exit status are the child's; on Windows the child itself.
        alive: The end of the pipe that is closed when gaverify is gone; None on Windows.
        answers: Where the child's messages come from; None: it says nothing, or no more.
        tasks: Where messages to the child go.
    """

    def __init__(
        self,
        process: subprocess.Popen[Any] | keeper.Fork,
        alive: int | None,
        answers: Connection | None = None,
        tasks: Connection | None = None,
    ) -> None:
        self.process, self._alive = process, alive
        if alive is not None:
            _alive_ends.add(alive)
        self.answers, self.tasks = answers, tasks

    @property
    def status(self) -> int | None:
        """How it ended: its exit code, of one that a signal ended the negative number; None while it runs."""
        return self.process.poll()

    def wait(self) -> int:
        """Waits until the child has ended; returns its status."""
        return int(self.process.wait())

    def send(self, task: object) -> None:
        """Sends a message to the child; nothing where it has died, which its end will tell."""
        assert self.tasks is not None
        with suppress(OSError):
            self.tasks.send(task)

    def read_messages(self) -> Iterator[Any]:
        """Yields what the child has said by now."""
        try:
            while self.answers is not None and self.answers.poll():
                yield self.answers.recv()
        except (EOFError, OSError):  # also in the middle of a message
            self._close()

    def _close(self) -> None:
        for pipe in filter(None, (self.answers, self.tasks)):
            pipe.close()
        self.answers = self.tasks = None

    def end(self) -> None:
        """Ends the child and everything that it started, and waits until they are gone; may be called twice."""
        if self._alive is not None:
            _alive_ends.discard(self._alive)
            os.close(self._alive)
            self._alive = None
        elif isinstance(self.process, subprocess.Popen):
            self.process.terminate()
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:  # stuck in the kernel: nobody can end it, and nobody has to wait for it
            self.process.kill()
        self._close()


def fork(work: Callable[[Connection], object]) -> Kept:
    """Forks a keeper and a process that runs `work`.

    Neither the terminal's signals nor the report's stdout reach it: what it prints goes to stderr.

    Args:
        work: Is given the pipe for messages to this process.
    """
    answers, says = Pipe(duplex=False)
    watched, alive = os.pipe()
    number = os.fork()
    if not number:
        try:
            # Each keeper has to see that gaverify alone closes its pipe, or is gone.
            for end in (*_alive_ends, alive):
                os.close(end)
            os.setsid()
            keeper.keep(watched, lambda: _fork_child(work, says))
        finally:
            os._exit(1)
    os.close(watched)
    says.close()  # the child has its own; with this one open, reading would never reach the end of the pipe
    return Kept(keeper.Fork(number), alive, answers)


def _fork_child(work: Callable[[Connection], object], says: Connection) -> keeper.Fork:
    """Forks the child of a keeper, in which this does not return."""
    number = os.fork()
    if number:
        says.close()
        return keeper.Fork(number)
    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        keeper.prepare_child()
        # A thread of the parent, such as a progress bar's, may hold the lock of its stream at the fork, for ever here.
        sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
        os.dup2(2, 1)
        work(says)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)  # threads that the user's code left are not waited for


def start_module(module: str, **options: Any) -> Kept:
    """Starts `main()` of a module of gaverify's in a fresh process, which calls `open_pipes`.

    Args:
        module: Its name.
        options: As for `subprocess.Popen`.

    Raises:
        OSError: It cannot be started.
    """
    command = [sys.executable, "-P", "-c", _START.format(module), *sys.path]
    (hears, tasks), (answers, says) = Pipe(duplex=False), Pipe(duplex=False)
    try:
        child = start_command(command, stdin=hears.fileno(), stdout=says.fileno(), **options)
    finally:
        hears.close()
        says.close()
    child.answers, child.tasks = answers, tasks
    return child


def open_pipes() -> tuple[Connection, Connection]:
    """Returns where a process that `start_module` has started hears tasks, and where it says what it found.

    Code of the user's then reads from stdin what it would read in CI, and prints to stderr.
    """
    hears, says = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace", line_buffering=True)  # type: ignore[union-attr]
    return hears, says


def start_command(command: Sequence[str], **options: Any) -> Kept:
    """Starts a command.

    Args:
        command: The program and its arguments.
        options: As for `subprocess.Popen`: streams, environment, encoding.

    Raises:
        OSError: It cannot be started.
    """
    if os.name != "posix":
        return Kept(subprocess.Popen(list(command), **options), None)
    watched, alive = os.pipe()
    kept_by = [sys.executable, "-I", "-S", keeper.__file__, str(watched)]
    try:
        process = subprocess.Popen([*kept_by, *command], pass_fds=(watched,), start_new_session=True, **options)
    except BaseException:
        os.close(alive)
        raise
    finally:
        os.close(watched)
    return Kept(process, alive)


received: list[int] = []
"""The signals that have ended this run as Ctrl-C would."""


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into KeyboardInterrupt, so that children and folders go whichever signal ends the run.

    A signal that is ignored (nohup) stays ignored, and one that the caller handles stays the caller's.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    numbers = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
