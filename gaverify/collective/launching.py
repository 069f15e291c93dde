"""Runs jobs in processes of their own, forked or fresh, all at the same time, and brings back what they returned.

A fork starts in milliseconds and shares the model and the batch with its parent. It works where there are only CPUs:
neither CUDA nor, beside it, autograd runs in a forked process. A fresh one, behind a keeper, imports torch and builds
the model again, which takes seconds. Its job and all that belongs to it are pickled into a file, so that it names what
it calls, and what it takes is data. What either has to say goes through its pipe, and neither outlives its parent.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from gaverify.children.launching import (
    Kept,
    ended_as_interrupted,
    private_stdout,
    signal_name,
    start_with_job,
    working_folder,
)
from gaverify.errors import GaverifyError, InternalError, ProblemError
from gaverify.passes.devices import select_device
from gaverify.torch_internals import import_compiler

Job = tuple[str, Callable[[], Any]]
"""A name for messages, and what to call; its result must be picklable."""

_POLL = 0.05
_LINGER = 0.5  # seconds: when one rank fails the others lose their connections, and may tell of that first
_KEPT_LINES = 12  # of a traceback that a message shows
_PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a process gets when its parent dies
_FRESH = "where there is an accelerator, ranks are fresh processes"
_ADVICE = (
    "define what they are made of at the top level of a module that can be imported, or run `gaverify run --ranks R "
    "--model package.module:factory`, which every process loads for itself, or hide the accelerator "
    "(CUDA_VISIBLE_DEVICES=) and write device='cpu'"
)
_upwards: list[Connection] = []
"""The pipe to whoever started this process, where `run` did."""
_places: dict[str, str] = {}
"""In a fresh process: the device of whoever started it, and its own."""


@dataclass(frozen=True)
class Fresh:
    """Where fresh processes compute: the tensors of their jobs lie `source`, and each shall find them on its device."""

    source: torch.device
    devices: Sequence[torch.device]


@dataclass(frozen=True)
class _Outcome:
    """What a job returned, or why it failed, and when (the clock of all processes is one)."""

    at: float
    value: Any = None
    error: GaverifyError | None = None


def report_upwards(*words: Any) -> None:
    """Tells whoever started this process something while its job runs; nobody where `run` did not start it."""
    for pipe in _upwards:  # not `send`: torch would hand tensors over in memory that ends with this process
        pipe.send_bytes(pickle.dumps(words))


def run(
    jobs: Sequence[Job],
    timeout: float | None = None,
    heard: Callable[..., None] = report_upwards,
    fresh: Fresh | None = None,
) -> list[Any]:
    """Runs each job in a process and returns their results in order; no process is left when it returns or raises.

    Args:
        jobs: What to run; everything in them must be picklable where processes are fresh.
        timeout: Seconds after which all are ended, their start included; None waits for ever.
        heard: Called with what a process tells while its job runs.
        fresh: None forks.

    Raises:
        GaverifyError: What the first job that failed raised, if it was one of gaverify's own errors.
        InternalError: A job raised something else.
        ProblemError: A process died, or was not done in time, or a job cannot be pickled.
    """
    children: list[_Child] = []
    with ExitStack() as stack:
        starting = _forks(jobs) if fresh is None else _starts(jobs, fresh, stack)
        try:
            for child in starting:
                children.append(child)
            return _results(children, timeout, heard)
        finally:
            for child in children:
                child.pipe.close()
                child.process.end()


def _results(children: Sequence[_Child], timeout: float | None, heard: Callable[..., None]) -> list[Any]:
    limit = math.inf if timeout is None else time.monotonic() + timeout
    busy = list(children)
    while busy and time.monotonic() <= limit:
        ready = wait([child.pipe for child in busy], _POLL)
        for child in [child for child in busy if child.pipe in ready and child.read(heard)]:
            busy.remove(child)
            if child.outcome.error is not None:
                limit = min(limit, time.monotonic() + _LINGER)
    done = [child.outcome for child in children if child not in busy]
    errors = {outcome.at: outcome.error for outcome in done if outcome.error is not None}
    if errors:
        raise errors[min(errors)]
    if busy:
        names = ", ".join(child.name for child in busy)
        raise ProblemError(f"{names} did not end within {timeout:g} s, and all were ended; --timeout waits longer")
    return [outcome.value for outcome in done]


class _Child:
    """A process that runs a job.

    Args:
        name: For messages.
        pipe: Where it says what it has to say.
        process: To end it.
    """

    def __init__(self, name: str, pipe: Connection, process: _Forked | Kept) -> None:
        self.name, self.pipe, self.process = name, pipe, process
        self._said: _Outcome | None = None

    def read(self, heard: Callable[..., None]) -> bool:
        """Reads what is there; whether the other end was closed."""
        while True:
            try:
                if not self.pipe.poll():
                    return False
                message = pickle.loads(self.pipe.recv_bytes())
            except (EOFError, OSError):  # also in the middle of a message
                return True
            if isinstance(message, _Outcome):
                self._said = message
            else:
                heard(*message)

    @property
    def outcome(self) -> _Outcome:
        """What it said in the end; where it said nothing, how it ended."""
        if self._said is None:
            code = self.process.wait()
            how = f"left with exit code {code}"
            if code < 0:
                how = f"was ended by signal {signal_name(-code).removeprefix('signal ')}"
            self._said = _Outcome(time.monotonic(), error=ProblemError(f"{self.name} {how} before it was done"))
        return self._said


def _answer(pipe: Connection, name: str, call: Callable[[], Any]) -> None:
    """What every process does: runs its job, and sends the outcome through its pipe."""
    _upwards[:] = [pipe]
    try:
        outcome = _Outcome(time.monotonic(), call())
    except GaverifyError as error:
        kind = InternalError if isinstance(error, InternalError) else ProblemError
        outcome = _Outcome(time.monotonic(), error=kind(str(error)))
    except BaseException as error:
        # what the user's code raises is a ProblemError by then; anything else is a fault of ours
        lines = "".join(traceback.format_exception(error)).rstrip().splitlines()[-_KEPT_LINES:]
        outcome = _Outcome(time.monotonic(), error=InternalError("\n".join([f"{name} raised:", *lines])))
    pipe.send_bytes(pickle.dumps(outcome))


class _Forked:
    """A forked process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None

    def wait(self) -> int:
        """Waits until it has ended; returns its exit code, of one that a signal ended the negative number."""
        _, self._status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(self._status)

    def end(self) -> None:
        """Kills it."""
        if self._status is not None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            self.wait()


def _forks(jobs: Sequence[Job]) -> Iterator[_Child]:
    for name, call in jobs:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        reading, writing = Pipe(duplex=False)
        pid = os.fork()
        if pid:
            writing.close()
            yield _Child(name, reading, _Forked(pid))
            continue
        code = 1
        try:
            reading.close()
            _settle(parent)
            _answer(writing, name, call)
            code = 0
        finally:
            os._exit(code)  # the parent's `finally` blocks and exit handlers are not this process's to run


def _settle(parent: int) -> None:
    """Makes the fork end with its parent, gives it streams of its own, and one thread to compute with."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before it was asked for
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in the background of a script, or under nohup
            signal.signal(number, signal.SIG_DFL)
    # a thread of the parent, such as a progress bar's, may hold the lock of its stream at the fork, for ever here
    sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    torch.set_num_threads(1)  # the threads of the parent's pool were not forked; waiting for them would never end


def _starts(jobs: Sequence[Job], fresh: Fresh, stack: ExitStack) -> Iterator[_Child]:
    file = stack.enter_context(working_folder("gaverify-ranks-")) / "jobs.pt"
    save_for_fresh(jobs, file)
    for number, ((name, _), device) in enumerate(zip(jobs, fresh.devices, strict=True)):
        asked = {"file": str(file), "there": str(fresh.source), "number": number, "device": str(device)}
        keeper = start_with_job("gaverify.collective.launching", {"name": name, "job": asked})
        assert keeper.process.stdout is not None
        yield _Child(name, Connection(os.dup(keeper.process.stdout.fileno()), writable=False), keeper)


def save_for_fresh(value: Any, file: Path) -> None:
    """Writes what a fresh process shall load.

    Raises:
        ProblemError: A part of it cannot be pickled.
    """
    try:
        torch.save(value, file)
    except Exception as error:  # `__reduce__` of the user's classes may raise anything
        raise ProblemError(f"{_FRESH}, to which model, loss and batch cannot be handed: {error}; {_ADVICE}") from error


def load_in_fresh(file: Path) -> Any:
    """Returns, in a fresh process, what was `save_for_fresh` for it, on its own device.

    Raises:
        ProblemError: A class or function in it cannot be found here.
    """
    try:
        return torch.load(file, map_location=_places, weights_only=False)
    except (AttributeError, ImportError) as error:
        raise ProblemError(f"{_FRESH}, in which one thing is missing: {error}; {_ADVICE}") from error


def main() -> None:
    """Runs the job that stdin names, and writes its outcome to stdout."""
    asked = json.load(sys.stdin)
    _answer(Connection(private_stdout(), readable=False), asked["name"], lambda: _run_job(**asked["job"]))
    sys.stderr.flush()
    os._exit(0)  # what was started in this process, such as a process group after a failure, is not waited for


def _run_job(file: str, number: int, there: str, device: str) -> Any:
    torch.set_num_threads(1)  # as launchers set it: the ranks share the processor
    select_device(torch.device(device))
    _places[there] = device
    return load_in_fresh(Path(file))[number][1]()


_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
Answer = TypeVar("Answer")
Progress = Callable[[str, int, int], None]


def run_in_process(
    work: Callable[[Progress], Answer], progress: Progress | None, afresh: torch.device | None = None
) -> Answer:
    """Returns what `work` returns in a process of its own; it is given a `progress` that reports in this one.

    Args:
        work: What to run.
        progress: Told how far it is.
        afresh: None forks. A device: the process is a fresh one, which computes there; `work` must be picklable.

    Raises:
        GaverifyError: What `work` raised.
    """
    if afresh is None:
        _import_compiler()
    with ended_as_interrupted(), working_folder("gaverify-ranks-") as folder:
        job = "the verification", partial(_work_in_folder, work, folder)
        fresh = Fresh(afresh, [afresh]) if afresh is not None else None
        (answer,) = run([job], heard=progress or (lambda *words: None), fresh=fresh)
    return answer  # type: ignore[no-any-return]


def _import_compiler() -> None:
    """Imports torch's compiler, which both engines import, for seconds: here once, not in every fork.

    The import makes a folder for what is compiled and notes it in the environment; here nothing is compiled.
    """
    cache_before = os.environ.get(_COMPILED)
    import_compiler()

    cache_folder = os.environ.get(_COMPILED)
    if cache_before is None and cache_folder is not None:
        del os.environ[_COMPILED]
        with suppress(OSError):  # not empty: it was there before
            os.rmdir(cache_folder)


def _work_in_folder(work: Callable[[Progress], Answer], folder: Path) -> Answer:
    # temporary files of a process that is killed would stay; the folder around them goes with this one
    tempfile.tempdir = str(folder)
    return work(report_upwards)
