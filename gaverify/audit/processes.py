"""Runs the child processes of an audit: at most two at once, each ended with everything that it started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gaverify.audit.ending import Child, check, output_of, progress_so_far
from gaverify.audit.job import Job
from gaverify.audit.launch import ERROR, folders_of, rank_that_failed
from gaverify.audit.outputs.guard import take_away
from gaverify.children import started
from gaverify.errors import ProblemError
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
_LINGER = 0.5  # seconds: when a rank fails the others lose their connections, and may be seen to fail before it
_PATIENCE = 5.0  # seconds that a launcher has to end the other ranks when one has failed


def run_jobs(jobs: Sequence[tuple[Job, str]], timeout: float, progress: Callable[[str], None]) -> list[Child]:
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
            if child.kept is not None:
                child.kept.end()
            for folder in folders_of(child.folder) if child.job.files == "guard" else ():
                take_away(folder)
    for child in [failed] if failed is not None else children:
        check(child, children)
    for child in children:
        child.write()
    return children


def _start(job: Job, command: str) -> Child:
    child = Child(job, command)
    child.folder.mkdir(parents=True, exist_ok=True)
    if job.meeting is not None:
        job.meeting.mkdir(exist_ok=True)
    code = _BOOT.format(root=_ROOT, job=child.describe())
    with (child.folder / "log.txt").open("wb") as log:
        child.kept = started(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(job),
        )
    child.started = time.monotonic()
    return child


def _environment(job: Job) -> dict[str, str]:
    """The variables of a run; all runs order sets of strings alike, or they might order their data differently."""
    fixed = {"PYTHONHASHSEED": str(job.seed or 0)}
    if job.seed is None and os.environ.get("PYTHONHASHSEED"):
        fixed = {}
    eager = {"TORCH_COMPILE_DISABLE": "1"} if job.eager else {}
    return {**os.environ, **fixed, **dict(job.environment), **eager}


def _wait(children: Sequence[Child], timeout: float) -> Child | None:
    """Waits for all; one that fails ends the wait and is returned: nothing can be compared any more."""
    open_children = list(children)
    while open_children:
        for child in list(open_children):
            child.seconds = time.monotonic() - child.started
            if child.done:
                open_children.remove(child)
                if child.status and not child.has_all:
                    return _first_of(children)
            elif child.job.launcher and rank_that_failed(child.folder, _PATIENCE):
                return child
            elif child.seconds > timeout:
                raise ProblemError(
                    f"the {child.title} was still running after {timeout:g} s and was ended (--timeout): "
                    f"{child.command}\n{progress_so_far(child, children)}{output_of(child)}"
                )
        if open_children:
            time.sleep(_TICK)
    return None


def _first_of(children: Sequence[Child]) -> Child:
    """Returns the child that failed first: one that was killed says nothing, and the others fail because of it."""
    limit = time.monotonic() + _LINGER
    while time.monotonic() < limit and any(child.status is None for child in children):
        time.sleep(_TICK)
    failed = [child for child in children if child.status and not child.has_all]
    silent = [child for child in failed if not (child.folder / ERROR).exists()]
    return (silent or sorted(failed, key=lambda child: (child.folder / ERROR).stat().st_mtime_ns))[0]
