"""Keeps the output streams in order while the user's code runs in this process.

Standard output belongs to the report: what the user's code prints goes to standard error instead. Standard error may be
closed or full: a message that cannot be written there is dropped and changes no exit code.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from typing import TextIO

from gaverify.guarding import guarded
from gaverify.tracebacks import Owner, calling_frame, owner_of, shown

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


@contextmanager
def guests() -> Iterator[None]:
    """While the user's code runs: its output goes to stderr, a warning is told once, the process stays as it is."""
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(_descriptor_redirected())
        stack.enter_context(_each_warning_once())
        stack.enter_context(guarded())
        yield


@contextmanager
def _descriptor_redirected() -> Iterator[None]:
    """Points descriptor 1 at stderr: libraries in C and child processes write to it without asking Python."""
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        _flush_c_streams()
        os.dup2(kept, 1)
        os.close(kept)


def _flush_c_streams() -> None:
    """Writes out what a library's `printf` left in C's buffer, before descriptor 1 is the report's again."""
    with suppress(Exception):  # no such function on this system: the buffer is written on exit
        import ctypes

        ctypes.CDLL(None).fflush(None)


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Prints each warning once, with the user's line that was running where Python would name one of gaverify's."""
    told: set[tuple[str, str]] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        said = str(message).strip()
        key = category.__name__, re.sub(r"\d+", "#", said)  # a shape differs from micro-batch to micro-batch
        if key in told:
            return
        told.add(key)
        place = (filename, lineno) if owner_of(filename) > Owner.MACHINERY else calling_frame()
        tell(f"{f'{shown(place[0])}:{place[1]}: ' if place else ''}{category.__name__}: {said}")

    before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
