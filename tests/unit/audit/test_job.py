"""How the recorder enters the processes of a launcher, and what it reads from the folders that they leave."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gaverify.audit.folders import (
    DISK_FULL,
    ERROR,
    INTERNAL,
    RECORDER_FAILED,
    ROOM,
    SCRIPT_FAILED,
    ended_early,
    failed_first,
    folder_for,
    folders_of,
    has_all_records,
    note_fault,
    note_rank,
    rank_of,
    ranks_of,
)
from gaverify.audit.job import Command, Job
from gaverify.audit.launchers import entry_variables, find_program, free_port
from gaverify.audit.outputs import IMPOSSIBLE
from gaverify.audit.processes import Child, check
from gaverify.audit.request import Request
from gaverify.children.launching import start_command
from gaverify.errors import ProblemError, SpecError

HIDDEN = "import sys\nsys.hidden_one_ran = True\n"
SEEN = """
import os, subprocess, sys
print(getattr(sys, "hidden_one_ran", False), os.environ.get("PYTHONPATH"), "GAVERIFY_AUDIT_JOB" in os.environ)
print(any("entrance" in folder for folder in sys.path))
"""
STARTED = f"""
import multiprocessing, os, subprocess, sys
code = {SEEN!r} + "print(type(sys.meta_path[0]).__name__)"
subprocess.run([sys.executable, "-c", code], check=True)
subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
sys.stdout.flush()
os.system(f"{{sys.executable}} -c '{{code}}'")
"""


def _printed(code: str, folder: Path) -> list[str]:
    """What a Python prints that was started as a launcher is."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    environment |= entry_variables(folder / "no-job.json", environment)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=folder
    )
    return done.stdout.splitlines()


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(HIDDEN, encoding="utf-8")
    return tmp_path


def test_the_script_sees_its_own_environment_and_its_own_sitecustomize(hidden: Path) -> None:
    assert _printed(SEEN, hidden) == [f"True {hidden} False", "False"]


@pytest.mark.skipif(os.name != "posix", reason="os.system with a shell's quotes")
def test_children_are_entered_however_they_are_started(hidden: Path) -> None:
    """With the environment of this process, with a copy of what the script sees, and through a shell."""
    one = [f"True {hidden} False", "False", "_After"]
    assert _printed(STARTED, hidden) == one * 3


def test_without_the_variable_nothing_is_recorded(hidden: Path) -> None:
    """A PYTHONPATH that somebody kept must not break a later Python."""
    environment = {**os.environ, **entry_variables(hidden, {})}
    del environment["GAVERIFY_AUDIT_JOB"]
    code = "import sys; print([type(finder).__name__ for finder in sys.meta_path if not isinstance(finder, type)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "_After" not in done.stdout


def _process(run: Path, process: int, rank: int, ranks: int, updates: int = 2) -> Path:
    folder = folder_for(run, process)
    meta = {"rank": rank, "ranks": ranks, "updates": updates}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return folder


def test_ranks_are_found_whatever_else_trained(tmp_path: Path) -> None:
    one, zero = _process(tmp_path, 11, 1, 2), _process(tmp_path, 12, 0, 2)
    _process(tmp_path, 13, 0, 1)  # a tokenizer, trained by the parent
    folder_for(tmp_path, 14)  # the launcher's agent
    assert ranks_of(tmp_path) == [zero, one]
    assert has_all_records(tmp_path) and ended_early(tmp_path) == []


def test_a_run_that_lacks_a_rank_is_not_whole(tmp_path: Path) -> None:
    _process(tmp_path, 11, 1, 2, updates=1)
    assert not has_all_records(tmp_path)
    assert ended_early(tmp_path) == [(1, 1)]


def test_the_first_failure_is_found(tmp_path: Path) -> None:
    victim, culprit = folder_for(tmp_path, 11), folder_for(tmp_path, 12)
    for at, folder in ((200, victim), (100, culprit)):
        (folder / "error.txt").write_text("ValueError: x\n", encoding="utf-8")
        os.utime(folder / "error.txt", (at, at))
    assert failed_first(tmp_path) == culprit


def test_a_rank_that_was_killed_is_named_before_those_that_fail_because_of_it(tmp_path: Path) -> None:
    job = Job(Command("train.py", ranks=2), "accumulated", 2, folder=str(tmp_path))
    code = (
        "import os, pathlib, time\n"
        "from gaverify.audit.launchers import start_ranks\n"
        f"folder = start_ranks(pathlib.Path({str(tmp_path)!r}), 2, 29500)\n"
        "if os.environ['RANK'] == '1':\n"
        "    time.sleep(0.3)\n"
        "    os.kill(os.getpid(), 9)\n"
        "(folder / 'error.txt').write_text('RuntimeError: connection closed', encoding='utf-8')\n"
        "os._exit(96)\n"
    )
    assert start_command([sys.executable, "-c", code]).wait() == SCRIPT_FAILED
    with pytest.raises(ProblemError, match=r"accumulated run \(rank 1 of 2\) failed: it was ended by signal SIGKILL"):
        check(Child(job))


def test_ranks_that_join_no_group_are_waited_for(tmp_path: Path) -> None:
    """Each of their records says that it is alone."""
    note_rank(_process(tmp_path, 0, 0, 1), 0, 2)
    assert has_all_records(tmp_path)
    note_rank(folder_for(tmp_path, 1), 1, 2)
    assert not has_all_records(tmp_path)


def test_a_rank_that_left_is_named_where_another_failed_without_it(tmp_path: Path) -> None:
    _process(tmp_path, 1, 1, 2, updates=1)
    failed = _process(tmp_path, 0, 0, 2, updates=1)
    assert ended_early(tmp_path) == []
    (failed / "error.txt").write_text("RuntimeError: connection closed\n", encoding="utf-8")
    assert ended_early(tmp_path) == [(1, 1)]


@pytest.mark.skipif(os.name != "posix", reason="ranks are forked")
def test_the_launcher_of_ranks_ends_soon_after_one_that_failed(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys, time\n"
        "from gaverify.audit.launchers import start_ranks\n"
        "folder = start_ranks(pathlib.Path(sys.argv[1]), 3, 29500)\n"
        "print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], folder.name[0], flush=True)\n"
        "time.sleep({'0': 0, '1': 0.1, '2': 60}[os.environ['RANK']])\n"
        "os._exit(7 * (os.environ['RANK'] == '1'))\n"
    )
    child = start_command([sys.executable, "-c", code, str(tmp_path)])
    assert child.wait() == 7
    folders = folders_of(tmp_path)
    assert [(folder / "log.txt").read_text(encoding="utf-8") for folder in folders] == [
        f"{rank} of 3 {rank}\n" for rank in range(3)
    ]
    assert [(folder / "error.txt").exists() for folder in folders] == [False, True, False]
    assert [rank_of(folder) for folder in folders] == [f"{rank} of 3" for rank in range(3)]


def test_a_run_without_a_launcher_is_its_own_process(tmp_path: Path) -> None:
    assert ranks_of(tmp_path) == [] and not has_all_records(tmp_path)
    (tmp_path / "meta.json").write_text('{"rank": 1, "ranks": 2, "updates": 2}', encoding="utf-8")
    assert ranks_of(tmp_path) == [tmp_path] and has_all_records(tmp_path)


def test_python_is_the_one_that_runs_gaverify() -> None:
    assert find_program("python") == sys.executable
    with pytest.raises(SpecError, match="no program `no-such-launcher`"):
        find_program("no-such-launcher")


def test_a_launcher_around_the_audit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script would wait for the other ranks until the timeout."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SpecError, match=r"WORLD_SIZE=2 .* --ranks 2"):
        Request(script=__file__, full=("--a",), accumulated=("--b",)).check()
    Request(script=__file__, full=("--a",), accumulated=("--b",), ranks=2).check()
    monkeypatch.setenv("WORLD_SIZE", "1")
    Request(script=__file__, full=("--a",), accumulated=("--b",)).check()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"launcher": ("python",), "ranks": 2}, "leave one out"),
        ({"full_launcher": ("python",)}, "--full-launcher needs --launcher"),
        ({"launcher": ("no-such-launcher", "-n", "2")}, "no program `no-such-launcher`"),
        ({"launcher": ("python",), "events_only": True}, "leave out --events-only"),
    ],
)
def test_requests_that_make_no_sense(options: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Request(script=__file__, full=("--a",), accumulated=("--b",), **options).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "full", "accumulated"),
    [
        ({}, 0, 0),
        ({"ranks": 3}, 1, 3),
        ({"launcher": ("torchrun",)}, 1, 0),
        ({"launcher": ("torchrun",), "full_launcher": ("torchrun",)}, 0, 0),
        ({"launcher": ("python",)}, 0, 0),  # the script makes its group itself
    ],
)
def test_a_full_batch_that_stands_alone_beside_ranks_is_a_group_of_one(
    options: dict[str, Any], full: int, accumulated: int
) -> None:
    request = Request(script=__file__, full=("--a",), accumulated=("--b",), **options)
    assert (request.ranks_of("full"), request.ranks_of("accumulated")) == (full, accumulated)


@pytest.mark.parametrize("drawn", [range(20), ()], ids=["another", "none"])
def test_a_port_that_is_taken_is_left_alone(monkeypatch: pytest.MonkeyPatch, drawn: Sequence[int]) -> None:
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        numbers = iter([port - 10_000, *drawn])
        monkeypatch.setattr("gaverify.audit.launchers.secrets.randbelow", lambda _: next(numbers, port - 10_000))
        if drawn:
            assert free_port() != port
        else:
            with pytest.raises(ProblemError, match=r"no free port on 127\.0\.0\.1 in 64 attempts"):
                free_port()


def test_ports_are_none_that_the_system_hands_out() -> None:
    """Rank 0 listens seconds later: until then another process is given one of those."""
    assert all(10_000 <= free_port() < 32_768 for _ in range(20))


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "writes", "status"),
    [
        (KeyError("ours"), True, RECORDER_FAILED),
        (KeyError("ours"), False, DISK_FULL),  # a text of it has no room
        (NO_SPACE, True, DISK_FULL),
        (RuntimeError("basic_ios::clear: iostream error"), True, DISK_FULL),
    ],
)
def test_a_full_disk_is_no_fault_of_the_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, writes: bool, status: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NO_SPACE

    if not writes:
        monkeypatch.setattr(Path, "write_text", refuse)
    assert note_fault(error, tmp_path) == status
    full = status == DISK_FULL
    assert ((tmp_path / INTERNAL).exists(), (tmp_path / ROOM).exists()) == (not full, full)


def test_a_descriptor_that_the_script_has_closed_is_no_fault_of_the_recorder(tmp_path: Path) -> None:
    assert note_fault(OSError(errno.EBADF, "Bad file descriptor"), tmp_path) == SCRIPT_FAILED
    assert not (tmp_path / INTERNAL).exists()
    assert (tmp_path / ERROR).read_text().startswith("the user's code closed a file descriptor that is not its own")


def test_a_full_disk_of_one_rank_is_told_although_its_launcher_says_nothing(tmp_path: Path) -> None:
    job = Job(Command("train.py", launcher=("torchrun",)), "accumulated", 2, folder=str(tmp_path))
    note_fault(NO_SPACE, folder_for(tmp_path, 7))
    with pytest.raises(ProblemError, match=r"no space left in .* while the accumulated run stored its gradients"):
        check(Child(job))


@pytest.mark.parametrize("reason", ["user namespaces are not allowed here", ""])
def test_where_the_kernel_makes_no_view_the_sentence_says_what_to_write(tmp_path: Path, reason: str) -> None:
    if reason:
        (tmp_path / "no-view.txt").write_text(reason)
    kept = start_command([sys.executable, "-c", f"import os; os._exit({IMPOSSIBLE})"])
    kept.wait()
    job = Job(Command("train.py"), "full", 1, folder=str(tmp_path))
    with pytest.raises(
        ProblemError, match=f"on a copy of your files{f': {reason}' * bool(reason)}. Write `--in-place`"
    ):
        check(Child(job, handle=kept))
