"""Makes the runs of one audit: plans them, gives each process its job, and reads what they recorded.

A `Runner` makes runs. A `Trial` is a full-batch run with the runs that follow it, and plans their controls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gaverify.audit.folders import COMPILED, ranks_of, remove_copies
from gaverify.audit.job import (
    Change,
    Changes,
    DisableCompilation,
    Files,
    Job,
    LeadSteps,
    PerturbWeights,
    ReplayData,
    Role,
    Run,
    UseMathKernels,
    merge_changes,
)
from gaverify.audit.launchers import free_port
from gaverify.audit.memory import fit_side_by_side
from gaverify.audit.processes import Child, check_parameters, check_ranks, check_updates, run_jobs
from gaverify.audit.request import Request
from gaverify.errors import ProblemError, TimeLimit
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.audit_report import RunSummary
from gaverify.records.events import Backward
from gaverify.records.ranks import Shares
from gaverify.records.windows import common_rounds, number_steps

if TYPE_CHECKING:
    from gaverify.audit.reading import RecordedRun

Progress = Callable[[str, int, int], None]


@dataclass
class Runner:
    """Runs the script with what the user asked for, and keeps a summary of every run.

    Args:
        request: The user's options.
        folder: Where the runs write.
        progress: Called with what runs now, how many runs are over, and how many there are as a rule.
        reuse_records: Make no runs, and read those that an earlier audit made in the folder.
        patched: (path, text) pairs of the user's files that the runs see changed.
    """

    request: Request
    folder: Path
    progress: Progress
    reuse_records: bool = False
    patched: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        self.summaries: list[RunSummary] = []
        self.timings: dict[str, float] = {}
        self.updates = self.request.updates
        self.done, self._last = 0, -1  # runs that have ended, and the number of the last one
        self._fits_twice = True  # whether two runs fit into the memory
        self.limit = TimeLimit(None if self.reuse_records else self.request.time_limit)

    def make_first(self, role: Role) -> tuple[RecordedRun, Changes]:
        """Makes the first run of an audit, and returns it with the changes that were needed to record it.

        It is made again without compilation if its steps were not seen. So it is if kernels or compiled graphs made
        random draws, which cannot be replayed.

        Raises:
            ProblemError: It failed, or trained in several processes without being asked to.
        """
        changes: Changes = ()
        if not self.reuse_records:
            # Reading a record needs torch: this process imports it while the script trains, not after that.
            threading.Thread(target=_import_torch).start()
        run = self.run(role)
        self._fits_twice = fit_side_by_side(run.closing.memory, self.request.ranks or 1)
        # A script that starts ranks by itself would compare ranks with ranks, which hides every fault of theirs.
        if self.request.launcher and not self.request.full_launcher and run.closing.ranks > 1:
            raise ProblemError(
                f"the full-batch run trained in {run.closing.ranks} processes, so errors between them would be in both "
                'runs and could not show. Give it arguments for one process, such as --full "--devices 1", or write '
                "--full-launcher if the script seeds by rank"
            )
        # No backward pass can be seen inside a compiled training step.
        if run.closing.unseen.has_compiled and not any(isinstance(event, Backward) for event in run.events):
            changes = (DisableCompilation(),)
            run = self._run_again(run, *changes)
        if fused := set(run.closing.draws.fused):
            # As few changes as possible: unfused attention needs more memory, and code without compilation more time.
            kernels = [UseMathKernels()] if fused != {COMPILED} else []
            changes = merge_changes(changes, kernels, [DisableCompilation()] if COMPILED in fused else [])
            run = self._run_again(run, *changes)
        return run, changes

    def _run_again(self, run: RecordedRun, *changes: Change) -> RecordedRun:
        """Makes a first run once more, which takes the place of the one that was made."""
        self.drop_copies(run)
        return self.run(run.role, *changes)

    def drop_copies(self, run: RecordedRun) -> None:
        """Removes the gradients that a run has copied for the steps of others: no run follows it any more."""
        if not self.reuse_records:
            remove_copies(run.folder)

    def run(self, role: Role, *changes: Change, shown_as: str = "") -> RecordedRun:
        """Makes one run that follows no other.

        Raises:
            ProblemError: It failed, or did not train.
        """
        return self.record(self.plan(role, *changes, shown_as=shown_as))[0]

    def plan(
        self,
        role: Role,
        *changes: Change,
        source: RecordedRun | None = None,
        updates: int | None = None,
        shown_as: str = "",
    ) -> Run:
        """Returns a run of the script with what the user asked for.

        Args:
            role: Its role.
            changes: Its differences from the script alone.
            source: The full-batch run that it follows; of one with ranks it follows rank 0, and is given the draws of
                all.
            updates: Updates to record; None: as many as the audit compares.
            shown_as: How the report calls it.
        """
        members = () if source is None else getattr(source, "ranks", (source,))
        sources = tuple(str(member.folder) for member in members)
        command = replace(self.request.command_of(role), patched=self.patched)
        return Run(command, role, self.updates if updates is None else updates, sources, changes, shown_as)

    def record(self, *runs: Run) -> list[RecordedRun]:
        """Makes runs, two side by side where the memory allows it, and returns what they recorded.

        Raises:
            ProblemError: A run failed, or did not train.
            TimeUp: They would belong to a search whose time is over.
        """
        self.limit.check()
        children = self._children([self._job_of(run) for run in runs])
        return [self._join(self._read_runs(child)) for child in children]

    def _job_of(self, run: Run) -> Job:
        self._last += 1
        port = free_port() if run.command.ranks else 0
        files: Files = "in-place" if self.request.in_place else "view"
        return Job(**vars(run), folder=str(self.folder / f"{self._last}-{run.kind}"), files=files, port=port)

    def _read_runs(self, child: Child) -> list[RecordedRun]:
        """Returns what the process of a run recorded, or each rank of its launcher."""
        from gaverify.audit.reading import RecordedRun

        runs = [RecordedRun(child.job.role, at, child.seconds) for at in ranks_of(child.folder)]
        self.done += 1
        self.timings[child.job.name] = child.seconds
        self.summaries.append(_summary(child, runs))
        for run in runs:
            check_updates(child, run)
        return runs

    def _join(self, runs: list[RecordedRun]) -> RecordedRun:
        """Returns the processes of a run as one run."""
        # One process is no group, even under a launcher; without one, ranks that a script starts itself are not joined.
        if len(runs) == 1 and (runs[0].closing.ranks == 1 or not self.request.has_ranks):
            return runs[0]
        from gaverify.audit.ranks import RankedRun

        check_ranks(self.request, [run.closing.ranks for run in runs])
        check_parameters(runs)
        return RankedRun(runs[0].role, runs[0].folder, max(run.seconds for run in runs), tuple(runs))

    def _children(self, jobs: Sequence[Job]) -> list[Child]:
        """Returns the processes of all jobs, which have ended."""
        if self.reuse_records:
            # the audit that made the records may have ended its search before these runs
            if self.request.time_limit is not None and not all(os.path.isdir(job.folder) for job in jobs):
                self.limit.end()
            return [Child.read(Path(job.folder)) for job in jobs]
        # Runs that have no memory beside each other, or that may write into the same folder, are made one by one.
        children, at_once = list[Child](), 2 if self._fits_twice and not self.request.in_place else 1
        for at in range(0, len(jobs), at_once):
            side_by_side = jobs[at : at + at_once]
            children += run_jobs(side_by_side, self.request.timeout, lambda what: self.progress(what, self.done, 3))
        return children


class Trial:
    """A full-batch run and the runs that follow it: the accumulated run, and the full batch with perturbed weights.

    Args:
        runner: Makes the runs.
        full: The full-batch run.
        changes: The differences of all three from the script alone.
        shown_as: How the report calls them; empty: by what they are.
    """

    def __init__(self, runner: Runner, full: RecordedRun, changes: Changes, shown_as: str = "") -> None:
        self.runner, self.full, self.changes, self.shown_as = runner, full, changes, shown_as
        copies = full.closing.copies
        if copies is not None:
            # An update without the full-batch run's step before it would start from other weights.
            runner.updates = min(runner.updates, copies.updates + 1)
        accumulated, self.perturbed = runner.record(self.control("accumulated"), self.perturbed_control())
        self.accumulated = accumulated.beside(full)
        self.failures: dict[str, str] = {}
        """Question of the search → why it could not be asked."""
        self.rounds = common_rounds(full.events, self.accumulated.events)
        """Steps of each update that is compared; a control is read at the same ones."""
        self.numbers = number_steps(self.rounds)

    @property
    def steps_itself(self) -> bool:
        """Whether the script has no optimizer of torch's and moves its weights itself."""
        return self.full.closing.steps_itself

    def control(
        self,
        role: Role,
        *changes: Change,
        source: RecordedRun | None = None,
        updates: int | None = None,
        shown_as: str = "",
        led: bool = True,
    ) -> Run:
        """Returns a control: a run with more changes than the runs that are compared.

        Args:
            role: Its role.
            changes: The control's own; they replace changes of the same class.
            source: The full-batch run that it follows; None: an accumulated run follows the trial's, a full-batch run
                follows none.
            updates: Updates to record; None: as many as the audit compares.
            shown_as: How the report calls it; empty: like the trial's runs.
            led: Let it step with the gradients of the run that it follows.
        """
        # Without the full-batch run's draws, dropout alone would make another gradient.
        if source is None and role == "accumulated":
            source = self.full
        leads = [LeadSteps()] if led and source is not None else []
        every_change = merge_changes(self.changes, leads, changes)
        shown_as = shown_as or self.shown_as
        return self.runner.plan(role, *every_change, source=source, updates=updates, shown_as=shown_as)

    def full_batch_control(self, *changes: Change, updates: int | None = None, shown_as: str = "") -> Run:
        """Returns a full-batch run that follows the trial's: it is given the same samples, and is led."""
        # `parts` is the accumulated run's: a full-batch run is given whole batches
        whole_batches = [replace(change, parts=1) for change in self.changes if isinstance(change, ReplayData)]
        return self.control("full", *whole_batches, *changes, source=self.full, updates=updates, shown_as=shown_as)

    def perturbed_control(self, seed: int = 0, *changes: Change, role: Role = "full") -> Run:
        """Returns a run with weights moved by their roundoff, in directions that the seed gives."""
        # A script without modules has no forward before which its weights could be moved.
        unit, has_modules = self.full.closing.arithmetic.unit, bool(self.full.closing.models.classes)
        perturbation = PerturbWeights(unit, seed, at_optimizer=not has_modules)
        plan = self.full_batch_control if role == "full" else partial(self.control, role)
        return plan(perturbation, *changes)

    def run(self, control: Run) -> RecordedRun:
        """Makes a control.

        Raises:
            ProblemError: It failed.
        """
        return self.runner.record(control)[0]

    def factors_of_passes(self, record: Record, weights: Sequence[float]) -> Shares:
        """Returns the factor on the loss of every backward pass: `weights` in the first update that differs, else 1.

        Empty if the update has another number of passes.
        """
        window = record.calls.window_of(record.divergent.number) if record.divergent is not None else None
        # By identity: two passes of a window may be equal as events.
        passes = [id(event) for event in self.accumulated.events if isinstance(event, Backward)]
        passes_of_update = [id(event) for event in window.of(Backward)] if window is not None else []
        if not weights or len(passes_of_update) != len(weights) or not set(passes_of_update) <= set(passes):
            return ()
        factors = dict(zip(passes_of_update, weights, strict=True))
        return (tuple(factors.get(event, 1.0) for event in passes),)

    def repeat_with(self, *changes: Change, shown_as: str) -> Trial:
        """Makes all three runs again, with more changes."""
        full = self.run(self.control("full", *changes, shown_as=shown_as))
        return Trial(self.runner, full, merge_changes(self.changes, changes), shown_as)

    def compare(
        self,
        own_run: RecordedRun | None = None,
        *,
        unclipped: bool = False,
        extra_perturbed: Sequence[tuple[RecordedRun, float]] = (),
    ) -> tuple[UpdateComparison, ...]:
        """Compares every update of the runs.

        Args:
            own_run: Stands for the accumulated run, if given.
            unclipped: Compare gradients as they are before they are clipped.
            extra_perturbed: More runs with perturbed weights, and the factors on their losses.
        """
        from gaverify.audit.judgement import compare_updates

        runs = self.full, self.perturbed, own_run or self.accumulated
        return compare_updates(*runs, self.runner.updates, unclipped=unclipped, extra_perturbed=extra_perturbed)


def _import_torch() -> None:
    # The main thread imports torch as well: an error that is raised here is raised there again.
    with suppress(Exception):
        import torch  # noqa: F401


def _summary(child: Child, members: list[RecordedRun]) -> RunSummary:
    job, run = child.job, members[0]
    disk = sum(member.disk_bytes for member in members)
    replay = job.find(ReplayData)
    replayed = "batches" if replay and replay.way == "batches" else "samples"
    ended = " ".join(filter(None, (run.closing.ending.value, run.closing.exit_code)))
    notes = {
        "without compilation": job.find(DisableCompilation),
        "attention on math kernels": job.find(UseMathKernels),
        "steps detected by changed weights": run.closing.steps_itself,
        f"fed with the {replayed} and random numbers of the full-batch run": replay and job.sources,
    }
    how = ", ".join(note for note, applies in notes.items() if applies)
    return RunSummary(job.name, str(job.command), run.updates, child.seconds, disk, ended, how)
