"""Runs of the script for one audit: their jobs, the processes, and what they left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaverify.audit.folders import COMPILED, ranks_of
from gaverify.audit.job import Files, Job, Role
from gaverify.audit.launchers import free_port
from gaverify.audit.processes import Child, NoView, check_parameters, check_ranks, check_updates, run_jobs
from gaverify.audit.request import Request
from gaverify.errors import ProblemError
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.audit_report import RunSummary
from gaverify.records.ranks import Shares
from gaverify.records.windows import common_rounds, number_steps
from gaverify.rules.wording import phrase

if TYPE_CHECKING:
    from gaverify.audit.reading import Run

Progress = Callable[[str, int, int], None]


@dataclass
class Runner:
    """Runs the script as an audit asks for it, and keeps account of it.

    Args:
        request: What the user asked for.
        folder: Where the runs write.
        progress: Told what runs now, how many runs are over, and how many there are as a rule.
        again: The runs were made before: only read what they left.
    """

    request: Request
    folder: Path
    progress: Progress
    reuse_records: bool = False

    def __post_init__(self) -> None:
        self.summaries: list[RunSummary] = []
        self.timings: dict[str, float] = {}
        self.updates = self.request.updates
        self.done, self._last = 0, -1  # how many processes have ended, and the number of the last run
        self._files: Files = "in-place" if self.request.in_place else "view"

    def _job(self, role: Role, *, rank: int = 0, source: Run | None = None, **options: Any) -> Job:
        """Returns the job of the next run, which plays `role`; `options` are fields of `Job`.

        Args:
            role: Its part.
            rank: Which of the run's ranks it is.
            source: The full-batch run; where that has ranks, each follows its own and is dealt the draws of all.
            options: Other fields of `Job`.
        """
        request, launcher = self.request, self.request.launcher_of(role)
        arguments = {"accumulated": request.accumulated, "frozen": request.accumulated, "events": ()}.get(
            role, request.full
        )
        folder = self.folder / (f"{self._last}-{role}" + (f"-rank-{rank}" if rank else ""))
        if request.has_ranks and launcher not in filter(None, (request.launcher, request.full_launcher)):
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
            (*request.common, *arguments),
            str(folder),
            files=self._files,
            environment=setting.environment,
            values=setting.values,
            seed=request.seed,
            launcher=launcher,
            **{"updates": self.updates, **options},
        )

    def first(self, role: Role) -> tuple[Run, dict[str, Any]]:
        """Returns the run that all others are held against, and the fields of `Job` with which it could be recorded.

        A script whose steps were not seen is run again: without compilation where it compiles, else by the change of
        its weights. So is one whose random draws were out of sight, in a way that shows them.

        Raises:
            ProblemError: It failed, or trained in several processes without being asked to.
        """
        visible: dict[str, Any] = {}
        run = self.run(role)
        if self.request.launcher and not self.request.full_launcher and run.meta["ranks"] > 1:
            raise ProblemError(phrase("runs.full-ranks", ranks=run.meta["ranks"]))
        if run.meta["compiled"] and not any(event.kind == "backward" for event in run.events):
            visible["eager"] = True
            run = self.run(role, **visible)
        if run.meta["by_hand"]:
            visible["by_hand"] = True
            run = self.run(role, **visible)
        if run.meta["fused"]:
            visible["math_kernels"] = set(run.meta["fused"]) != {COMPILED}
            visible["eager"] = visible.get("eager", False) or COMPILED in run.meta["fused"]
            run = self.run(role, **visible)
        return run, visible

    def run(self, role: Role, **options: Any) -> Run:
        """Makes one run; `options` are fields of `Job`.

        Raises:
            ProblemError: It failed, or did not train.
        """
        return self.runs(self.jobs(role, **options))[0]

    def runs(self, *groups: list[Job]) -> list[Run]:
        """Makes runs, two side by side, each given by the jobs of its ranks, and returns what they recorded.

        Raises:
            ProblemError: A run failed, or did not train.
        """
        children = iter(self._children(groups))
        return [self._together([run for _ in jobs for run in self._read_runs(next(children))]) for jobs in groups]

    def _read_runs(self, child: Child) -> list[Run]:
        """Returns what a process recorded, or all ranks of its launcher."""
        from gaverify.audit.reading import Run

        runs = [Run(child.job.role, at, child.seconds) for at in ranks_of(child.folder)]
        self.done += 1
        self.timings[child.job.shown_as or child.job.role] = child.seconds
        self.summaries.append(_summary(child, runs))
        for run in runs:
            check_updates(child, run)
        return runs

    def jobs(self, role: Role, **options: Any) -> list[Job]:
        """Returns the jobs of a run, one for each rank that gaverify starts itself; `options` are fields of `Job`."""
        count = None if role in ("full", "perturbed") else self.request.ranks
        self._last += 1
        if count is None:
            return [self._job(role, **options)]
        port = free_port()
        return [self._job(role, rank=rank, world=(rank, count, port), **options) for rank in range(count)]

    def _together(self, runs: list[Run]) -> Run:
        """Returns the processes of a run as one run."""
        if len(runs) == 1 and (runs[0].meta["ranks"] == 1 or not self.request.has_ranks):
            return runs[0]
        from gaverify.audit.ranks import RankedRun

        check_ranks(self.request, [run.meta["ranks"] for run in runs])
        check_parameters(runs)
        return RankedRun(runs[0].role, runs[0].folder, max(run.seconds for run in runs), tuple(runs))

    def _children(self, groups: Sequence[list[Job]]) -> list[Child]:
        """Two runs side by side, or one after the other where they would write into the same folder."""
        if self.reuse_records:
            return [Child.read(Path(job.folder)) for jobs in groups for job in jobs]
        request, children, at_once = self.request, list[Child](), 2 if self._files == "view" else 1
        try:
            for at in range(0, len(groups), at_once):
                jobs = [job for jobs in groups[at : at + at_once] for job in jobs]
                commands = [request.command(job.arguments, request.setting(job.role), job.launcher) for job in jobs]
                pairs = list(zip(jobs, commands, strict=True))
                children += run_jobs(pairs, request.timeout, lambda what: self.progress(what, self.done, 3))
            return children
        except NoView:
            self._files = "guard"
            return self._children([[replace(job, files="guard") for job in jobs] for jobs in groups])


class Trial:
    """A full-batch run and what is held against it: the same with moved weights, and the accumulated run.

    Args:
        runner: Makes the runs.
        full: The full-batch run.
        options: Fields of `Job` that all three have; `parts` is the accumulated run's.
    """

    def __init__(self, runner: Runner, full: Run, options: dict[str, Any]) -> None:
        self.runner, self.full, self.options = runner, full, options
        accumulated, self.perturbed = runner.runs(self.jobs("accumulated"), self.perturbed_jobs())
        self.accumulated = accumulated.beside(full)
        self.numbers = number_steps(common_rounds(full.events, self.accumulated.events))

    def jobs(self, role: Role, *, source: Run | None = None, **changed: Any) -> list[Job]:
        """Returns the jobs of a control: of the run that plays a role, with other fields of `Job`.

        Args:
            role: Its part.
            source: The full-batch run that it follows, where that is another.
            changed: What is other than in the runs that are compared.
        """
        options = {**self.options, **changed}
        if role != "full":
            options["source"] = source or self.full
        if role == "perturbed" and "parts" in options:
            options["parts"] = 1
        return self.runner.jobs(role, **options)

    def run_control(self, role: Role, **changed: Any) -> Run:
        """Makes a control, as `jobs` says.

        Raises:
            ProblemError: It failed.
        """
        return self.runner.runs(self.jobs(role, **changed))[0]

    def shares(self, record: Record, right: Sequence[float]) -> Shares:
        """Returns what each backward pass multiplies its loss by, for weights in the first update that differs.

        Empty where its passes are not those that the weights are of.
        """
        window = record.window_of(record.divergent.number) if record.divergent is not None else None
        passes = [id(event) for event in self.accumulated.events if event.kind == "backward"]
        own_passes = [id(event) for event in window.of("backward")] if window is not None else []
        if not right or len(own_passes) != len(right) or not set(own_passes) <= set(passes):
            return ()
        times = dict(zip(own_passes, right, strict=True))
        return (tuple(times.get(event, 1.0) for event in passes),)

    def repeat_with(self, **changed: Any) -> Trial:
        """Makes all three runs again."""
        return Trial(self.runner, self.run_control("full", **changed), {**self.options, **changed})

    def compare(
        self, own_run: Run | None = None, *, unclipped: bool = False, extra_perturbed: Sequence[tuple[Run, float]] = ()
    ) -> tuple[UpdateComparison, ...]:
        """Compares every update of the runs; `own_run` takes the place of the accumulated one."""
        from gaverify.audit.judgement import compare_updates

        runs = self.full, self.perturbed, own_run or self.accumulated
        return compare_updates(*runs, self.runner.updates, unclipped=unclipped, extra_perturbed=extra_perturbed)

    def perturbed_jobs(self, **changed: Any) -> list[Job]:
        """Returns the jobs of a run with moved weights."""
        unit, early = float(self.full.meta["unit"]), not self.full.meta["modules"]
        return self.jobs("perturbed", unit=unit, perturb_early=early, **changed)


def _summary(child: Child, members: list[Run]) -> RunSummary:
    job, run = child.job, members[0]
    disk = sum(member.disk_bytes for member in members)
    what = {"inputs": "inputs", "batches": "batches and draws"}.get(job.replay, "samples and draws")
    replay_note = [f"with the full-batch run's {what}"] if job.replay and job.source else []
    ended = " ".join(filter(None, (run.meta["reason"], run.meta["status"])))
    how = ", ".join(
        [
            *["without compilation"] * job.eager,
            *["attention unfused"] * job.math_kernels,
            *["its steps seen by its weights"] * job.by_hand,
            *["compared by the change of the weights"] * run.meta["by_change"],
            *replay_note,
        ]
    )
    return RunSummary(job.shown_as or job.role, child.command, run.updates, child.seconds, disk, ended, how)
