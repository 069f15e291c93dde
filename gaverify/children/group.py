"""Processes that run at the same time: what they say, how each ended, and the end of all of them."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gaverify.children.folders import working_folder
from gaverify.children.last_words import Ended
from gaverify.children.launching import Kept, ended_as_interrupted, fork, start_module

_TICK = 0.05  # seconds between two looks whether a process has ended


class Group:
    """Processes that gaverify starts, and ends with everything that they started."""

    def __init__(self, folder: Path | None) -> None:
        self._messages: deque[tuple[Kept, Any]] = deque()
        self.processes: list[Kept] = []
        self.folder = folder

    def add(self, process: Kept) -> Kept:
        """Takes a process that was started into the group, and returns it."""
        self.processes.append(process)
        return process

    def start_module(self, module: str, variables: Mapping[str, str], **options: Any) -> Kept:
        """Starts `main()` of a module of gaverify's in a fresh process.

        Args:
            module: Its name.
            variables: Added to this process's environment.
            options: As for `subprocess.Popen`.
        """
        # Temporary files that an ended process leaves go with the folder.
        environment = {**os.environ, "TMPDIR": str(self.folder), **variables}
        return self.add(start_module(module, env=environment, **options))

    def fork(self, work: Callable[[Connection], object]) -> Kept:
        """Forks a process that runs `work`, which is given the pipe for messages to this one."""
        return self.add(fork(work))

    def receive(self, until: float = math.inf) -> tuple[Kept, Any] | None:
        """Waits until a process says something or ends, or until a time has come.

        Args:
            until: As `time.monotonic` counts.

        Returns:
            The process and its message, in the end `Ended`, with which it leaves the group; None: the time has come.
        """
        while not self._messages:
            pipes = [process.answers for process in self.processes if process.answers is not None]
            # Looked at before the pipes: all that these have said is there by then.
            ended = [process for process in self.processes if process.status is not None]
            is_over = time.monotonic() >= until
            wait(pipes, 0 if ended or is_over else min(until - time.monotonic(), _TICK))
            for process in self.processes:
                self._messages.extend((process, message) for message in process.read_messages())
            for process in ended:
                process.end()  # what it started may go on
                self.processes.remove(process)
                self._messages.append((process, Ended(process.wait())))
            if is_over and not self._messages:
                return None
        return self._messages.popleft()

    def end(self, process: Kept) -> None:
        """Ends one of the processes, of which nothing more is received."""
        process.end()
        self._messages = deque(news for news in self._messages if news[0] is not process)
        if process in self.processes:
            self.processes.remove(process)


@contextmanager
def open_group(prefix: str = "") -> Iterator[Group]:
    """Gives a group of processes. Behind the block none of them is left, and no folder, whatever ends it.

    SIGTERM and SIGHUP interrupt the block.

    Args:
        prefix: The beginning of the name of the group's folder for temporary files; empty: it has none.
    """
    with ended_as_interrupted(), working_folder(prefix) if prefix else nullcontext() as folder:
        group = Group(folder)
        try:
            yield group
        finally:
            for process in list(group.processes):
                group.end(process)
