"""The blocks of an answer's page: plain values that every format shows in its own way, without knowing the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gaverify.records.findings import Finding
from gaverify.records.numbers import count_text
from gaverify.records.outcomes import Outcome, ParameterComparison
from gaverify.records.profile import Row

Call = tuple[str, str]
"""A call of a script: what it is, and its place as `file:line`."""

Repeated = tuple[Sequence[Call], int]
"""Calls in their order, and how often they follow one another."""


@dataclass(frozen=True)
class Headline:
    """The lines that a reader sees first."""

    title: str
    """The spec's file and name, else the model or script; distinguishes this answer from the others."""
    outcome: Outcome
    """Outcome of all compared parameters and findings together."""
    sentence: str
    """Why, in one sentence."""
    method: str = ""
    """How it was decided, in words; empty: nothing was."""
    version: str = ""
    """The program that made the answer, as `gaverify 0.1.0 audit`; empty: a profile without a setting."""
    states: tuple[str, ...] = ()
    """Words for the accepted or expected outcomes, one or two each."""
    stale: str = ""
    """How many entries accept nothing any more, in words; empty: none."""
    remarks: tuple[str, ...] = ()
    """Consequences of accepted divergences, expectations and an interruption, in sentences."""
    passed: bool = False
    """Whether the command exits with 0 for this answer: equivalent, accepted or expected."""

    @property
    def words(self) -> str:
        """The outcome, and what the user's entries and expectation make of it: `divergent, as expected`."""
        return ", ".join(filter(None, (self.outcome.value, *self.states, self.stale)))


@dataclass(frozen=True)
class Facts:
    """Texts with their labels."""

    rows: tuple[tuple[str, str], ...]
    """(label, text) of each."""
    indent: int = 13
    """Columns in front of the texts where they stand below each other in plain text."""


@dataclass(frozen=True)
class Table:
    """Rows of texts in columns."""

    rows: Sequence[Sequence[str]]
    """The cells, the first row is the heading."""
    right: tuple[int, ...] = ()
    """Columns that are flush right."""
    notes: tuple[tuple[int, str], ...] = ()
    """(row, text): what stands below a row; below the last one it may concern the whole table."""
    outcome: int | None = None
    """Column whose words give a row its colour; None: no row has one."""


@dataclass(frozen=True)
class Parameters:
    """Parameters that were compared together."""

    rows: tuple[ParameterComparison, ...]
    """Every parameter, in the model's order."""
    outcome: Outcome
    """Outcome of all of them."""
    name: str = ""
    """The update of an audit; empty: a verdict's only comparison."""
    summary: str = ""
    """The parameters that were compared in that update, in words."""
    causes: frozenset[str] = frozenset()
    """Modules that findings name."""
    judged: bool = True
    """Whether differences mean anything; not where the runs had different data or weights."""


@dataclass(frozen=True)
class Bar:
    """One bar: its name, its length and marks in percent of the axis, and its value in words."""

    name: str
    kind: str
    """The class that gives the colour: an outcome, or "used" and "right" where there is none."""
    percent: float
    size: str
    is_cause: bool = False
    """Whether a finding names it."""
    allowed: float | None = None
    """Where the allowed difference lies, in percent of the axis."""
    working: float | None = None
    """Where the difference in working precision lies, if another precision decided; in percent of the axis."""


@dataclass(frozen=True)
class Chart:
    """Bars with their axis; empty charts are false."""

    label: str = ""
    """The chart in words, for those who cannot see it."""
    bars: Sequence[Bar] = ()
    ticks: Sequence[tuple[float, str]] = ()
    """Marks of the axis: (percent of the axis, text)."""
    bars_left_out: int = 0
    caption: str = ""
    """The chart in a sentence, above it."""
    legend: Sequence[tuple[str, str]] = ()
    """(class, text) of each colour and mark that needs an explanation."""
    is_foldable: bool = False
    """Whether a reader may fold it away: it has a bar for each module."""

    def __bool__(self) -> bool:
        return bool(self.bars)


@dataclass(frozen=True)
class Timeline:
    """The calls of a script in their order."""

    entries: Sequence[tuple[str, Sequence[Repeated]]]
    """(updates and rank, their calls)."""


Block = Facts | Table | Parameters | Chart | Timeline


@dataclass(frozen=True)
class Section:
    """Blocks that belong together."""

    heading: str
    """Title of the section where a format has titles; empty: the blocks say it themselves."""
    blocks: Sequence[Block]


@dataclass(frozen=True)
class FindingBlock:
    """A cause or a note, with the texts that every format shows of it."""

    finding: Finding
    kind: str
    """How sure it is: `note`, `proven` or `suspected`."""
    summary: str
    """The fault in a sentence, with its place in front unless it names the place already."""
    place: str
    """File and line where the summary names only the module; else empty."""
    rows: tuple[tuple[str, str], ...]
    """The evidence, the control and the remedy, as (label, text)."""
    chart: Chart
    """The difference as it is, without the cause in both runs, and with each repair that ran; empty: no control ran."""


@dataclass(frozen=True)
class PatchBlock:
    """The repair as a change of the user's source, or why there is none."""

    rows: tuple[tuple[str, str], ...]
    """The effect of the patch, the findings that it repairs, and its side effects, as (label, text)."""
    diff: str = ""
    """The unified diff; empty: there is none."""


@dataclass(frozen=True)
class Page:
    """One answer, as every format shows it."""

    kind: str
    """Command that made the answer: `run`, `audit` or `profile`."""
    headline: Headline
    """The lines that a reader sees first."""
    findings: tuple[FindingBlock, ...]
    """Causes and notes."""
    facts: Facts
    """The facts about the run."""
    sections: tuple[Section, ...]
    """The numbers."""
    source: str = ""
    """File of the spec or script; empty: the command line said what to run."""
    model: str = ""
    """The model as the spec names it; empty for a script."""
    command: str = ""
    """Command that makes the answer again; empty: not known."""
    seconds: float = 0.0
    """How long it took; 0.0 where no total was measured."""
    made_by: str = ""
    """Versions, platform and git commit; empty: nothing ran."""
    started: str = ""
    """UTC time when the answer was made; empty: not known."""
    profile_rows: tuple[Row, ...] = ()
    """The rows of a profile."""
    patch: PatchBlock | None = None
    """The patch, or why there is none; None: nobody asked for one."""

    @property
    def why(self) -> str:
        """Code and place of the first cause, and the sentence: what a list of answers says of each."""
        faults = [block.finding for block in self.findings if block.finding.severity == "fault"]
        # Stable: a cause that is not accepted is the one to look at.
        faults.sort(key=lambda finding: bool(finding.accepted))
        cause = _code_and_place(faults[0]) if faults else ""
        if len(faults) > 1:
            cause += f" and {count_text(len(faults) - 1, 'other cause')}"
        return "; ".join(filter(None, (cause, self.headline.sentence, self.headline.stale)))

    @property
    def blocks(self) -> Iterator[Block]:
        """Every block of every section."""
        return (block for section in self.sections for block in section.blocks)

    @property
    def comparisons(self) -> list[Parameters]:
        """The compared parameters: one table of a verdict, one per update of an audit, none of a profile."""
        return [block for block in self.blocks if isinstance(block, Parameters)]


def _code_and_place(finding: Finding) -> str:
    """Returns `GAV101 in layer features.1 at cnn.py:9`."""
    place, words = finding.location, [finding.code]
    if place is not None and place.module is not None:
        words.append(f"in layer {place.module}" if place.module else "in the model itself")
    if place is not None and place.file is not None:
        words.append(f"at {place.file}" if place.line is None else f"at {place.file}:{place.line}")
    return " ".join(words)
