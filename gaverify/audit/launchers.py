"""Launchers: gaverify's own, which forks ranks, and how every Python that torchrun or another starts is recorded."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gaverify.audit.folders import ERROR, LOG, SCRIPT_FAILED, folder_for, note_rank
from gaverify.children.last_words import Ended
from gaverify.children.ranks import HERE, torchrun_variables
from gaverify.errors import ProblemError, SpecError

JOB = "GAVERIFY_AUDIT_JOB"
"""The variable that tells a process started by a launcher where its job is described."""

_PORTS, _TRIES = range(10_000, 32_768), 64
_LINGER = 0.5  # seconds
_ENTRANCE = str(Path(__file__).with_name("entrance"))  # what the script could import by accident is elsewhere


def start_ranks(run: Path, ranks: int, port: int) -> Path:
    """Forks this process into the ranks of a run, and returns in each of them the folder of its own.

    This process itself ends with the last of them, or soon after one has failed; its keeper ends those that are left.

    Args:
        run: The run's folder.
        ranks: How many there are.
        port: Where rank 0 listens.
    """
    folders = {}
    for rank in range(ranks):
        folder = folder_for(run, rank)
        note_rank(folder, rank, ranks)
        process = os.fork()
        if not process:
            os.environ |= torchrun_variables(rank, ranks, port)
            with (folder / LOG).open("wb") as log:
                for stream in (1, 2):
                    os.dup2(log.fileno(), stream)
            return folder
        folders[process] = folder
    os._exit(_wait_for_ranks(folders))


def _wait_for_ranks(folders: dict[int, Path]) -> int:
    """Waits for the processes of ranks until all have ended, or one has failed; returns the status of the launcher."""
    first_failure = 0
    while folders:
        process, ended = os.waitpid(-1, os.WNOHANG if first_failure else 0)
        if not process:
            break
        folder, status = folders.pop(process), os.waitstatus_to_exitcode(ended)
        if status and not (folder / ERROR).exists():
            with contextlib.suppress(OSError):  # on a full disk the rank has noted that itself
                (folder / ERROR).write_text(explain_status(status) + "\n", encoding="utf-8")
                os.utime(folder / ERROR, (0, 0))  # others fail because of it, and may have said so before
        if status and not first_failure:
            first_failure = status
            time.sleep(_LINGER)  # one that was killed may be seen to end after those that lose their connections to it
    return first_failure if first_failure >= 0 else SCRIPT_FAILED


def explain_status(status: int) -> str:
    """Returns why a process ended that has not said so itself; the status of one that a signal ended is negative."""
    return f"it {Ended(status)}" + (", and not through Python's own exit (os._exit?)" if status >= 0 else "")


def free_port() -> int:
    """Returns a port of the loopback that nobody listens on now.

    Ports that the system hands out (32768 and above) are left alone: until rank 0 listens it has time to give one of
    them to another process. The choice depends on no seed of the script's.
    """
    for _ in range(_TRIES):
        port = _PORTS.start + secrets.randbelow(len(_PORTS))
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind((HERE, port))
            return port
    raise ProblemError(f"no free port on {HERE} in {_TRIES} attempts: end the programs that listen there")


def entry_variables(job: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with which every Python that a launcher starts enters the recorder.

    Args:
        job: Where the job is described.
        environment: The variables of the launcher without them.
    """
    # In front of the user's folders: Python imports the first `sitecustomize` that it finds, and no other.
    path = environment.get("PYTHONPATH")
    return {JOB: str(job), "PYTHONPATH": _ENTRANCE + (os.pathsep + path if path else "")}


_REMOTE_PROGRAMS = ("srun", "ssh", "pdsh")
_LISTS_OF_HOSTS = ("-H", "--host", "-host")
_FILES_OF_HOSTS = ("--hostfile", "-hostfile", "--machinefile", "-machinefile")
_COUNTS_OF_HOSTS = ("--nnodes", "--num_machines", "--num-machines", "--num_nodes")
_THIS_HOST = ("localhost", "127.0.0.1")


def find_remote_word(words: Sequence[str]) -> str:
    """Returns the word by which a launcher's command starts processes on other machines; "" where none does."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        value = value if equals else "".join(words[at + 1 : at + 2])
        hosts = {host.partition(":")[0] for host in value.split(",")}
        if (
            (at == 0 and os.path.basename(word) in _REMOTE_PROGRAMS)
            or name in _FILES_OF_HOSTS
            or (name in _LISTS_OF_HOSTS and not hosts <= {*_THIS_HOST})
            or (name in _COUNTS_OF_HOSTS and value.rpartition(":")[2] != "1")  # `1:4` is a range
        ):
            return name
    return ""


def find_program(word: str, option: str = "--launcher") -> str:
    """Returns the path of a launcher: one installed beside this Python comes first, `python` is this Python.

    Args:
        word: Its name.
        option: Where the user wrote it.

    Raises:
        SpecError: There is none of this name.
    """
    # The first `python` of PATH may have neither the user's torch nor gaverify.
    if word in ("python", "python3"):
        return sys.executable
    folders = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    path = shutil.which(word, path=os.pathsep.join(folders))
    if path is None:
        raise SpecError(
            f"{option}: there is no program `{word}`; write the command as in a shell, such as "
            f'{option} "torchrun --nproc-per-node 2"'
        )
    return path
