"""Keeps the output streams in order while the user's code runs here: progress, sentences for exceptions, exit codes.

Standard output belongs to the report: what the user's code prints goes to standard error instead. Standard error may be
closed or full: a message that cannot be written there is dropped and changes no exit code.
"""

from __future__ import annotations

import gc
import os
import re
import shlex
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TextIO

import click

from gaverify.errors import (
    INTERNAL,
    INTERRUPTED,
    USAGE,
    Agreed,
    HardExit,
    InternalError,
    SpecError,
    as_foreseen,
    current_folder,
    cut_text,
    text_of,
)
from gaverify.launched import is_first
from gaverify.records.numbers import count_text
from gaverify.tracebacks import Owner, calling_frame, display_path, owner_of

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


# Guards the process, which gaverify shares with the user's code, against things that code may not do to it.


@contextmanager
def guard_process() -> Iterator[None]:
    """While the user's code runs: `os._exit` raises `HardExit`, and a change of the current folder ends with the block.

    Without the first a factory could end gaverify, or a whole run of pytest, with 0. Without the second reports would
    be written, and the next specs looked for, in a folder that nobody named.
    """
    leave, process, folder = os._exit, os.getpid(), current_folder()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:  # a child that was forked leaves by it, as it must
            leave(status)
        raise HardExit(status)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave
        if folder is not None:
            with suppress(OSError):
                os.chdir(folder)


# Keeps the output streams in order while the user's code runs here; exceptions become sentences and exit codes.


_CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), 127, *range(128, 160))}
"""Control characters, all but tab and newline, as Python writes them: a terminal would obey them."""


def harmless(text: str) -> str:
    """Returns the text with every control character (colours, window titles, the bell) written out as an escape."""
    return text.translate(_CONTROL)


def tell(line: str) -> None:
    """Writes a line on stderr; a stderr that is full or closed is no reason to leave with another exit code."""
    try:
        print(harmless(line), file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        silence(sys.stderr)


def silence(stream: TextIO | None) -> None:
    """Points a stream at /dev/null, so that Python's flush on exit cannot fail on what the stream still holds."""
    with suppress(OSError, ValueError, AttributeError):
        target = stream.fileno()  # type: ignore[union-attr]
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, target)
        os.close(nothing)


def open_closed_streams() -> None:
    """Opens descriptors that the caller has closed (`2>&-`) on /dev/null; the next open file would get their number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 — lives as long as Python


def ignore_missing_numpy() -> None:
    """Hides that torch warns at its import where NumPy is missing, which is optional for torch and for gaverify.

    To be called by every process that imports torch for a verification.
    """
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


@contextmanager
def guests() -> Iterator[None]:
    """While the user's code runs: its output goes to stderr, a warning is told once, the process stays as it is."""
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(_descriptor_redirected())
        stack.enter_context(_each_warning_once())
        stack.enter_context(guard_process())
        yield


@contextmanager
def _descriptor_redirected() -> Iterator[None]:
    """Points descriptor 1 at stderr: child processes write to it without asking Python."""
    try:
        saved_descriptor = os.dup(1)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        os.dup2(saved_descriptor, 1)
        os.close(saved_descriptor)


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Prints each warning once, with the user's line that was running where Python would name one of gaverify's."""
    warned: set[tuple[str, str]] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        said = cut_text(str(message))
        key = category.__name__, re.sub(r"\d+", "#", said)  # a shape differs from micro-batch to micro-batch
        if key in warned:
            return
        warned.add(key)
        place = (filename, lineno) if owner_of(filename) > Owner.MACHINERY else calling_frame()
        tell(f"{f'{display_path(place[0])}:{place[1]}: ' if place else ''}{category.__name__}: {said}")

    before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def say(message: str, label: str = "error") -> None:
    """Prints the message on stderr, each line with `gaverify: error: ` in front; empty lines are left out."""
    for line in [line for line in message.splitlines() if line.strip()] or [""]:
        tell(f"gaverify: {label}: {line}")


_received: list[int] = []
"""The SIGINTs of this call of `main`."""
_answers: list[int] = []
"""How many answers this call of `main` has; each number as it grew."""


def note_answers(count: int) -> None:
    """Notes that so many answers are there, which Ctrl-C does not take away."""
    _answers.append(count)


@contextmanager
def interrupts_noted() -> Iterator[None]:
    """Remembers that Ctrl-C came, for `report_failure`; it still raises KeyboardInterrupt.

    A library may turn that exception into one of its own: pydantic does while it builds a class, and imports do.
    """
    _received.clear()
    _answers.clear()
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        _received.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Invocation:
    """How gaverify was called: the words, for a report to the authors, whether to show tracebacks, and when."""

    words: tuple[str, ...] = ()
    debug: bool = False
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


class Failure(NamedTuple):
    """Why one of several runs came to no answer, and the exit code that it asks for."""

    source: str
    message: str
    code: int
    position: int | None = None
    """How many runs were asked for before it; None: not known."""


def failures_of(
    error: BaseException, source: str, invocation: Invocation, *, alone: bool = False, row_width: int | None = None
) -> list[Failure]:
    """Tells on stderr what one of several specs ended with; returns it as rows.

    Args:
        error: The exception that ended it.
        source: The spec's file, or a name in place of it.
        invocation: How gaverify was called.
        alone: Whether it is the only spec: its name then stands in front of nothing.
        row_width: Print it on stdout, where other specs have a row with a name of so many columns; None: on stderr, as
            a fault of gaverify is in any case.
    """
    names_itself = isinstance(error, SpecError) and error.source == source
    sentences = (
        error.problems if isinstance(error, SpecError) and names_itself else (failure_message(error, invocation.words),)
    )
    foreseen = as_foreseen(error)
    if (
        row_width is not None
        and foreseen is not None
        and foreseen.exit_code == USAGE
        and not (_received or invocation.debug)
    ):
        from gaverify.report import print_no_answer

        for sentence in sentences:
            print_no_answer("error", source, sentence, row_width)
        sys.stdout.flush()
        return [Failure(source, sentence, USAGE) for sentence in sentences]
    code = report_failure(error, invocation, "" if names_itself or alone else source)
    return [Failure(source, sentence, code) for sentence in sentences]


def report_failure(error: BaseException, invocation: Invocation, source: str = "") -> int:
    """Prints on stderr what an exception means and returns the exit code.

    Args:
        error: The exception that arrived at `main`, or that ended one of several specs.
        invocation: How gaverify was called.
        source: The spec, where there are several.
    """
    if _received or isinstance(error, KeyboardInterrupt | click.Abort):
        count = max(_answers, default=0)
        when = f" after {count_text(count, 'verdict')}" if count else "; nothing was decided"
        tell(f"gaverify: interrupted{when}")
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        return _report_usage(error)
    if isinstance(error, Agreed) and not is_first():  # which tells it
        return error.exit_code
    if invocation.debug:
        for line in "".join(traceback.format_exception(error)).splitlines():
            tell(line)
    foreseen = as_foreseen(error)
    message = failure_message(error, invocation.words)
    where = f"{source}: " if source else ""
    if foreseen is not None and not isinstance(foreseen, InternalError):
        say("\n".join(where + line for line in message.splitlines() or [type(error).__name__]))
        return foreseen.exit_code
    say(where + message, "internal error")
    traceback_place = "above" if invocation.debug else "that `--debug` prints"
    tell(
        "This is a bug in gaverify, not in your model; nothing was decided. Please report it on gaverify's issue\n"
        f"tracker with the traceback {traceback_place}, the line that `gaverify --version` prints, and this command:\n"
        f"    gaverify {shlex.join(invocation.words)}"
    )
    return INTERNAL


def failure_message(error: BaseException, words: Sequence[str] = ()) -> str:
    """Returns the sentence for an exception: gaverify's own, or Python's with its type in front.

    Args:
        error: The exception that arrived.
        words: The command line. A number of micro-batches that stands there is named as it was given.
    """
    foreseen = as_foreseen(error)
    if foreseen is None:
        return f"{type(error).__name__}: {text_of(error)}"
    # Whoever finds K too large for the batch knows a number alone, which may be from a file or a call as well.
    if any(word.partition("=")[0] == "--steps" for word in words):
        return re.sub(r"\bsteps = (\d+) micro-batches", r"--steps \1: \1 micro-batches", str(foreseen))
    return str(foreseen)


def _report_usage(error: click.ClickException) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 and later: the message is the help text
        tell(error.format_message())
        return USAGE
    say(error.format_message())
    if context is not None:
        tell(f"Try `{context.command_path} --help`.")
    return USAGE


@contextmanager
def pause_collector() -> Iterator[None]:
    """Switches the garbage collector off inside the block, and on again behind it if it was on.

    While torch is imported it looks through every object again and again, and finds nothing: for a small model that
    costs more than the verification itself.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Progress on stderr: a bar with a clock on a terminal, a line for each started run elsewhere.


DELAY = 1.0  # seconds; a bar that flashes up and away says nothing
LIFE = 30.0  # seconds between two lines that say, where no bar can, what is being done
_CLOCK, _BAR = 7, 20  # columns


def _has_terminal() -> bool:
    """Whether stderr is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class DelayedProgress:
    """Shows a bar once `DELAY` has passed; `report` is the callback of `verify_spec`.

    The bar starts from a timer's thread, because the slow part may be a single step without any report. A terminal
    that cannot move its cursor gets a line for each start, if there are several or a CI runs it. Every `LIFE` seconds
    another line says what is being done.

    Args:
        title: The name of the run.
        number: Which of several it is, from 0 on.
        count: How many there are.
        quiet: Say nothing where there is no terminal.
        unit: The noun for the steps of a known total; those behind them are checks.
        noun: The noun for each of several runs.
    """

    def __init__(
        self,
        title: str,
        number: int = 0,
        count: int = 1,
        *,
        quiet: bool = False,
        unit: str = "pass",
        noun: str = "spec",
    ) -> None:
        self._title, self._unit = title, unit
        self._which = f"{noun} {number + 1} of {count}, " if count > 1 else ""
        self._began = time.monotonic()
        in_ci = os.environ.get("CI", "") not in ("", "false", "0")
        self._says_start = bool(title) and not quiet and (count > 1 or in_ci)
        self._says_life = not quiet
        self._ended = threading.Event()
        self._planned = 0  # the last total that was known
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
            return self
        if self._says_start:
            tell(f"gaverify: running {self._which}{self._title}")
        if self._says_life:
            threading.Thread(target=self._tell_life, daemon=True).start()
        return self

    def _tell_life(self) -> None:
        while not self._ended.wait(LIFE):
            with self._lock:
                text = self._describe()
            tell(f"gaverify: {text} ({time.monotonic() - self._began:.0f} s)")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:  # the timer may be building the bar at this moment
            self._closed = True
            if self._bar is not None:
                self._bar.stop()
        if kind is None and self._which and self._says_start and not _has_terminal():
            tell(f"gaverify: decided {self._which}{self._title}")

    def report(self, label: str, done: int, total: int) -> None:
        """Notes what is being done, and how many of how many steps are finished; a total of 0 is not known."""
        with self._lock:
            self._state = (label, done, total)
            self._planned = total or self._planned
            self._update()

    def _describe(self) -> str:
        """Says what is being done. No total is shown that is overtaken: behind the planned steps checks are counted."""
        label, done, total = self._state
        step = ""
        if done < total:
            step = f"{self._unit} {done + 1} of {total}, "
        elif done or total:
            step = f"check {done - self._planned + 1}, "
        return f"{self._which}{step}{self._title}{': ' if self._title else ''}{label}"

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
        _, done, total = self._state
        text = self._describe()
        # rich would take room from every column: what stands at the end is the least of a line
        room = max(self._bar.console.width - _CLOCK - _BAR - 2, 20)
        text = text if len(text) <= room else f"{text[: room - 1]}…"
        # without a total the bar moves to and fro: it is not full before the work is done
        self._bar.tasks[0].total = total if done < total else None
        self._bar.update(self._task, description=text, completed=done)

    @contextmanager
    def hide_bar(self) -> Iterator[None]:
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
            self._shown = DelayedProgress("", quiet=quiet, unit="spec")
        self.hide_bar = self._shown.hide_bar

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

    def finish(self, number: int) -> None:
        """Notes that one of the specs is done; its row is printed in the order of the specs, which may be later."""
        self._finished += 1
        if len(self._titles) > 1 and not (self._quiet or _has_terminal()):
            tell(f"gaverify: decided spec {number + 1} of {len(self._titles)}, {self._titles[number]}")
