"""Runs the child processes of an audit: at most two at once, each ended with everything that it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaverify.audit.editing import PLACED, assigned, not_placed
from gaverify.audit.job import DISK_FULL, RECORDER_FAILED, Job
from gaverify.audit.outputs import IMPOSSIBLE
from gaverify.audit.outputs.guard import take_away
from gaverify.children import Kept, started
from gaverify.children.output import last_lines
from gaverify.errors import InternalError, ProblemError
from gaverify.records.audit_report import TITLES

_ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = (
    "import sys\n"
    "if not sys.flags.safe_path: sys.path.pop(0)\n"
    "root = {root!r}\n"
    "if root not in sys.path: sys.path.append(root)\n"
    "from gaverify.audit.child import main\n"
    "main({job!r})\n"
)
_TICK = 0.05
_JOB, _DONE = "job.json", "done.json"


@dataclass(frozen=True)
class Done:
    """A run that has left a complete record.

    Args:
        job: What it was told.
        command: What it stands for.
        seconds: How long it took.
        folder: Where its record lies.
    """

    job: Job
    command: str
    seconds: float
    folder: Path

    def write(self) -> None:
        """Notes beside the record what only the parent knows."""
        text = json.dumps({"command": self.command, "seconds": self.seconds})
        (self.folder / _DONE).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Done:
        """Reads the record of a run that was kept."""
        noted = json.loads((folder / _DONE).read_text(encoding="utf-8"))
        return cls(Job.read(folder / _JOB), noted["command"], noted["seconds"], folder)


@dataclass
class Child:
    """A process and the job that it works on."""

    job: Job
    command: str
    kept: Kept
    started: float
    seconds: float = 0.0

    @property
    def status(self) -> int | None:
        """How it ended; None while it runs."""
        return self.kept.process.poll()

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return Path(self.job.folder)

    @property
    def title(self) -> str:
        """What it is, for sentences."""
        return TITLES[self.job.role]


class NoView(Exception):
    """No run can be given a view of its own of the files; the message says why. Nothing of the script has run."""


def run_jobs(jobs: Sequence[tuple[Job, str]], timeout: float, progress: Callable[[str], None]) -> list[Done]:
    """Runs jobs side by side until all have ended.

    Args:
        jobs: Each with the command that it stands for.
        timeout: Seconds for each.
        progress: Told what is running.

    Raises:
        NoView: The kernel makes no view of the files.
        ProblemError: A script failed, hung, or was killed; the message holds its own traceback and last output.
    """
    progress(" and ".join(TITLES[job.role] for job, _ in jobs))
    children: list[Child] = []
    try:
        children += [_start(job, command) for job, command in jobs]
        failed = _wait(children, timeout)
    finally:
        for child in children:
            child.kept.end()
            if child.job.files == "guard":
                take_away(child.folder)
    for child in [failed] if failed is not None else children:
        _check(child)
    done = [Done(child.job, child.command, child.seconds, child.folder) for child in children]
    for run in done:
        run.write()
    return done


def _start(job: Job, command: str) -> Child:
    folder = Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if job.meeting is not None:
        job.meeting.mkdir(exist_ok=True)
    description = folder / _JOB
    job.write(description)
    code = _BOOT.format(root=_ROOT, job=str(description))
    with (folder / "log.txt").open("wb") as log:
        kept = started(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(job),
        )
    return Child(job, command, kept, time.monotonic())


def _environment(job: Job) -> dict[str, str]:
    """The variables of a run; all runs order sets of strings alike, or they might order their data differently."""
    fixed = {"PYTHONHASHSEED": str(job.seed or 0)}
    if job.seed is None and os.environ.get("PYTHONHASHSEED"):
        fixed = {}
    return {**os.environ, **fixed, **dict(job.environment)}


def _wait(children: Sequence[Child], timeout: float) -> Child | None:
    """Waits for all; one that fails ends the wait and is returned: nothing can be compared any more."""
    open_children = list(children)
    while open_children:
        for child in list(open_children):
            child.seconds = time.monotonic() - child.started
            if child.status is not None:
                open_children.remove(child)
                if child.status and not (_complete(child) and _enough(child)):
                    return child
            elif child.seconds > timeout:
                raise ProblemError(
                    f"the {child.title} was still running after {timeout:g} s and was ended (--timeout): "
                    f"{child.command}\n{_progress_so_far(child)}{_output(child)}"
                )
        if open_children:
            time.sleep(_TICK)
    return None


def _check(child: Child) -> None:
    """Raises unless the run left a complete record."""
    status = child.status
    if _complete(child) and (status == 0 or _enough(child)):
        _check_values(child)
        return
    if status == DISK_FULL:
        raise ProblemError(
            f"no space left in `{child.folder.parent}` while the {child.title} stored its gradients; "
            "free some, record fewer `--updates`, or set TMPDIR to a larger disk"
        )
    if status == RECORDER_FAILED:
        internal = child.folder / "internal.txt"
        text = internal.read_text(encoding="utf-8") if internal.exists() else "no traceback"
        raise InternalError(f"the recorder failed in the {child.title}: {text}")
    if status == IMPOSSIBLE:
        raise NoView((child.folder / "no-view.txt").read_text(encoding="utf-8"))
    refused = child.folder / "refused.json"
    if refused.exists():
        raise ProblemError(_refusal(child, *json.loads(refused.read_text(encoding="utf-8"))))
    assert status is not None
    cause, whole = _cause(child, status)
    raise ProblemError(f"the {child.title} failed: {cause}\n{child.command}\n{whole}{_output(child)}".rstrip())


def _check_values(child: Child) -> None:
    """Raises where a value of the source was asked for and nothing in the source took it."""
    path = child.folder / PLACED
    taken = set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()
    left = [name for name, _ in child.job.values if ":" not in name and name not in taken]
    if left:
        try:
            known = assigned(Path(child.job.script).read_bytes())
        except OSError:
            known = []
        sentences = [not_placed(name, child.job.script, known) for name in left]
        raise ProblemError(f"the {child.title}: " + "\n".join(sentences))


def _refusal(child: Child, name: str, place: list[Any] | None) -> str:
    where = f" ({place[0]}:{place[1]})" if place else ""
    return (
        f"the {child.title} would change `{name}`{where}, which was there before it, and was ended; the file is as it "
        f"was: {child.command}\nthis system cannot give each run a view of the files of its own; let each write into "
        'a folder of its own, such as --full "--out a" --accumulated "--out b", or write `--in-place` if the file may '
        "be changed"
    )


def _cause(child: Child, status: int) -> tuple[str, str]:
    """Why a run failed, in a line, and the traceback where there is one."""
    error = child.folder / "error.txt"
    if error.exists():
        cause, _, whole = error.read_text(encoding="utf-8", errors="replace").partition("\n")
        said = last_lines(child.folder / "log.txt")[-1:] if not whole else []
        return ": ".join([cause, *said]), whole
    if status < 0:
        return f"it was killed by {_signal(-status)}" + (" (out of memory?)" if -status == 9 else ""), ""
    return f"it left with status {status} past Python's own exit (os._exit)", ""


def _complete(child: Child) -> bool:
    return (child.folder / "meta.json").exists()


def _enough(child: Child) -> bool:
    """Whether a script that failed in the end had made all updates that were asked for."""
    meta = json.loads((child.folder / "meta.json").read_text(encoding="utf-8"))
    return bool(child.job.updates) and int(meta["updates"]) >= child.job.updates


def _progress_so_far(child: Child) -> str:
    done = len(list(child.folder.glob("samples-*.pt")))
    return f"it had made {done} of {child.job.updates} updates\n" if child.job.updates else ""


def _output(child: Child) -> str:
    lines = last_lines(child.folder / "log.txt")
    if not lines:
        return ""
    return "\nthe last lines of its output:\n" + "\n".join(f"    {line}" for line in lines)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
