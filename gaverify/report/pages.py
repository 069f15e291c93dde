"""The page of any answer, a report of several, and the places in files that other tools show findings at."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from gaverify.errors import USAGE, worst_exit_code
from gaverify.records.answers import Answer
from gaverify.records.audit_report import Audit
from gaverify.records.findings import Finding
from gaverify.records.json_objects import JsonRecord, as_json, json_object
from gaverify.records.numbers import bytes_text, count_text, seconds_text
from gaverify.records.outcomes import Outcome, together
from gaverify.records.profile import LABELS, Profile, Row
from gaverify.records.verdict import Verdict
from gaverify.report.audit_page import audit_page
from gaverify.report.blocks import Bar, Chart, Facts, FindingBlock, Page, Section, Table
from gaverify.report.common_blocks import make_page
from gaverify.report.layout import join_title, number
from gaverify.report.verdict_page import verdict_page
from gaverify.tracebacks import repository_of

# A profile as a page: what was run, the rows, and a bar for the memory of each.


def profile_page(profile: Profile) -> Page:
    """Returns the page of a profile."""
    model = profile.setting.model if profile.setting else ""
    return make_page(
        profile,
        join_title(profile.source, profile.name) or model or "profile",
        _sentence(profile),
        Facts(tuple(_facts(profile))),
        [Section("Memory and time against K", (_chart(profile.rows), _table(profile.rows)))],
        remarks=["interrupted: the rows that were not run are missing"] if profile.interrupted else (),
        file=profile.source,
        model=model,
        profile_rows=profile.rows,
    )


def _chart(rows: Sequence[Row]) -> Chart:
    """Returns a chart of the bytes that autograd keeps in each row that got so far, on a linear axis from zero."""
    sizes = [(row, size) for row in rows if (size := row.activation_bytes) is not None]
    largest = max((size for _, size in sizes), default=0) or 1
    bars = [Bar(" ".join(_cells(row)[:2]), "right", round(100 * n / largest, 1), bytes_text(n)) for row, n in sizes]
    caption = "Saved activations: what autograd keeps for the backward pass, parameters left out"
    return Chart(caption, bars, [(0.0, "0"), (100.0, bytes_text(largest))], caption=caption)


def _facts(profile: Profile) -> list[tuple[str, str]]:
    """Returns the profiled model and machine, as (label, text); nothing where no row got so far."""
    setting = profile.setting
    if setting is None:
        return []
    trainable = "all" if setting.trainable == setting.parameters else f"{setting.trainable:,}"
    # torch does not count a CPU's memory
    memory = f" with {bytes_text(setting.device_memory)}" if setting.device_memory else ""
    # the threads of a GPU's host do not matter to it
    threads = f", {count_text(setting.threads, 'thread')}" if setting.device == "cpu" else ""
    step = f"step of {setting.optimizer}" if setting.optimizer else "no optimizer step (`--optimizer` adds one)"
    rows = [
        ("spec", join_title(profile.source, profile.name)),
        ("model", f"{setting.model}: {count_text(setting.parameters, 'parameter')}, {trainable} trainable"),
        ("batch", f"B = {setting.batch_size}, in K micro-batches of at most n samples"),
        ("update", f"forward and backward of every micro-batch, {step}; {setting.mode} mode, seed {setting.seed}"),
        (
            "where",
            f"{setting.device} ({setting.device_name}{memory}{threads}), {setting.dtype}, "
            f"autocast {setting.autocast or 'off'}, torch {setting.torch}",
        ),
    ]
    return [(label, text) for label, text in rows if text]


_HEADS = ("strategy", "K × n", "activations", "peak", "time", "outcome", "rel. diff")
_STATUS = {"out-of-memory": "out of memory", "does-not-fit": "does not fit", "failed": "failed", "not-run": "not run"}


def _table(rows: Sequence[Row]) -> Table:
    notes = tuple((at, row.message) for at, row in enumerate(rows, 1) if row.message)
    return Table((_HEADS, *map(_cells, rows)), (1, 2, 3, 4, 6), notes, outcome=5)


def _cells(row: Row) -> tuple[str, ...]:
    """Returns the cells of a table's row, in the columns of `_HEADS`; `-` where there is no figure."""
    outcome, difference = "-" if row.outcome is None else row.outcome.value, row.relative_difference
    if row.status != "measured":
        outcome, difference = _STATUS[row.status], None
    # every other row is compared with this one
    elif row.strategy == "full-batch":
        outcome, difference = "reference", None
    return (
        LABELS[row.strategy],
        f"{row.steps}" + (f" × {row.micro_batch}" if row.micro_batch is not None else ""),
        "-" if row.activation_bytes is None else bytes_text(row.activation_bytes),
        "-" if row.memory is None else bytes_text(row.memory.peak),
        "-" if row.seconds is None else seconds_text(row.seconds.median),
        outcome,
        "" if difference is None else number(difference),
    )


def _sentence(profile: Profile) -> str:
    """Returns the result of the profile in words."""
    compared = profile.compared
    if not compared:
        text = "nothing was compared with the full batch"
    else:
        agree = sum(row.outcome is profile.outcome for row in compared)
        text = f"{agree} of {len(compared)} compared rows {profile.outcome.value} to the full batch's gradient"
        if profile.outcome is Outcome.DIVERGENT:
            text = f"{agree} of {len(compared)} compared rows diverge; `gaverify run` names the cause"
        elif profile.outcome is Outcome.INCONCLUSIVE:
            text = f"{agree} of {len(compared)} compared rows could not be decided"
    failed = sum(row.status == "failed" for row in profile.rows)
    return text + (f"; {count_text(failed, 'row')} failed" if failed else "")


# The page of any answer, a report of several, and the places in files that other tools show findings at.


_PAGES: dict[type[Answer], Callable[[Any], Page]] = {
    Verdict: verdict_page,
    Audit: audit_page,
    Profile: profile_page,
}


class _ByKind:
    """Tells pydantic to look at `kind` before it reads an answer, so that messages name the keys of this kind alone."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        write = core_schema.plain_serializer_function_ser_schema(as_json)
        kinds = {kind.kind: handler.generate_schema(kind) for kind in _PAGES}
        return core_schema.tagged_union_schema(kinds, "kind", serialization=write)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return handler({key: value for key, value in schema.items() if key != "serialization"})


AnyAnswer = Annotated[Answer, _ByKind()]
"""An answer of any kind."""


@json_object()
class NoAnswer(NamedTuple):
    """Why a run came to no answer; a run with several reasons has one for each."""

    source: str
    """The file, or what stands for it."""
    message: str
    """The reason, in a sentence."""
    position: int | None = None
    """How many runs were asked for before it; None: not known."""


@dataclass(frozen=True)
class Unanswered:
    """A run without an answer, as reports list it between those with one."""

    word: str
    """`error` or `skipped`."""
    source: str
    """The file, or what stands for it."""
    messages: tuple[str, ...]
    """The reasons, a sentence each."""


@dataclass(frozen=True)
class Report(JsonRecord):
    """Everything that one call of a command found.

    Args:
        answers: In the order they were run.
        errors: Why runs failed.
        skipped: Why runs were left out; these are no failures.
        show_all: Every parameter in tables; else long ones are folded to those that are not equivalent.
        exit_code: The command's exit code; where no command made the report, the code that one would have. Never 0
            without an answer.
        started: When the command was called, as `2026-01-31T12:00:00+00:00`; "" where no command made the report.
    """

    version: ClassVar[Literal[2]] = Answer.version
    written = ("version", "outcome", "exit_code", "started")
    unwritten = ("show_all",)

    answers: tuple[AnyAnswer, ...]
    errors: tuple[NoAnswer, ...] = ()
    skipped: tuple[NoAnswer, ...] = ()
    show_all: bool = False
    exit_code: int = -1
    started: str = ""

    def __post_init__(self) -> None:
        if self.exit_code < 0:
            # a command that found nothing to run must not look like a success
            failed = [USAGE] if self.errors or not self.answers else []
            code = worst_exit_code([answer.exit_code for answer in self.answers] + failed)
            object.__setattr__(self, "exit_code", code)

    @property
    def outcome(self) -> Outcome:
        """Divergent if any answer is, equivalent if all are and nothing failed."""
        outcome = together(answer.outcome for answer in self.answers)
        return Outcome.INCONCLUSIVE if self.errors and outcome is Outcome.EQUIVALENT else outcome

    @property
    def is_list(self) -> bool:
        """Whether the report lists its runs: it is not of one run with an answer."""
        return len(self.answers) != 1 or bool(self.errors or self.skipped)

    def list_runs(self, pages: Sequence[Page]) -> list[Page | Unanswered]:
        """Returns every run in the order in which they were asked for.

        Args:
            pages: Of the answers.
        """
        reasons: dict[tuple[float, str, str], list[str]] = {}
        for word, entries in (("error", self.errors), ("skipped", self.skipped)):
            for source, message, position in entries:
                key = (math.inf if position is None else position, word, source)
                reasons.setdefault(key, []).append(message)
        runs: list[Page | Unanswered] = list(pages)
        # From the first position on, so that each finds all runs before it in their places.
        for place, word, source in sorted(reasons, key=lambda key: key[0]):
            at = len(runs) if math.isinf(place) else int(place)
            runs.insert(at, Unanswered(word, source, tuple(reasons[place, word, source])))
        return runs


def page_of(answer: Answer) -> Page:
    """Returns the blocks that every format shows of `answer`."""
    return _PAGES[type(answer)](answer)


_EXPLANATIONS = ("GAV301",)
"""Codes of notes that say how gaverify compared, and ask nobody to change a line."""


def findings_at_lines(page: Page) -> list[FindingBlock]:
    """Returns the findings that a pull request or an editor shows at a line."""
    return [block for block in page.findings if block.finding.code not in _EXPLANATIONS]


@dataclass(frozen=True)
class Place:
    """A line of a file; `inside` says whether the file lies in the repository, and `path` is relative to its root then.

    `text` is the line as it stood when the finding was made, "" where it was not read.
    """

    path: str
    line: int
    inside: bool
    text: str = ""


def place_of(finding: Finding | None, page: Page) -> Place | None:
    """Returns the finding's own line; else the first line of the file that says what was run; None without any file.

    A pull request shows an annotation only at a file, and the spec or script is where a reader goes on from.
    """
    location = finding.location if finding is not None else None
    if location is not None and location.file:
        text = location.excerpt.line(location.line) if location.excerpt is not None else ""
        return place_of_line(location.file, location.line or 1, text)
    files = (page.source, page.model.rpartition(":")[0])  # a model may be given as `file.py:factory`
    return next((place_of_line(file, 1) for file in files if os.path.isfile(file)), None)


def place_of_line(file: str, line: int, text: str = "") -> Place:
    """Returns the place of a line of a file; `text` is the line."""
    path = Path(os.path.abspath(file))
    # outside a repository a path is relative to where the command runs
    root = repository_of(path.parent) or Path.cwd()
    if path.is_relative_to(root):
        return Place(path.relative_to(root).as_posix(), line, True, text)
    return Place(path.as_posix(), line, False, text)
