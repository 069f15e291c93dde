"""Launchers such as torchrun: the variables that they set, and how every Python that they start enters the recorder."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from gaverify.errors import ProblemError, SpecError

JOB = "GAVERIFY_AUDIT_JOB"
"""The variable that tells a process started by a launcher where its job is described."""

_HERE = "127.0.0.1"
_PORTS, _TRIES = range(10_000, 32_768), 64
_ENTRANCE = str(Path(__file__).with_name("entrance"))  # holds nothing but `sitecustomize.py`


def torchrun_variables(rank: int, ranks: int, port: int) -> Mapping[str, str]:
    """Returns the variables that torchrun gives to a process of one machine; gloo is kept on the loopback.

    Args:
        rank: From 0.
        ranks: How many processes there are.
        port: Where rank 0 listens.
    """
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "MASTER_ADDR": _HERE,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in values.items()} | {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    }


def free_port() -> int:
    """Returns a port of the loopback that nobody listens on now.

    Ports that the system hands out (32768 and above) are left alone: until rank 0 listens it has time to give one of
    them to another process. The choice depends on no seed of the script's.
    """
    for _ in range(_TRIES):
        port = _PORTS.start + secrets.randbelow(len(_PORTS))
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind((_HERE, port))
            return port
    raise ProblemError(f"none of {_TRIES} ports of {_HERE} that were tried is free: end what listens on them")


def entry_variables(job: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with which every Python that a launcher starts enters the recorder.

    Args:
        job: Where the job is described.
        environment: The variables of the launcher without them.
    """
    # In front of the user's folders: Python imports the first `sitecustomize` that it finds, and no other.
    path = environment.get("PYTHONPATH")
    return {JOB: str(job), "PYTHONPATH": _ENTRANCE + (os.pathsep + path if path else "")}


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
