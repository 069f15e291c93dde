"""Starts a child process behind a keeper and ends it; its folders, which go with gaverify; what it said in the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from gaverify.errors import GaverifyError, is_out_of_space

try:
    import fcntl
except ImportError:  # Windows: the folders of killed runs stay
    fcntl = None  # type: ignore[assignment]

_KEEPER = str(Path(__file__).with_name("keeper.py"))
# The child gets this process's own search path; `-P` keeps the current folder from shadowing the standard library.
_START = "import sys; sys.path[:] = sys.argv[1:]; from {} import main; main()"
_PATIENCE = 10.0  # seconds; the keeper itself needs two at most, for a child that ignores SIGTERM
_OWNER = "owner"
_TAIL = 15
_READ = 1 << 14  # bytes of a log that are read from its end
_NO_NUMPY = "UserWarning: Failed to initialize NumPy"
_MARK = "Traceback (most recent call last):"


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
                with suppress(OSError):
                    stream.close()


def start_with_job(module: str, job: Mapping[str, Any], **options: Any) -> Kept:
    """Starts `main()` of a module of gaverify's in a fresh process, whose stdout is a pipe, and hands it its job.

    Args:
        module: With a `main` that reads the job, as JSON, from stdin.
        job: What the process is told.
        options: As for `subprocess.Popen`.

    Raises:
        OSError: It cannot be started.
    """
    child = start_module(module, **options)
    assert child.process.stdin is not None
    try:
        with suppress(BrokenPipeError):  # it died at once; its exit code says how
            child.process.stdin.write(json.dumps(job).encode())
            child.process.stdin.close()
    except BaseException:
        child.end()
        raise
    return child


def start_module(module: str, **options: Any) -> Kept:
    """Starts `main()` of a module of gaverify's in a fresh process, whose stdin and stdout are pipes.

    Raises:
        OSError: It cannot be started.
    """
    command = [sys.executable, "-P", "-c", _START.format(module), *sys.path]
    return start_command(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)


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


@contextmanager
def working_folder(prefix: str) -> Iterator[Path]:
    """Gives a new folder in the system's place for temporary files, and takes away those of runs that were killed.

    The owner holds a lock on a file in the folder. The system lets go of it when the process ends, however it ends, and
    a folder whose lock is free has no owner any more.

    Args:
        prefix: Of the folder's name.
    """
    remove_abandoned(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        with _lock_owner_file(folder), told_where_full(folder):
            yield folder
    finally:
        remove(folder)


@contextmanager
def told_where_full(folder: Path) -> Iterator[None]:
    """Names the folder where a disk fills up: what fails to write knows of no file.

    Raises:
        GaverifyError: There was no space left.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not is_out_of_space(error):
            raise
        raise GaverifyError(f"no space left in `{folder}`; free some, or set TMPDIR to a larger disk") from error


def remove_abandoned(prefix: str) -> None:
    """Removes folders with this prefix whose owner is gone; those of other users stay, and so do links."""
    if fcntl is None:
        return
    for owner in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_OWNER}"):
        with suppress(OSError):
            if owner.parent.is_symlink() or owner.parent.stat().st_uid != os.geteuid():
                continue
            with owner.open("r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(owner.parent)


@contextmanager
def _lock_owner_file(folder: Path) -> Iterator[None]:
    new = folder / f"{_OWNER}.new"
    with new.open("wb") as lock:
        if fcntl is not None:
            # A file system without locks: the folder looks abandoned only to a run that has them.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(folder / _OWNER)  # the name appears only once it is locked
        yield


def remove(folder: Path) -> None:
    """Removes a file, or a folder with all that it holds, also what an overlay leaves without permissions."""

    def retry_with_permissions(function: Callable[[str], object], path: str, error: object) -> None:
        with suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700)
            if function in (os.scandir, os.open, os.lstat):
                shutil.rmtree(path, ignore_errors=True)
            else:
                function(path)

    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, onerror=retry_with_permissions)
    else:
        folder.unlink(missing_ok=True)


def private_stdout() -> int:
    """Returns a descriptor of stdout for the answer, and points what everybody else calls stdout at stderr."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    return descriptor


def last_lines(log: Path) -> list[str]:
    """Returns the last lines of a child's output; none where it printed nothing."""
    with suppress(OSError), log.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - _READ))
        lines = stream.read().decode("utf-8", "replace").splitlines()
        return [line for line in _without_numpy(lines) if line.strip()][-_TAIL:]
    return []


def _without_numpy(lines: list[str]) -> list[str]:
    """Leaves out what torch says at every import where NumPy is not installed: it would read as a run's last words.

    Python prints a warning as its text and, indented below, the line of source that it comes from.
    """
    other_lines: list[str] = []
    warned = False
    for line in lines:
        source = warned and line.startswith("  ")
        warned = _NO_NUMPY in line
        if not warned and not source:
            other_lines.append(line)
    return other_lines


def signal_name(number: int) -> str:
    """Returns the name of the signal that ended a child, such as SIGKILL; `signal 40` where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def cause_of(error: BaseException) -> str:
    """Returns an exception in a line: `ValueError: the first line of its message`.

    An exception that carries the traceback of another process (of a data loader's worker, of `mp.spawn`) is told by
    that traceback's last line.
    """
    name = type(error).__name__
    try:
        message = str(error).strip()
    except Exception:
        return name
    lines = [line for line in message.splitlines() if line.strip()]
    if _MARK in message:
        ends = [
            line
            for line in lines[lines.index(next(line for line in lines if _MARK in line)) + 1 :]
            if not line.startswith(" ")
        ]
        return ends[-1].strip() if ends else name
    return f"{name}: {lines[0].strip()}" if lines else name
