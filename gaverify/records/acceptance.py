"""What a user's accepted findings make of an answer: its exit code, and the entries that match nothing any more."""

from __future__ import annotations

from collections.abc import Iterable
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


def is_accepted(outcome: Outcome, findings: Iterable[Finding]) -> bool:
    """Returns whether a divergence is explained by faults that are all accepted; False for any other outcome."""
    faults = [finding for finding in findings if finding.severity == "fault"]
    return outcome is Outcome.DIVERGENT and bool(faults) and all(finding.accepted for finding in faults)


def exit_code(outcome: Outcome, findings: Iterable[Finding], acceptance: Acceptance) -> int:
    """Returns 0 for an equivalent, an accepted or an expected outcome, else 1 for divergent and 3 for inconclusive.

    Where a divergence is expected and the outcome is equivalent, the test of the test has failed: 1. Nothing makes an
    inconclusive outcome a success but expecting it.
    """
    expected = acceptance.expected
    if outcome is Outcome.INCONCLUSIVE:
        return 0 if outcome is expected else outcome.exit_code
    if acceptance.strict and acceptance.stale:
        return 1
    if expected is not None:
        return 0 if outcome is expected else 1
    return 0 if is_accepted(outcome, findings) else outcome.exit_code
