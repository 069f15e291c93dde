"""Two reports side by side: what was run before and after, what was found, and which parameters changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gaverify.records.comparison import Outcome, ParameterComparison, badness
from gaverify.report.stories import Answer, Story, story_of
from gaverify.report.text.layout import Layout, Line, table_of
from gaverify.report.text.table import STYLES
from gaverify.report.text.wording import NOT_RELATIVE, measures

_SHOWN = 20
"""Parameters that a text shows; a page has a table of all."""


@dataclass(frozen=True)
class Comparison:
    """One answer before and after; None where there is only one of them.

    Args:
        title: What the answer is called.
        before: The earlier answer.
        after: The later one.
        rows: (label, before, after): outcome and reason, then the facts that differ, then the findings.
        parameters: (name, before, after) of each parameter, those whose outcome changed first.
        changed: How many of the parameters have another outcome.
    """

    title: str
    before: Story | None
    after: Story | None
    rows: tuple[tuple[str, str, str], ...]
    parameters: tuple[tuple[str, str, str], ...]
    changed: int


def compared(before: Sequence[Answer], after: Sequence[Answer]) -> list[Comparison]:
    """Returns the answers of both reports in pairs: by title, or the only one with the only one."""
    if len(before) == len(after) == 1:
        return [_pair(before[0], after[0])]
    earlier = {story_of(answer).title: answer for answer in before}
    later = {story_of(answer).title: answer for answer in after}
    return [_pair(earlier.get(title), later.get(title)) for title in dict.fromkeys([*earlier, *later])]


def _pair(before: Answer | None, after: Answer | None) -> Comparison:
    sides = (before, after)
    stories = [None if answer is None else story_of(answer) for answer in sides]
    rows = [
        ("outcome", *("not in this report" if story is None else story.said for story in stories)),
        ("result", *("-" if story is None else story.sentence for story in stories)),
        *_differing([dict(story.facts) if story is not None else {} for story in stories]),
        *_findings(stories),
    ]
    parameters, changed = _parameters(stories)
    title = next(story.title for story in reversed(stories) if story is not None)
    return Comparison(title, stories[0], stories[1], tuple((a, b, c) for a, b, c in rows), parameters, changed)


def _differing(sides: Sequence[dict[str, str]]) -> Iterator[tuple[str, str, str]]:
    before, after = sides
    for label in dict.fromkeys([*before, *after]):
        if before.get(label) != after.get(label):
            yield label, before.get(label, "-"), after.get(label, "-")


def _findings(stories: Sequence[Story | None]) -> Iterator[tuple[str, str, str]]:
    sides: list[dict[str, list[str]]] = [{}, {}]
    for side, story in zip(sides, stories, strict=True):
        for finding in story.findings if story else ():  # a code may be found at several places
            text = f"{finding.summary} (accepted)" if finding.accepted else finding.summary
            side.setdefault(f"{finding.code} {finding.name}", []).append(text)
    for label in sorted(sides[0].keys() | sides[1].keys()):
        before, after = ("; ".join(side.get(label, ["not found"])) for side in sides)
        yield label, before, after


def _parameters(stories: Sequence[Story | None]) -> tuple[tuple[tuple[str, str, str], ...], int]:
    before, after = ({} if story is None else _rows(story) for story in stories)
    names = dict.fromkeys([*before, *after])
    changes = {name: _outcome_of(before.get(name)) is not _outcome_of(after.get(name)) for name in names}

    def rank(name: str) -> tuple[bool, tuple[int, float]]:
        worst = max(badness(row) for row in (before.get(name), after.get(name)) if row is not None)
        return changes[name], worst

    ordered = sorted(names, key=rank, reverse=True)
    return tuple((name, _shown(before.get(name)), _shown(after.get(name))) for name in ordered), sum(changes.values())


def _rows(story: Story) -> dict[str, ParameterComparison]:
    return {
        f"{table.heading}: {row.name}" if table.heading else row.name: row
        for table in story.tables
        for row in table.rows
    }


def _outcome_of(row: ParameterComparison | None) -> Outcome | None:
    return None if row is None else row.outcome


def _shown(row: ParameterComparison | None) -> str:
    return "-" if row is None else f"{row.outcome.value} {measures(row)[2]}"


def comparison_lines(comparisons: Iterable[Comparison], layout: Layout) -> list[Line]:
    """Returns the pairs for a terminal: what stands on both sides, and the parameters whose outcome changed."""
    lines: list[Line] = []
    for comparison in comparisons:
        lines += [*([[]] if lines else []), [(layout.text(comparison.title), "bold")]]
        for label, before, after in comparison.rows:
            lines += _two(label, before, after, layout)
        lines += _changed(comparison, layout)
    return lines


def _two(label: str, before: str, after: str, layout: Layout) -> list[Line]:
    styles = {outcome.value: STYLES[outcome] for outcome in Outcome}
    if before == after:
        return layout.wrap(before, first=f"  {layout.shorten(label, 24)}", indent=28, style=styles.get(before, ""))
    lines = layout.wrap(f"before: {before}", first=f"  {layout.shorten(label, 24)}", indent=28)
    return lines + layout.wrap(f"after: {after}", indent=28, style=styles.get(after, ""))


def _changed(comparison: Comparison, layout: Layout) -> list[Line]:
    if not comparison.parameters:
        return []
    total = len(comparison.parameters)
    lines = layout.wrap(
        f"{comparison.changed:,} of {total:,} {'parameter has' if total == 1 else 'parameters have'} another outcome",
        indent=2,
    )
    shown = comparison.parameters[: min(comparison.changed, _SHOWN)]
    cells = [
        [layout.shorten(name, 40), before, after] for name, before, after in (("parameter", "before", "after"), *shown)
    ]
    if shown:
        lines += table_of(cells, indent=4)
    if any("*" in side for _, *sides in shown for side in sides):
        lines += layout.wrap(NOT_RELATIVE, indent=4, style="dim")
    if comparison.changed > len(shown):
        lines += layout.wrap(f"… and {comparison.changed - len(shown):,} more", indent=4, style="dim")
    return lines
