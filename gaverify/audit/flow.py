"""The whole audit: three runs of the script, their comparison, the rules, the report.

A first audit watches. Where its runs did not see the same samples, or drew numbers outside the model's forwards, the
runs are made again: the full-batch run keeps what its loaders gave and what its loop drew, and the others are given the
rows of the same samples.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gaverify.audit.changes import (
    Changes,
    ComputeInFloat32,
    DisableCompilation,
    Order,
    Replay,
    ReplayData,
    merge_changes,
)
from gaverify.audit.editing import check_values
from gaverify.audit.outcome import is_explained, report_of, same_arguments
from gaverify.audit.request import RECORDED, Request, encode_request, read_request
from gaverify.audit.running import Progress, Runner, Trial
from gaverify.children.launching import ended_as_interrupted, remove, told_where_full, working_folder
from gaverify.errors import ProblemError
from gaverify.records.audit import Record
from gaverify.records.audit_report import AuditReport
from gaverify.records.comparison import Outcome
from gaverify.records.events import Backward, ClosingRecord, Forward, ledger_of
from gaverify.records.facts import facts_of_loop
from gaverify.records.windows import windows_of
from gaverify.rules import findings_for
from gaverify.sources import with_excerpts
from gaverify.thresholds import CUT, STARTED_APART, U32

if TYPE_CHECKING:
    from gaverify.audit.reading import RecordedRun


def replay_helps(record: Record, full: ClosingRecord, accumulated: ClosingRecord) -> bool:
    """Whether a comparison may have failed for what lies outside the model's forwards.

    Args:
        record: The comparison.
        full: The closing record of the full-batch run.
        accumulated: That of the accumulated run.
    """
    draws = full.draws.in_loop or accumulated.draws.in_loop
    if not (draws or full.loaders) or not _may_see_the_same(record):
        return False
    if not all(update.data.same for update in record.updates):
        return True
    unrepeatable = bool(record.updates[0].unrepeatable)
    return draws and (bool(record.unaligned) or record.divergent is not None or unrepeatable)


def inputs_help(record: Record, full: ClosingRecord) -> bool:
    """Whether the runs may be given the same inputs where loaders and draws do not make them the same.

    That is right only where the forwards return their losses: else the script holds targets that would be others'.

    Args:
        record: The comparison.
        full: The closing record of the full-batch run.
    """
    if not full.models.returns_loss or not _may_see_the_same(record):
        return False
    return record.updates[0].data.checked and not record.updates[0].data.same


def _may_see_the_same(record: Record) -> bool:
    """Whether both runs began with the same weights, and were fed as many rows as a batch and its micro-batches are."""
    if not record.updates or record.same_pieces or record.updates[0].started_apart > STARTED_APART:
        return False
    data = record.updates[0].data
    return not data.checked or max(data.full, data.accumulated) < CUT * min(data.full, data.accumulated)


def hidden_below_float32(record: Record) -> bool:
    """Whether runs below float32 leave open, or without a name, what they could compare."""
    if record.unit <= U32:
        return False
    if record.divergent is not None:
        return not is_explained(record)
    return any(update.data.same and update.outcome is Outcome.INCONCLUSIVE for update in record.updates)


def parts_of(record: Record) -> int:
    """Micro-batches per batch of the full-batch run; 0 where that is not known.

    Backward passes count them, unless the window holds some of another optimizer's loss (of a generator's through its
    critic): then the rows of the first forwards do.
    """
    first = record.first
    if first is not None and any(set(backward.optimizers) - set(first.optimizers) for backward in first.of(Backward)):
        forwards = [windows[0].of(Forward) if windows else () for windows in (record.full_windows, record.windows)]
        whole_rows, rows = ((calls[0].rows or 0) if calls else 0 for calls in forwards)
        return whole_rows // rows if rows and whole_rows % rows == 0 else 0
    full_backwards = next(
        (window.backwards for window in record.full_windows if first and window.number == first.number), 0
    )
    steps = (record.expected(first) or 0) if first is not None else 0
    return steps // full_backwards if full_backwards and steps % full_backwards == 0 else 0


def orders(full: RecordedRun, accumulated: RecordedRun, *, alike: bool) -> tuple[Order, ...]:
    """Returns the orders in which ranks may share the samples of a batch, the likelier first.

    Args:
        full: The full-batch run.
        accumulated: That of the ranks.
        alike: Both fed the same rows to their models, so that the rows tell the order. Else the draws are among them,
            and a replay in the wrong order will have other rows.
    """
    from gaverify.audit.same_data import Matcher  # which needs torch

    if not alike:
        return "turns", "blocks"
    last, rows = getattr(accumulated, "ranks", (accumulated,))[-1].rows(1), full.rows(1)
    spot = Matcher(rows).find(range(len(rows)), last[0]) if last else None
    if spot is None:
        return ()
    return ("turns",) if spot.is_scattered else ("blocks",)


_NUMBER = re.compile(r"(?<![\w.])\d{1,6}(?![\w.])")


def audit(request: Request, progress: Progress | None = None) -> AuditReport:
    """Runs the script as the request says and returns what was found.

    Raises:
        SpecError: The request itself is wrong.
        ProblemError: A run of the script failed, or gave nothing to compare.
    """
    request.check()
    for command in (request.command_of("full"), request.command_of("accumulated")):
        check_values(command.script, command.module, command.values)
    if not request.events_only and request.same:
        return same_arguments(request)
    with ended_as_interrupted(), _folder(request) as folder:
        return _report(request, Runner(request, folder, progress or (lambda *_: None)))


def audit_again(folder: str) -> AuditReport:
    """Compares and judges the records of an audit that `--keep` left in `folder`; runs nothing.

    Raises:
        SpecError: The folder holds no such records.
        ProblemError: They do not suffice: another version of gaverify made them.
    """
    request = read_request(folder)
    return _report(request, Runner(request, Path(folder), lambda *_: None, reuse_records=True))


def _report(request: Request, runner: Runner) -> AuditReport:
    started = time.monotonic()
    audited = _Audit(request, runner)
    record = audited.events_only() if request.events_only else audited.compare()
    findings = with_excerpts(findings_for(facts_of_loop(record)))
    timings = {**runner.timings, "total": time.monotonic() - started}
    return report_of(request, record, findings, runner.summaries, audited.main.closing, timings)


@contextmanager
def _folder(request: Request) -> Iterator[Path]:
    """Where the runs write: a folder that goes with the audit, or one that is kept if the audit comes to its end."""
    if request.keep is None:
        with working_folder("gaverify-audit-") as folder:
            yield folder
        return
    folder = Path(request.keep).resolve()
    existed = folder.is_dir()
    try:
        with told_where_full(folder):
            folder.mkdir(parents=True, exist_ok=True)
            yield folder
            (folder / RECORDED).write_text(encode_request(request), encoding="utf-8")
        for changes in folder.glob("*/written"):
            remove(changes)
    except BaseException:
        for entry in list(folder.iterdir()) if folder.is_dir() else []:
            remove(entry)
        if not existed:
            remove(folder)
        raise


class _Audit:
    """The runs of one audit, and what their comparison says."""

    def __init__(self, request: Request, runner: Runner) -> None:
        self._request, self._runner = request, runner
        self._replay: Replay = "samples"
        self._changes: Changes = ()  # of the runs that are judged

    def events_only(self) -> Record:
        """One run, its calls alone."""
        self.main, _ = self._runner.first("events")
        windows = windows_of(self.main.events)
        return Record(windows, ledger_of(self.main.events), steps=self._request.steps)

    def compare(self) -> Record:
        """Full batch first, because its draws are dealt to the accumulated run; then the other two side by side."""
        full, changes = self._runner.first("full")
        record = self._in_float32(self._compare_with_replay(full, changes))
        return self._with_tail(record, changes) if self._request.tail else replace(record, epochs=self._epochs())

    def _compare_with_replay(self, full: RecordedRun, changes: Changes) -> Record:
        """Compares, and again with the data of the full-batch run where that may help."""
        first = self._against(full, changes)
        self._changes = changes
        main, unaligned = self.main, dict(first.unaligned)
        for way in self._ways(first, full):
            replaying = (ReplayData(way, parts_of(first)), *changes)
            record = self._against(self._runner.run("full", *replaying), replaying)
            if record.updates and record.updates[0].data.same:
                self._replay, self._changes = way, replaying
                return record
            unaligned |= record.unaligned
        self.main = main
        return replace(first, unaligned=unaligned)

    def _in_float32(self, record: Record) -> Record:
        """The same in float32, where rounding below it hides what the loop does; a script may not run so."""
        if not hidden_below_float32(record):
            return record
        main, changes = self.main, merge_changes(self._changes, [ComputeInFloat32(), DisableCompilation()])
        with suppress(ProblemError):
            full = self._runner.run("full", *changes, shown_as="float32")
            float32_record = self._against(full, changes, "float32")
            if float32_record.updates and not hidden_below_float32(float32_record):
                record = replace(float32_record, float32=True)
        self.main = main
        return record

    def _ways(self, record: Record, full: RecordedRun) -> list[Replay]:
        """How the runs may be given the same data, what changes least first."""
        helps, ways = replay_helps(record, full.closing, self.main.closing), list[Replay]()
        if self._request.has_ranks:  # what their loops draw is dealt to them; their loaders hand out samples as they do
            if not helps or not (full.closing.draws.in_loop or self.main.closing.draws.in_loop):
                return []
            alike = record.updates[0].data.same
            return [*orders(full, self.main, alike=alike)]
        if helps:
            ways.append("samples")
            if full.closing.loaders:  # their collation may draw, which would be other draws for micro-batches
                ways.append("batches")
        if inputs_help(record, full.closing):
            ways.append("inputs")
        return ways

    def _epochs(self) -> str:
        unseen = self.main.closing.loaders and not self.main.closing.epochs
        cut = "; micro-batches were rows of the full batch's batches, and padded like those"
        return cut * (self._replay == "batches") + (
            "; no epoch's end was reached (`--tail` makes one)" if unseen else ""
        )

    def _with_tail(self, record: Record, changes: Changes) -> Record:
        """The same runs on epochs that end with a short window, where nothing was found without."""
        if record.divergent is not None or is_explained(record):
            return record
        parts, loaders = parts_of(record), self.main.closing.loaders
        if parts < 2 or not loaders or self._request.has_ranks:
            why = "it trains without a `DataLoader`" if not loaders else "K is not known: give `--steps`"
            why = "the loaders of several ranks are left alone" if self._request.has_ranks else why
            return replace(record, epochs=f"; `--tail` could not shorten an epoch: {why}")
        # A whole window, the short one, and the first of the next epoch:
        self._runner.updates = max(self._request.updates, 3)
        replay = ReplayData("batches" if self._replay == "batches" else "samples", parts, parts // 2)
        record = self._against(self._runner.run("full", replay, *changes), (replay, *changes))
        return replace(record, epochs=f"; with epochs whose last window has {parts // 2} of {parts} micro-batches")

    def _against(self, full: RecordedRun, changes: Changes, shown_as: str = "") -> Record:
        """Makes the runs that are held against a full-batch run, and compares."""
        trial = Trial(self._runner, full, changes, shown_as)
        self.main = trial.accumulated
        self._runner.progress("comparing", self._runner.done, 3)
        from gaverify.audit.controls import run_controls

        return run_controls(trial, self._record(trial), ranked=self._request.has_ranks)

    def _record(self, trial: Trial) -> Record:
        """What the runs show without any control."""
        from gaverify.audit.judgement import windows_skipped_alike, working_unit  # the first to need torch

        begun = time.monotonic()
        full, accumulated, numbers = trial.full, trial.accumulated, trial.numbers
        record = Record(
            windows_of(accumulated.events, numbers),
            ledger_of(accumulated.events),
            windows_of(full.events, numbers),
            trial.compare(),
            self._request.steps,
            working_unit(full),
            full_ledger=ledger_of(full.events),
            skipped_alike=windows_skipped_alike(full, accumulated),
            ranks=max(full.closing.ranks, accumulated.closing.ranks),
            full_ranks=full.closing.ranks if self._request.has_ranks else 1,
            dealt=full.closing.draws.count if accumulated.closing.draws.dealt else 0,
            unaligned=accumulated.closing.draws.unaligned,
            numbers=tuple(
                int(word) for argument in self._request.accumulated or () for word in _NUMBER.findall(argument)
            ),
        )
        self._runner.timings["comparison"] = time.monotonic() - begun
        return record
