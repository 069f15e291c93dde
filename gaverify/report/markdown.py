"""Markdown for a pull request, a job's summary or a chat: the verdict and its cause first, tables folded away.

Names come from the user's model and are text, whatever they hold: outside code everything that Markdown or HTML would
read is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.records.findings import Finding
from gaverify.records.profile import Row
from gaverify.report.stories import Report, Story, Table, story_of
from gaverify.report.text.layout import clean
from gaverify.report.text.verdict import kind_of, rows_of, summary_and_place
from gaverify.report.text.wording import PROFILE, measures, profile_cells, sort_rows

_SIGNS = {Outcome.EQUIVALENT: "✅", Outcome.DIVERGENT: "❌", Outcome.INCONCLUSIVE: "⚠️"}
_ROWS = 50
"""Rows of a table without `--all`: GitHub refuses a summary of more than 1 MiB."""
_CODE = re.compile(r"(`[^`]+`)")
_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")  # no name starts a line, where more would be special


def markdown_text(report: Report) -> str:
    """Returns the whole report."""
    stories = [story_of(answer) for answer in report.answers]
    parts = _overview(stories, report.errors) if len(stories) != 1 or report.errors else []
    for story in stories:
        parts += _story(story, report.show_all)
    return "\n".join(parts) + "\n"


def _overview(stories: Sequence[Story], errors: Sequence[tuple[str, str]]) -> list[str]:
    rows = [(_outcome_with_sign(story), text(story.title), text(story.sentence)) for story in stories]
    rows += [("⛔ error", text(source), text(message)) for source, message in errors]
    return ["## gaverify", "", *_table(("", "run", "result"), rows), ""]


def _outcome_with_sign(story: Story) -> str:
    """The outcome with its sign."""
    return f"{'☑️' if story.accepted else _SIGNS[story.outcome]} {story.said}"


def _story(story: Story, show_all: bool) -> list[str]:
    parts = [f"### {_outcome_with_sign(story)}: {text(story.title)}", "", f"**{text(story.sentence)}**"]
    parts += ["", text(story.method)] if story.method else []
    parts += ["", *(f"- {text(sentence)}" for sentence in story.remarks)] if story.remarks else []
    for finding in story.findings:
        parts += ["", *_finding(finding)]
    for table in story.tables:
        parts += ["", *_fold_table(table, show_all)]
    if story.rows:
        parts += ["", *_profile(story.rows)]
    if story.command:
        parts += ["", f"```console\n$ {clean(story.command).replace('```', '')}\n```"]
    return [*parts, ""]


def _finding(finding: Finding) -> Iterator[str]:
    summary, where = summary_and_place(finding)
    yield f"**{text(f'{finding.code} {finding.name}')}** ({kind_of(finding)}): {text(summary)}"
    yield ""
    for label, statement in [("where", where), ("accepted", finding.accepted)]:
        if statement:
            yield f"- {label}: {text(statement)}"
    for label, statement in rows_of(finding):
        yield f"- {text(label)}: {text(statement)}"
    yield f"- {text(f'`gaverify explain {finding.code}`')}"


def _fold_table(table: Table, show_all: bool) -> Iterator[str]:
    rows = sort_rows(table.rows)
    first_rows = rows if show_all else rows[:_ROWS]
    heading = f"{table.heading}: " if table.heading else ""
    yield f"<details><summary>{heading}{len(rows):,} parameters</summary>"
    yield ""
    yield from _table(
        ("parameter", "shape", "full", "relative difference", "allowed", "outcome"), map(_cells, first_rows)
    )
    yield ""
    if len(first_rows) < len(rows):
        yield f"{len(rows) - len(first_rows):,} more are left out; `--all` shows them."
    yield "</details>"


def _cells(row: ParameterComparison) -> tuple[str, ...]:
    return (text(row.name or "(unnamed)"), *measures(row, " (norm)"), row.outcome.value)


def _profile(rows: Sequence[Row]) -> Iterator[str]:
    columns = [list(PROFILE), *(list(profile_cells(row)) for row in rows)]
    if any(row.message for row in rows):
        said = ("message", *(text(row.message) for row in rows))
        columns = [[*row, more] for row, more in zip(columns, said, strict=True)]
    yield from _table(columns[0], columns[1:])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def text(value: str) -> str:
    """Returns `value` as Markdown that shows exactly it; what stands between two backticks stays code."""
    parts = _CODE.split(clean(" ".join(value.split())))
    # inside code nothing is read but the bar, which would end a table's cell
    return "".join(part.replace("|", r"\|") if at % 2 else _escape_part(part) for at, part in enumerate(parts))


def _escape_part(part: str) -> str:
    for plain, entity in (("&", "&amp;"), ("<", "&lt;"), ("@", "&#64;")):  # a name must not mention anybody
        part = part.replace(plain, entity)
    return _SPECIAL.sub(r"\\\1", part)
