"""What a rule makes its findings with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gaverify.records.findings import Evidence, Finding, Location, Severity


@dataclass(frozen=True)
class Rule:
    """The code and the name that all findings of one module bear."""

    code: str
    name: str

    def finding(
        self,
        summary: str,
        *evidence: Evidence,
        remedy: str,
        proven: bool,
        location: Location | None = None,
        severity: Severity = "fault",
    ) -> Finding:
        """Returns a finding; it is `proven` only where a control run, or the numbers alone, leave no doubt."""
        return Finding(self.code, self.name, severity, summary, location, evidence, remedy, proven)


def measured(source: str, statement: str, /, **values: Any) -> Evidence:
    """Returns evidence that was measured, under the name of what measured it, with the numbers behind the sentence."""
    return Evidence(source, "measured", statement, values)


def controlled(source: str, statement: str, /, **values: Any) -> Evidence:
    """Returns the evidence of a control run."""
    return Evidence(source, "control", statement, values)
