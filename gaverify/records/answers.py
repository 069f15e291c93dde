"""The base of every answer: what it says, how it prints itself, and what it was made with."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from gaverify.records.findings import Acceptance, Finding
from gaverify.records.json_objects import JsonRecord
from gaverify.records.numbers import Number
from gaverify.records.outcomes import Outcome
from gaverify.records.patch import Patch
from gaverify.version import __version__, current_time, git_commit

# How an answer prints itself. Records know no format, so the package's root names the writer that does.


class AnswerWriter(Protocol):
    """Writes one answer in the forms that Python, notebooks and users ask an object for."""

    def short_text(self, answer: Any, /) -> str:
        """Returns the outcome and the findings, as `print` shows them."""

    def line_text(self, answer: Any, /) -> str:
        """Returns one line, as the interactive prompt shows it."""

    def card_html(self, answer: Any, /) -> str:
        """Returns a piece of HTML, as notebooks show it."""

    def document_text(self, answer: Any, /) -> str:
        """Returns the JSON document."""


# Versions, machine, moment and commit of an answer.


@dataclass(frozen=True)
class Environment(JsonRecord):
    """The versions that ran, when the answer was made, and the commit of git in its working folder."""

    torch: str = "not loaded"
    """Version of PyTorch; "not loaded" where nothing ran."""
    gaverify: str = __version__
    """Version of gaverify."""
    # Asked for when an answer is made: git and `platform.platform()` take milliseconds, which an import must not cost.
    python: str = field(default_factory=platform.python_version)
    """Version of Python."""
    platform: str = field(default_factory=platform.platform)
    """Operating system and machine, as `platform.platform()` says."""
    started: str = field(default_factory=current_time)
    """When the answer was made, UTC to the second; "" in documents that older versions wrote."""
    commit: str = field(default_factory=git_commit)
    """Git commit that was checked out in the working folder; "" outside a repository."""


# The base of the answers of runs, audits and profiles.


@dataclass(frozen=True, repr=False, kw_only=True)
class Answer(JsonRecord):
    """The answer of a run, an audit or a profile, which `print`, notebooks and `to_json` can show."""

    load_writer: ClassVar[Callable[[], AnswerWriter]]
    """Returns the writer; `gaverify/__init__.py` sets it, which runs before any module of the package."""
    version: ClassVar[Literal[2]] = 2
    """Version of the documents; it grows when a reader of the older one would break."""
    kind: ClassVar[str]
    """Which answer it is, as documents say it."""
    written: ClassVar[tuple[str, ...]] = ("version", "kind", "name", "outcome", "exit_code")
    """Keys at the beginning of a document."""

    if TYPE_CHECKING:  # a field of a verdict and of an audit; a profile computes it

        @property
        def outcome(self) -> Outcome:
            """Equivalent, divergent or inconclusive."""

    environment: Environment = field(default_factory=Environment)
    """Versions, platform, time and commit of its making."""
    source: str = ""
    """Path of the file that says what to run, or of the test; "" where the command line or a call said it."""
    command: str = ""
    """Command line that repeats it; "" where it came from a call."""
    timings: Mapping[str, Number] = field(default_factory=dict)
    """Seconds of each part, and "total"."""
    findings: tuple[Finding, ...] = ()
    """Findings of the rules."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Findings that the user accepts and the outcome that the user expects."""
    patch: Patch | None = None
    """Patch of the user's source that was tried and makes the gradients agree; None where there is none."""
    patch_written: str = ""
    """Into which files the patch was written and how that is undone; "" where none was written."""
    patch_refused: str = ""
    """Why there is no patch although one was asked for, or why it was not written; else ""."""

    def __str__(self) -> str:
        return Answer.load_writer().short_text(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {Answer.load_writer().line_text(self)}>"

    def _repr_html_(self) -> str:
        """Returns what Jupyter and other notebooks show of an answer."""
        return Answer.load_writer().card_html(self)

    def to_json(self) -> str:
        """Returns the answer as a JSON document, with everything it rests on."""
        return Answer.load_writer().document_text(self)

    @property
    def accepted(self) -> bool:
        """Whether the divergence is explained by faults that are all accepted; False for any other outcome."""
        faults = [finding for finding in self.findings if finding.severity == "fault"]
        return self.outcome is Outcome.DIVERGENT and bool(faults) and all(finding.accepted for finding in faults)

    @property
    def exit_code(self) -> int:
        """The command line's exit code: 0 for an equivalent, accepted, expected or repaired one, else 1 or 3."""
        expected = self.acceptance.expected
        # An inconclusive outcome stays one whatever is stale; only expecting it makes it a success.
        if self.outcome is not Outcome.INCONCLUSIVE and self.acceptance.strict and self.acceptance.stale:
            return 1
        if expected is self.outcome or self.patch_written:
            return 0
        # Where a divergence is expected and both gradients agree, the test of the test has failed.
        if expected is not None and self.outcome is not Outcome.INCONCLUSIVE:
            return 1
        return 0 if self.accepted else self.outcome.exit_code

    @property
    def is_equivalent(self) -> bool:
        """Whether the gradients agree; what the user accepts or expects does not count here."""
        return self.outcome is Outcome.EQUIVALENT

    def __bool__(self) -> bool:
        # Python calls every object without this method true: `assert verify(...)` would pass for a divergence
        raise TypeError(
            f"{type(self).__name__} is neither true nor false: it has three outcomes. Write `verdict.is_equivalent`, "
            "`verdict.outcome is gaverify.Outcome.EQUIVALENT`, or call `gaverify.assert_equivalent(...)`"
        )
