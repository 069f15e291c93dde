"""A verdict as pytest shows a failure."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

from gaverify.records.verdict import Verdict
from gaverify.report.terminal import layout_for
from gaverify.report.text.layout import Line, plain
from gaverify.report.text.report import answer_lines
from gaverify.report.text.wording import sentence


class _Crash(NamedTuple):
    """What pytest's summary and its XML read of a failure."""

    path: str
    lineno: int
    message: str


class ReportText:
    """A verdict as pytest shows a failure: its lines in pytest's own colours.

    pytest-xdist sends no object from its workers but its text, and pytest's summary shows the first line of that: so
    the text begins with the sentence that the summary takes from `reprcrash` otherwise.
    """

    def __init__(self, verdict: Verdict, path: str, line: int) -> None:
        self.lines = _lines(verdict)
        self.reprcrash = _Crash(path, line, f"{verdict.outcome.value}: {sentence(verdict)}")

    def __str__(self) -> str:
        return f"{self.reprcrash.message}\n\n" + plain(self.lines).rstrip("\n")

    def toterminal(self, tw: Any) -> None:
        """Writes the report with pytest's writer, which knows whether it may colour."""
        for line in self.lines:
            for text, style in line:
                marks = dict.fromkeys((word for word in style.split() if word != "dim"), True)
                tw.write(text, **marks)
            tw.line()


def _lines(verdict: Verdict) -> list[Line]:
    return answer_lines(verdict, layout_for(io.StringIO()))
