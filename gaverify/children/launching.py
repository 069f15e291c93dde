"""Starts a child process behind a keeper, or forks one, talks with it, and ends it with everything that it started."""

from __future__ import annotations

import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

from gaverify.children import keeper

# The child gets this process's own search path; `-P` keeps the current folder from shadowing the standard library.
_START = "import sys; sys.path[:] = sys.argv[1:]; from {} import main; main()"
_PATIENCE = 10.0  # seconds; the keeper itself needs two at most, for a child that ignores SIGTERM
_TICK = 0.01
_ENDING_SIGNALS = [
    number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None
]


class Channel:
    """The pipes between gaverify and a process that it started.

    Args:
        reads: Where messages come from; None: nothing comes.
        writes: Where messages go; None: nothing goes.
    """

    def __init__(self, reads: Connection | None, writes: Connection | None) -> None:
        self.reads, self.writes = reads, writes

    def send(self, message: object) -> None:
        """Sends a message."""
        assert self.writes is not None
        # Not `Connection.send`: torch would hand tensors over in memory that ends with this process.
        self.writes.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        """Waits for a message and returns it.

        Raises:
            EOFError: Nobody can send any more.
        """
        assert self.reads is not None
        return pickle.loads(self.reads.recv_bytes())

    def read_all(self) -> Iterator[Any]:
        """Yields the messages that are there."""
        try:
            while self.reads is not None and self.reads.poll():
                yield self.receive()
        except (EOFError, OSError):  # also in the middle of a message
            assert self.reads is not None
            self.reads.close()
            self.reads = None

    def close(self) -> None:
        """Closes the pipes."""
        for pipe in (self.reads, self.writes):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self.reads = self.writes = None


class Kept:
    """A child process that ends with gaverify.

    Args:
        process: The keeper, whose streams and exit status are the child's; on Windows, or where it was forked, the
            child itself.
        alive: The end of the pipe that is closed when gaverify is gone; None where there is no keeper.
        channel: How to talk with the child.
    """

    def __init__(
        self, process: subprocess.Popen[Any] | Fork, alive: int | None, channel: Channel | None = None
    ) -> None:
        self.process, self._alive = process, alive
        self.channel = channel or Channel(None, None)

    @property
    def status(self) -> int | None:
        """How it ended: its exit code, of one that a signal ended the negative number; None while it runs."""
        return self.process.poll()

    def wait(self) -> int:
        """Waits until the child has ended; returns its status."""
        return int(self.process.wait())

    def end(self) -> None:
        """Ends the child and everything that it started, and waits until they are gone; may be called twice."""
        if self._alive is not None:
            alive, self._alive = self._alive, None
            os.close(alive)
        else:
            self.process.terminate()
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:  # stuck in the kernel: nobody can end it, and nobody has to wait for it
            self.process.kill()
        self.channel.close()


class Fork:
    """A forked process that leads a group of processes, by the names of `subprocess.Popen`."""

    def __init__(self, number: int) -> None:
        self.pid = number
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns how it ended; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Waits until it has ended, and returns how.

        Raises:
            subprocess.TimeoutExpired: It runs on.
        """
        limit = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(_TICK)
        return code

    def terminate(self) -> None:
        """Ends it and its group, of which others may go on when it has ended itself."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it leads no group yet, or nobody is left
            if self.poll() is None:
                os.kill(self.pid, signal.SIGKILL)

    kill = terminate


def fork(work: Callable[[Channel], object]) -> Kept:
    """Forks a process that runs `work` and ends, at the latest with this one.

    Neither the terminal's signals nor the report's stdout reach it: what it prints goes to stderr.

    Args:
        work: Is given what sends messages to this process.
    """
    parent = os.getpid()
    reads, writes = Pipe(duplex=False)
    number = os.fork()
    if not number:
        _run_fork(work, Channel(None, writes), parent)
    writes.close()  # the child has its own; with this one open, reading would never reach the end of the pipe
    return Kept(Fork(number), None, Channel(reads, None))


def _run_fork(work: Callable[[Channel], object], channel: Channel, parent: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        keeper.end_with_parent()
        if os.getppid() != parent:  # it was killed before that
            os._exit(code)
        for number in _ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as in the background of a script, or under nohup
                signal.signal(number, signal.SIG_DFL)
        # A thread of the parent, such as a progress bar's, may hold the lock of its stream at the fork, for ever here.
        sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
        os.dup2(2, 1)
        work(channel)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)  # threads that the user's code left are not waited for


def start_module(module: str, **options: Any) -> Kept:
    """Starts `main()` of a module of gaverify's in a fresh process, which calls `open_channel` to talk with this one.

    Args:
        module: Its name.
        options: As for `subprocess.Popen`.

    Raises:
        OSError: It cannot be started.
    """
    command = [sys.executable, "-P", "-c", _START.format(module), *sys.path]
    (tasks, sends), (reads, answers) = Pipe(duplex=False), Pipe(duplex=False)
    try:
        child = start_command(command, stdin=tasks.fileno(), stdout=answers.fileno(), **options)
    finally:
        tasks.close()
        answers.close()
    child.channel = Channel(reads, sends)
    return child


def open_channel() -> Channel:
    """Returns how a process that `start_module` has started talks with gaverify.

    Code of the user's then reads from stdin what it would read in CI, and prints to stderr.
    """
    channel = Channel(Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace", line_buffering=True)  # type: ignore[union-attr]
    return channel


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

    # Python turns SIGINT into the same by itself.
    numbers = [number for number in _ENDING_SIGNALS if number != signal.SIGINT]
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
