"""The whole audit: three runs of the script, their comparison, the rules, the report."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaverify.audit.job import COMPILED, Files, Job, Role
from gaverify.audit.launch import free_port
from gaverify.audit.outcome import report_of, same_arguments
from gaverify.audit.processes import Done, NoView, run_jobs
from gaverify.audit.replay.deciding import parts_of, replay_helps
from gaverify.audit.request import RECORDED, Request, kept, written
from gaverify.children import ended_as_interrupted, working_folder
from gaverify.children.folders import remove
from gaverify.errors import ProblemError
from gaverify.records.audit import Record
from gaverify.records.audit_report import TITLES, AuditReport, RunSummary
from gaverify.records.facts import facts_of_loop
from gaverify.records.rounds import common_rounds, numbered, rounds_of
from gaverify.records.weights import WeightFit
from gaverify.records.windows import ledger_of, windows_of
from gaverify.rules import findings_for
from gaverify.sources import with_excerpts

if TYPE_CHECKING:
    from gaverify.audit.reading import Run

Progress = Callable[[str, int, int], None]
_NUMBER = re.compile(r"(?<![\w.])\d{1,6}(?![\w.])")
_MOST_HELD = 64  # micro-batches that the control with undone steps runs at most


def audit(request: Request, progress: Progress | None = None) -> AuditReport:
    """Runs the script as the request says and returns what was found.

    Raises:
        SpecError: The request itself is wrong.
        ProblemError: A run of the script failed, or gave nothing to compare.
    """
    request.check()
    if not request.events_only and request.same:
        return same_arguments(request)
    with ended_as_interrupted(), _folder(request) as folder:
        return _report(request, _Audit(request, folder, progress or (lambda *_: None)))


def audit_again(folder: str) -> AuditReport:
    """Compares and judges the records of an audit that `--keep` left in `folder`; runs nothing.

    Raises:
        SpecError: The folder holds no such records.
        ProblemError: They do not suffice: another version of gaverify made them.
    """
    request = kept(folder)
    return _report(request, _Audit(request, Path(folder), lambda *_: None, again=True))


def _report(request: Request, audited: _Audit) -> AuditReport:
    started = time.monotonic()
    record = audited.events_only() if request.events_only else audited.compared()
    findings = with_excerpts(findings_for(facts_of_loop(record)))
    timings = {**audited.timings, "total": time.monotonic() - started}
    return report_of(request, record, findings, audited.summaries, audited.main.meta, timings)


@contextmanager
def _folder(request: Request) -> Iterator[Path]:
    """Where the runs write: a folder that goes with the audit, or one that is kept if the audit comes to its end."""
    if request.keep is None:
        with working_folder("gaverify-audit-") as folder:
            yield folder
        return
    folder = Path(request.keep).resolve()
    there = folder.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        (folder / RECORDED).write_text(written(request), encoding="utf-8")
        for changes in folder.glob("*/written"):
            remove(changes)
    except BaseException:
        for entry in list(folder.iterdir()) if folder.is_dir() else []:
            remove(entry)
        if not there:
            remove(folder)
        raise


@dataclass
class _Audit:
    request: Request
    folder: Path
    progress: Progress
    again: bool = False  # the runs were made before: only read what they left

    def __post_init__(self) -> None:
        self.summaries: list[RunSummary] = []
        self.timings: dict[str, float] = {}
        self._done = 0
        self._updates = self.request.updates
        self._files: Files = "in-place" if self.request.in_place else "view"

    def events_only(self) -> Record:
        """One run, its calls alone."""
        (self.main,) = self._run([self._job("events")])
        windows = windows_of(self.main.events)
        return Record(windows, ledger_of(self.main.events), steps=self.request.steps)

    def compared(self) -> Record:
        """Full batch first, because its draws are dealt to the accumulated run; then the other two side by side."""
        (full,) = self._run([self._job("full")])
        visible: dict[str, Any] = {}
        if full.meta["fused"]:  # random draws out of sight: again, in a way that shows them
            eager = COMPILED in full.meta["fused"]
            visible = {"math_kernels": set(full.meta["fused"]) != {COMPILED}, "eager": eager}
            (full,) = self._run([self._job("full", **visible)])
        record = self._replayed(full, visible)
        return self._with_tail(record, visible) if self.request.tail else replace(record, epochs=self._epochs())

    def _replayed(self, full: Run, visible: dict[str, Any]) -> Record:
        """Compares, and once more with the data of the full-batch run where that may help."""
        record = self._against(full, visible, {})
        if self.request.ranks is not None or not replay_helps(record, full.meta, self.main.meta):
            return record
        first, main, again = record, self.main, {"replay": True, **visible}
        (full,) = self._run([self._job("full", **again)])
        record = self._against(full, again, {"parts": parts_of(first)})
        if record.updates and record.updates[0].data.same:
            return record
        self.main = main
        return replace(first, unaligned={**first.unaligned, **record.unaligned})

    def _epochs(self) -> str:
        unseen = self.main.meta["loaders"] and not self.main.meta["epochs"]
        return "; no epoch's end was reached (`--tail` makes one)" if unseen else ""

    def _with_tail(self, record: Record, visible: dict[str, Any]) -> Record:
        """The same runs on epochs that end with a short window, where nothing was found without."""
        if record.divergent is not None or any(
            finding.severity == "fault" for finding in findings_for(facts_of_loop(record))
        ):
            return record
        parts, loaders = parts_of(record), self.main.meta["loaders"]
        if parts < 2 or not loaders or self.request.ranks is not None:
            why = "it trains without a `DataLoader`" if not loaders else "K is not known: give `--steps`"
            why = "with `--ranks` loaders are left alone" if self.request.ranks is not None else why
            return replace(record, epochs=f"; `--tail` could not shorten an epoch: {why}")
        tail: dict[str, Any] = {"parts": parts, "tail": parts // 2}
        self._updates = max(self.request.updates, 3)  # a whole window, the short one, and the next epoch's first
        again = {"replay": True, **visible}
        (full,) = self._run([self._job("full", **again, **tail)])
        record = self._against(full, again, tail)
        return replace(record, epochs=f"; with epochs whose last window has {parts // 2} of {parts} micro-batches")

    def _against(self, full: Run, visible: dict[str, Any], parts: dict[str, Any]) -> Record:
        """Makes the runs that are held against a full-batch run, and compares."""
        unit, early = float(full.meta["unit"]), not full.meta["modules"]
        options: dict[str, Any] = {"source": str(full.folder), **visible}
        repeated = {**options, **parts, "parts": 1} if parts else options
        *ranks, perturbed = self._run(
            [
                *self._ranks(**options, **parts),
                self._job("perturbed", unit=unit, perturb_early=early, **repeated),
            ]
        )
        accumulated = self._together(ranks)
        self.main = accumulated
        self.progress("comparing", 3, 3)
        return self._record(full, perturbed, accumulated, {**options, **parts})

    def _ranks(self, **options: Any) -> list[Job]:
        """The jobs of the accumulated run, one for each rank."""
        count = self.request.ranks
        if count is None:
            return [self._job("accumulated", **options)]
        port = free_port()
        return [self._job("accumulated", rank=rank, world=(rank, count, port), **options) for rank in range(count)]

    def _together(self, runs: list[Run]) -> Run:
        if self.request.ranks is None:
            return runs[0]
        from gaverify.audit.ranks import RankedRun

        _check_ranks([run.meta["ranks"] for run in runs])
        return RankedRun(runs[0].role, runs[0].folder, max(run.seconds for run in runs), tuple(runs))

    def _record(self, full: Run, perturbed: Run, accumulated: Run, options: dict[str, Any]) -> Record:
        from gaverify.audit.judgement import compare_updates, working_unit  # the first to need torch

        begun = time.monotonic()
        numbers = numbered(common_rounds(full.events, accumulated.events))
        record = Record(
            windows_of(accumulated.events, numbers),
            ledger_of(accumulated.events),
            windows_of(full.events, numbers),
            compare_updates(full, perturbed, accumulated, self._updates),
            self.request.steps,
            working_unit(full),
            full_ledger=ledger_of(full.events),
            ranks=max(full.meta["ranks"], accumulated.meta["ranks"]),
            dealt=full.meta["draws"] if accumulated.meta["dealt"] else 0,
            unaligned=accumulated.meta["unaligned"],
            numbers=tuple(int(word) for argument in self.request.accumulated for word in _NUMBER.findall(argument)),
        )
        if self.request.ranks is not None and record.updates:
            from gaverify.audit.ranks import RankedRun, rank_facts

            assert isinstance(accumulated, RankedRun)
            first_update = record.updates[0]
            facts = rank_facts(full, accumulated, first_update.outcome, first_update.relative_difference, record.unit)
            record = replace(record, together=facts)
        self.timings["comparison"] = time.monotonic() - begun
        if any(update.other_step for update in record.updates):
            record = self._on_its_own(full, perturbed, record, options)
        first = record.first
        if self.request.ranks is None and first is not None and first.backwards < (record.expected(first) or 0):
            record = replace(record, held=self._held(full, record, options))
        return record

    def _on_its_own(self, full: Run, perturbed: Run, record: Record, options: dict[str, Any]) -> Record:
        """The control for a step that makes something else of the same gradient: with the script's own gradients."""
        from gaverify.audit.judgement import settled_by_weights

        try:
            own = self._together(self._run([replace(job, lead=False) for job in self._ranks(**options)]))
        except ProblemError:
            return record
        return replace(record, updates=settled_by_weights(record.updates, full, perturbed, own))

    def _held(self, full: Run, record: Record, options: dict[str, Any]) -> WeightFit | None:
        """The control for a step inside the window: once more with every step undone, then fit all micro-batches."""
        from torch import Tensor

        from gaverify.audit.fitting import fit_gradients

        first = record.first
        steps = record.expected(first) if first is not None else None
        if first is None or steps is None or not 1 < steps <= _MOST_HELD:
            return None
        try:
            (held,) = self._run([replace(self._job("frozen", **options), updates=steps)])
        except ProblemError:
            return None
        samples = [held.samples(round_) for round_ in rounds_of(held.events)[:steps]]
        increments = [increment for sample in samples for increment in sample.increments][:steps]
        whole = full.samples(rounds_of(full.events)[0])
        used = {at: sum(step[at] for step in increments if at in step) for at in whole.summed}
        totals = {at: total for at, total in used.items() if isinstance(total, Tensor)}
        if len(totals) < len(used):
            return None  # a step inside the backward left no gradient to be seen
        return fit_gradients(whole.summed, whole.of("stretches"), totals, increments)

    def _job(self, role: Role, *, rank: int = 0, **options: Any) -> Job:
        request = self.request
        own = {"accumulated": request.accumulated, "frozen": request.accumulated, "events": ()}.get(role, request.full)
        folder = self.folder / (f"{len(self.summaries)}-{role}" + (f"-rank-{rank}" if rank else ""))
        if request.ranks is not None:
            options.setdefault("world", (0, 1, free_port()))
        setting = request.setting(role)
        return Job(
            role,
            setting.script or request.script,
            request.module,
            (*request.common, *own),
            str(folder),
            self._updates,
            files=self._files,
            environment=setting.environment,
            values=setting.values,
            seed=request.seed,
            **options,
        )  # type: ignore[arg-type]

    def _run(self, jobs: list[Job]) -> list[Run]:
        from gaverify.audit.reading import Run

        children = self._children(jobs)
        self._done += len(jobs)
        runs = [Run(child.job.role, child.folder, child.seconds) for child in children]
        for child, run in zip(children, runs, strict=True):
            self.timings[child.job.role] = child.seconds
            self.summaries.append(_summary(child, run))
            _check_updates(child, run)
        return runs

    def _children(self, jobs: list[Job]) -> list[Done]:
        """Side by side, or one after the other where they would write into the same folder."""
        if self.again:
            return [_done_before(Path(job.folder)) for job in jobs]
        pairs = [(job, self.request.command(job.arguments, self.request.setting(job.role))) for job in jobs]
        roles = list(dict.fromkeys(job.role for job in jobs))  # the ranks of a run need each other
        apart = [[pair for pair in pairs if pair[0].role == role] for role in roles]
        groups = [pairs] if self._files == "view" else apart
        try:
            return [child for group in groups for child in run_jobs(group, self.request.timeout, self._running)]
        except NoView:
            self._files = "guard"
            return self._children([replace(job, files="guard") for job in jobs])

    def _running(self, what: str) -> None:
        self.progress(what, self._done, 3)


def _check_ranks(seen: list[int]) -> None:
    """Raises unless the script trained in as many ranks as were started."""
    if set(seen) != {len(seen)}:
        counts = ", ".join(map(str, sorted(set(seen))))
        raise ProblemError(
            f"--ranks {len(seen)}: the script's process group had {counts} of {len(seen)} ranks at its first step; "
            "it has to call torch.distributed.init_process_group with the RANK and WORLD_SIZE of its environment, as "
            "under torchrun"
        )


def _done_before(folder: Path) -> Done:
    try:
        return Done.read(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProblemError(
            f"--from {folder.parent}: the record of `{folder.name}` is missing or cannot be read ({error}); "
            "another version of gaverify made them: run the audit again"
        ) from error


def _summary(child: Done, run: Run) -> RunSummary:
    job = child.job
    given = ["with the full-batch run's samples and draws"] if job.replay and job.source else []
    how = ", ".join(["without compilation"] * job.eager + ["attention unfused"] * job.math_kernels + given)
    return RunSummary(job.role, child.command, run.updates, child.seconds, run.disk_bytes, run.meta["reason"], how)


def _check_updates(child: Done, run: Run) -> None:
    """Raises unless the script trained."""
    title = TITLES[child.job.role]
    backwards = any(event.kind == "backward" for event in run.events)
    steps = any(event.kind == "step" for event in run.events)
    ended = run.meta["reason"]
    how = f"it left with sys.{ended.replace('exit ', 'exit(', 1)})" if ended.startswith("exit") else "it ran to its end"
    if not steps:
        seen = "neither a backward pass nor an optimizer step"
        if backwards:
            seen = "backward passes, but no optimizer step"
        raise ProblemError(
            f"the {title} reached no optimizer step ({how}): {child.command}\n"
            f"it made {seen}; give arguments with which it trains for at least one update"
        )
    if not backwards:
        raise ProblemError(
            f"the {title} stepped without any backward pass ({how}): {child.command}\n"
            "gradients that come from torch.autograd.grad or are set by hand cannot be followed"
        )
