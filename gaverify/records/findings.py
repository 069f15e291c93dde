"""Named causes and remarks with their places and their evidence: what rules yield and reports show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["fault", "note"]


@dataclass(frozen=True)
class Excerpt:
    """Lines of a user's file, as they stood when a finding was made; `first` is the number of the first of them."""

    first: int
    lines: tuple[str, ...]

    def line(self, number: int | None) -> str:
        """Returns the text of a line by its number in the file; "" where the excerpt does not hold it."""
        at = -1 if number is None else number - self.first
        return self.lines[at] if 0 <= at < len(self.lines) else ""


@dataclass(frozen=True)
class Location:
    """Where a finding lies: module path in the model, its class, and file and line in the user's code where known."""

    module: str | None = None
    kind: str | None = None
    file: str | None = None
    line: int | None = None
    excerpt: Excerpt | None = field(default=None, compare=False)

    def __str__(self) -> str:
        parts = []
        if self.module is not None:
            parts.append(f"`{self.module or '(root)'}`" + (f" ({self.kind})" if self.kind else ""))
        if self.file is not None:
            parts.append(f"{self.file}:{self.line}" if self.line is not None else self.file)
        return " at ".join(parts)


@dataclass(frozen=True)
class Evidence:
    """What one probe saw: a sentence for people, and the numbers behind it for rules and JSON."""

    probe: str
    label: str
    statement: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A named cause (`severity` "fault") or a remark that changes no exit code ("note").

    `accepted` is the reason why the user accepts it; "" where nobody does.
    """

    code: str
    name: str
    severity: Severity
    summary: str
    location: Location | None = None
    evidence: tuple[Evidence, ...] = ()
    remedy: str = ""
    proven: bool = False
    accepted: str = ""
