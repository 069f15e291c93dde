"""Runs of the script for one audit: their jobs, the processes, and what they left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaverify.audit.checks import check_parameters, check_ranks, check_updates
from gaverify.audit.ending import NoView
from gaverify.audit.job import COMPILED, Files, Job, Role
from gaverify.audit.launch import free_port
from gaverify.audit.members import ranks_of
from gaverify.audit.processes import Done, run_jobs
from gaverify.audit.request import Request
from gaverify.errors import ProblemError
from gaverify.records.audit_report import RunSummary

if TYPE_CHECKING:
    from gaverify.audit.reading import Run

Progress = Callable[[str, int, int], None]


@dataclass
class Runner:
    """Runs the script in the parts that an audit needs, and keeps account of it.

    Args:
        request: What the user asked for.
        folder: Where the runs write.
        progress: Told what runs now, how many runs are over, and how many there are as a rule.
        again: The runs were made before: only read what they left.
    """

    request: Request
    folder: Path
    progress: Progress
    again: bool = False

    def __post_init__(self) -> None:
        self.summaries: list[RunSummary] = []
        self.timings: dict[str, float] = {}
        self.updates = self.request.updates
        self._done = 0
        self._files: Files = "in-place" if self.request.in_place else "view"

    def job(self, role: Role, *, rank: int = 0, source: Run | None = None, **options: Any) -> Job:
        """Returns the job of the next run, which plays `role`; `options` are fields of `Job`.

        Args:
            role: Its part.
            rank: Which of the run's ranks it is.
            source: The full-batch run; where that has ranks, each follows its own and is dealt the draws of all.
            options: Other fields of `Job`.
        """
        request, launcher = self.request, self.request.launcher_of(role)
        own = {"accumulated": request.accumulated, "frozen": request.accumulated, "events": ()}.get(role, request.full)
        folder = self.folder / (f"{len(self.summaries)}-{role}" + (f"-rank-{rank}" if rank else ""))
        if request.ranked and launcher not in filter(None, (request.launcher, request.full_launcher)):
            options.setdefault("world", (0, 1, free_port()))
        if source is not None:
            members = getattr(source, "ranks", (source,))
            options["source"] = str(members[rank if rank < len(members) else 0].folder)
            options["sources"] = tuple(str(member.folder) for member in members)
        setting = request.setting(role)
        return Job(
            role,
            setting.script or request.script,
            request.module,
            (*request.common, *own),
            str(folder),
            self.updates,
            files=self._files,
            environment=setting.environment,
            values=setting.values,
            seed=request.seed,
            launcher=launcher,
            **options,
        )  # type: ignore[arg-type]

    def first(self, role: Role) -> tuple[Run, dict[str, Any]]:
        """Returns the run that all others are held against, and the fields of `Job` with which it could be recorded.

        A script whose steps were not seen is run again: without compilation where it compiles, else by the change of
        its weights. So is one whose random draws were out of sight, in a way that shows them.

        Raises:
            ProblemError: It failed, or trained in several processes without being asked to.
        """
        visible: dict[str, Any] = {}
        run = self._first(role)
        if run.meta["compiled"] and not any(event.kind == "backward" for event in run.events):
            visible["eager"] = True
            run = self._first(role, **visible)
        if run.meta["by_hand"]:
            visible["by_hand"] = True
            run = self._first(role, **visible)
        if run.meta["fused"]:
            visible["math_kernels"] = set(run.meta["fused"]) != {COMPILED}
            visible["eager"] = visible.get("eager", False) or COMPILED in run.meta["fused"]
            run = self._first(role, **visible)
        return run, visible

    def full(self, **options: Any) -> Run:
        """Makes the full-batch run; `options` are fields of `Job`.

        Raises:
            ProblemError: It failed, or trained in several processes without being asked to.
        """
        (full,) = self.runs(self.jobs("full", **options))
        if self.request.launcher and not self.request.full_launcher and full.meta["ranks"] > 1:
            raise ProblemError(
                f"the full-batch run trained in {full.meta['ranks']} processes: what goes wrong between them would be "
                'in both runs; give it arguments for one process, such as --full "--devices 1", or --full-launcher if '
                "the script seeds by rank"
            )
        return full

    def _first(self, role: Role, **options: Any) -> Run:
        return self.full(**options) if role == "full" else self.runs([self.job(role, **options)])[0]

    def runs(self, *groups: list[Job]) -> list[Run]:
        """Makes runs side by side, each given by the jobs of its ranks, and returns what they recorded.

        Raises:
            ProblemError: A run failed, or did not train.
        """
        made = iter(self._processes([job for jobs in groups for job in jobs]))
        return [self._together([run for _ in jobs for run in next(made)]) for jobs in groups]

    def _processes(self, jobs: list[Job]) -> list[list[Run]]:
        """Makes the runs of some jobs; each gives a process, or all ranks of its launcher."""
        from gaverify.audit.reading import Run

        children = self._children(jobs)
        self._done += len(jobs)
        runs = [[Run(child.job.role, at, child.seconds) for at in ranks_of(child.folder)] for child in children]
        for child, members in zip(children, runs, strict=True):
            self.timings[_part(child.job)] = child.seconds
            self.summaries.append(_summary(child, members))
            for run in members:
                check_updates(child, run)
        return runs

    def jobs(self, role: Role, **options: Any) -> list[Job]:
        """Returns the jobs of a run, one for each rank that gaverify starts itself; `options` are fields of `Job`."""
        count = None if role in ("full", "perturbed") else self.request.ranks
        if count is None:
            return [self.job(role, **options)]
        port = free_port()
        return [self.job(role, rank=rank, world=(rank, count, port), **options) for rank in range(count)]

    def beside(self, full: Run, options: dict[str, Any]) -> tuple[Run, Run]:
        """Makes the two runs that are held against a full-batch run: the same with moved weights, and the accumulated.

        Args:
            full: The full-batch run.
            options: Fields of `Job` that all three share; `parts` is the accumulated run's.
        """
        accumulated, perturbed = self.runs(self.jobs("accumulated", source=full, **options), self._moved(full, options))
        return perturbed, accumulated

    def moved(self, full: Run, options: dict[str, Any], coins: int, factor: float) -> Run:
        """Makes another run with moved weights; `coins` says in which directions, `factor` multiplies its losses."""
        (perturbed,) = self.runs(self._moved(full, {**options, "coins": coins, "shrink": factor}))
        return perturbed

    def _moved(self, full: Run, options: dict[str, Any]) -> list[Job]:
        unit, early = float(full.meta["unit"]), not full.meta["modules"]
        options = {**options, "parts": 1} if "parts" in options else options
        return self.jobs("perturbed", source=full, unit=unit, perturb_early=early, **options)

    def _together(self, runs: list[Run]) -> Run:
        """Returns the processes of a run as one run."""
        if len(runs) == 1 and (runs[0].meta["ranks"] == 1 or not self.request.ranked):
            return runs[0]
        from gaverify.audit.ranks import RankedRun

        check_ranks(self.request, [run.meta["ranks"] for run in runs])
        check_parameters(runs)
        return RankedRun(runs[0].role, runs[0].folder, max(run.seconds for run in runs), tuple(runs))

    def _children(self, jobs: list[Job]) -> list[Done]:
        """Side by side, or one after the other where they would write into the same folder."""
        if self.again:
            return [_done_before(Path(job.folder)) for job in jobs]
        told = self.request.command
        pairs = [(job, told(job.arguments, self.request.setting(job.role), job.launcher)) for job in jobs]
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


def _done_before(folder: Path) -> Done:
    try:
        return Done.read(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProblemError(
            f"--from {folder.parent}: the record of `{folder.name}` is missing or cannot be read ({error}); "
            "another version of gaverify made them: run the audit again"
        ) from error


def _part(job: Job) -> str:
    """The part that a run plays, for the report; a control is none of the runs that it repeats."""
    if job.shares or job.synchronise or job.gathers or job.frozen:
        return "coupling" if job.outputs else "ranks"
    if job.term:
        return "terms"
    if job.outputs:
        return "coupling"
    return job.role if job.shrink >= 1.0 else "unclipped"


def _summary(child: Done, members: list[Run]) -> RunSummary:
    job, run = child.job, members[0]
    disk = sum(member.disk_bytes for member in members)
    what = "inputs" if job.inputs else "batches and draws" if job.collated else "samples and draws"
    given = [f"with the full-batch run's {what}"] if job.replay and job.source else []
    ended = " ".join(filter(None, (run.meta["reason"], run.meta["status"])))
    how = ", ".join(
        [
            *["without compilation"] * job.eager,
            *["attention unfused"] * job.math_kernels,
            *["its steps seen by its weights"] * job.by_hand,
            *["compared by the change of the weights"] * run.meta["by_change"],
            *given,
        ]
    )
    return RunSummary(_part(job), child.command, run.updates, child.seconds, disk, ended, how)
