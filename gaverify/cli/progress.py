"""Progress on stderr: a bar with a clock on a terminal, a line for each started run elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from gaverify.cli.streams import tell

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

DELAY = 1.0  # seconds; a bar that flashes up and away says nothing
_CLOCK, _BAR = 7, 20  # columns


def _has_terminal() -> bool:
    """Whether stderr is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class DelayedProgress:
    """Shows a bar once `DELAY` has passed; `report` is the callback of `verify_spec`.

    The bar starts from a timer's thread, because the slow part may be a single step without any report. Where there is
    no terminal that can move its cursor, it says in a line what was started, if there are several or a CI runs it.

    Args:
        title: What runs.
        number: Which of several it is, from 0 on.
        count: How many there are.
        quiet: Say nothing where there is no terminal.
        unit: What the steps are called.
        noun: What each of several is called.
    """

    def __init__(
        self,
        title: str,
        number: int = 0,
        count: int = 1,
        *,
        quiet: bool = False,
        unit: str = "step",
        noun: str = "spec",
    ) -> None:
        self._title, self._unit = title, unit
        self._which = f"{noun} {number + 1} of {count}, " if count > 1 else ""
        self._began = time.monotonic()
        self._says_start = not quiet and (count > 1 or os.environ.get("CI", "") not in ("", "false", "0"))
        self._state: tuple[str, int, int] = ("preparing", 0, 0)
        self._lock = threading.Lock()
        self._closed = False
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> DelayedProgress:
        if _has_terminal():
            self._timer = threading.Timer(DELAY, self._show)
            self._timer.daemon = True  # a program that ends sooner does not wait for it
            self._timer.start()
        elif self._says_start:
            tell(f"gaverify: running {self._which}{self._title}")
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
        """Notes what is being done, and how many of how many steps are finished; a total of 0 is not known."""
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
            # no markup: `cnn.py:factory:` would be the picture of a factory
            words = TextColumn("{task.description}", markup=False)
            columns = (TimeElapsedColumn(), BarColumn(bar_width=_BAR), words)
            # the user's prints already go to stderr; rich must not take stdout over for its own
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
            self._task = self._bar.add_task(self._title, total=None)
            self._bar.tasks[0].start_time = self._began  # the clock counts what ran before the bar was shown, too
            self._bar.start()
            self._update()

    def _update(self) -> None:
        if self._bar is None or self._task is None:
            return
        label, done, total = self._state
        step = f"{self._unit} {done + 1}" + (f" of {total}, " if done < total else ", ") if done or total else ""
        text = f"{self._which}{step}{self._title}{': ' if self._title else ''}{label}"
        # rich would take room from every column: what stands at the end is the least of a line
        room = max(self._bar.console.width - _CLOCK - _BAR - 2, 20)
        text = text if len(text) <= room else f"{text[: room - 1]}…"
        # without a total the bar moves to and fro: it is not full before the work is done
        self._bar.tasks[0].total = total if done < total else None
        self._bar.update(self._task, description=text, completed=done)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Takes the bar off the terminal while something is printed."""
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            try:
                yield
            finally:
                if self._bar is not None and not self._closed:
                    self._bar.start()


class SeveralProgress:
    """Progress of specs in processes of their own: one bar, which is full when all are done."""

    def __init__(self, titles: Sequence[str], *, quiet: bool = False) -> None:
        self._titles = titles
        self._quiet = quiet
        self._started: set[int] = set()
        self._finished = 0
        if len(titles) == 1:
            self._shown = DelayedProgress(titles[0], quiet=quiet)
        else:
            self._shown = DelayedProgress("", quiet=True, unit="spec")
        self.hidden = self._shown.hidden

    def __enter__(self) -> SeveralProgress:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, trace)

    def report_of(self, number: int, label: str, done: int, total: int) -> None:
        """Notes what is being done for one of the specs."""
        count = len(self._titles)
        if count == 1:
            self._shown.report(label, done, total)
            return
        if number not in self._started and not (self._quiet or _has_terminal()):
            tell(f"gaverify: running spec {number + 1} of {count}, {self._titles[number]}")
        self._started.add(number)
        self._shown.report(f"{self._titles[number]}: {label}", self._finished, count)

    def finish(self) -> None:
        """Notes that one of the specs is done."""
        self._finished += 1
