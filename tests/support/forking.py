"""Forks the runs of an audit from a process that has imported torch: most of what an audit of a small script takes.

What a forked run finds is what a started one finds. Where the environment gives Python and torch something else to read
when they start, runs have a server of their own, from the second on: one server takes as long as one start.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gaverify.audit import processes
from gaverify.audit.launchers import free_port
from gaverify.children import keeper
from gaverify.children.launching import Kept, start_command

_SERVER = Path(__file__).with_name("fork_server.py")
# Every optimizer imports `torch._dynamo`, which takes as long as torch; the rest is imported before any script runs.
_IMPORTED = ("torch._dynamo", "gaverify.audit.recording.recorder")
_READ_AT_START = (
    *("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ATEN_", "TORCH_", "TORCHDYNAMO_"),
)


@contextlib.contextmanager
def forked_runs(*imported: str) -> Iterator[None]:
    """Lets the runs of audits be forked for a while, with some more modules imported."""
    servers, before = Servers(imported), processes.start_command
    processes.start_command = servers.started
    try:
        yield
    finally:
        processes.start_command = before
        servers.end()


class Servers:
    """One for what each environment lets Python and torch find when they start."""

    def __init__(self, imported: Sequence[str] = ()) -> None:
        self._imported = imported
        self._usual = _read_at_start({"PYTHONHASHSEED": "0", **os.environ})
        self._of: dict[tuple[str, ...], Server | None] = {}

    def started(self, command: Sequence[str], *, env: Mapping[str, str], **streams: Any) -> Kept:
        """Forks `python -c CODE`, or starts it; see `gaverify.children.launching.start_command`."""
        read = _read_at_start(env)
        if not can_fork() or (read not in self._of and read != self._usual):
            self._of[read] = None
            return start_command(command, env=env, **streams)
        server = self._of[read] = self._of.get(read) or Server(env, self._imported)
        return server.started(command, env=env, **streams)

    def end(self) -> None:
        """Ends all."""
        for server in filter(None, self._of.values()):
            server.end()


class Server:
    """It ends when nobody holds the other end of its channel, and what it has forked, when nobody holds its pipe."""

    def __init__(self, environment: Mapping[str, str], imported: Sequence[str] = ()) -> None:
        self.environment = environment
        self._channel, theirs = socket.socketpair()
        text, number = _SERVER.read_text(encoding="utf-8"), theirs.fileno()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", text, str(number), keeper.__file__, *_IMPORTED, *imported],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,
            )

    def started(self, command: Sequence[str], *, env: Mapping[str, str], stdin: int, stdout: Any, stderr: Any) -> Kept:
        """Forks `python -c CODE`."""
        assert stdin == subprocess.DEVNULL
        errors = stdout if stderr == subprocess.STDOUT else stderr
        watched, alive = os.pipe()
        ours, theirs = socket.socketpair()
        text = json.dumps({"command": list(command), "environment": dict(env), "folder": os.getcwd()}).encode()
        with open(os.devnull, "rb") as nothing, theirs:
            given = [nothing.fileno(), stdout.fileno(), errors.fileno(), watched, theirs.fileno()]
            rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given)
            self._channel.sendmsg([len(text).to_bytes(8, "big")], [rights])
            self._channel.sendall(text)
        os.close(watched)
        return Kept(_Forked(ours), alive)  # type: ignore[arg-type]

    def end(self) -> None:
        """Ends it; its runs have ended, or end with their pipes."""
        self._channel.close()
        self.process.kill()
        self.process.wait()


def run_ranks(ranks: int, folder: Path, program: str, *arguments: str) -> list[tuple[int, str, str]]:
    """Returns exit code, stdout and stderr of ranks that nobody watches over, as some launchers leave them.

    Args:
        ranks: How many there are.
        folder: Where they run, and leave what they print.
        program: A script, or a module that is run as `python -m` runs it.
        arguments: Of the program.
    """
    run = "run_path" if program.endswith(".py") else "run_module"
    code = f"import runpy, sys; sys.argv = {[program, *arguments]!r}; runpy.{run}({program!r}, run_name='__main__')"
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # The hash seed of an audit's runs, so that one server forks both.
    shared = {"PYTHONHASHSEED": "0", **os.environ, **place, "GLOO_SOCKET_IFNAME": "lo"}
    started: list[Kept] = []
    before = os.getcwd()
    os.chdir(folder)  # a forked process begins where it is asked for
    try:
        for rank in range(ranks):
            with open(f"{rank}.out", "wb") as out, open(f"{rank}.err", "wb") as errors:
                streams: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": errors}
                environment = {**shared, "RANK": str(rank)}
                started.append(processes.start_command([sys.executable, "-c", code], env=environment, **streams))
        codes = [kept.process.wait(240) for kept in started]
    finally:
        os.chdir(before)
        for kept in started:
            kept.end()
    texts = [[(folder / f"{rank}.{kind}").read_text("utf-8") for kind in ("out", "err")] for rank in range(ranks)]
    return [(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]


@cache
def can_fork() -> bool:
    """No accelerator can be used after a fork."""
    from gaverify.passes.precision import available_devices

    return sys.platform == "linux" and len(available_devices()) == 1


def _read_at_start(environment: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(sorted(f"{name}={word}" for name, word in environment.items() if name.startswith(_READ_AT_START)))


class _Forked:
    """What gaverify asks of a process, by the names of `subprocess.Popen`; the server tells how it ended."""

    stdin = stdout = None

    def __init__(self, told: socket.socket) -> None:
        with told:
            self._told = told.makefile("rb", 0)
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
            self.returncode = int(self._told.readline())
            self._told.close()
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
