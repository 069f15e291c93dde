"""The page from a report: template, style and script put together into one file."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from gaverify.records.comparison import Outcome
from gaverify.report.documents import answer_item
from gaverify.report.documents.encoding import plain
from gaverify.report.documents.reading import answer_of
from gaverify.report.page.views import view_of
from gaverify.report.stories import Answer, Report
from gaverify.report.text.layout import clean

if TYPE_CHECKING:
    from jinja2 import Template

_LIMIT = 250
"""Rows of a table that a browser draws at once; the script has the same number, and shows the others when asked."""
_COLOURS = {Outcome.DIVERGENT: "#c62828", Outcome.EQUIVALENT: "#2e7d32", Outcome.INCONCLUSIVE: "#b26a00"}
"""Of a card: they can be read on white and on black."""
_FOLDER = Path(__file__).parent


def html_text(report: Report) -> str:
    """Returns the page.

    It is made of what a JSON document keeps, so that one written from a saved document later is the same to the byte.
    """
    views = [view_of(answer, report.show_all) for answer in map(_round_trip, report.answers)]
    script = _file("page.js")
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = _template("page.html.jinja").render(
        answers=views,
        runs=len(report.answers) + len({source for source, _ in report.errors}),
        errors=report.errors,
        style=Markup(_file("page.css")),
        script=Markup(script),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'; base-uri 'none'",
    )
    return text + "\n"


def card_html(answer: Answer) -> str:
    """Returns outcome and findings of one answer as a piece of HTML.

    A notebook puts it between pieces of its own, and takes out styles and scripts of what it does not trust.
    """
    view = view_of(answer)
    colour = _COLOURS[view.story.outcome]
    return _template("card.html.jinja").render(story=view.story, findings=view.findings, colour=colour)


def _round_trip(answer: Answer) -> Answer:
    return answer_of(json.loads(json.dumps(plain(answer_item(answer)))))


def _printable(value: object) -> object:
    """A text without what no page can hold; line breaks are written out as well."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else clean(value)


def _mark_code(text: str, lines: bool = False) -> Markup:
    """What stands between two backticks as code, all of it printable and escaped; `lines`: line breaks stay."""
    clean_text = "\n".join(map(clean, text.split("\n"))) if lines else clean(text)
    parts = clean_text.split("`")
    if len(parts) % 2 == 0:  # one without a partner
        return escape(clean_text)
    return Markup("").join(Markup("<code>{}</code>").format(p) if at % 2 else escape(p) for at, p in enumerate(parts))


@cache
def _file(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def _template(name: str) -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Everything is escaped: module names, file names and messages come from the user's code.
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters["coded"] = _mark_code
    environment.globals["limit"] = _LIMIT
    return environment.get_template(name)
