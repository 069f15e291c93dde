"""A report as one file of HTML: blocks, style and script put together by a template."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from gaverify.records.answers import Answer
from gaverify.records.outcomes import Outcome
from gaverify.report.blocks import Block, Chart, FindingBlock, Parameters, PatchBlock, Table
from gaverify.report.charts import chart_by_parameters, parameters_chart
from gaverify.report.documents import answer_text
from gaverify.report.documents.reading import answer_of
from gaverify.report.layout import clean, clean_code, footnotes, measures, number, sort_rows, worst
from gaverify.report.pages import Report, page_of

if TYPE_CHECKING:
    from jinja2 import Template

_LIMIT = 250
"""Rows of a table that a browser draws at once; the script has the same number, and shows the others when asked."""
_COLOURS = {Outcome.DIVERGENT: "#c62828", Outcome.EQUIVALENT: "#2e7d32", Outcome.INCONCLUSIVE: "#b26a00"}
"""The colours of a card: they can be read on white and on black."""
_FOLDER = Path(__file__).parent / "templates"


def html_text(report: Report) -> str:
    """Returns the page.

    It is made of what a JSON document keeps, so that one written from a saved document later is the same to the byte.
    """
    script = _file("page.js")
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    pages = [page_of(answer_of(json.loads(answer_text(answer)))) for answer in report.answers]
    text = _template("page.html.jinja").render(
        pages=pages,
        show_all=report.show_all,
        runs=report.list_runs(pages),
        is_list=report.is_list,
        style=Markup(_file("page.css")),
        script=Markup(script),
        # nothing may be loaded, and no script may run but the one whose hash stands here
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'; base-uri 'none'",
    )
    return text + "\n"


def card_html(answer: Answer) -> str:
    """Returns outcome and findings of one answer as a piece of HTML.

    A notebook puts it between pieces of its own, and takes out styles and scripts of what it does not trust.
    """
    page = page_of(answer)
    return _template("card.html.jinja").render(page=page, colour=_COLOURS[page.headline.outcome])


def _printable(value: object) -> object:
    """A text without what no page can hold; line breaks are written out as well."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else clean(value)


def _mark_code(text: str, lines: bool = False) -> Markup:
    """Marks text between two backticks as code, all of it printable and escaped; `lines`: line breaks stay."""
    clean_text = "\n".join(map(clean, text.split("\n"))) if lines else clean(text)
    parts = clean_text.split("`")
    if len(parts) % 2 == 0:  # one without a partner
        return escape(clean_text)
    return Markup("").join(Markup("<code>{}</code>").format(p) if at % 2 else escape(p) for at, p in enumerate(parts))


def _block_name(block: Block) -> str:
    return type(block).__name__


def _source_lines(block: FindingBlock) -> list[tuple[int, str, bool]]:
    """The lines around a finding, as (number, text, whether it is the finding's own)."""
    place = block.finding.location
    if place is None or place.excerpt is None:
        return []
    numbered = enumerate(place.excerpt.lines, place.excerpt.first)
    # a browser makes tabs eight columns wide
    return [(at, text.expandtabs(4), at == place.line) for at, text in numbered]


def _diff_lines(patch: PatchBlock) -> list[tuple[str, Markup]]:
    """The lines of a diff, each with the class of its colour; tabs stay, so that a copy of the lines applies."""
    classes = {"+": "added", "-": "removed", "@": "place"}
    return [(classes.get(line[:1], ""), escape(line)) for line in clean_code(patch.diff)]


def _parameter_rows(parameters: Parameters, show_all: bool) -> list[tuple[str, ...]]:
    return [
        (
            row.name or "(unnamed)",
            *measures(row),
            number(row.working_difference_norm),
            row.word,
            str(row.method),
            (worst(row) if show_all else "") or row.reason,
        )
        for row in sort_rows(parameters.rows)
    ]


def _parameter_charts(parameters: Parameters) -> list[Chart]:
    """Its charts that tell something: by module, and of each parameter."""
    # only a page draws them: with thousands of parameters they take a tenth of a second
    charts = (chart_by_parameters(parameters.rows, parameters.causes), parameters_chart(parameters.rows))
    return [chart for chart in charts if chart]


def _rows_with_notes(table: Table) -> list[tuple[str, ...]]:
    # a column of its own keeps the rows sortable
    notes = dict(table.notes)
    return [(*row, notes.get(at, "")) for at, row in enumerate(table.rows[1:], 1)]


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
        # a misspelt name in a template must fail, and not print nothing
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    views = (_source_lines, _diff_lines, _parameter_rows, _parameter_charts, _rows_with_notes)
    for function in (_mark_code, _block_name, *views):
        environment.filters[function.__name__.lstrip("_")] = function
    environment.globals["footnotes"] = footnotes
    environment.globals["limit"] = _LIMIT
    return environment.get_template(name)
