"""Which of the specs a run takes: those whose names fit `-k`, those that failed last, and the list of them.

A spec that fails leaves a file in the user's folder of caches, until it succeeds. Each spec has a file of its own: runs
at the same time take nothing from each other.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import click

from gaverify.cli.streams import say
from gaverify.errors import USAGE, SpecError, cut_text
from gaverify.records.numbers import count_text
from gaverify.spec import Spec

COMMAND_LINE = "command line"
"""The source of a model that the command line names."""
_WIDEST_NAME = 48
_LISTED_NAMES = 20

Job = tuple[str, Spec | SpecError]
"""A source and its spec, or what is wrong with it."""

# Which of the specs a run takes: the expression of `-k`, in the words of pytest.

Choice = Callable[[str], bool]
_TOKEN = re.compile(r"\s*(\(|\)|[^\s()]+)")


def read_expression(text: str) -> Choice:
    """Returns whether a name is chosen by an expression of words, `and`, `or`, `not` and parentheses.

    A word chooses the names that contain it, in capitals or not.

    Raises:
        SpecError: It is no such expression.
    """
    tokens = _TOKEN.findall(text)
    try:
        choice = _read_or(tokens)
    except IndexError:  # a word was missing, or stood where none of its kind may stand
        tokens = ["its end"]
    except RecursionError:
        raise SpecError("-k: parentheses, or `not`, stand too deep in each other; a few are enough") from None
    if tokens or not text.strip():
        raise SpecError(
            f"-k: `{cut_text(text)}` cannot be read{f' at {tokens[0]}' if tokens else ''}; write words with `and`, "
            "`or`, `not` and parentheses, such as -k 'cnn and not slow'"
        )
    return choice


# One function for each level of precedence, as in Python: `or` binds weakest, then `and`, then `not`. Each takes its
# tokens off the front of the list.
def _read_or(tokens: list[str]) -> Choice:
    choices = [_read_and(tokens)]
    while tokens and tokens[0] == "or":
        tokens.pop(0)
        choices.append(_read_and(tokens))
    return lambda name: any(choice(name) for choice in choices)


def _read_and(tokens: list[str]) -> Choice:
    choices = [_read_word(tokens)]
    while tokens and tokens[0] == "and":
        tokens.pop(0)
        choices.append(_read_word(tokens))
    return lambda name: all(choice(name) for choice in choices)


def _read_word(tokens: list[str]) -> Choice:
    word = tokens.pop(0)
    if word == "not":
        choice = _read_word(tokens)
        return lambda name: not choice(name)
    if word == "(":
        choice = _read_or(tokens)
        if tokens.pop(0) != ")":
            raise IndexError
        return choice
    if word in (")", "and", "or"):
        raise IndexError
    return lambda name: word.lower() in name.lower()


# The specs that fit.


def choose(jobs: Sequence[Job], choice: Choice) -> list[Job]:
    """Returns the jobs whose file, name or model an expression chooses.

    Raises:
        SpecError: There is none; the sentence lists the names.
    """
    chosen = [(source, spec) for source, spec in jobs if choice(_words_of(source, spec))]
    if not chosen:
        names = [name_of(source, spec) for source, spec in jobs]
        more = f" and {len(names) - _LISTED_NAMES} more, which `--list` shows" if len(names) > _LISTED_NAMES else ""
        listed = ", ".join(names[:_LISTED_NAMES])
        raise SpecError(f"-k: no spec matches; write a part of the name of a spec or model. There are {listed}{more}")
    return chosen


def _words_of(source: str, spec: Spec | SpecError) -> str:
    """Returns the text in which the words of `-k` are looked for: the file, and the names of the spec and its model."""
    names = (spec.name or "", spec.model) if isinstance(spec, Spec) else ()
    return " ".join((source if source != COMMAND_LINE else "", *names))


def name_of(source: str, spec: Spec | SpecError) -> str:
    """Returns what reports call a run."""
    if isinstance(spec, SpecError):
        return source
    file, name = "" if source == COMMAND_LINE else source, spec.name or ""
    return f"{file} ({name})" if file and name else file or name or spec.model


def name_width(jobs: Iterable[Job]) -> int:
    """Returns the columns that names take; one that is much longer than the others moves its own row alone."""
    return min(max((len(name_of(*job)) for job in jobs), default=0), _WIDEST_NAME)


def list_jobs(jobs: Sequence[Job]) -> int:
    """Prints a line for each job: its name, its model and K, or what is wrong with it; returns the exit code."""
    from gaverify.report.layout import clean

    width = name_width(jobs)
    for source, spec in jobs:
        what = f"{spec.model}, K = {spec.steps}" if isinstance(spec, Spec) else f"error: {'; '.join(spec.problems)}"
        click.echo(clean(f"{name_of(source, spec):<{width}}  {what}"))
    return USAGE if any(isinstance(spec, SpecError) for _, spec in jobs) else 0


# The specs that failed last.


def leave_out_successes(jobs: list[Job]) -> list[Job]:
    """Returns the jobs whose specs failed when they last ran, all where none did, and says how many these are."""
    failed = [(source, spec) for source, spec in jobs if source != COMMAND_LINE and _marker(source).exists()]
    if not failed:
        say("no spec failed last time: all are run", "--lf")
        return jobs
    say(f"{len(failed)} of {count_text(len(jobs), 'spec')} failed last time, the others are left out", "--lf")
    return failed


def remember(source: str, *, failed: bool) -> None:
    """Notes for the next call whether a spec failed; without a folder that can be written nothing is noted."""
    if source == COMMAND_LINE:
        return
    with suppress(OSError, RuntimeError):
        marker = _marker(source)
        if failed:
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.write_text(f"{os.path.realpath(source)}\n", encoding="utf-8", errors="replace")
        else:
            marker.unlink(missing_ok=True)


def _marker(source: str) -> Path:
    file = os.path.realpath(source).encode("utf-8", "surrogateescape")
    return _cache_folder() / "failed" / hashlib.sha256(file).hexdigest()[:32]


def _cache_folder() -> Path:
    """The folder of gaverify's caches: `GAVERIFY_CACHE`, else where the system keeps those of the user."""
    folder = os.environ.get("GAVERIFY_CACHE")
    return (
        Path(folder)
        if folder
        else Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "gaverify"
    )
