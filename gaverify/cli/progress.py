"""A progress bar on stderr for runs that take longer than a second on a terminal."""

from __future__ import annotations

import os
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

DELAY = 1.0  # seconds; a bar that flashes up and away says nothing


class DelayedProgress:
    """Shows a bar once `DELAY` has passed; `report` is the callback of `verify_spec`.

    The bar starts from a timer's thread, because the slow part may be a single step without any report. On a pipe, or a
    terminal that cannot move its cursor, nothing is ever shown.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._state: tuple[str, int, int] = ("preparing", 0, 0)
        self._lock = threading.Lock()
        self._closed = False
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> DelayedProgress:
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            self._timer = threading.Timer(DELAY, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:  # the timer may be building the bar at this moment
            self._closed = True
            if self._bar is not None:
                self._bar.stop()

    def report(self, label: str, done: int, total: int) -> None:
        """Notes what is being done, and how many of how many parts are."""
        with self._lock:
            self._state = (label, done, total)
            self._update()

    def _show(self) -> None:
        # rich only here: a run that is over sooner does not pay for it
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._closed:
                return
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            # the user's prints already go to stderr; rich must not take stdout over for its own
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
            self._task = self._bar.add_task(self._title, total=None)
            self._update()
            self._bar.start()

    def _update(self) -> None:
        if self._bar is not None and self._task is not None:
            from rich.markup import escape

            label, done, total = self._state
            text = escape(f"{self._title}: {label}")
            self._bar.update(self._task, description=text, completed=done, total=total or None)
