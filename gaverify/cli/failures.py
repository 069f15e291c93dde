"""Exceptions become sentences on stderr and exit codes."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import click

from gaverify.cli.streams import tell
from gaverify.errors import GaverifyError, InternalError, exit_call, is_out_of_memory, text_of

USAGE = 2
INTERNAL = 70
INTERRUPTED = 130


def say(message: str, label: str = "error") -> None:
    """Prints the message on stderr, each line with `gaverify: error: ` in front; empty lines are left out."""
    for line in [line for line in message.splitlines() if line.strip()] or [""]:
        tell(f"gaverify: {label}: {line}")


_received: list[int] = []
"""The SIGINTs of this call of `main`."""


@contextmanager
def interrupts_noted() -> Iterator[None]:
    """Remembers that Ctrl-C came, for `report_failure`; it still raises KeyboardInterrupt.

    A library may turn that exception into one of its own: pydantic does while it builds a class, and imports do.
    """
    _received.clear()
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
    """How gaverify was called: the words, for a report to the authors, and whether to show tracebacks."""

    words: tuple[str, ...] = ()
    debug: bool = False


def report_failure(error: BaseException, invocation: Invocation, source: str = "") -> int:
    """Prints on stderr what an exception means and returns the exit code.

    Args:
        error: What arrived at `main`, or what one of several specs ended with.
        invocation: How gaverify was called.
        source: The spec, where there are several.
    """
    if _received:
        return report_interrupt()
    if isinstance(error, click.ClickException):
        return _report_usage(error)
    if invocation.debug:
        for line in "".join(traceback.format_exception(error)).splitlines():
            tell(line)
    foreseen = as_foreseen(error)
    message = failure_message(error)
    where = f"{source}: " if source else ""
    if foreseen is not None and not isinstance(foreseen, InternalError):
        say("\n".join(where + line for line in message.splitlines() or [type(error).__name__]))
        return foreseen.exit_code
    say(where + message, "internal error")
    shown = "above" if invocation.debug else "that `--debug` prints"
    tell(
        "This is a fault in gaverify, not in your model; nothing was decided. Please report it on gaverify's issue\n"
        f"tracker with the traceback {shown}, the line that `gaverify --version` prints, and this command:\n"
        f"    gaverify {shlex.join(invocation.words)}"
    )
    return INTERNAL


def failure_message(error: BaseException) -> str:
    """Returns the sentence for an exception: gaverify's own, or Python's with its type in front."""
    foreseen = as_foreseen(error)
    return f"{type(error).__name__}: {text_of(error)}" if foreseen is None else str(foreseen)


def as_foreseen(error: BaseException) -> GaverifyError | None:
    """Returns the error as one that gaverify foresees, or None if it is a fault."""
    if isinstance(error, GaverifyError):
        return error
    if is_out_of_memory(error):
        said = text_of(error).splitlines()[:1]
        detail = f" ({said[0].rstrip()})" if said else ""
        return GaverifyError(f"out of memory{detail}; try a smaller `--batch-size`, a smaller model or another device")
    if isinstance(error, SystemExit):
        # user code that exits with 0 would otherwise read as "equivalent"
        return GaverifyError(f"the model's code left Python with {exit_call(error)}; nothing was compared")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return GaverifyError(f"cannot write: {error.strerror}")
    if isinstance(error, FileNotFoundError) and _folder_is_gone():
        return GaverifyError("the folder that this was started in has been removed; change to another one")
    return None


def _folder_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def report_interrupt() -> int:
    """Says that Ctrl-C ended the run and returns its exit code."""
    tell("gaverify: interrupted; nothing was decided")
    return INTERRUPTED


def _report_usage(error: click.ClickException) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 and later: the message is the help text
        tell(error.format_message())
        return USAGE
    say(error.format_message())
    if context is not None:
        tell(f"Try `{context.command_path} --help`.")
    return USAGE
