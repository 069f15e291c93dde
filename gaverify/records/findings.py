"""Named causes and remarks with their places and their evidence, and what the user accepts of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gaverify.records.json_objects import JsonObject, JsonRecord
from gaverify.records.outcomes import Outcome

Severity = Literal["fault", "note"]

ALSO = "also"
"""The value of an evidence that has further places of its finding: what is proven of all together."""


@dataclass(frozen=True)
class Excerpt(JsonRecord):
    """Lines of a user's file, as they stood when a finding was made."""

    first: int
    """Number of the first line in the file."""
    lines: tuple[str, ...]
    """The lines, without line breaks."""

    def line(self, number: int | None) -> str:
        """Returns the text of a line by its number in the file; "" where the excerpt does not hold it."""
        at = -1 if number is None else number - self.first
        return self.lines[at] if 0 <= at < len(self.lines) else ""


@dataclass(frozen=True)
class Location(JsonRecord):
    """Where a finding lies."""

    # None and "" differ: "" is the path of the model itself.
    module: str | None = None
    """Path of the module in the model, "" for the model itself; None outside of it."""
    kind: str | None = None
    """Class name of the module; None where not known."""
    file: str | None = None
    """File of the user's code; None where not known."""
    line: int | None = None
    """Line in `file`, counted from 1; None where not known."""
    excerpt: Excerpt | None = field(default=None, compare=False)
    """The lines around it; None where they were not read."""

    @property
    def module_text(self) -> str:
        """The module in backticks with its class; the model itself by its class."""
        if self.module:
            return f"`{self.module}`" + (f" ({self.kind})" if self.kind else "")
        return f"`{self.kind}` (the model itself)" if self.kind else "the model itself"

    def __str__(self) -> str:
        parts = []
        if self.module is not None:
            parts.append(self.module_text)
        if self.file is not None:
            parts.append(f"{self.file}:{self.line}" if self.line is not None else self.file)
        return " at ".join(parts)


@dataclass(frozen=True)
class Evidence(JsonRecord):
    """One observation of a probe."""

    probe: str
    """Name of the probe, such as "weights"."""
    label: str
    """Kind of evidence, such as "measured" or "control"."""
    statement: str
    """The observation, as a sentence."""
    values: JsonObject = field(default_factory=dict)
    """The numbers and names in the statement, for rules and programs."""


@dataclass(frozen=True)
class Finding(JsonRecord):
    """A named cause or a remark."""

    code: str
    """Code of the rule: "GAV101"."""
    name: str
    """Name of the rule: "batch-statistics"."""
    severity: Severity
    """"fault" for a cause, "note" for a remark that changes no exit code."""
    summary: str
    """The fault, in one sentence."""
    location: Location | None = None
    """Where it lies; None where not known."""
    evidence: tuple[Evidence, ...] = ()
    """Observations that show it."""
    remedy: str = ""
    """The change that repairs it; "" where nothing can be said."""
    proven: bool = False
    """Whether a control run shows that only rounding is left without the cause."""
    accepted: str = ""
    """Reason why the user accepts it; "" where nobody does."""

    @property
    def places(self) -> tuple[Location | None, ...]:
        """Where it lies, and everywhere else that it is said of."""
        # A list of plain mappings, as JSON writes evidence without knowing what it holds.
        other_places = (place for evidence in self.evidence for place in evidence.values.get(ALSO, ()))
        return (self.location, *(Location(**place) for place in other_places))


@dataclass(frozen=True)
class Acceptance(JsonRecord):
    """Divergences that the user accepts, and which of them were found."""

    expected: Outcome | None = None
    """Outcome that `expect` asks for; None where the spec does not say."""
    stale: tuple[str, ...] = ()
    """A sentence for each entry of `accept` that matches no finding."""
    strict: bool = False
    """Whether such an entry makes the exit code 1."""
    refused: tuple[str, ...] = ()
    """A sentence for each entry that fits a finding and does not accept it."""
