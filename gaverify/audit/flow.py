"""The whole audit: three runs of the script, their comparison, the rules, the report.

The first runs only record. They may not see the same samples, or draw random numbers outside the model's forwards.
Then they are made again with a replay: the full-batch run stores the samples of its loaders and the draws of its
loop. The other runs are given the rows of the same samples.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gaverify.acceptance import with_excerpts
from gaverify.audit.editing import check_values
from gaverify.audit.folders import remove_copies
from gaverify.audit.job import (
    Changes,
    ComputeInFloat32,
    DisableCompilation,
    LeadSteps,
    Order,
    Replay,
    ReplayData,
    merge_changes,
)
from gaverify.audit.outcome import is_explained, report_of, report_without_comparison, same_arguments
from gaverify.audit.request import RECORDED, Request, encode_request, read_request, script_of
from gaverify.audit.running import Progress, Runner, Trial
from gaverify.children.folders import remove, told_where_full, working_folder
from gaverify.children.launching import ended_as_interrupted
from gaverify.errors import ProblemError, Uncompared
from gaverify.patches import read_context
from gaverify.patches.searching import Patches, TrialResult, explain_no_trial, search_patch
from gaverify.records.audit import Calls, Record, Stage
from gaverify.records.audit_report import Audit
from gaverify.records.comparison import comparison_of
from gaverify.records.events import Backward, ClosingRecord, Forward, GradientCopies, ledger_of
from gaverify.records.numbers import bytes_text
from gaverify.records.outcomes import Outcome
from gaverify.records.windows import windows_of
from gaverify.rules import findings_for
from gaverify.thresholds import COMPUTED_FLOAT32, CUT, STARTED_APART, U32

if TYPE_CHECKING:
    from gaverify.audit.reading import RecordedRun


def needs_replay(record: Record, full: ClosingRecord, accumulated: ClosingRecord) -> bool:
    """Whether a comparison may have failed for samples or draws outside the model's forwards.

    Args:
        record: The comparison.
        full: The closing record of the full-batch run.
        accumulated: That of the accumulated run.
    """
    has_draws = full.draws.in_loop or accumulated.draws.in_loop
    # Without draws or loaders a replay has nothing to give: the same runs would be made once more.
    if not (has_draws or full.loaders) or not _may_see_same_samples(record):
        return False
    if not all(update.data.same for update in record.updates):
        return True
    is_unrepeatable = bool(record.updates[0].unrepeatable)
    return has_draws and (bool(record.unaligned) or record.divergent is not None or is_unrepeatable)


def _may_see_same_samples(record: Record) -> bool:
    """Whether both runs began with the same weights, and their models were given about as many rows."""
    # Other initial weights, or twice as many rows, are no question of samples: no replay makes them equal.
    if not record.updates or record.same_pieces or record.updates[0].started_apart > STARTED_APART:
        return False
    data = record.updates[0].data
    return not data.checked or max(data.full, data.accumulated) < CUT * min(data.full, data.accumulated)


def is_hidden_below_float32(record: Record) -> bool:
    """Whether rounding below float32 hides the outcome, or the cause of a difference."""
    if record.unit <= U32:
        return False
    if record.divergent is not None:
        return record.stopped_after is None and not is_explained(record)
    return any(update.data.same and update.outcome is Outcome.INCONCLUSIVE for update in record.updates)


def micro_batches_per_batch(record: Record) -> int:
    """Returns how many micro-batches have the samples of one batch of the full-batch run; 0 if that is not known."""
    first = record.calls.first
    if first is not None and any(set(backward.optimizers) - set(first.optimizers) for backward in first.of(Backward)):
        # The window has backward passes of another optimizer's loss (a generator's, through its critic), which are not
        # those of its micro-batches: the rows of the first forwards tell.
        forwards = [
            windows[0].of(Forward) if windows else () for windows in (record.calls.full_windows, record.calls.windows)
        ]
        full_rows, micro_rows = ((calls[0].rows or 0) if calls else 0 for calls in forwards)
        return full_rows // micro_rows if micro_rows and full_rows % micro_rows == 0 else 0
    full_backwards = next(
        (window.backwards for window in record.calls.full_windows if first and window.number == first.number), 0
    )
    steps = (record.calls.expected_passes(first) or 0) if first is not None else 0
    return steps // full_backwards if full_backwards and steps % full_backwards == 0 else 0


def possible_orders(full: RecordedRun, accumulated: RecordedRun, *, has_same_rows: bool) -> tuple[Order, ...]:
    """Returns the orders in which ranks may share the samples of a batch, the likelier first.

    Args:
        full: The full-batch run.
        accumulated: That of the ranks.
        has_same_rows: Whether both gave the same rows to their models.
    """
    from gaverify.audit.same_data import Matcher  # which needs torch

    if not has_same_rows:  # draws are added to them: a replay in the wrong order will have other rows
        return "turns", "blocks"
    last, rows = getattr(accumulated, "ranks", (accumulated,))[-1].rows(1), full.rows(1)
    spot = Matcher(rows).find(range(len(rows)), last[0]) if last else None
    if spot is None:
        return ()
    return ("turns",) if spot.is_scattered else ("blocks",)


_NUMBER = re.compile(r"(?<![\w.])\d{1,6}(?![\w.])")  # such as the K that a script is given


def audit(request: Request, progress: Progress | None = None, *, patches: Patches = "none") -> Audit:
    """Runs the script as the request says and returns what was found.

    Args:
        request: The script and its two runs.
        progress: Called with what runs now, how many runs are over, and how many there are as a rule.
        patches: Which patches of the user's source are tried; "unsafe": also those that change the model.

    Raises:
        SpecError: The request itself is wrong.
        ProblemError: A run of the script failed, or gave nothing to compare.
    """
    request.check()
    for command in (request.command_of("full"), request.command_of("accumulated")):
        # A wrong name is told before the first run: a run may take minutes before it shows that nothing took the value.
        check_values(command.script, command.module, command.values)
    if not request.events_only and request.is_same:
        return same_arguments(request)
    with ended_as_interrupted(), _folder(request) as folder:
        return _report(request, Runner(request, folder, progress or (lambda *_: None)), patches)


def audit_again(folder: str) -> Audit:
    """Compares and judges the records of an audit that `--keep` left in `folder`; runs nothing.

    Raises:
        SpecError: The folder holds no such records.
        ProblemError: They do not suffice: another version of gaverify made them.
    """
    request = read_request(folder)
    return _report(request, Runner(request, Path(folder), lambda *_: None, reuse_records=True))


def _report(request: Request, runner: Runner, patches: Patches = "none") -> Audit:
    started = time.monotonic()
    audited = Comparer(request, runner)
    try:
        runs = audited.record_events() if request.events_only else audited.compare()
    except Uncompared as error:
        return report_without_comparison(request, str(error))
    report = _report_of(request, runner, runs)
    if patches != "none":
        report = _with_patch(report, runs, runner, patches)
    return replace(report, timings={**runner.timings, "total": time.monotonic() - started})


def _report_of(request: Request, runner: Runner, runs: ComparedRuns) -> Audit:
    findings = with_excerpts(findings_for(comparison_of(runs.record)))
    closing = runs.accumulated.closing
    return report_of(request, runs.record, findings, runner.summaries, closing, runner.timings)


# A patch of the user's source: the audit is made again on copies of the files that hold it.


def _with_patch(report: Audit, runs: ComparedRuns, runner: Runner, patches: Patches) -> Audit:
    """Returns the report with a patch that was tried and came out equivalent, or with the reason why there is none."""
    request = runner.request
    if report.outcome is not Outcome.DIVERGENT or request.events_only:
        return replace(report, patch_refused=explain_no_trial(report, events_only=request.events_only))
    if request.in_place:
        return replace(report, patch_refused="with `--in-place` there are no copies of the files to try a patch on")
    trials = PatchTrials(runner, runs, len(report.updates))
    context = read_context(script_of(request), runs.record)
    patch, refused = search_patch(report.findings, context, trials, allow_unsafe=patches == "unsafe")
    return replace(report, patch=patch, patch_refused=refused)


@dataclass(frozen=True)
class PatchTrials:
    """Makes the audit again with patched sources.

    Args:
        runner: The runner of the unpatched audit.
        runs: Its runs.
        updates: How many updates it compared.
    """

    runner: Runner
    runs: ComparedRuns
    updates: int

    def __call__(self, texts: Mapping[str, str], *, safe: bool) -> TrialResult:
        """Returns what the audit of patched sources finds.

        Args:
            texts: The patched files.
            safe: Whether the gradient of the patched full-batch run is compared with the unpatched one's.
        """
        runner = self.runner
        runner.progress("trying a patch", runner.done, 3)
        patched = tuple(texts.items())
        folder = runner.folder / "patched"
        folder.mkdir()
        try:
            trial_runner = Runner(runner.request, folder, runner.progress, patched=patched)
            runs = Comparer(runner.request, trial_runner).compare()
            report = _report_of(runner.request, trial_runner, runs)
            compared = sum(update.judged for update in report.updates)
            is_right = report.outcome is Outcome.EQUIVALENT and compared >= self.updates
            factor = self._factor_of_full_batch(patched) if is_right and safe else math.nan
            return TrialResult(is_right, report.findings, runs.record, factor)
        except (ProblemError, Uncompared):
            return TrialResult(is_equivalent=False)
        finally:
            remove(folder)

    def _factor_of_full_batch(self, patched: tuple[tuple[str, str], ...]) -> float:
        """Returns of what multiple of the unpatched full batch's first gradient the patched one is; NaN of none."""
        trial = self.runs.trial
        if trial is None:
            return math.nan
        planned = trial.full_batch_control(LeadSteps(), updates=1)
        run = trial.run(replace(planned, command=replace(planned.command, patched=patched)))
        update = next(iter(trial.compare(run)), None)
        if update is None or not update.judged:
            return math.nan
        # A clipping that reaches the step only now changes what is used, and not the gradient itself.
        summed = (stage.outcome for stage in update.stages if stage.stage is Stage.SUMMED)
        if Outcome.EQUIVALENT in (update.outcome, *summed):
            return 1.0
        fit = update.window.fit
        is_multiple = fit is not None and fit.factor_residual < COMPUTED_FLOAT32 and abs(fit.factor) > COMPUTED_FLOAT32
        return fit.factor if fit is not None and is_multiple else math.nan


@contextmanager
def _folder(request: Request) -> Iterator[Path]:
    """Gives the folder of the runs' records: it is removed with the audit, or kept if that ends without an error."""
    if request.keep is None:
        with working_folder("gaverify-audit-") as folder:
            yield folder
        return
    folder = Path(request.keep).resolve()
    # A folder that was there before stays, even if it is empty; one that the audit made goes with a failure.
    existed = folder.is_dir()
    try:
        with told_where_full(folder):
            folder.mkdir(parents=True, exist_ok=True)
            yield folder
            (folder / RECORDED).write_text(encode_request(request), encoding="utf-8")
        # Files that the script itself wrote, such as checkpoints, are no record, and may be large.
        for changes in folder.glob("*/written"):
            remove(changes)
        remove_copies(folder)  # no run is made of kept records
    except BaseException:
        for entry in list(folder.iterdir()) if folder.is_dir() else []:
            remove(entry)
        if not existed:
            remove(folder)
        raise


@dataclass(frozen=True)
class ComparedRuns:
    """A full-batch run, the accumulated run that was compared with it, and what that shows."""

    record: Record
    full: RecordedRun
    accumulated: RecordedRun
    changes: Changes = ()
    """The changes of both runs."""
    trial: Trial | None = None
    """Makes the controls that explain a difference; None: there are no two runs to compare."""

    @property
    def has_same_samples(self) -> bool:
        """Whether both runs saw the same samples in their first update."""
        return bool(self.record.updates) and self.record.updates[0].data.same

    @property
    def way(self) -> Replay | None:
        """The kind of replay of both runs; None: nothing was replayed."""
        return next((change.way for change in self.changes if isinstance(change, ReplayData)), None)


class Comparer:
    """Makes the runs of one audit and compares them, again with more changes if that may decide more."""

    def __init__(self, request: Request, runner: Runner) -> None:
        self._request, self._runner = request, runner

    def record_events(self) -> ComparedRuns:
        """Makes one run, and looks only at the order of its calls."""
        run, changes = self._runner.make_first("events")
        record = Record(Calls(windows_of(run.events), ledger_of(run.events), steps=self._request.steps))
        return ComparedRuns(record, run, run, changes)

    def compare(self) -> ComparedRuns:
        """Compares the runs: as they are, with a replay, in float32, and with a short last window if that is asked for.

        The full-batch run comes first: the others are given its random draws.
        """
        full, changes = self._runner.make_first("full")
        runs = self._lift(self._replay(self._compare(full, changes)))
        # Last, since it changes the script's epochs: only if full windows show no fault is a short one worth the runs.
        if self._request.tail:
            return self._shorten_epochs(runs, changes)
        return replace(runs, record=replace(runs.record, epochs=_epochs_text(runs)))

    def _compare(self, full: RecordedRun, changes: Changes, shown_as: str = "") -> ComparedRuns:
        """Makes the runs that follow a full-batch run, compares, and runs the controls that decide the outcome."""
        trial = Trial(self._runner, full, changes, shown_as)
        self._runner.progress("comparing", self._runner.done, 3)
        from gaverify.audit.controls import decide_outcome

        return ComparedRuns(decide_outcome(trial, self._record_of(trial)), full, trial.accumulated, changes, trial)

    def _replay(self, first: ComparedRuns) -> ComparedRuns:
        """Compares again with the data of the full-batch run, if the runs may have seen other samples or draws.

        Only the comparison that is returned is explained.
        """
        unaligned = dict(first.record.unaligned)
        for way in self._ways(first):
            changes = (ReplayData(way, micro_batches_per_batch(first.record)), *first.changes)
            runs = self._compare(self._runner.run("full", *changes), changes)
            if runs.has_same_samples:
                self._runner.drop_copies(first.full)
                # The first comparison stays without a cause: other draws alone may be what made it differ.
                return _explain(runs)
            unaligned |= runs.record.unaligned
            self._runner.drop_copies(runs.full)
        explained = _explain(first)
        return replace(explained, record=replace(explained.record, unaligned=unaligned))

    def _ways(self, first: ComparedRuns) -> list[Replay]:
        """Returns the replays that may help, the smallest change to the script first."""
        record, full, accumulated = first.record, first.full.closing, first.accumulated.closing
        helps = needs_replay(record, full, accumulated)
        if self._request.has_ranks:
            # Only draws of their loops are given to ranks: their own loaders share the samples.
            if not helps or not (full.draws.in_loop or accumulated.draws.in_loop):
                return []
            return [*possible_orders(first.full, first.accumulated, has_same_rows=first.has_same_samples)]
        ways: list[Replay] = ["samples"] if helps else []
        if helps and full.loaders:
            ways.append("batches")  # where the collation draws, micro-batches that are collated anew would draw anew
        return ways

    def _lift(self, runs: ComparedRuns) -> ComparedRuns:
        """Compares in float32, if rounding below it hides the outcome or the cause; the report is of the first runs."""
        if not is_hidden_below_float32(runs.record):
            return runs
        self._runner.drop_copies(runs.full)  # the difference is explained as far as these runs can
        changes = merge_changes(runs.changes, [ComputeInFloat32(), DisableCompilation()])
        with suppress(ProblemError):  # a script may not run in float32
            full = self._runner.run("full", *changes, shown_as="float32")
            record = _explain(self._compare(full, changes, "float32")).record
            if record.updates and not is_hidden_below_float32(record):
                return replace(runs, record=replace(record, float32=True))
        return runs

    def _shorten_epochs(self, runs: ComparedRuns, changes: Changes) -> ComparedRuns:
        """Compares on epochs that end with a short window, if nothing was found without."""
        record, loaders = runs.record, runs.accumulated.closing.loaders
        if record.divergent is not None or is_explained(record):
            return runs
        parts, copies = micro_batches_per_batch(record), runs.full.closing.copies
        has_no_copy = copies is not None and not copies.updates
        if has_no_copy or parts < 2 or not loaders or self._request.has_ranks:
            why = "it trains without a `DataLoader`" if not loaders else "K is not known: give `--steps`"
            why = "with several ranks, gaverify does not change the loaders" if self._request.has_ranks else why
            why = "the disk has no room for a copy of the gradients" if has_no_copy else why
            return replace(runs, record=replace(record, epochs=f"; `--tail` could not shorten an epoch: {why}"))
        self._runner.drop_copies(runs.full)
        self._runner.updates = max(self._request.updates, 3)  # a full window, a short one, the next epoch's first
        replay = ReplayData("batches" if runs.way == "batches" else "samples", parts, parts // 2)
        tail = _explain(self._compare(self._runner.run("full", replay, *changes), (replay, *changes)))
        epochs = f"; with epochs whose last window has {parts // 2} of {parts} micro-batches"
        return replace(tail, record=replace(tail.record, epochs=epochs))

    def _record_of(self, trial: Trial) -> Record:
        """Returns what the runs show without any control."""
        from gaverify.audit.judgement import windows_skipped_alike, working_unit  # the first to need torch

        started = time.monotonic()
        full, accumulated, numbers = trial.full, trial.accumulated, trial.numbers
        arguments = self._request.accumulated or ()
        record = Record(
            Calls(
                windows_of(accumulated.events, numbers),
                ledger_of(accumulated.events),
                windows_of(full.events, numbers),
                ledger_of(full.events),
                steps=self._request.steps,
                numbers=tuple(int(word) for argument in arguments for word in _NUMBER.findall(argument)),
                skipped_alike=windows_skipped_alike(full, accumulated),
            ),
            trial.compare(),
            unit=working_unit(full),
            ranks=max(full.closing.ranks, accumulated.closing.ranks),
            full_ranks=full.closing.ranks if self._request.has_ranks else 1,
            dealt=full.closing.draws.count if accumulated.closing.draws.dealt else 0,
            unaligned=accumulated.closing.draws.unaligned,
            left_out=left_out_text(full.closing.copies, self._request.updates),
        )
        self._runner.timings["comparison"] = time.monotonic() - started
        return record


def _explain(runs: ComparedRuns) -> ComparedRuns:
    """Returns a comparison with the causes of a difference, which take controls of their own."""
    if runs.trial is None:
        return runs
    from gaverify.audit.controls import explain_difference

    return replace(runs, record=explain_difference(runs.trial, runs.record))


def left_out_text(copies: GradientCopies | None, wanted: int) -> str:
    """Returns what the report says of updates that start from steps whose gradients were not copied."""
    if copies is None or copies.updates + 1 >= wanted:
        return ""
    copy = bytes_text(copies.wanted)
    if copies.updates:
        return f"; only updates 1 and 2 were compared: others would need more than one copy of the gradients ({copy})"
    return (
        f"; only update 1 was compared: update 2 needs a copy of the gradients, whose {copy} are over half of what "
        f"is free on the disk ({bytes_text(copies.free)}). The variable `TMPDIR` names a folder on another disk"
    )


def _epochs_text(runs: ComparedRuns) -> str:
    """Returns what the report adds about epochs and padding."""
    closing = runs.accumulated.closing
    padded = "; micro-batches were cut from the full-batch run's batches, with their padding"
    unseen = "; no epoch ended: `--tail` also checks a shorter last window"
    return padded * (runs.way == "batches") + unseen * bool(closing.loaders and not closing.epochs)
