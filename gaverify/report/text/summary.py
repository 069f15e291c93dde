"""One line per answer, for calls that ran several specs."""

from __future__ import annotations

from collections.abc import Sequence

from gaverify.records.comparison import Outcome
from gaverify.report.stories import Story
from gaverify.report.text.layout import Layout, Line, cells, columns
from gaverify.report.text.table import STYLES

_WIDEST = 28
"""Columns of a name; a spec's path is told apart by its end, which shortening keeps."""


def summary_lines(stories: Sequence[Story], errors: Sequence[tuple[str, str]], layout: Layout) -> list[Line]:
    """Returns one line per story and per (source, message) of `errors`, and a count of the outcomes."""
    lines: list[Line] = [[("summary", "bold")]]
    names = columns([[layout.shorten(story.title, _WIDEST)] for story in stories])
    for story, (name,) in zip(stories, names, strict=True):
        lead = f"  {story.outcome.value:<14}"
        told = f"{story.sentence} (accepted)" if story.accepted else story.sentence
        body = layout.wrap(told, indent=len(lead) + cells(name) + 2)
        body[0][:1] = [(lead, STYLES[story.outcome]), (name + "  ", "")]
        lines += body
    for source, message in errors:
        body = layout.wrap(f"{source}: {message}", indent=2 + 14)
        body[0][0] = (f"  {'error':<14}", "bold red")
        lines += body
    counts = [(sum(story.outcome is outcome for story in stories), outcome.value) for outcome in Outcome]
    failed = len({source for source, _ in errors})  # a spec may have several sentences, and is one run
    counts.append((failed, "error" if failed == 1 else "errors"))
    total = len(stories) + failed
    text = ", ".join(f"{count} {word}" for count, word in counts if count) or "nothing was run"
    return lines + layout.wrap(f"{total} {'run' if total == 1 else 'runs'}: {text}", indent=2)
