"""How a run ended: whether its record is complete, and if not, what to say about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gaverify.amounts import bytes_text
from gaverify.audit.editing import PLACED, not_placed
from gaverify.audit.job import DISK_FULL, RECORDER_FAILED, ROOM, Job
from gaverify.audit.launch import (
    ERROR,
    INTERNAL,
    RANK,
    ended_early,
    failed_first,
    folders_of,
    is_whole,
    meta_of,
    ranks_of,
    updates_of,
)
from gaverify.audit.outputs import IMPOSSIBLE
from gaverify.children.launching import Kept, last_lines, signal_name
from gaverify.errors import InternalError, ProblemError
from gaverify.records.audit_report import TITLES

_JOB, _DONE = "job.json", "done.json"


@dataclass
class Child:
    """A run of the script: what it was told, the command that it stands for, how many seconds it took.

    `kept` is its process, where it was not made by an earlier audit.
    """

    job: Job
    command: str
    seconds: float = 0.0
    kept: Kept | None = None
    started: float = 0.0

    @property
    def status(self) -> int | None:
        """How it ended; None while it runs."""
        return self.kept.process.poll() if self.kept is not None else 0

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return Path(self.job.folder)

    @property
    def title(self) -> str:
        """What it is, for sentences."""
        return TITLES[self.job.role] + (f" (rank {self.job.rank} of {self.job.ranks})" if self.job.ranks > 1 else "")

    @property
    def done(self) -> bool:
        """Whether it has ended, or all ranks that its launcher started are done: what it does then is no concern."""
        return self.status is not None or (bool(self.job.launcher) and self.has_all)

    @property
    def has_all(self) -> bool:
        """Whether the run has made all updates that were asked for, even where its script failed in the end."""
        if not is_whole(self.folder):
            return False
        updates = [int(meta_of(folder)["updates"]) for folder in ranks_of(self.folder)]
        return bool(self.job.updates) and min(updates) >= self.job.updates

    def describe(self) -> str:
        """Writes down what it is told, and returns the name of that file."""
        self.job.write(self.folder / _JOB)
        return str(self.folder / _JOB)

    def write(self) -> None:
        """Notes beside the record what only the parent knows."""
        text = json.dumps({"command": self.command, "seconds": self.seconds})
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
                "another version of gaverify made them: run the audit again"
            ) from error


class NoView(Exception):
    """No run can be given a view of its own of the files; the message says why. Nothing of the script has run."""


def check(child: Child, beside: Sequence[Child] = ()) -> None:
    """Raises unless the run left a complete record.

    Args:
        child: The run, or one rank of it.
        beside: What ran at the same time, its other ranks among them.
    """
    status = child.status
    if child.has_all or (status == 0 and is_whole(child.folder)):
        _check_values(child)
        return

    def told(name: str) -> str:
        """What a file holds that one of its processes left; empty where none did."""
        left = [folder / name for folder in folders_of(child.folder) if (folder / name).exists()]
        return left[0].read_text(encoding="utf-8") if left else ""

    room, fault, refused = told(ROOM), told(INTERNAL), told("refused.json")
    if room or status == DISK_FULL:
        no_room = _no_room(child, *json.loads(room or "[0, 0]"))
        raise ProblemError(f"{no_room}; free some, record fewer `--updates`, or set TMPDIR to a larger disk")
    if fault or status == RECORDER_FAILED:
        raise InternalError(f"the recorder failed in the {child.title}: {fault or 'no traceback'}")
    if status == IMPOSSIBLE:
        raise NoView((child.folder / "no-view.txt").read_text(encoding="utf-8"))
    if refused:
        raise ProblemError(_refusal(child, *json.loads(refused)))
    cause, whole = _cause(child, status)
    left = _left_before(child, beside)
    raise ProblemError(f"the {child.title} failed: {cause}\n{child.command}\n{left}{whole}{output_of(child)}".rstrip())


def _no_room(child: Child, wanted: int, free: int) -> str:
    """Says what was to be stored where the recorder knew before it began; else that the disk filled up."""
    if not wanted:
        return f"no space left in `{child.folder.parent}` while the {child.title} stored its gradients"
    return (
        f"the {child.title} has to store {bytes_text(wanted)} of gradients, and `{child.folder.parent}` has "
        f"{bytes_text(free)} left"
    )


def _check_values(child: Child) -> None:
    """Raises where a value of the source was asked for and nothing in the source took it."""
    path = child.folder / PLACED
    taken = set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()
    left = [name for name, _ in child.job.values if name not in taken]
    if left:
        sentences = [not_placed(name, child.job.script, child.job.module) for name in left]
        raise ProblemError(f"the {child.title}: " + "\n".join(sentences))


def _refusal(child: Child, name: str, place: list[Any] | None) -> str:
    where = f" ({place[0]}:{place[1]})" if place else ""
    return (
        f"the {child.title} would change `{name}`{where}, which was there before it, and was ended; the file is as it "
        f"was: {child.command}\nthis system cannot give each run a view of the files of its own; let each write into "
        'a folder of its own, such as --full "--out a" --accumulated "--out b", or write `--in-place` if the file may '
        "be changed"
    )


def _cause(child: Child, status: int | None) -> tuple[str, str]:
    """Why a run failed, in a line, and the traceback where there is one: that of the process that failed first."""
    first = failed_first(child.folder)
    if first is not None:
        cause, _, whole = (first / ERROR).read_text(encoding="utf-8", errors="replace").partition("\n")
        said = last_lines(child.folder / "log.txt")[-1:] if not whole else []
        rank = f"rank {(first / RANK).read_text(encoding='ascii')}: " if (first / RANK).exists() else ""
        return rank + ": ".join([cause, *said]), whole
    if child.job.launcher:
        return _of_launcher(child, status), ""
    assert status is not None
    if status < 0:
        return f"it was killed by {signal_name(-status)}" + (" (out of memory?)" if -status == 9 else ""), ""
    return f"it left with status {status} past Python's own exit (os._exit)", ""


def _left_before(child: Child, beside: Sequence[Child]) -> str:
    """Which ranks had come to their end before one failed that may have waited for them; ends its line."""
    if child.job.launcher:
        ended = ended_early(child.folder)
    else:
        others = [other for other in beside if child.job.ranks > 1 and other.job.ranks > 1 and other is not child]
        ended = [(other.job.rank, updates_of(other.folder)) for other in others if other.status == 0]
    told = [f"rank {rank} had left with {made} of {child.job.updates} updates" for rank, made in ended]
    return "; ".join(told) + "\n" if told else ""


def _of_launcher(child: Child, status: int | None) -> str:
    """Why a launcher's run has no complete record although no process of it said so."""
    word = child.job.launcher[0]
    found = ranks_of(child.folder)
    if found:
        ranks, updates = meta_of(found[0])["ranks"], [meta_of(folder)["updates"] for folder in found]
        made = ", ".join(map(str, updates))
        return f"{len(found)} of its {ranks} ranks came to their end ({made} updates); `{word}` left with {status}"
    entered = any(folder != child.folder for folder in folders_of(child.folder))
    if not entered and status == 0:
        return (
            f"no Python that `{word}` started could be entered: it has to pass PYTHONPATH on, and to run Python "
            "without -I, -E and -S"
        )
    return f"none of its processes reached an optimizer step; `{word}` left with {status}"


def progress_so_far(child: Child, children: Sequence[Child]) -> str:
    """Returns how many updates a run, and the other ranks beside it, had made when it was ended; ends its line."""
    if not child.job.updates:
        return ""
    of = f"of {child.job.updates} updates"
    if child.job.launcher:
        made = [count for count in map(updates_of, folders_of(child.folder)) if count]
        return f"its processes had made {', '.join(map(str, made)) or 0} {of}\n"
    if child.job.ranks == 1:
        return f"it had made {updates_of(child.folder)} {of}\n"
    told = []
    for other in children:
        if other.job.ranks > 1:
            state = "went on" if other.status is None else "had ended"
            told.append(f"rank {other.job.rank} {state} with {updates_of(other.folder)} {of}")
    return "; ".join(told) + "\n"


def output_of(child: Child) -> str:
    """Returns the last lines of what a run printed; empty where it printed nothing."""
    lines = last_lines(child.folder / "log.txt")
    if not lines:
        return ""
    return "\nthe last lines of its output:\n" + "\n".join(f"    {line}" for line in lines)
