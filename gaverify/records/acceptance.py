"""What a user's accepted findings make of an answer: its exit code, and the entries that match nothing any more."""

from __future__ import annotations

from dataclasses import dataclass

from gaverify.records.comparison import Outcome
from gaverify.records.findings import Finding


@dataclass(frozen=True)
class Acceptance:
    """What the user said about known divergences, and what became of it.

    Args:
        expected: The outcome that `expect` asks for; None where the spec does not say.
        stale: A sentence for each entry of `accept` that matches no finding.
        strict: A stale entry makes the exit code 1.
        refused: A sentence for each entry that fits a finding and does not accept it.
    """

    expected: Outcome | None = None
    stale: tuple[str, ...] = ()
    strict: bool = False
    refused: tuple[str, ...] = ()


class Settled:
    """What a verdict and an audit come to once it is known what the user accepts and expects."""

    outcome: Outcome
    findings: tuple[Finding, ...]
    acceptance: Acceptance

    @property
    def accepted(self) -> bool:
        """Whether the divergence is explained by faults that are all accepted; False for any other outcome."""
        faults = [finding for finding in self.findings if finding.severity == "fault"]
        return self.outcome is Outcome.DIVERGENT and bool(faults) and all(finding.accepted for finding in faults)

    @property
    def exit_code(self) -> int:
        """What the command line leaves with: 0 for an equivalent, an accepted or an expected outcome, else 1 or 3.

        Where a divergence is expected and the outcome is equivalent, the test of the test has failed: 1. Nothing makes
        an inconclusive outcome a success but expecting it.
        """
        expected = self.acceptance.expected
        if self.outcome is not Outcome.INCONCLUSIVE and self.acceptance.strict and self.acceptance.stale:
            return 1
        if expected is self.outcome:
            return 0
        if expected is not None and self.outcome is not Outcome.INCONCLUSIVE:
            return 1
        return 0 if self.accepted else self.outcome.exit_code

    def to_json(self) -> str:
        """Returns the document that `--format json` prints."""
        from gaverify.report.documents import answer_text

        return answer_text(self)  # type: ignore[arg-type]  # one of the two answers that inherit this
