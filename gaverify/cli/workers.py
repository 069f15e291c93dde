"""Verifies specs in processes of their own: several at a time, and each for as long as its `timeout` allows.

A hang inside a kernel or a lock cannot be ended from the same process. A worker imports torch once and verifies one
spec after the other. It stands behind a keeper, which ends with it whatever the user's code has started.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from gaverify.children.launching import (
    Kept,
    ended_as_interrupted,
    private_stdout,
    signal_name,
    start_module,
    working_folder,
)
from gaverify.errors import InternalError, ProblemError, as_foreseen
from gaverify.spec import Spec

if TYPE_CHECKING:
    from gaverify.records.verdict import Verdict

Progress = Callable[[str, int, int], None]


class _Ready(NamedTuple):
    """Torch is imported: the time of the next spec begins."""


class _Step(NamedTuple):
    """What a verification is doing: as `verify_spec` tells it."""

    label: str
    done: int
    total: int


@dataclass
class _Worker:
    """A process, and what it is at.

    `started` is when its verification began, None while it imports torch; `is_over`: it can verify nothing more.
    """

    process: Kept
    answers: Connection
    tasks: Connection
    number: int = -1
    spec: Spec | None = None
    started: float | None = None
    is_ready: bool = False
    is_over: bool = False
    step: str = ""

    @property
    def deadline(self) -> float:
        """When the verification is ended; a run on ranks ends itself, as its limit holds for each window."""
        if self.spec is None or self.started is None or not needs_worker(self.spec):
            return math.inf
        return self.started + (self.spec.timeout or math.inf)

    def give(self, number: int, spec: Spec) -> None:
        """Hands it the next spec."""
        self.number, self.spec, self.step = number, spec, "preparing"
        # Importing torch must not count: the time limit is the verification's.
        self.started = time.monotonic() if self.is_ready else None
        with suppress(OSError):  # it has died; reading its answer tells how
            self.tasks.send_bytes(pickle.dumps(spec))

    def read(self, progress: Callable[[int, str, int, int], None]) -> Any:
        """Returns the answer to its spec, or None where it has not come yet."""
        try:
            while self.answers.poll():
                message = pickle.loads(self.answers.recv_bytes())
                if isinstance(message, _Ready):
                    self.is_ready, self.started = True, time.monotonic()
                elif isinstance(message, _Step):
                    self.step = message.label
                    progress(self.number, *message)
                else:
                    return message
        except (EOFError, OSError):
            return self._death()
        return self._lateness() if time.monotonic() >= self.deadline else None

    def _death(self) -> ProblemError:
        self.is_over, code = True, self.process.wait()
        how = f"signal {signal_name(-code).removeprefix('signal ')}" if code < 0 else f"exit code {code}"
        return ProblemError(f"the verification's process ended with {how} during: {self.step}")

    def _lateness(self) -> ProblemError:
        assert self.spec is not None
        self.is_over = True
        return ProblemError(
            f"did not finish within {self.spec.timeout:g} s and was stopped during: {self.step}; "
            "give a larger `--timeout` or a smaller batch"
        )

    def end(self) -> None:
        """Ends the process and all that it started."""
        self.process.end()
        for pipe in (self.answers, self.tasks):
            with suppress(OSError):
                pipe.close()


def needs_worker(spec: Spec) -> bool:
    """Whether a spec has a limit of time that holds for all of its verification."""
    return spec.timeout is not None and spec.ranks is None


def verify_in_workers(
    specs: Sequence[Spec], count: int, progress: Callable[[int, str, int, int], None], *, debug: bool = False
) -> Generator[tuple[int, Any], None, None]:
    """Yields the number of a spec and its verdict, or what it ended with, as soon as it is there.

    Args:
        specs: What to verify.
        count: How many at a time.
        progress: Told the number of a spec, what is done, and how many parts of how many are.
        debug: Print the traceback of what a verification raised.
    """
    # Reversed, because `pop` takes the last one.
    waiting = list(enumerate(specs))[::-1]
    workers: list[_Worker] = []
    with ExitStack() as stack:
        stack.enter_context(ended_as_interrupted())
        folder = str(stack.enter_context(working_folder("gaverify-run-")))
        stack.callback(_end_all, workers)
        while waiting or workers:
            while waiting and len(workers) < count:
                workers.append(_start_worker(folder, count, debug=debug))
                workers[-1].give(*waiting.pop())
            now = time.monotonic()
            # A worker that hangs sends nothing: without the next deadline `wait` would never return.
            nearest = min(worker.deadline for worker in workers)
            wait([worker.answers for worker in workers], max(nearest - now, 0) if nearest < math.inf else None)
            for worker in list(workers):
                answer = worker.read(progress)
                if answer is None:
                    continue
                number = worker.number  # read before the worker is given the next spec
                # A process that died or was stopped at its limit can verify nothing more.
                if worker.is_over or not waiting:
                    workers.remove(worker)
                    worker.end()
                else:
                    worker.give(*waiting.pop())
                yield number, answer


def verify_in_worker(spec: Spec) -> Verdict:
    """Returns the verdict of one spec, which is verified in a process of its own.

    Raises:
        GaverifyError: What the verification ended with.
    """
    with closing(verify_in_workers([spec], 1, lambda *step: None)) as answers:
        _, answer = next(answers)
    if isinstance(answer, BaseException):
        raise answer
    verdict: Verdict = answer
    return verdict


def _end_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.end()


def _start_worker(folder: str, count: int, *, debug: bool) -> _Worker:
    # what a verification that is ended leaves in the place for temporary files goes with this folder
    environment = {**os.environ, "TMPDIR": folder}
    if count > 1:
        # Workers that use all cores each are slower together than one after the other.
        environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // count, 1)))
    environment["GAVERIFY_DEBUG"] = "1" if debug else ""
    worker = start_module("gaverify.cli.workers", env=environment)
    assert worker.process.stdin is not None and worker.process.stdout is not None
    # Connection and Popen each close their descriptor: without `dup` one would close the other's.
    answers = Connection(os.dup(worker.process.stdout.fileno()), writable=False)
    return _Worker(worker, answers, Connection(os.dup(worker.process.stdin.fileno()), readable=False))


def main() -> None:
    """Runs in a worker: verifies each spec that stdin names, and writes verdicts and errors to stdout."""
    tasks = Connection(os.dup(0), writable=False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the user's code reads what it would read in CI, and no specs
    answers = Connection(private_stdout(), readable=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace", line_buffering=True)  # type: ignore[union-attr]
    try:
        from gaverify.verification import verify_spec
    except Exception as error:
        _send(answers, InternalError(f"torch cannot be imported: {error}"))
        os._exit(1)
    _send(answers, _Ready())
    while True:
        try:
            spec = pickle.loads(tasks.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # threads that the user's code left are not waited for
        _send(answers, _verify(verify_spec, spec, lambda *step: _send(answers, _Step(*step))))


def _send(answers: Connection, message: object) -> None:
    answers.send_bytes(pickle.dumps(message))


def _verify(verify_spec: Callable[..., Any], spec: Spec, progress: Progress) -> Any:
    from gaverify.cli.streams import guests

    try:
        with guests():
            return verify_spec(spec, progress=progress)
    except BaseException as error:
        if os.environ.get("GAVERIFY_DEBUG"):
            traceback.print_exc()
        foreseen = as_foreseen(error)
        if foreseen is None:
            return InternalError(f"{type(error).__name__}: {error}")
        # What it was raised from cannot be read where torch is not imported.
        foreseen.__cause__ = foreseen.__context__ = foreseen.__traceback__ = None
        return foreseen
