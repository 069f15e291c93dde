"""A run that is forked finds what a started one finds, and ends as it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import forking
import pytest
from forking import Server, Servers

from gaverify.children.launching import Kept, start_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux"),
    pytest.mark.xdist_group("forking"),  # they share a server
]
FINDS = """
import torch._dynamo, numpy, multiprocessing.process, os, random, signal, sys, threading, warnings
signals = [str(signal.getsignal(number)).split(" at ")[0] for number in sorted(signal.valid_signals())]
variables = {name: word for name, word in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
frame = sys._getframe()
found = {
    "Python": [sys.argv, sys.path, sys.flags, sorted(globals()), len(sys.orig_argv), frame.f_code.co_filename],
    "folder": [os.getcwd(), multiprocessing.process.ORIGINAL_DIR],
    "process": [sorted(variables.items()), signals, os.getsid(0) == os.getpid(), sorted(os.listdir("/proc/self/fd"))],
    "streams": [sys.stdin.read(), os.isatty(1), sys.stdout.encoding, sys.stdout.line_buffering, sys.stderr.errors],
    "torch": [torch.get_num_threads(), threading.active_count(), torch.get_default_dtype()],
    "order": hash("a word"),
    "warnings": [str(filter) for filter in warnings.filters],
}
for name, value in found.items():
    print(name, value)
print(random.random(), torch.rand(1).item(), numpy.random.rand(), file=sys.stderr)
"""
STUCK = """
import os, signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
while True: signal.pause()
"""
FORGETFUL = """
import os, signal, subprocess, sys
from forking import Server
env, none = dict(os.environ), subprocess.DEVNULL
server = Server(env)
with open(sys.argv[1], "wb") as log:
    streams = {"stdin": none, "stdout": log, "stderr": subprocess.STDOUT}
    kept = server.started([sys.executable, "-c", sys.argv[2]], env=env, **streams)
print(server.process.pid, kept.process.pid, flush=True)
while len(open(sys.argv[1]).read().split()) < 2: signal.sigtimedwait([], 0.02)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server({**os.environ, "PYTHONHASHSEED": "0"})
    yield server
    server.end()


def _run(how: Callable[..., Kept], code: str, log: Path, **variables: str) -> Kept:
    environment = {**os.environ, "PYTHONHASHSEED": "0", **variables}
    with log.open("wb") as stream:
        options = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": subprocess.STDOUT}
        return how([sys.executable, "-c", code], env=environment, **options)


def test_it_finds_what_a_started_one_finds(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "forked", tmp_path / "again", tmp_path / "started"
    ways = server.started, server.started, start_command
    assert [_run(how, FINDS, log, ONE="1").wait() for how, log in zip(ways, logs, strict=True)] == [0, 0, 0]
    drawn, *same = zip(*(sorted(log.read_text().splitlines()) for log in logs), strict=True)
    assert [len(set(numbers)) for numbers in zip(*map(str.split, drawn), strict=True)] == [3, 3, 3]
    for forked, _, begun in same:
        assert forked == begun


@pytest.mark.parametrize(
    "end",
    [
        "raise ValueError('no')",
        "raise SystemExit(5)",
        "import os; os._exit(7)",
        "import os; os.kill(os.getpid(), 9)",
        "import atexit; atexit.register(print, 'last')",
    ],
)
def test_it_ends_as_a_started_one_does(end: str, server: Server, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ended = [(_run(how, end, log).wait(), log.read_text().splitlines()[-1:]) for how in (server.started, start_command)]
    assert ended[0] == ended[1]


def test_nobody_has_to_wait_for_it(server: Server, tmp_path: Path) -> None:
    for _ in range(3):
        _run(server.started, "", tmp_path / "log")  # forgotten at once, as after an interrupt
    assert _run(server.started, "print(1)", tmp_path / "log").wait() == 0


def test_it_is_ended_with_all_that_it_started(server: Server, tmp_path: Path) -> None:
    log = tmp_path / "log"
    kept = _run(server.started, STUCK, log)
    while len(log.read_text().split()) < 2:
        assert kept.process.poll() is None
        signal.sigtimedwait([], 0.02)
    kept.end()
    assert kept.process.poll() == -signal.SIGKILL
    assert not any(map(_lives, log.read_text().split()))


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "PYTHONHASHSEED", "TORCH_COMPILE_DISABLE", "ONE"])
def test_what_python_and_torch_read_when_they_start_has_its_own_server(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str | None] = []
    monkeypatch.setattr(forking, "start_command", lambda command, env, **streams: begun.append(env[variable]))
    monkeypatch.setattr(
        Server, "started", lambda server, command, env, **streams: begun.append(server.environment.get(variable))
    )
    servers = Servers()
    for word in ("1", "3", "3", "1"):
        _run(servers.started, "", tmp_path / "log", **{variable: word})
    assert begun == (["1"] * 4 if variable == "ONE" else ["1", "3", "3", "1"])


def test_the_server_and_its_runs_go_with_who_asked(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    asking = [sys.executable, "-c", FORGETFUL, str(log), STUCK]
    said = subprocess.run(asking, env=environment, stdout=subprocess.PIPE, text=True).stdout.split()
    processes = [*said, *log.read_text().split()]
    assert len(processes) == 4
    for _ in range(1000):
        if not any(map(_lives, processes)):
            return
        signal.sigtimedwait([], 0.02)
    raise AssertionError([process for process in processes if _lives(process)])


def _lives(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
