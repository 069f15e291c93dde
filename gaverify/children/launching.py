"""Starts a child process behind a keeper, and ends it as Ctrl-C would when this one is told to end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_KEEPER = str(Path(__file__).with_name("keeper.py"))
# The child gets this process's own search path; `-P` keeps the current folder from shadowing the standard library.
_START = "import sys; sys.path[:] = sys.argv[1:]; from {} import main; main()"
_PATIENCE = 10.0  # seconds; the keeper itself needs two at most, for a child that ignores SIGTERM


class Kept:
    """A child process that ends with gaverify.

    Args:
        process: The keeper, whose streams and exit status are the child's; on Windows the child itself.
        alive: The end of the pipe that is closed when gaverify is gone; None on Windows.
    """

    def __init__(self, process: subprocess.Popen[Any], alive: int | None) -> None:
        self.process, self._alive = process, alive

    def wait(self) -> int:
        """Waits until the child has ended; returns its exit code, of one that a signal ended the negative number."""
        return int(self.process.wait())

    def end(self) -> None:
        """Ends the child and everything that it started, and waits until they are gone; may be called twice."""
        if self._alive is not None:
            alive, self._alive = self._alive, None
            os.close(alive)
        elif self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:  # stuck in the kernel: nobody can end it, and nobody has to wait for it
            self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def given(module: str, job: Mapping[str, Any], **options: Any) -> Kept:
    """Starts `main()` of a module of gaverify's in a fresh process, whose stdout is a pipe, and hands it its job.

    Args:
        module: With a `main` that reads the job, as JSON, from stdin.
        job: What the process is told.
        options: As for `subprocess.Popen`.

    Raises:
        OSError: It cannot be started.
    """
    command = [sys.executable, "-P", "-c", _START.format(module), *sys.path]
    kept = started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
    assert kept.process.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # it died at once; its exit code says how
            kept.process.stdin.write(json.dumps(job).encode())
            kept.process.stdin.close()
    except BaseException:
        kept.end()
        raise
    return kept


def started(command: Sequence[str], **options: Any) -> Kept:
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
    keeper = [sys.executable, "-I", "-S", _KEEPER, str(watched)]
    try:
        process = subprocess.Popen([*keeper, *command], pass_fds=(watched,), start_new_session=True, **options)
    except BaseException:
        os.close(alive)
        raise
    finally:
        os.close(watched)
    return Kept(process, alive)


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into KeyboardInterrupt, so that children and folders go whichever signal ends the run.

    A signal that is ignored (nohup) stays ignored, and one that the caller handles stays the caller's.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
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
