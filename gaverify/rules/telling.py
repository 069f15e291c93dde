"""Findings told from values: the sentences stand in `words.toml`, by code and kind of finding."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from importlib.resources import files as resources
from string import Formatter
from typing import Any

from gaverify.records.findings import Evidence, Finding, Location, Severity
from gaverify.rules.rule import finding_of
from gaverify.rules.wording import count, counts, difference, passes, quoted, times, updates, weights_text

_SHAPES: Mapping[str, Callable[[Any], str]] = {
    "counts": counts,
    "difference": difference,
    "names": quoted,
    "passes": passes,
    "times": times,
    "updates": updates,
    "weights": partial(weights_text, each=False),
}
"""How a sentence shows a value, beside what Python's own format knows: `{window.backwards:passes}`."""


class _Sentences(Formatter):
    """Sentences with values in their places; `{found:count draw}` is a number with its noun."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """Returns one value as the sentence shows it."""
        shape, _, noun = format_spec.partition(" ")
        if shape == "count":
            return count(value, noun)
        return _SHAPES[shape](value) if shape in _SHAPES else format(value, format_spec)


@cache
def words(code: str) -> Mapping[str, Any]:
    """Returns what `words.toml` says of a code: the sentences of each kind of finding, and phrases in tables."""
    text = (resources("gaverify") / "rules" / "words.toml").read_text(encoding="utf-8")
    table: Mapping[str, Any] = tomllib.loads(text).get(code, {})
    return table


def said(sentence: str, **values: Any) -> str:
    """Returns a sentence with values in their places."""
    return _Sentences().vformat(sentence, (), values)


def told(
    key: str,
    *more: Evidence,
    proven: bool,
    location: Location | None = None,
    severity: Severity = "fault",
    together: Iterable[Location | None] = (),
    **values: Any,
) -> Finding:
    """Returns the finding whose sentences stand under a key of `words.toml`, with the values in their places.

    Args:
        key: A code and which of its findings: `GAV606.clipped`.
        more: Evidence behind that of the table.
        proven: Whether a control run, or the numbers alone, leave no doubt.
        location: Where the cause lies.
        severity: Whether it is a fault.
        together: The places of everything that it is said of.
        values: What the sentences name, and what their evidence hands on.
    """
    code, _, kind = key.partition(".")
    parts = dict(words(code)[kind])
    summary, remedy = (said(parts.pop(part), **values) for part in ("summary", "remedy"))
    seen = (
        Evidence(probe, label, said(sentence, **values), dict(_handed(name, values) for name in handed))
        for label, (probe, sentence, *handed) in parts.items()
    )
    return finding_of(
        summary,
        *seen,
        *more,
        remedy=remedy,
        proven=proven,
        location=location,
        severity=severity,
        together=together,
    )


def _handed(name: str, values: Mapping[str, Any]) -> tuple[str, Any]:
    """A value that documents hand on with its name there: `update`, or `update=update.number`."""
    key, _, path = name.partition("=")
    return key, Formatter().get_field(path or key, (), values)[0]
