"""The table of parameters: worst first, long models folded to the rows that matter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gaverify.records.comparison import Method, Outcome, ParameterComparison
from gaverify.report.layout import Layout, Line, cells, columns, pad
from gaverify.report.wording import NOT_RELATIVE, measures, number, sort_rows, value, worst

SMALL = 10
"""A table of at most so many parameters is never folded."""

FOLDED = 10
"""A folded table shows at most so many rows: with their worst elements they fill a screen, and the worst are first."""

STYLES = {
    "equivalent": "green",
    "divergent": "bold red",
    "inconclusive": "bold yellow",
    "out of memory": "bold red",
    "failed": "bold red",
}
"""How the words of an outcome look; every other word is plain."""

_HEADER = ("parameter", "shape", "‖full‖", "rel. diff", "allowed", "verdict")
_GAP = "  "
_SHORTEST = 9
"""Cells that a name gets at least: where they are not left, columns are left out instead."""
_LEFT_OUT = (0, 0, 1)
"""Columns behind the name that a narrow terminal goes without, one after the other: shape, ‖full‖, allowed."""


def table_lines(parameters: Iterable[ParameterComparison], layout: Layout, show_all: bool) -> list[Line]:
    """Returns the table with its header, the folded count and the footnote; nothing where there is no parameter."""
    rows = sort_rows(parameters)
    if not rows:
        return []
    visible_rows = rows if show_all or len(rows) <= SMALL else _failing(rows)
    lines = _rows(visible_rows, layout, with_worst=show_all) if visible_rows else []
    lines += _lines_of_fold(rows[len(visible_rows) :], layout, "… and {} more" if visible_rows else "{}")
    if any(row.vanishing for row in visible_rows):
        lines += layout.wrap(NOT_RELATIVE, indent=2, style="dim")
    return lines


def _failing(rows: Sequence[ParameterComparison]) -> list[ParameterComparison]:
    return [row for row in rows if row.outcome is not Outcome.EQUIVALENT][:FOLDED]


def _lines_of_fold(rows: Sequence[ParameterComparison], layout: Layout, counted: str) -> list[Line]:
    """Returns a line for each outcome that the fold hides."""
    lines: list[Line] = []
    for outcome in (Outcome.DIVERGENT, Outcome.INCONCLUSIVE, Outcome.EQUIVALENT):
        count = sum(row.outcome is outcome for row in rows)
        if count:
            noun = "parameter" if count == 1 else "parameters"
            text = f"{counted.format(f'{count:,}')} {noun}: {outcome.value} (use --all)"
            lines += layout.wrap(text, indent=2, style="dim")
    return lines


def _rows(rows: Sequence[ParameterComparison], layout: Layout, with_worst: bool) -> list[Line]:
    body = [[layout.text(cell) for cell in _cells(row)] for row in rows]
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
    wide = _worst_column(rows, layout, layout.width - taken - widest - len(_GAP)) if with_worst else None
    room = widest if wide or layout.whole else max(min(widest, layout.width - taken), _SHORTEST)
    lines: list[Line] = []
    for at, tail in enumerate(other_cells):
        name = table[at][0]
        if cells(name) > room:  # what is cut off might be what tells two parameters apart: it has a line of its own
            lines += layout.wrap(name, indent=2)
            name = ""
        style = "bold" if at == 0 else STYLES[rows[at - 1].outcome.value]
        middle = [*tail[:-2], *([wide[at]] if wide else []), tail[-2]]
        text = _GAP + pad(name, room) + _GAP + _GAP.join(middle) + _GAP
        lines.append([(text, "bold" if at == 0 else ""), (tail[-1], style)])
        if at:
            below = [_worst_element(rows[at - 1])] if with_worst and not wide else []
            for text in filter(None, [*below, rows[at - 1].reason]):
                lines += layout.wrap(text, indent=6, style="dim")
    return lines


def _cells_width(rest: Sequence[Sequence[str]]) -> int:
    """The cells of a line that are not the name's."""
    return sum(cells(cell) + len(_GAP) for cell in rest[0]) + len(_GAP)


def _cells(row: ParameterComparison) -> tuple[str, ...]:
    sized, norm, *sizes = measures(row)
    if row.method == Method.NOT_COMPARED:
        # where nothing was compared nothing was allowed
        sizes = [number(row.relative_difference), "-"]
    return row.name or "(unnamed)", sized, norm, *sizes, row.outcome.value


def _worst_column(rows: Sequence[ParameterComparison], layout: Layout, room: int) -> list[str] | None:
    """Returns the worst elements as a column, or None where they need a line of their own."""
    texts = [worst(row) for row in rows]
    if not any(texts):
        return None
    column = ["worst element: full vs accumulated", *texts]
    padded = [cell for (cell,) in columns([[layout.text(cell)] for cell in column])]
    return padded if cells(padded[0]) <= room else None


def _worst_element(row: ParameterComparison) -> str:
    if row.worst is None or not worst(row):
        return ""
    index = worst(row).partition(":")[0]
    return f"worst element {index}: full {value(row.worst.reference)}, accumulated {value(row.worst.accumulated)}"
