"""The page of any answer, a report of several, and the places in files that other tools show findings at."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gaverify.errors import USAGE, worst_exit_code
from gaverify.records.audit_report import AuditReport
from gaverify.records.findings import Finding
from gaverify.records.profile import Profile
from gaverify.records.verdict import Verdict
from gaverify.report.audit_page import audit_page
from gaverify.report.blocks import FindingBlock, Page
from gaverify.report.profile_page import profile_page
from gaverify.report.verdict_page import verdict_page
from gaverify.tracebacks import repository_of

Answer = Verdict | AuditReport | Profile


@dataclass(frozen=True)
class Report:
    """Everything that one call of a command found.

    Args:
        answers: In the order they were run.
        errors: One (source, message) for each run that came to no answer.
        show_all: Every parameter in tables; else long ones are folded to those that are not equivalent.
        exit_code: What the command leaves with; None where no command made the report.
        started: When the command was called, as `2026-01-31T12:00:00+00:00`; "" where no command made the report.
    """

    answers: tuple[Answer, ...]
    errors: tuple[tuple[str, str], ...] = ()
    show_all: bool = False
    exit_code: int | None = None
    started: str = ""

    @property
    def code(self) -> int:
        """The exit code of the command that made the report, or that it would have; never 0 without an answer."""
        if self.exit_code is not None:
            return self.exit_code
        # a command that found nothing to run must not look like a success
        failed = [USAGE] if self.errors or not self.answers else []
        return worst_exit_code([answer.exit_code for answer in self.answers] + failed)


def page_of(answer: Answer) -> Page:
    """Returns the blocks that every format shows of `answer`."""
    if isinstance(answer, Verdict):
        return verdict_page(answer)
    return audit_page(answer) if isinstance(answer, AuditReport) else profile_page(answer)


_EXPLANATIONS = ("GAV301",)
"""Codes of notes that say how gaverify compared, and ask nobody to change a line."""


def findings_at_lines(page: Page) -> list[FindingBlock]:
    """Returns the findings that a pull request or an editor shows at a line."""
    return [block for block in page.findings if block.finding.code not in _EXPLANATIONS]


@dataclass(frozen=True)
class Place:
    """A line of a file; `inside` says whether the file lies in the repository, and `path` is relative to its root then.

    `text` is the line as it stood when the finding was made, "" where it was not read.
    """

    path: str
    line: int
    inside: bool
    text: str = ""


def place_of(finding: Finding | None, page: Page) -> Place | None:
    """Returns the finding's own line; else the first line of the file that says what was run; None without any file.

    A pull request shows an annotation only at a file, and the spec or script is where a reader goes on from.
    """
    location = finding.location if finding is not None else None
    if location is not None and location.file:
        text = location.excerpt.line(location.line) if location.excerpt is not None else ""
        return _place(location.file, location.line or 1, text)
    files = (page.source, page.model.rpartition(":")[0])  # a model may be given as `file.py:factory`
    return next((_place(file, 1, "") for file in files if os.path.isfile(file)), None)


def _place(file: str, line: int, text: str) -> Place:
    path = Path(os.path.abspath(file))
    # outside a repository a path is relative to where the command runs
    root = repository_of(path.parent) or Path.cwd()
    if path.is_relative_to(root):
        return Place(path.relative_to(root).as_posix(), line, True, text)
    return Place(path.as_posix(), line, False, text)
