"""Pages as lines of text, and these lines on a stream: plain or coloured, as pytest shows a failure."""

from __future__ import annotations

import codecs
import io
import os
import shutil
from collections.abc import Iterable, Sequence
from typing import IO, Any, NamedTuple

from gaverify.records.numbers import count_text, seconds_text
from gaverify.records.outcomes import Method, Outcome, ParameterComparison
from gaverify.records.verdict import Verdict
from gaverify.report.blocks import Facts, FindingBlock, Page, Parameters, Section, Table
from gaverify.report.diffs import diffs_of
from gaverify.report.layout import (
    Layout,
    Line,
    cells,
    clean,
    columns,
    footnotes,
    join_paragraphs,
    measures,
    number,
    pad,
    plain,
    sort_rows,
    value,
    worst,
)
from gaverify.report.pages import Report, Unanswered, page_of
from gaverify.report.verdict_page import verdict_page

_WIDEST = 28
"""Columns of a name; a spec's path is told apart by its end, which shortening keeps."""

_SMALL = 10
"""A table of at most so many parameters is never folded."""

_FOLDED = 10
"""A folded table shows at most so many rows: with their worst elements they fill a screen, and the worst are first."""

_STYLES = {
    "equivalent": "green",
    "divergent": "bold red",
    "inconclusive": "bold yellow",
    "out of memory": "bold red",
    "failed": "bold red",
    "error": "bold red",
    "skipped": "bold yellow",
}
"""How the words of an outcome look; every other word is plain."""

_NO_OUTCOME = ("error", "skipped")
_OUTCOME = 14
"""Columns of an outcome's word in a list of runs."""

_HEADER = ("parameter", "shape", "‖full‖", "rel. diff", "allowed", "verdict")
_SHORTEST = 9
"""Cells that a name gets at least: where they are not left, columns are left out instead."""
_LEFT_OUT = (0, 0, 1)
"""Columns behind the name that a narrow terminal goes without, one after the other: shape, ‖full‖, allowed."""


def page_lines(page: Page, layout: Layout, show_all: bool = False) -> list[Line]:
    """Returns the whole report of one answer: the outcome and why, findings, then what was run and its numbers."""
    sections = (_section(section, layout, show_all) for section in page.sections)
    patch = _facts(Facts(page.patch.rows, page.facts.indent), layout) if page.patch is not None else []
    return join_paragraphs([short_lines(page, layout), _facts(page.facts, layout), *sections, patch])


def short_lines(page: Page, layout: Layout) -> list[Line]:
    """Returns the outcome of one answer and why, and its findings."""
    headline = page.headline
    lines = layout.wrap(f"{headline.version}: {headline.title}", style="bold") if headline.version else []
    word = headline.outcome.name
    first = layout.wrap(headline.sentence, first=word, indent=len(word) + 2, style="bold")
    first[0][0] = (first[0][0][0], _STYLES[word.lower()])
    for sentence in [*filter(None, [headline.method]), *headline.remarks]:
        first += layout.wrap(sentence, indent=len(word) + 2)
    return join_paragraphs([lines + first, *(_finding(*each, layout) for each in enumerate(page.findings))])


def _finding(number: int, block: FindingBlock, layout: Layout) -> list[Line]:
    """A heading with place and summary, then evidence, remedy and page on lines of their own."""
    finding = block.finding
    head = f"{finding.code} {finding.name}"
    if block.kind != "proven":
        head += f" ({block.kind})"
    if finding.accepted:
        head += " (accepted)"
    lines = layout.wrap(f"{head}: {block.summary}", indent=4)
    style = _STYLES["divergent"] if finding.severity == "fault" else "bold"
    lines[0] = [(lines[0][1][0], style)]  # the heading starts at the margin, what follows hangs
    # a note that needs no action is one line beside the causes; pages and documents hold what was measured
    if block.kind == "note" and not finding.remedy:
        return lines
    # the page of words is named once in a report
    see = f"gaverify explain {finding.code}" + (", gaverify explain words" if number == 0 else "")
    heads = [("where", block.place), ("accepted", finding.accepted)]
    for label, statement in [*heads, *block.rows, ("see", see)]:
        if statement:
            lines += layout.wrap(statement, first=f"    {layout.shorten(label, 10)}", indent=4 + 11)
    return lines


def _section(section: Section, layout: Layout, show_all: bool) -> list[Line]:
    lines: list[Line] = []
    for block in section.blocks:
        if isinstance(block, Parameters):
            lines += _parameters(block, layout, show_all)
        elif isinstance(block, Facts):
            lines += _facts(block, layout)
        elif isinstance(block, Table):
            lines += _table(block, layout)
    return lines


def _parameters(parameters: Parameters, layout: Layout, show_all: bool) -> list[Line]:
    lines: list[Line] = []
    if parameters.name:
        lines = layout.wrap(parameters.summary, first=parameters.name, indent=14)
        lines[0][0] = (lines[0][0][0], "bold")
    # numbers of runs that had different data would only mislead
    return lines + (_parameter_table(parameters.rows, layout, show_all) if parameters.judged or show_all else [])


def _parameter_table(parameters: Iterable[ParameterComparison], layout: Layout, show_all: bool) -> list[Line]:
    """The table with its header, the folded count and the footnotes; nothing where there is no parameter."""
    rows = sort_rows(parameters)
    if not rows:
        return []
    visible_rows = rows if show_all or len(rows) <= _SMALL else _failing(rows)
    lines = _parameter_rows(visible_rows, layout, with_worst=show_all) if visible_rows else []
    lines += _lines_of_fold(rows[len(visible_rows) :], layout, "… and {} more" if visible_rows else "{}")
    for note in footnotes(visible_rows):
        lines += layout.wrap(note, indent=2, style="dim")
    return lines


def _failing(rows: Sequence[ParameterComparison]) -> list[ParameterComparison]:
    return [row for row in rows if row.outcome is not Outcome.EQUIVALENT][:_FOLDED]


def _lines_of_fold(rows: Sequence[ParameterComparison], layout: Layout, counted: str) -> list[Line]:
    """A line for each outcome that the fold hides."""
    lines: list[Line] = []
    for outcome in (Outcome.DIVERGENT, Outcome.INCONCLUSIVE, Outcome.EQUIVALENT):
        count = sum(row.outcome is outcome for row in rows)
        if count:
            noun = "parameter" if count == 1 else "parameters"
            text = f"{counted.format(f'{count:,}')} {noun}: {outcome.value} (use --all)"
            lines += layout.wrap(text, indent=2, style="dim")
    return lines


def _parameter_rows(rows: Sequence[ParameterComparison], layout: Layout, with_worst: bool) -> list[Line]:
    body = [[layout.text(cell) for cell in _parameter_cells(row)] for row in rows]
    table = [[layout.text(cell) for cell in _HEADER], *body]
    other_cells = columns([row[1:] for row in table], right=(1, 2, 3))
    taken = _cells_width(other_cells)
    # a narrow terminal keeps the name, the difference and the outcome longest
    for at in _LEFT_OUT:
        if taken + _SHORTEST > layout.width and not layout.whole:
            other_cells = [[*row[:at], *row[at + 1 :]] for row in other_cells]
            taken = _cells_width(other_cells)
    widest = max(cells(row[0]) for row in table)
    # a column of worst elements fits only beside whole names
    wide = _worst_column(rows, layout, layout.width - taken - widest - 2) if with_worst else None
    room = widest if wide or layout.whole else max(min(widest, layout.width - taken), _SHORTEST)
    lines: list[Line] = []
    for at, tail in enumerate(other_cells):
        name = table[at][0]
        if cells(name) > room:  # what is cut off might be what tells two parameters apart: it has a line of its own
            lines += layout.wrap(name, indent=2)
            name = ""
        style = "bold" if at == 0 else _STYLES.get(rows[at - 1].word, "")
        middle = [*tail[:-2], *([wide[at]] if wide else []), tail[-2]]
        text = f"  {pad(name, room)}  {'  '.join(middle)}  "
        lines.append([(text, "bold" if at == 0 else ""), (tail[-1], style)])
        if at:
            below = [_worst_element(rows[at - 1])] if with_worst and not wide else []
            for text in filter(None, [*below, rows[at - 1].reason]):
                lines += layout.wrap(text, indent=6, style="dim")
    return lines


def _cells_width(rest: Sequence[Sequence[str]]) -> int:
    """The cells of a line that are not the name's."""
    return sum(cells(cell) + 2 for cell in rest[0]) + 2


def _parameter_cells(row: ParameterComparison) -> tuple[str, ...]:
    sized, norm, *sizes = measures(row)
    if row.method == Method.NOT_COMPARED:
        # where nothing was compared nothing was allowed
        sizes = [number(row.relative_difference), "-"]
    return row.name or "(unnamed)", sized, norm, *sizes, row.word


def _worst_column(rows: Sequence[ParameterComparison], layout: Layout, room: int) -> list[str] | None:
    """The worst elements as a column, or None where they need a line of their own."""
    texts = [worst(row) for row in rows]
    if not any(texts):
        return None
    column = ["worst element: full vs accumulated", *texts]
    padded = [cell for (cell,) in columns([[layout.text(cell)] for cell in column])]
    return padded if cells(padded[0]) <= room else None


def _worst_element(row: ParameterComparison) -> str:
    if row.worst is None or not worst(row):
        return f"worst element {worst(row)}" if worst(row) else ""
    index = worst(row).partition(":")[0]
    return f"worst element {index}: full {value(row.worst.reference)}, accumulated {value(row.worst.accumulated)}"


def _facts(facts: Facts, layout: Layout) -> list[Line]:
    return [line for label, text in facts.rows for line in layout.wrap(text, f"  {label}", facts.indent)]


def _table(table: Table, layout: Layout) -> list[Line]:
    lines: list[Line] = []
    for at, row in enumerate(columns([[layout.text(cell) for cell in row] for row in table.rows], table.right)):
        head = "" if at else "bold"
        if table.outcome is None:
            lines.append([("  " + "  ".join(row), head)])
        else:
            style = _STYLES.get(table.rows[at][table.outcome], "") if at else head
            before, word, after = row[: table.outcome], row[table.outcome], row[table.outcome + 1 :]
            lines.append([("  " + "  ".join(before) + "  ", head), (word, style), ("  " + "  ".join(after), head)])
        # the message of a row hangs below it; where rows have no outcome a note is about the rows together
        indent = 2 if table.outcome is None else 6
        for text in (text for below, text in table.notes if below == at):
            lines += layout.wrap(text, indent=indent, style="dim")
    return lines


def page_line(page: Page) -> str:
    """Returns an answer in one line: outcome, name, code and place of its first cause, why.

    `DIVERGENT cnn.py:factory: GAV101 in layer features.1 at cnn.py:9; 8 of 10 parameters differ, …`
    """
    return clean(f"{page.headline.outcome.name} {page.headline.title}: {_with_states(page)}")


def row_lines(word: str, name: str, text: str, layout: Layout, width: int = 0) -> list[Line]:
    """Returns a run as one line in columns, however long, so that a program can read it.

    Args:
        word: The outcome, or what came in its place.
        name: The name of the run.
        text: The words that follow.
        layout: The width and the characters of the stream.
        width: Columns of the names of all runs.
    """
    lead = f"{word.upper():<{_OUTCOME}}"
    return [[(lead, _STYLES[word]), (layout.text(f"{pad(name, width)}  {' '.join(text.split())}"), "")]]


def page_row(page: Page, layout: Layout, width: int) -> list[Line]:
    """Returns an answer as such a line."""
    return row_lines(page.headline.outcome.value, page.headline.title, _describe(page), layout, width)


def _describe(page: Page) -> str:
    """Returns the words of a list for an answer: the user's expectation, cause, sentence and time."""
    return _with_states(page) + (f" ({seconds_text(page.seconds)})" if page.seconds else "")


def _with_states(page: Page) -> str:
    states = ", ".join(page.headline.states)
    return f"{states}: {page.why}" if states else page.why


def report_lines(report: Report, layout: Layout) -> list[Line]:
    """Returns every answer, with a summary where it is not one answer alone."""
    pages = [page_of(answer) for answer in report.answers]
    paragraphs = [page_lines(page, layout, report.show_all) for page in pages]
    if report.is_list:
        paragraphs.append(summary_lines(report, pages, layout))
    return join_paragraphs(paragraphs)


def summary_lines(report: Report, pages: Sequence[Page], layout: Layout) -> list[Line]:
    """Returns a line for each run of a report, whose answers have these pages, and a count of the outcomes."""
    lines: list[Line] = [[("summary", "bold")]]
    widest = max((cells(layout.shorten(page.headline.title, _WIDEST)) for page in pages), default=0)
    runs = report.list_runs(pages)
    for run in runs:
        if isinstance(run, Unanswered):
            for message in run.messages:
                lines += _summary_row(run.word, layout.wrap(f"{run.source}: {message}", indent=2 + _OUTCOME))
            continue
        headline = run.headline
        body = layout.wrap(_describe(run), indent=2 + _OUTCOME + widest + 2)
        name = pad(layout.shorten(headline.title, _WIDEST), widest)
        body[0][:1] = [("", ""), (name + "  ", "")]
        lines += _summary_row(headline.outcome.value, body)
    counts = [(sum(page.headline.outcome is outcome for page in pages), outcome.value) for outcome in Outcome]
    counts += [(sum(isinstance(run, Unanswered) and run.word == word for run in runs), word) for word in _NO_OUTCOME]
    text = ", ".join(
        f"{count} {word}s" if count > 1 and word == "error" else f"{count} {word}" for count, word in counts if count
    )
    seconds = sum(page.seconds for page in pages)
    took = f" in {seconds_text(seconds)}" if seconds else ""
    return lines + layout.wrap(f"{count_text(len(runs), 'run')}{took}: {text or 'nothing was run'}", indent=2)


def slowest_lines(pages: Sequence[Page], count: int, layout: Layout) -> list[Line]:
    """Returns the pages whose answers took longest, at most so many, with their times."""
    slowest = sorted(pages, key=lambda page: page.seconds, reverse=True)[:count]
    rows = columns([("  " + seconds_text(page.seconds), page.headline.title) for page in slowest], right=(0,))
    heading = f"slowest {len(slowest)} of {count_text(len(pages), 'run')}"
    return [[], [(heading, "bold")], *([(layout.text("  ".join(row)), "")] for row in rows)]


def _summary_row(word: str, body: list[Line]) -> list[Line]:
    """Puts the word of an outcome in front of the first of some lines."""
    body[0][0] = (f"  {word:<{_OUTCOME}}", _STYLES[word])
    return body


# Lines on a stream: plain or coloured, as plain text, as pytest shows a failure.


_WIDEST_TERMINAL = 140
"""Longer lines are hard to follow with the eye."""

_NARROWEST = 40
"""Below it the words of a sentence no longer fit beside their label; the terminal wraps the lines."""


def layout_for(stream: IO[str]) -> Layout:
    """Returns how wide a report on `stream` may be and which characters it may have; `COLUMNS` wins.

    Where neither a terminal nor `COLUMNS` says how wide a line may be, names are whole.
    """
    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isascii() and columns.isdigit() else 0
    width = asked or (shutil.get_terminal_size((80, 24)).columns if _is_terminal(stream) else 80)
    return Layout(
        width=max(_NARROWEST, min(width, _WIDEST_TERMINAL)),
        ascii_only=not _is_unicode(stream),
        whole=not asked and not _is_terminal(stream),
    )


def write_lines(lines: list[Line], layout: Layout, stream: IO[str]) -> None:
    """Writes the lines, with colours where the stream shows them."""
    is_visible = _is_terminal(stream) and os.environ.get("TERM") != "dumb"
    if not os.environ.get("NO_COLOR") and (is_visible or os.environ.get("FORCE_COLOR")):
        _print_colours(lines, stream, layout.width)
    else:
        stream.write(plain(lines))


def _is_terminal(stream: IO[str]) -> bool:
    return bool(getattr(stream, "isatty", lambda: False)())


def _is_unicode(stream: IO[str]) -> bool:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        return codecs.lookup(encoding).name.startswith("utf")
    except LookupError:
        return False


def _print_colours(lines: Iterable[Line], stream: IO[str], width: int) -> None:
    # rich takes a while to load, and most reports go to pipes and files
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, width=width, force_terminal=True, highlight=False)
    for line in lines:
        assembled = Text.assemble(*line)
        assembled.rstrip()
        # a name may hold what rich would read as markup or an emoji
        console.print(assembled, soft_wrap=True, highlight=False, markup=False, emoji=False)


def text(report: Report) -> str:
    """Returns the report as plain text: sentences of 80 columns, names as they are; the diffs of patches come last."""
    return "\n".join(filter(None, [plain(report_lines(report, Layout(whole=True))), diffs_text(report)]))


def diffs_text(report: Report) -> str:
    """Returns the unified diffs of all answers as `git apply` and `patch -p1` take them; "" where there is none."""
    return "".join(diffs_of(report))


class _Crash(NamedTuple):
    """The parts of a failure that pytest's summary and its XML read."""

    path: str
    lineno: int
    message: str


class ReportText:
    """A verdict as pytest shows a failure: its lines in pytest's own colours.

    pytest-xdist sends no object from its workers but its text, and pytest's summary shows the first line of that: so
    the text begins with the sentence that the summary takes from `reprcrash` otherwise.
    """

    def __init__(self, verdict: Verdict, path: str, line: int) -> None:
        page = verdict_page(verdict)
        self.lines = page_lines(page, layout_for(io.StringIO()))
        self.reprcrash = _Crash(path, line, f"{verdict.outcome.value}: {page.why}")

    def __str__(self) -> str:
        return f"{self.reprcrash.message}\n\n" + plain(self.lines).rstrip("\n")

    def toterminal(self, tw: Any) -> None:
        """Writes the report with pytest's writer, which knows whether it may colour."""
        for line in self.lines:
            for text, style in line:
                marks = dict.fromkeys((word for word in style.split() if word != "dim"), True)
                tw.write(text, **marks)
            tw.line()
