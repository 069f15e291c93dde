"""Runs the child processes of an audit: at most two at once, each ended with everything that it started.

It says how each ended: whether its record is complete, and if not, why. Two things have to hold of the records before
anything is compared: they trained, and their ranks trained alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gaverify.audit.editing import PLACED, explain_unplaced
from gaverify.audit.folders import (
    DISK_FULL,
    ERROR,
    INTERNAL,
    LOG,
    RECORDER_FAILED,
    ROOM,
    closing_record_of,
    ended_early,
    failed_first,
    folders_of,
    has_all_records,
    rank_of,
    rank_that_failed,
    ranks_of,
    updates_of,
)
from gaverify.audit.job import Job
from gaverify.audit.launchers import explain_status
from gaverify.audit.outputs import IMPOSSIBLE
from gaverify.audit.request import Request
from gaverify.children.group import Group, open_group
from gaverify.children.last_words import last_lines
from gaverify.children.launching import Kept, start_command
from gaverify.errors import InternalError, ProblemError, Uncompared
from gaverify.records.audit_report import TITLES
from gaverify.records.events import Backward, Ending, Step, WeightsMoved
from gaverify.records.numbers import bytes_text
from gaverify.rules.rule import join_texts

if TYPE_CHECKING:
    from gaverify.audit.reading import RecordedRun

_JOB, _DONE = "job.json", "done.json"


@dataclass
class Child:
    """The process of one run, which may be a launcher: its job, and how many seconds it took.

    `handle` is its process, where it was not made by an earlier audit.
    """

    job: Job
    seconds: float = 0.0
    handle: Kept | None = None
    started: float = 0.0

    @property
    def status(self) -> int | None:
        """How it ended; None while it runs."""
        return self.handle.status if self.handle is not None else 0

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return Path(self.job.folder)

    @property
    def command(self) -> str:
        """The command that it stands for, for sentences."""
        return str(self.job.command)

    @property
    def title(self) -> str:
        """The noun for it in sentences."""
        return TITLES[self.job.kind]

    @property
    def is_done(self) -> bool:
        """Whether it has ended, or its launcher's ranks have all left their records: it may still run then."""
        return self.status is not None or (self.job.is_launched and self.has_all)

    @property
    def has_all(self) -> bool:
        """Whether the run has made all updates that were asked for, even where its script failed in the end."""
        if not has_all_records(self.folder):
            return False
        updates = [closing_record_of(folder).updates for folder in ranks_of(self.folder)]
        return bool(self.job.updates) and min(updates) >= self.job.updates

    def write(self) -> None:
        """Writes the seconds of the run beside its record, for `read`."""
        text = json.dumps({"seconds": self.seconds})
        (self.folder / _DONE).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Child:
        """Reads the record of a run that was kept.

        Raises:
            ProblemError: There is none.
        """
        try:
            job = replace(Job.read(folder / _JOB), folder=str(folder))
            return cls(job, **json.loads((folder / _DONE).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ProblemError(
                f"--from {folder.parent}: the record of `{folder.name}` is missing or cannot be read ({error}); "
                "another version of gaverify may have made it: run the audit again"
            ) from error


def check(child: Child) -> None:
    """Raises unless the run left a complete record."""
    status = child.status
    # A script that fails after its last recorded update has left everything that is compared.
    if child.has_all or (status == 0 and has_all_records(child.folder)):
        _check_values(child)
        return

    def read_note(name: str) -> str:
        """Returns the text of a file that one of the run's processes left; empty if none did."""
        notes = [folder / name for folder in (child.folder, *folders_of(child.folder)) if (folder / name).exists()]
        return notes[0].read_text(encoding="utf-8") if notes else ""

    room, fault = read_note(ROOM), read_note(INTERNAL)
    # Before all other causes: on a full disk the script fails as well, and its traceback would mislead the reader.
    if status == DISK_FULL or any((folder / ROOM).exists() for folder in folders_of(child.folder)):
        wanted, free = (bytes_text(count) for count in json.loads(room or "[0, 0]"))
        folder = child.folder.parent
        # the recorder knew before it began, or else the disk filled up
        no_room = (
            f"the {child.title} has to store {wanted} of gradients, and `{folder}` has {free} left"
            if room
            else f"no space left in `{folder}` while the {child.title} stored its gradients"
        )
        raise ProblemError(f"{no_room}; free some, record fewer `--updates`, or set TMPDIR to a larger disk")
    if fault or status == RECORDER_FAILED:
        raise InternalError(f"the recorder failed in the {child.title}: {fault or 'no traceback'}")
    if status == IMPOSSIBLE:
        reason = read_note("no-view.txt")  # empty where the view that failed hides the file
        raise ProblemError(
            f"this system cannot run a script on a copy of your files{f': {reason}' if reason else ''}. Write "
            "`--in-place` to let the runs change your files, and let each write into its own folder, such as "
            '--full "--out a" --accumulated "--out b"'
        )
    folder = failed_first(child.folder) or child.folder
    cause, trace = _cause(child, folder)
    rank = f" (rank {rank_of(folder)})" if rank_of(folder) else ""
    details = f"{early_ends(child)}{trace}{output_of(folder, child)}"
    raise ProblemError(f"the {child.title}{rank} failed: {cause}\n{child.command}\n{details}".rstrip())


def _check_values(child: Child) -> None:
    """Raises where a value of the source was asked for and nothing in the source took it."""
    # The name may lie in a module that the script imports: only the run can tell that nothing took it.
    command, everyone = child.job.command, folders_of(child.folder)
    files = {folder: folder / PLACED for folder in everyone}
    taken = {at: path.read_text(encoding="utf-8").splitlines() if path.exists() else [] for at, path in files.items()}
    # A launcher's own process, such as torchrun's agent, runs no script.
    trained = ranks_of(child.folder) if command.launcher else everyone
    missing = [name for name, _ in command.values if any(name not in taken[folder] for folder in trained)]
    sentences = [
        f"`{name}` was changed in the process that `{command.launcher[0]}` started, and not in the ranks that the "
        "script starts from there; use arguments or variables (--full, --accumulated, --full-env, --accumulated-env)"
        if command.launcher and any(name in names for names in taken.values())
        else explain_unplaced(name, command.script)
        for name in missing
    ]
    if sentences:
        raise ProblemError(f"the {child.title}: " + "\n".join(sentences))


def _cause(child: Child, folder: Path) -> tuple[str, str]:
    """Why a run failed, in a line, and the traceback where there is one.

    Args:
        child: The run.
        folder: The folder of its process that failed first; the run's own where none said so.
    """
    if (folder / ERROR).exists():
        cause, newline, trace = (folder / ERROR).read_text(encoding="utf-8", errors="replace").partition("\n")
        said = _last_output(folder, child)[-1:] if not newline else []
        return ": ".join([cause, *said]), trace
    if child.job.command.launcher:
        return _of_launcher(child, child.status), ""
    assert child.status is not None
    return explain_status(child.status), ""


def _of_launcher(child: Child, status: int | None) -> str:
    """Why a launcher's run has no complete record if none of its processes reported a failure."""
    word = child.job.command.launcher[0]
    folders = ranks_of(child.folder)
    if folders:
        records = [closing_record_of(folder) for folder in folders]
        updates = ", ".join(str(record.updates) for record in records)
        return (
            f"only {len(folders)} of {records[0].ranks} ranks finished ({updates} updates); "
            f"`{word}` ended with exit code {status}"
        )
    entered = any(folder != child.folder for folder in folders_of(child.folder))
    if entered or status:
        return f"none of its processes reached an optimizer step; `{word}` ended with exit code {status}"
    return (
        f"gaverify could not record any Python process that `{word}` started. The command has to pass on the variable "
        "PYTHONPATH, and to run Python without -I, -E and -S"
    )


def early_ends(child: Child) -> str:
    """Names the ranks that came to their end where others did not, which may have waited for them; ends its line."""
    updates = child.job.updates
    ended = [(rank, count) for rank, count in ended_early(child.folder) if not updates or count < updates]
    sentences = [f"rank {rank} had ended after {count} of {updates} updates" for rank, count in ended]
    return ", ".join(sentences) + "\n" if sentences else ""


def progress_so_far(child: Child) -> str:
    """Returns how many updates the processes of a run had made when it was ended; ends its line."""
    if not child.job.updates:
        return ""
    counts = []
    for folder in folders_of(child.folder):
        rank, count = rank_of(folder), updates_of(folder)
        # Processes without any update may be no ranks, if a launcher of the user's has started them.
        counts += [f"{count} (rank {rank.split()[0]})" if rank else f"{count}"] if rank or count else []
    who = "its processes" if child.job.has_ranks else "it"
    return f"{who} had made {', '.join(counts) or 0} of {child.job.updates} updates\n" + early_ends(child)


def _last_output(folder: Path, child: Child) -> list[str]:
    """Returns the last lines that a process printed; the run's where it has no output of its own, as under torchrun."""
    return last_lines(folder / LOG) or last_lines(child.folder / LOG)


def output_of(folder: Path, child: Child) -> str:
    """Returns the last lines of what a process of a run printed; empty where it printed nothing."""
    lines = _last_output(folder, child)
    if not lines:
        return ""
    return "\nthe last lines of its output:\n" + "\n".join(f"    {line}" for line in lines)


_ROOT = str(Path(__file__).resolve().parents[2])
# `python -c` puts the working folder first: a `random.py` of the user's there would replace Python's own.
_BOOT = (
    "import sys\n"
    "if not sys.flags.safe_path: sys.path.pop(0)\n"
    "root = {root!r}\n"
    "if root not in sys.path: sys.path.append(root)\n"
    "from gaverify.audit.child import main\n"
    "main({job!r})\n"
)
_TICK = 0.05
_TELL = 0.5  # seconds between two looks at how many updates have been made
_PATIENCE = 5.0  # seconds that a launcher has to end the other ranks when one has failed


def run_jobs(jobs: Sequence[Job], timeout: float, progress: Callable[[str], None]) -> list[Child]:
    """Runs jobs side by side until all have ended.

    Args:
        jobs: The jobs to run.
        timeout: Seconds for each.
        progress: Called with what is running.

    Raises:
        ProblemError: The kernel makes no view of the files; or a script failed, hung, or was killed, and the message
            holds its own traceback and last output.
    """
    progress(_name_runs(jobs))
    with open_group() as group:
        children = [_start(job, group) for job in jobs]
        failed = _wait(children, group, timeout, partial(_tell_updates, children, progress))
    # If one has failed, the group has ended the others: that their records are incomplete says nothing.
    for child in [failed] if failed is not None else children:
        check(child)
    for child in children:
        child.write()
    return children


def _name_runs(jobs: Iterable[Job]) -> str:
    return " and ".join(dict.fromkeys(TITLES[job.name] for job in jobs))


def _tell_updates(children: Sequence[Child], progress: Callable[[str], None]) -> None:
    """Tells which update the slowest of the processes makes."""
    updates_made = min((updates_of(folder) for child in children for folder in folders_of(child.folder)), default=0)
    wanted = children[0].job.updates
    which = f"update {min(updates_made + 1, wanted)} of {wanted}" if wanted else f"update {updates_made + 1}"
    # first, because a narrow terminal cuts the end off
    progress(f"{which}, {_name_runs(child.job for child in children)}")


def _start(job: Job, group: Group) -> Child:
    child = Child(job)
    child.folder.mkdir(parents=True, exist_ok=True)
    job.write(child.folder / _JOB)
    code = _BOOT.format(root=_ROOT, job=str(child.folder / _JOB))
    with (child.folder / LOG).open("wb") as log:
        # No standard input: a script that asks a question would wait for the answer until the timeout.
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        child.handle = group.add(start_command([sys.executable, "-c", code], env=_environment(job), **streams))
    child.started = time.monotonic()
    return child


def _environment(job: Job) -> dict[str, str]:
    """The variables of a run; all runs order sets of strings alike, or they might order their data differently."""
    fixed = {"PYTHONHASHSEED": str(job.command.seed or 0)}
    if job.command.seed is None and os.environ.get("PYTHONHASHSEED"):
        fixed = {}
    return {**os.environ, **fixed, **job.environment}


def _wait(children: Sequence[Child], group: Group, timeout: float, tell: Callable[[], None]) -> Child | None:
    """Waits for all; one that fails ends the wait and is returned: nothing can be compared any more."""
    open_children, last_told = list(children), time.monotonic()
    while open_children:
        if time.monotonic() - last_told > _TELL:
            tell()
            last_told = time.monotonic()
        for child in list(open_children):
            child.seconds = time.monotonic() - child.started
            if child.is_done:
                open_children.remove(child)
                if child.status and not child.has_all:
                    return child
            # The other ranks wait in a collective for the one that failed, and the launcher waits for them.
            elif rank_that_failed(child.folder, _PATIENCE):
                return child
            elif child.seconds > timeout:
                output = output_of(folders_of(child.folder)[0], child)
                raise ProblemError(
                    f"the {child.title} was still running after {timeout:g} s and was stopped (a larger `--timeout` "
                    f"gives it more time): {child.command}\n{progress_so_far(child)}{output}"
                )
        if open_children:
            group.receive(time.monotonic() + _TICK)
    return None


def check_ranks(request: Request, group_sizes: list[int]) -> None:
    """Raises unless the script trained in as many ranks as were started."""
    # A script that joins no process group trains one model per process: each would seem to lack the others' rows.
    if set(group_sizes) != {len(group_sizes)}:
        counts = ", ".join(map(str, sorted(set(group_sizes))))
        option = f"--ranks {len(group_sizes)}" if request.ranks is not None else "--launcher"
        recorded, most = len(group_sizes), max(group_sizes)
        if most > recorded:
            raise ProblemError(
                f"{option}: the script trains in {most} processes, but gaverify recorded only {recorded}. Start each "
                "process anew (torchrun, `mp.spawn`); do not fork it from a process that has imported torch"
            )
        raise ProblemError(
            f"{option}: the script's process group had {counts} of {recorded} ranks at its first step. Call "
            "torch.distributed.init_process_group with RANK and WORLD_SIZE from the environment, as under torchrun"
        )


def check_parameters(runs: Sequence[RecordedRun]) -> None:
    """Raises unless every rank trains the same parameters, whole or in shards.

    A parameter that one rank leaves out would be trained by the other ranks alone.
    """
    # A flat piece runs over the borders of parameters: no gradient can be compared parameter by parameter.
    if any(run.closing.models.is_flattened for run in runs):
        raise ProblemError(
            "FullyShardedDataParallel (FSDP1) cuts the model into flat pieces, which cannot be compared with whole "
            "parameters; for the audit, use `fully_shard` (FSDP2) or DistributedDataParallel"
        )
    shapes_by_rank = [{key.partition(":")[2]: shape for key, shape in run.parameters.values()} for run in runs]
    for rank, shapes in enumerate(shapes_by_rank):
        named = list(dict.fromkeys([*shapes_by_rank[0], *shapes]))
        differing = [name for name in named if shapes_by_rank[0].get(name) != shapes.get(name)]
        if differing:
            listing = join_texts([f"`{name}`" for name in differing], 5)
            raise ProblemError(
                f"the ranks train different parameters: {listing} in the optimizer of only one of ranks 0 and {rank}, "
                "or with another shape. Give the optimizers of all ranks the same parameters"
            )


def check_updates(child: Child, run: RecordedRun) -> None:
    """Raises unless the script trained.

    Args:
        child: The process.
        run: The record of that process.

    Raises:
        Uncompared: It moved its weights itself, by gradients that were not seen.
        ProblemError: It made no step, or stepped without any gradient.
    """
    if run.closing.keeps_no_gradients:
        raise Uncompared(
            f"the script moves its weights itself, by gradients that no `.grad` holds at that time; {_LET_ADD_UP}"
        )
    has_backward = any(isinstance(event, Backward) for event in run.events)
    if not any(isinstance(event, Step) for event in run.events):
        if any(isinstance(event, WeightsMoved) and event.where == "between" for event in run.events):
            raise Uncompared(
                f"the script moves its weights itself, and its `{run.closing.optimizers[0]}` never steps; {_LET_STEP}"
            )
        activity = _explain_missing_step(child.job, run)
        if has_backward:
            activity = f"backward passes, but no optimizer step; {_TRAIN}"
        raise ProblemError(_explain_no_updates(child, run, "reached no optimizer step", f"it made {activity}"))
    # Steps without any gradient change nothing: two such runs would agree and prove nothing.
    if not has_backward and not run.closing.had_gradients:
        activity = "made optimizer steps without any backward pass and without a gradient"
        raise ProblemError(_explain_no_updates(child, run, activity, _TRAIN))


_LET_STEP = "let a `torch.optim` optimizer make the steps"
_LET_ADD_UP = f"let `.grad` add them up until the weights move, or {_LET_STEP}"
_TRAIN = "give arguments with which it trains for at least one update"


def _explain_missing_step(job: Job, run: RecordedRun) -> str:
    """Says how a script ended without a recorded step, and what the user can change."""
    unseen = run.closing.unseen
    if unseen.processes and not job.command.launcher:
        return (
            f"no update in its own process, and started {unseen.processes} others; if those train, write "
            "`--launcher python` so that gaverify records them"
        )
    if unseen.elsewhere:
        return (
            "backward passes for tensors that are not an `nn.Parameter`, whose updates gaverify cannot judge. Make the "
            "weights an `nn.Parameter` and give them to a `torch.optim` optimizer"
        )
    if any("capture" in why for why in unseen.left_out):
        return (
            "calls inside the capture of a CUDA graph, whose replays gaverify cannot record. Run it without the graph "
            "for the audit, or call the optimizer's step outside of the graph"
        )
    if unseen.left_out.get("torch.func"):
        return (
            "gradients with `torch.func` for weights that no module or optimizer has, which gaverify cannot judge. "
            "Assign them to the `.grad` of a module's parameters and use a `torch.optim` optimizer"
        )
    return f"neither a backward pass nor an optimizer step; {_TRAIN}"


def _explain_no_updates(child: Child, run: RecordedRun, what: str, advice: str) -> str:
    has_exited = run.closing.ending is Ending.EXIT
    how = f"it called sys.exit({run.closing.exit_code})" if has_exited else "it ran to its end"
    return f"the {child.title} {what} ({how}): {child.command}\n{advice}"
