"""Runs the child processes of an audit: at most two at once, each ended with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from gaverify.audit.job import DISK_FULL, RECORDER_FAILED, Job
from gaverify.errors import InternalError, ProblemError

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
_TAIL = 15  # lines of a script's output that are shown when it fails
TITLES = {
    "full": "full-batch run", "perturbed": "full-batch run with moved weights", "accumulated": "accumulated run",
    "frozen": "accumulated run with its steps undone", "events": "run",
}  # fmt: skip


@dataclass
class Child:
    """A process and the job that it works on."""

    job: Job
    command: str
    process: subprocess.Popen[bytes]
    started: float
    seconds: float = 0.0

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return Path(self.job.folder)

    @property
    def title(self) -> str:
        """What it is, for sentences."""
        return TITLES[self.job.role]


def run_jobs(jobs: Sequence[tuple[Job, str]], timeout: float, progress: Callable[[str], None]) -> list[Child]:
    """Runs jobs side by side until all have ended.

    Args:
        jobs: Each with the command that it stands for.
        timeout: Seconds for each.
        progress: Told what is running.

    Raises:
        ProblemError: A script failed, hung, or was killed; the message holds its own traceback and last output.
    """
    progress(" and ".join(TITLES[job.role] for job, _ in jobs))
    children: list[Child] = []
    with _terminated_as_interrupted():
        try:
            children += [_start(job, command) for job, command in jobs]
            failed = _wait(children, timeout)
        finally:
            for child in children:
                _end(child.process)
    for child in [failed] if failed is not None else children:
        _check(child)
    return children


def _start(job: Job, command: str) -> Child:
    folder = Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    description = folder / "job.json"
    job.write(description)
    code = _BOOT.format(root=_ROOT, job=str(description))
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    return Child(job, command, process, time.monotonic())


def _wait(children: Sequence[Child], timeout: float) -> Child | None:
    """Waits for all; one that fails ends the wait and is returned: nothing can be compared any more."""
    open_children = list(children)
    while open_children:
        for child in list(open_children):
            child.seconds = time.monotonic() - child.started
            if child.process.poll() is not None:
                open_children.remove(child)
                if child.process.returncode and not (_complete(child) and _enough(child)):
                    return child
            elif child.seconds > timeout:
                _end(child.process)
                raise ProblemError(
                    f"the {child.title} was still running after {timeout:g} s and was ended (--timeout): "
                    f"{child.command}\n{_progress_so_far(child)}{_output(child)}"
                )
        if open_children:
            time.sleep(_TICK)
    return None


def _check(child: Child) -> None:
    """Raises unless the run left a complete record."""
    status = child.process.returncode
    if _complete(child) and (status == 0 or _enough(child)):
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
    error = child.folder / "error.txt"
    if error.exists():
        why = error.read_text(encoding="utf-8", errors="replace")
    elif status < 0:
        why = f"it was killed by {_signal(-status)}" + (" (out of memory?)" if -status == 9 else "")
    else:
        why = f"it left with status {status} past Python's own exit (os._exit)"
    raise ProblemError(f"the {child.title} failed: {child.command}\n{why}{_output(child)}")


def _complete(child: Child) -> bool:
    return (child.folder / "meta.json").exists()


def _enough(child: Child) -> bool:
    """Whether a script that failed in the end had made all updates that were asked for."""
    import json

    meta = json.loads((child.folder / "meta.json").read_text(encoding="utf-8"))
    return bool(child.job.updates) and int(meta["updates"]) >= child.job.updates


def _progress_so_far(child: Child) -> str:
    done = len(list(child.folder.glob("samples-*.pt")))
    return f"it had made {done} of {child.job.updates} updates\n" if child.job.updates else ""


def _output(child: Child) -> str:
    with suppress(OSError):
        with (child.folder / "log.txt").open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - (1 << 14)))
            lines = log.read().decode("utf-8", "replace").splitlines()
        if lines:
            return "\nthe last lines of its output:\n" + "\n".join(f"    {line}" for line in lines[-_TAIL:])
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a child and everything in its session: workers first get the chance to clean up."""
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        with suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, number)
            else:
                process.kill()
        if process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        if not _group_alive(process.pid):
            return
        time.sleep(_TICK)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError, AttributeError):
        return False
    return True


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Turns SIGTERM into the exception of Ctrl-C, so that children and the temporary folder go in either case."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
