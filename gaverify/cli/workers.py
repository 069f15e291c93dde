"""Verifies specs in processes of their own: several at a time, and each for as long as its `timeout` allows.

A hang inside a kernel or a lock cannot be ended from the same process. A worker imports torch once and verifies one
spec after the other. It stands behind a keeper, which ends with it whatever the user's code has started.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gaverify.children.group import Group, open_group
from gaverify.children.last_words import Ended
from gaverify.children.launching import Kept, open_pipes
from gaverify.errors import BrokenTorch, InternalError, ProblemError, as_foreseen
from gaverify.spec import Spec

if TYPE_CHECKING:
    from gaverify.records.verdict import Verdict

Progress = Callable[[str, int, int], None]


class _Ready(NamedTuple):
    """Torch is imported: the time of the next spec begins."""


class _Step(NamedTuple):
    """The current step of a verification, as `verify_spec` tells it."""

    label: str
    done: int
    total: int


@dataclass
class _Worker:
    """A process, and what it is at.

    `started` is when its verification began, None while it imports torch; `is_over`: it can verify nothing more.
    """

    process: Kept
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
        self.process.send(spec)

    def answer(self, message: Any, progress: Callable[[int, str, int, int], None]) -> Any:
        """Returns the answer to its spec that a message is, or None where it is none.

        Args:
            message: The message of its process; None: its time is over.
            progress: As of `verify_in_workers`.
        """
        if isinstance(message, Ended):
            self.is_over = True
            return ProblemError(f"the verification's process {message} during: {self.step}")
        if isinstance(message, _Ready):
            self.is_ready, self.started = True, time.monotonic()
            return None
        if isinstance(message, _Step):
            self.step = message.label
            progress(self.number, *message)
            if time.monotonic() < self.deadline:
                return None
            message = None
        if message is None:
            assert self.spec is not None
            self.is_over = True
            return ProblemError(
                f"did not finish within {self.spec.timeout:g} s and was stopped during: {self.step}; "
                "give a larger `--timeout` or a smaller batch"
            )
        return message


def needs_worker(spec: Spec) -> bool:
    """Whether a spec has a limit of time that holds for all of its verification."""
    return spec.timeout is not None and spec.ranks is None


def verify_in_workers(
    specs: Sequence[Spec],
    count: int,
    progress: Callable[[int, str, int, int], None],
    *,
    debug: bool = False,
    sources: Mapping[str, str] | None = None,
) -> Generator[tuple[int, Any], None, None]:
    """Yields the number of a spec and its verdict, or what it ended with, as soon as it is there.

    Args:
        specs: The specs to verify.
        count: How many at a time.
        progress: Called with the number of a spec, what is done, and how many parts of how many are.
        debug: Print the traceback of what a verification raised.
        sources: Texts of files, by their real paths, that stand for what the files hold; None: no others.
    """
    # Reversed, because `pop` takes the last one.
    waiting = list(enumerate(specs))[::-1]
    workers: dict[Kept, _Worker] = {}
    with open_group("gaverify-run-") as group:
        while waiting or workers:
            while waiting and len(workers) < count:
                process = _start_worker(group, count, debug=debug)
                if sources:
                    process.send(dict(sources))
                workers[process] = _Worker(process)
                workers[process].give(*waiting.pop())
            # A worker that hangs says nothing: the next deadline ends the wait.
            due = min(workers.values(), key=lambda worker: worker.deadline)
            process, message = group.receive(due.deadline) or (due.process, None)
            worker = workers[process]
            answer = worker.answer(message, progress)
            if answer is None:
                continue
            number = worker.number  # read before the worker is given the next spec
            if worker.is_over or not waiting:
                del workers[process]
                group.end(process)
            else:
                worker.give(*waiting.pop())
            yield number, answer


def verify_in_worker(spec: Spec, sources: Mapping[str, str] | None = None) -> Verdict:
    """Returns the verdict of one spec, which is verified in a process of its own.

    Args:
        spec: The spec to verify.
        sources: As of `verify_in_workers`.

    Raises:
        GaverifyError: The verification ended with it.
    """
    with closing(verify_in_workers([spec], 1, lambda *step: None, sources=sources)) as answers:
        _, answer = next(answers)
    if isinstance(answer, BaseException):
        raise answer
    verdict: Verdict = answer
    return verdict


def _start_worker(group: Group, count: int, *, debug: bool) -> Kept:
    variables = {"GAVERIFY_DEBUG": "1" if debug else ""}
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:
        # Workers that use all cores each are slower together than one after the other.
        variables["OMP_NUM_THREADS"] = str(max((os.cpu_count() or 1) // count, 1))
    return group.start_module("gaverify.cli.workers", variables)


def main() -> None:
    """Runs in a worker: verifies each spec that it is sent, and sends verdicts and errors."""
    from gaverify.cli.streams import ignore_missing_numpy

    hears, says = open_pipes()
    ignore_missing_numpy()
    try:
        from gaverify.loading.importing import replace_sources
        from gaverify.verification import verify_spec
    except Exception as error:
        says.send(BrokenTorch(error))
        os._exit(1)
    says.send(_Ready())
    while True:
        try:
            spec = hears.recv()
        except (EOFError, OSError):
            os._exit(0)  # threads that the user's code left are not waited for
        if not isinstance(spec, Spec):  # sources, which come before the specs
            replace_sources(spec)
            continue
        says.send(_verify(verify_spec, spec, lambda *step: says.send(_Step(*step))))


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
        # The exceptions that it was raised from cannot be read where torch is not imported.
        foreseen.__cause__ = foreseen.__context__ = foreseen.__traceback__ = None
        return foreseen
