"""Markdown for a pull request, a job's summary or a chat: the verdict and its cause first, tables folded away.

Names come from the user's model and are text, whatever they hold: outside code everything that Markdown or HTML would
read is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from gaverify.records.outcomes import Outcome, ParameterComparison
from gaverify.report.blocks import Block, Facts, FindingBlock, Headline, Page, Parameters, PatchBlock, Section, Table
from gaverify.report.diffs import changes_of, diffs_of
from gaverify.report.layout import clean, clean_code, footnotes, measures, sort_rows
from gaverify.report.pages import Report, Unanswered, page_of

_SIGNS = {Outcome.EQUIVALENT: "✅", Outcome.DIVERGENT: "❌", Outcome.INCONCLUSIVE: "⚠️"}
_NO_ANSWER = {"error": "⛔", "skipped": "⏭️"}
_ROWS = 50
"""Rows of a table without `--all`: GitHub refuses a summary of more than 1 MiB."""
_NORM = "(norm)"
"""Marks numbers that are not relative; a star would be read as the beginning of a list or of emphasis."""
_CODE = re.compile(r"(`[^`]+`)")
_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")  # no name starts a line, where more would be special


def markdown_text(report: Report) -> str:
    """Returns the whole report."""
    pages = [page_of(answer) for answer in report.answers]
    parts = _overview(report.list_runs(pages)) if report.is_list else []
    for page in pages:
        parts += _page(page, report.show_all)
    return "\n".join(parts) + "\n"


def _overview(runs: Iterable[Page | Unanswered]) -> list[str]:
    rows: list[tuple[str, str, str]] = []
    for run in runs:
        if isinstance(run, Unanswered):
            rows += [(f"{_NO_ANSWER[run.word]} {run.word}", text(run.source), text(each)) for each in run.messages]
        else:
            headline = run.headline
            rows.append((_outcome_with_sign(headline), text(headline.title), text(run.why)))
    return ["## gaverify", "", *_table(("", "run", "result"), rows), ""]


def _outcome_with_sign(headline: Headline) -> str:
    # An accepted or expected divergence is no agreement, and an agreement that nobody expected is a failure.
    sign = _SIGNS[headline.outcome] if headline.passed == (headline.outcome is Outcome.EQUIVALENT) else None
    return f"{sign or ('☑️' if headline.passed else '❌')} {headline.words}"


def _page(page: Page, show_all: bool) -> list[str]:
    headline = page.headline
    parts = [f"### {_outcome_with_sign(headline)}: {text(headline.title)}", "", f"**{text(headline.sentence)}**"]
    parts += ["", text(headline.method)] if headline.method else []
    parts += ["", *(f"- {text(sentence)}" for sentence in headline.remarks)] if headline.remarks else []
    for finding in page.findings:
        parts += ["", *_finding(finding)]
    parts += _patch(page.patch) if page.patch is not None else []
    for section in page.sections:
        parts += _section(section, show_all)
    if page.command:
        parts += ["", f"```console\n$ {clean(page.command).replace('```', '')}\n```"]
    return [*parts, ""]


def _finding(block: FindingBlock) -> Iterator[str]:
    finding = block.finding
    yield f"**{text(f'{finding.code} {finding.name}')}** ({block.kind}): {text(block.summary)}"
    yield ""
    heads = [row for row in (("where", block.place), ("accepted", finding.accepted)) if row[1]]
    yield from _list([*heads, *block.rows])
    yield f"- {text(f'`gaverify explain {finding.code}`')}"


def _patch(patch: PatchBlock) -> list[str]:
    return ["", *_list(patch.rows), *(["", _fence("diff", patch.diff)] if patch.diff else [])]


def _fence(language: str, text: str) -> str:
    """A block of code that shows exactly the text, which may itself hold fences."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}{language}", *clean_code(text), fence])


def suggestions_text(report: Report) -> str:
    """Returns the patches of a report as suggestion blocks, for review comments at the lines that they replace."""
    changes = [change for diff in diffs_of(report) for change in changes_of(diff)]
    parts: list[str] = []
    for change in changes:
        lines = f"line {change.first}" if change.first == change.last else f"lines {change.first} to {change.last}"
        parts += [f"{text(f'`{change.path}`')}, {lines}:", "", _fence("suggestion", "\n".join(change.lines)), ""]
    return "\n".join(parts) + "\n" if parts else ""


def _section(section: Section, show_all: bool) -> list[str]:
    """Its blocks after empty lines; pictures have no place in Markdown, and parameters are folded away."""
    parts: list[str] = []
    for lines in (list(_block(block, show_all)) for block in section.blocks):
        parts += ["", *lines] if lines else []
    # GitHub reads Markdown inside a tag only after an empty line
    if any(isinstance(block, Parameters) for block in section.blocks):
        return ["", f"<details><summary>{section.heading}</summary>", *parts, "</details>"]
    return parts


def _block(block: Block, show_all: bool) -> Iterator[str]:
    if isinstance(block, Parameters):
        yield from _parameters(block, show_all)
    elif isinstance(block, Table):
        yield from _rows(block)
    elif isinstance(block, Facts):
        yield from _list(block.rows)


def _list(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    return (f"- {text(label)}: {text(statement)}" for label, statement in rows)


def _parameters(parameters: Parameters, show_all: bool) -> Iterator[str]:
    if parameters.summary:
        yield f"{text(parameters.summary)}\n"
    rows = sort_rows(parameters.rows)
    first_rows = rows if show_all else rows[:_ROWS]
    yield from _table(
        ("parameter", "shape", "full", "relative difference", "allowed", "outcome"), map(_cells, first_rows)
    )
    yield ""
    for note in footnotes(first_rows, _NORM):
        yield f"{text(note)}\n"
    if len(first_rows) < len(rows):
        yield f"{len(rows) - len(first_rows):,} more are left out; `--all` shows them."


def _cells(row: ParameterComparison) -> tuple[str, ...]:
    return (text(row.name or "(unnamed)"), *measures(row, f" {_NORM}"), row.word)


def _rows(table: Table) -> Iterator[str]:
    head, *rows = [[text(cell) for cell in row] for row in table.rows]
    notes = {at: text(note) for at, note in table.notes}
    if table.outcome is None or not notes:
        yield from _table(head, rows)
        yield from (f"\n{note}" for note in notes.values())
    else:  # the note of a row is the message that explains its outcome
        yield from _table([*head, "message"], [[*row, notes.get(at, "")] for at, row in enumerate(rows, 1)])


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
