"""The whole audit: three runs of the script, their comparison, the rules, the report."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gaverify.audit.answer import AuditReport, RunSummary
from gaverify.audit.job import COMPILED, Job, Role
from gaverify.audit.outcome import report_of, same_arguments
from gaverify.audit.processes import TITLES, Child, run_jobs
from gaverify.audit.records import Record, WeightFit
from gaverify.audit.request import Request
from gaverify.audit.rules import findings_for
from gaverify.audit.windows import ledger_of, windows_of
from gaverify.errors import ProblemError

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
    if not request.events_only and request.full == request.accumulated:
        return same_arguments(request)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gaverify-audit-", ignore_cleanup_errors=True) as folder:
        audited = _Audit(request, Path(folder), progress or (lambda *_: None))
        record = audited.events_only() if request.events_only else audited.compared()
        findings = findings_for(record)
        timings = {**audited.timings, "total": time.monotonic() - started}
        return report_of(request, record, findings, audited.summaries, audited.main.meta, timings)


@dataclass
class _Audit:
    request: Request
    folder: Path
    progress: Progress

    def __post_init__(self) -> None:
        self.summaries: list[RunSummary] = []
        self.timings: dict[str, float] = {}
        self._done = 0

    def events_only(self) -> Record:
        """One run, its calls alone."""
        (self.main,) = self._run([self._job("events")])
        windows = windows_of(self.main.events)
        return Record(windows, ledger_of(self.main.events), steps=self.request.steps)

    def compared(self) -> Record:
        """Full batch first, because its draws are dealt to the accumulated run; then the other two side by side."""
        (full,) = self._run([self._job("full")])
        visible: dict[str, object] = {}
        if full.meta["fused"]:  # random draws out of sight: again, in a way that shows them
            eager = COMPILED in full.meta["fused"]
            visible = {"math_kernels": set(full.meta["fused"]) != {COMPILED}, "eager": eager}
            (full,) = self._run([self._job("full", **visible)])
        unit, early = float(full.meta["unit"]), not full.meta["modules"]
        options = {"source": str(full.folder), **visible}
        accumulated, perturbed = self._run([
            self._job("accumulated", **options),
            self._job("perturbed", unit=unit, perturb_early=early, **visible),
        ])  # fmt: skip
        self.main = accumulated
        self.progress("comparing", 3, 3)
        return self._record(full, perturbed, accumulated, options)

    def _record(self, full: Run, perturbed: Run, accumulated: Run, options: dict[str, object]) -> Record:
        from gaverify.audit.judgement import compare_updates, working_unit  # the first to need torch

        begun = time.monotonic()
        windows = windows_of(accumulated.events)
        record = Record(
            windows, ledger_of(accumulated.events), windows_of(full.events),
            compare_updates(full, perturbed, accumulated, self.request.updates), self.request.steps,
            working_unit(full), dealt=full.meta["draws"] if accumulated.meta["dealt"] else 0,
            unaligned=accumulated.meta["unaligned"],
            numbers=tuple(int(word) for argument in self.request.accumulated for word in _NUMBER.findall(argument)),
        )  # fmt: skip
        self.timings["comparison"] = time.monotonic() - begun
        first = record.first
        if first is not None and first.backwards < (record.expected(first) or 0):
            record = replace(record, held=self._held(full, record, options))
        return record

    def _held(self, full: Run, record: Record, options: dict[str, object]) -> WeightFit | None:
        """The control for a step inside the window: once more with every step undone, then fit all micro-batches."""
        from torch import Tensor

        from gaverify.audit.fitting import fit_weights

        first = record.first
        steps = record.expected(first) if first is not None else None
        if first is None or steps is None or not 1 < steps <= _MOST_HELD:
            return None
        try:
            (held,) = self._run([replace(self._job("frozen", **options), updates=steps)])
        except ProblemError:
            return None
        samples = [held.samples(number) for number in range(1, min(held.updates, steps) + 1)]
        increments = [increment for sample in samples for increment in sample["increments"]][:steps]
        used = {at: sum(step[at] for step in increments if at in step) for at in full.samples(1)["final"]}
        if not all(isinstance(total, Tensor) for total in used.values()):
            return None  # a step inside the backward left no gradient to be seen
        return fit_weights(full.samples(1), {"final": used, "increments": increments})

    def _job(self, role: Role, **options: object) -> Job:
        request = self.request
        own = {"accumulated": request.accumulated, "frozen": request.accumulated, "events": ()}.get(role, request.full)
        folder = self.folder / f"{len(self.summaries)}-{role}"
        return Job(role, request.script, request.module, (*request.common, *own), str(folder), request.updates,
                   **options)  # type: ignore[arg-type]  # fmt: skip

    def _run(self, jobs: list[Job]) -> list[Run]:
        from gaverify.audit.reading import Run

        pairs = [(job, self.request.command(job.arguments)) for job in jobs]
        children = run_jobs(pairs, self.request.timeout, lambda what: self.progress(what, self._done, 3))
        self._done += len(jobs)
        runs = [Run(child.job.role, child.folder, child.seconds) for child in children]
        for child, run in zip(children, runs, strict=True):
            self.timings[child.job.role] = child.seconds
            self.summaries.append(_summary(child, run))
            _check_updates(child, run)
        return runs


def _summary(child: Child, run: Run) -> RunSummary:
    job = child.job
    how = ", ".join(["without compilation"] * job.eager + ["attention unfused"] * job.math_kernels)
    return RunSummary(job.role, child.command, run.updates, child.seconds, run.disk_bytes, run.meta["reason"], how)


def _check_updates(child: Child, run: Run) -> None:
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
