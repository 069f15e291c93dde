"""Answers in every format: frozen records in, strings and files out; no tensors, no torch.

Each format loads its parts when it is used, so that importing this package costs next to nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import IO

from gaverify.errors import SpecError
from gaverify.records.answers import Answer
from gaverify.report.formats import FORMATS, check_writable, format_for, format_named
from gaverify.report.layout import Layout, Line, clean_code, plain
from gaverify.report.pages import NoAnswer, Report, page_of
from gaverify.report.text import (
    diffs_text,
    page_line,
    page_lines,
    page_row,
    report_lines,
    row_lines,
    short_lines,
    slowest_lines,
    summary_lines,
)
from gaverify.text_files import write_whole

__all__ = [
    "FORMATS",
    "Answer",
    "NoAnswer",
    "Report",
    "card_html",
    "check_writable",
    "document_text",
    "format_for",
    "format_named",
    "line_text",
    "print_answer",
    "print_diffs",
    "print_line",
    "print_no_answer",
    "print_report",
    "print_slowest",
    "print_summary",
    "render",
    "short_text",
    "suggestions_text",
    "write_all",
]


def document_text(answer: Answer) -> str:
    """Returns one answer as a JSON document."""
    from gaverify.report.documents import answer_text

    return answer_text(answer)


def short_text(answer: Answer) -> str:
    """Returns the outcome of one answer and its findings as plain text, without what was run and the numbers."""
    return plain(short_lines(page_of(answer), Layout(whole=True))).rstrip("\n")


def line_text(answer: Answer) -> str:
    """Returns one answer as one line: outcome, name, why, and where the first cause lies."""
    return page_line(page_of(answer))


def card_html(answer: Answer) -> str:
    """Returns the first screen of an answer's page as a piece of HTML that brings its own colours."""
    from gaverify.report.html import card_html

    return card_html(answer)


def suggestions_text(report: Report) -> str:
    """Returns the patches of a report as Markdown that a reviewer puts at the lines that they replace."""
    from gaverify.report.markdown import suggestions_text

    return suggestions_text(report)


def render(answers: Iterable[Answer], form: str, show_all: bool = False, errors: Iterable[tuple[str, str]] = ()) -> str:
    """Returns the report of all answers in the format of that name.

    Raises:
        SpecError: An unknown format; the message names the known ones.
    """
    return format_named(form).render(
        Report(tuple(answers), tuple(NoAnswer(*error) for error in errors), show_all=show_all)
    )


def write_all(report: Report, paths: Iterable[str | os.PathLike[str]]) -> None:
    """Writes a report to each path in the format of its ending; every file is written whole or not at all.

    Raises:
        SpecError: An unknown ending, or files that cannot be written; the others are there all the same.
    """
    # every text is made before the first file is touched: a fault of one leaves all files as they are
    texts = [(path, format_for(path).render(report)) for path in paths]
    problems: list[str] = []
    for path, text in texts:
        try:
            write_whole(path, text)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)


def print_answer(answer: Answer, *, show_all: bool = False, file: IO[str] | None = None) -> None:
    """Prints one answer: coloured on a terminal, plain on a pipe or under `NO_COLOR`, ASCII where needed.

    Args:
        answer: The answer to print.
        show_all: Every parameter; else long tables are folded to the ones that are not equivalent.
        file: Default is the present `sys.stdout`.
    """
    _print(lambda layout: page_lines(page_of(answer), layout, show_all), file)


def print_report(report: Report, file: IO[str] | None = None) -> None:
    """Prints a whole report, as `render(…, "text")` writes it but for colours and width."""
    _print(lambda layout: report_lines(report, layout), file)


def print_summary(report: Report, file: IO[str] | None = None) -> None:
    """Prints a line for each run, with a heading and the count of outcomes."""
    _print(lambda layout: summary_lines(report, [page_of(answer) for answer in report.answers], layout), file)


def print_slowest(report: Report, count: int) -> None:
    """Prints the answers of a report that took longest, at most so many."""
    _print(lambda layout: slowest_lines([page_of(answer) for answer in report.answers], count, layout))


def print_line(answer: Answer, width: int = 0) -> None:
    """Prints one answer as one line in columns; names take `width` of them."""
    _print(lambda layout: page_row(page_of(answer), layout, width))


def print_no_answer(word: str, source: str, message: str, width: int = 0) -> None:
    """Prints such a line of a run that came to no answer: an `error`, or one that was `skipped`."""
    _print(lambda layout: row_lines(word, source, message, layout, width))


def print_diffs(report: Report, *, alone: bool = False) -> None:
    """Prints the diffs of a report's patches as they are, so that `git apply` takes them from a pipe.

    Args:
        report: Has the answers.
        alone: Nothing stands in front of them, and no empty line is needed.
    """
    diffs = diffs_text(report)
    if not diffs:
        return
    stream = sys.stdout
    if getattr(stream, "isatty", bool)():  # a terminal, which would obey control characters, and applies nothing
        diffs = "\n".join([*clean_code(diffs), ""])
    text = diffs if alone else f"\n{diffs}"
    stream.flush()
    # Sources are UTF-8 whatever the terminal shows, and Windows would write other line ends.
    if (binary := getattr(stream, "buffer", None)) is not None:
        binary.write(text.encode("utf-8"))
        binary.flush()
    else:
        stream.write(text)


def _print(lines: Callable[[Layout], list[Line]], file: IO[str] | None = None) -> None:
    from gaverify.report.text import layout_for, write_lines

    # looked up at each call: tests and notebooks replace `sys.stdout`
    stream = file or sys.stdout
    layout = layout_for(stream)
    write_lines(lines(layout), layout, stream)
