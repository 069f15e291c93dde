"""Words and numbers that all pages share, and styled lines of text that fit a width.

A line is a list of (text, style) segments. No markup is ever parsed, so a parameter named `[red]` prints as it is.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gaverify.records.answers import Environment
from gaverify.records.numbers import bytes_text
from gaverify.records.outcomes import Method, Outcome, ParameterComparison, badness
from gaverify.records.ranks import RankFacts

# Words and numbers that all pages and formats share.


METHODS: Mapping[str, str] = {
    Method.WORKING_PRECISION: "in working precision",
    Method.FLOAT64_CONTROL: "by repeating both runs in float64",
    Method.NOISE_FLOOR: "by the rounding noise of the full batch",
    Method.TWO_SAMPLES: "by the rounding of two samples, which agree in float64",
    Method.FEW_SAMPLES: "by the weights that fit, and by float64 on a few samples",
    Method.WEIGHTS: "by the weights that fit",
    Method.FLOAT32_RUNS: "by the same runs in float32, where rounding hides nothing",
    Method.FLOAT64_PART: "by float64 on a part of the batch",
    Method.TOLERANCE: "by the tolerances that were asked for",
}


_IN_FLOAT64 = (Method.FLOAT64_CONTROL, Method.FLOAT64_PART)


def footnotes(rows: Sequence[ParameterComparison], mark: str = "*") -> list[str]:
    """Returns what stands below a table of these parameters: what `mark` means, and which numbers are of float64."""
    compared = [row for row in rows if row.method != Method.NOT_COMPARED]
    in_float64 = sum(row.method in _IN_FLOAT64 for row in compared)
    notes = []
    if any(row.outcome is Outcome.DIVERGENT and row.method != Method.TOLERANCE for row in compared):
        notes.append("allowed: the largest difference that counts as rounding")
    if any(row.vanishing for row in rows):
        notes.append(f"{mark} absolute, not relative: the full-batch gradient is zero up to rounding")
    if in_float64:
        which = "" if in_float64 == len(compared) else f" for {in_float64} of {len(compared)} parameters"
        notes.append(f"‖full‖, relative difference and allowed: computed in float64{which}")
    return notes


def word_resolution(resolution: float) -> str:
    """Says which difference the deciding method does not miss."""
    return f"a relative difference above {number(resolution)} would have been detected"


def number(value: float) -> str:
    """Returns a norm or a relative difference with two digits: `8.8e-01`, `0`, `inf`, `-` where there is none."""
    if math.isnan(value):
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def value(amount: float) -> str:
    """Returns a value with six digits, integers with their point: `-16.0`, `0.0123457`."""
    text = f"{amount:.6g}"
    # a trained scalar is read as a float, not as a count
    return text + ".0" if text.lstrip("-").isdigit() else text


def percent(fraction: float) -> str:
    """Returns a relative difference for a sentence: `88 %`, `0.006 %`, `31 times`."""
    # a percentage of five digits is harder to read than a factor
    if fraction >= 10:
        return f"{fraction:.0f} times" if fraction < 1e6 else f"{fraction:.1e} times"
    share = fraction * 100
    # two significant digits would write 100 % as 1e+02 %
    if share >= 99.5:
        return f"{share:.0f} %"
    return f"{share:.2g} %" if share >= 1e-4 or share == 0 else f"{share:.0e} %"


def ranks_line(facts: RankFacts, micro_batches: int) -> str:
    """Returns how many ranks there were, under which engine, and what they sent each other."""
    engine = facts.engine.value if facts.engine is not None else "no known engine"
    traffic, difference = facts.traffic.window, facts.replicas.difference
    kinds = ", ".join(f"{count} {kind.value}" for kind, count in traffic.counts.items()) or "no collective"
    replicas = "" if math.isnan(difference) else f"; replicas {'identical' if difference == 0.0 else 'apart'}"
    # the ranks of a script have no K that could be divided among them
    each = f", K = {micro_batches // facts.ranks} each" if micro_batches else ""
    return f"{facts.ranks} × {engine}{each}: {kinds} per window, {bytes_text(traffic.bytes_moved)}{replicas}"


def shape(row: ParameterComparison) -> str:
    """Returns the shape as `32×16`, `scalar` where it has no dimension."""
    return "×".join(str(size) for size in row.shape) or "scalar"


def measures(row: ParameterComparison, mark: str = "*") -> tuple[str, str, str, str]:
    """Returns shape, norm, relative difference and what was allowed.

    Relative to zero everything is infinite: the plain norms say something then, and the mark says what they are.
    """
    sizes = (number(row.relative_difference), number(row.relative_allowed))
    if row.vanishing:
        sizes = (number(row.difference_norm) + mark, number(row.allowed) + mark)
    return shape(row), number(row.reference_norm), *sizes


def worst(row: ParameterComparison) -> str:
    """Returns the worst element as `[3, 4]: 0.1 vs 0.2` (full batch against accumulated).

    Empty for equivalent rows: which element rounding hits most, and whether it hits any, differs between processors.
    It is not known of a sketch, or of a parameter whose parts lie in several processes.
    """
    if row.worst is None:
        return "not known" if row.outcome is Outcome.DIVERGENT and math.isfinite(row.difference_norm) else ""
    if row.outcome is Outcome.EQUIVALENT:
        return ""
    index = f"[{', '.join(str(at) for at in row.worst.index)}]"
    return f"{index}: {value(row.worst.reference)} vs {value(row.worst.accumulated)}"


def sort_rows(rows: Iterable[ParameterComparison]) -> list[ParameterComparison]:
    """Returns the parameters worst first; equivalent ones, which rounding alone tells apart, keep the model's order."""

    def rank(row: ParameterComparison) -> tuple[float, ...]:
        # by their size they would stand in another order on every processor
        return badness(row) if row.outcome is not Outcome.EQUIVALENT else badness(row)[:1]

    return sorted(rows, key=rank, reverse=True)


def join_title(source: str, name: str) -> str:
    """Returns file and name of a spec together: a folder may hold two of one name, and a model many."""
    return f"{source} ({name})" if source and name else source or name


def modules_of(rows: Iterable[ParameterComparison]) -> list[tuple[str, list[ParameterComparison]]]:
    """Returns (module path, its own parameters) in the order in which the model names them."""
    groups: dict[str, list[ParameterComparison]] = {}
    for row in rows:
        groups.setdefault(row.name.rpartition(".")[0], []).append(row)
    return list(groups.items())


def made_by(made: Environment) -> str:
    """Returns the versions, the platform and the git commit that an answer was made with."""
    versions = f"gaverify {made.gaverify}, torch {made.torch}, Python {made.python}, {made.platform}"
    return ", commit ".join(filter(None, (versions, made.commit[:12])))


# Styled lines of text that fit a width: the one form that the terminal, the pictures and plain text share.


Segment = tuple[str, str]
Line = list[Segment]

_ASCII = dict(zip("‖×−–—…→≤·’µ", ("|", "x", "-", "-", "-", "...", "->", "<=", "-", "'", "u"), strict=True))

_BREAK = re.compile(r" (?![%×]|[mµ]?s\b)")  # a number stays with its unit


@dataclass(frozen=True)
class Layout:
    """How wide a report may be, and whether it may leave ASCII.

    Args:
        width: Columns of the terminal.
        ascii_only: The stream cannot carry anything else; other characters become escapes, not errors.
        whole: Nobody counts columns, as in a file or a pipe: sentences wrap at `width`, no name is cut.
    """

    width: int = 80
    ascii_only: bool = False
    whole: bool = False

    def text(self, value: object) -> str:
        """Returns `value` as printable text: control characters, lone surrogates and line breaks as escapes."""
        return "".join(self._character(character) for character in str(value))

    def _character(self, character: str) -> str:
        if self.ascii_only and not character.isascii():
            return _ASCII.get(character) or character.encode("ascii", "backslashreplace").decode()
        return character if character.isprintable() else character.encode("unicode_escape", "replace").decode()

    def shorten(self, value: object, width: int) -> str:
        """Returns `value` in at most `width` cells; an ellipsis stands for what is cut off at its left.

        The end of a path tells more than its beginning, and can be searched for as it stands.
        """
        text = self.text(value)
        if self.whole or cells(text) <= width:
            return text
        mark = "..." if self.ascii_only else "…"
        # what is cut off is at the left: the text is turned around, cut, and turned back
        return _cut(mark + _cut(text[::-1], max(width - len(mark), 0))[::-1], width)

    def wrap(self, value: object, first: str = "", indent: int = 0, style: str = "") -> list[Line]:
        """Returns the words of `value` after the heading `first`, later lines hanging at `indent`.

        Only a word longer than a whole line is cut, and then at its left; a path is never cut, as
        terminals and editors open it as it stands.
        """
        room = max(self.width - indent, 10)
        rows: list[str] = []
        for word in _BREAK.split(self.text(" ".join(str(value).split()))):
            # editors and terminals open a path only as it stands
            word = word if "/" in word else self.shorten(word, room)
            if rows and cells(rows[-1]) + 1 + cells(word) <= room:
                rows[-1] += " " + word
            else:
                rows.append(word)
        lead = pad(first, indent)
        return [[(lead if number == 0 else " " * indent, ""), (row, style)] for number, row in enumerate(rows)]


def clean(value: object) -> str:
    """Returns `value` as printable text of any width, as `Layout.text` does."""
    return Layout().text(value)


def clean_code(text: str) -> list[str]:
    """Returns the lines of source code as printable text: tabs stay, line ends of Windows do not."""
    # Not `splitlines`, which also splits at form feeds inside a line.
    lines = text.removesuffix("\n").split("\n")
    return ["\t".join(map(clean, line.rstrip("\r").split("\t"))) for line in lines]


def cells(text: str) -> int:
    """Returns the columns that a terminal spends on `text` (two for wide characters, none for combining ones)."""
    if text.isascii():
        return len(text)
    return sum(_cell(character) for character in text)


def _cell(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _cut(text: str, room: int) -> str:
    used = 0
    for position, character in enumerate(text):
        used += _cell(character)
        if used > room:
            return text[:position]
    return text


def pad(text: str, width: int, right: bool = False) -> str:
    """Returns `text` filled with spaces to `width` cells, on its left if `right`."""
    fill = " " * max(width - cells(text), 0)
    return fill + text if right else text + fill


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[list[str]]:
    """Returns the cells of `rows` padded to the widest of their column; those in `right` are flush right."""
    flush = set(right)
    widths = [max(cells(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return [[pad(cell, widths[at], at in flush) for at, cell in enumerate(row)] for row in rows]


def join_paragraphs(paragraphs: Iterable[list[Line]]) -> list[Line]:
    """Returns the paragraphs with an empty line between them; empty ones are left out."""
    lines: list[Line] = []
    for paragraph in filter(None, paragraphs):
        lines += [[], *paragraph] if lines else paragraph
    return lines


def plain(lines: Iterable[Line]) -> str:
    """Returns the lines without their styles, each ended by a newline and none with trailing spaces."""
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)
