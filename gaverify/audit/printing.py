"""An audit in every format that `gaverify run` has."""

from __future__ import annotations

from typing import IO

from gaverify.audit.answer import AuditReport
from gaverify.report import _PICTURE, _layout, _print
from gaverify.report.layout import Layout, plain


def print_report(report: AuditReport, stream: IO[str], show_all: bool = False) -> None:
    """Prints an audit: coloured on a terminal, plain on a pipe or under `NO_COLOR`, ASCII where needed."""
    from gaverify.audit.terminal import report_lines

    layout = _layout(stream)
    _print(report_lines(report, layout, show_all), layout, stream)


def render_report(report: AuditReport, form: str, show_all: bool = False) -> str:
    """Returns an audit as `text`, `json`, `junit`, `svg` or `html`."""
    if form == "json":
        return report.to_json() + "\n"
    from gaverify.audit.terminal import report_lines, verdict_of

    if form == "junit":
        from gaverify.report.junit import junit_text

        return junit_text([verdict_of(report, update) for update in report.updates or (None,)])
    if form == "text":
        return plain(report_lines(report, Layout(), show_all))
    from gaverify.report import picture

    draw = picture.svg if form == "svg" else picture.html
    return draw(report_lines(report, Layout(width=_PICTURE), show_all), _PICTURE)
