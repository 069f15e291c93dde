"""Ranks that torch's launcher starts: what comes back, what is raised, and that none is left, whatever the signal."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gaverify
from gaverify import verification
from gaverify.children.ranks import torchrun_variables
from gaverify.collective.flow import explain_options
from gaverify.collective.launching import Progress, TellEnd, run_on_ranks
from gaverify.collective.membership import devices_beside
from gaverify.errors import Agreed, InternalError, MissingPackage, ProblemError
from gaverify.passes.precision import backend_of, devices_of_ranks
from gaverify.spec import Spec
from gaverify.verification import verify_spec

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
Work = Callable[[Progress, TellEnd], Any]


def rank() -> int:
    return int(os.environ["RANK"])


def on_rank_1(act: Callable[[], Any]) -> Work:
    """What acts on rank 1, while rank 0 waits for it."""

    def work(progress: Progress, tell_end: TellEnd) -> None:
        if rank() == 1:
            act()
        time.sleep(60)

    return work


def _raise(error: BaseException) -> None:
    raise error


def _answer(progress: Progress, tell_end: TellEnd) -> tuple[int, str, str]:
    progress("half", rank(), 2)
    return rank(), os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["forked", "spawned"])
def test_rank_0_answers_and_reports(forks: bool) -> None:
    heard: list[tuple[object, ...]] = []
    answer = run_on_ranks(_answer, 2, lambda *step: heard.append(step), forks=forks)
    assert answer == (0, "2", "127.0.0.1") and heard == [("half", 0, 2)]
    assert "RANK" not in os.environ and "TORCHELASTIC_SIGNALS_TO_HANDLE" not in os.environ


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (lambda: _raise(ProblemError("no luck")), ProblemError, "rank 1: no luck"),
        (lambda: _raise(ZeroDivisionError("ours")), InternalError, "ZeroDivisionError: ours"),
        (lambda: _raise(SystemExit(0)), ProblemError, r"rank 1: the model's code called sys.exit\(0\)"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), ProblemError, "rank 1 of 2 was ended by signal SIGKILL"),
        (lambda: os._exit(3), ProblemError, "rank 1 of 2 ended with exit code 3"),
    ],
    ids=["foreseen", "ours", "leaves", "signal", "exit"],
)
def test_a_rank_that_fails_ends_all(act: Callable[[], None], error: type[Exception], words: str) -> None:
    begun, before = time.monotonic(), _children()
    with pytest.raises(error, match=words):
        run_on_ranks(on_rank_1(act), 2)
    assert time.monotonic() - begun < 30
    assert _children() <= before  # those of other tests aside


def test_what_all_ranks_raise_is_raised_as_it_is() -> None:
    def work(progress: Progress, tell_end: TellEnd) -> None:
        raise MissingPackage("timm is not installed")

    with pytest.raises(MissingPackage, match=r"^timm is not installed$"):
        run_on_ranks(work, 2)


def test_what_ranks_agreed_on_has_no_number() -> None:
    def work(progress: Progress, tell_end: TellEnd) -> None:
        raise Agreed("the batches differ")

    with pytest.raises(Agreed, match=r"^the batches differ$"):
        run_on_ranks(work, 2)


def test_a_rank_that_loses_another_does_not_hide_its_reason() -> None:
    def work(progress: Progress, tell_end: TellEnd) -> None:
        raise ProblemError("Connection closed by peer" if rank() == 0 else "the batch is too small")

    with pytest.raises(ProblemError, match=r"^rank 1: the batch is too small$"):
        run_on_ranks(work, 2)


def test_no_rank_works_before_all_are_there() -> None:
    """One that is forked while another connects would inherit a lock of the C library, and hang."""

    def count_started(progress: Progress, tell_end: TellEnd) -> int:
        return len(list(Path(tempfile.gettempdir()).glob("started-*")))

    assert run_on_ranks(count_started, 6) == 6


def test_a_rank_that_its_watcher_ends_tells_why() -> None:
    def work(progress: Progress, tell_end: TellEnd) -> None:
        tell_end("rank 1 got no further")
        os._exit(2)

    with pytest.raises(ProblemError, match=r"^rank 1 got no further$"):
        run_on_ranks(work, 2)


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_ranks_end_with_a_parent_that_is_killed() -> None:
    """The parent is killed as the system kills for memory; its ranks must not go on."""
    reading, writing = os.pipe()

    def work(progress: Progress, tell_end: TellEnd) -> None:
        os.write(writing, f"{os.getpid()} ".encode())
        time.sleep(60)

    parent = os.fork()
    if not parent:
        try:
            run_on_ranks(work, 2)
        finally:
            os._exit(1)
    started: list[int] = []
    while len(started) < 2:
        started += map(int, os.read(reading, 64).decode().split())
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    for _ in range(100):
        if not any(map(_runs, started)):
            return
        time.sleep(0.05)
    pytest.fail("a rank goes on")


@pytest.mark.skipif(sys.platform != "linux", reason="orphans come to a keeper on Linux")
def test_what_ranks_have_started_ends_with_them(tmp_path: Path) -> None:
    def work(progress: Progress, tell_end: TellEnd) -> None:
        started = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (tmp_path / f"{rank()}.new").write_text(str(started.pid))
        (tmp_path / f"{rank()}.new").rename(tmp_path / str(rank()))
        while len(list(tmp_path.glob("[01]"))) < 2:
            time.sleep(0.01)
        if rank():
            os._exit(3)
        time.sleep(60)

    with pytest.raises(ProblemError, match="rank 1 of 2 ended with exit code 3"):
        run_on_ranks(work, 2)
    assert [_runs(int((tmp_path / number).read_text())) for number in "01"] == [False, False]


def _children() -> set[str]:
    """The processes that this one has started and not waited for."""
    lists = Path("/proc/self/task").glob("*/children")
    return {pid for path in lists for pid in path.read_text(encoding="ascii").split()}


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "model"), [("ddp", "problems_ranks:own_count"), ("fsdp2", "mlp")])
def test_spawned_ranks_find_what_forked_ones_find(engine: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an accelerator ranks are spawned. `own_count` diverges, so that float64 decides and a control runs."""
    spec = Spec(model=model, steps=1, ranks=2, engine=engine, device="cpu")
    forked = verify_spec(spec)
    monkeypatch.setattr(verification, "available_devices", lambda: ["cpu", "cuda:0"])
    spawned = verify_spec(spec)
    assert spawned.outcome is forked.outcome and spawned.findings == forked.findings
    assert repr(spawned.parameters) == repr(forked.parameters)
    assert repr(spawned.ranks) == repr(forked.ranks)


DRAWING = """
import os, torch
from gaverify import Problem
def drawing():
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
    model = torch.nn.Linear(3, 1)
    return Problem(model, lambda model, batch: model(batch).mean(), torch.ones(8, 3))
"""


def test_a_factory_that_draws_anew_on_every_rank_is_told(tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(DRAWING, encoding="utf-8")
    with pytest.raises(ProblemError, match="rank 1 has other weights than rank 0: give every rank the same"):
        verify_spec(Spec(model=f"{tmp_path / 'drawing.py'}:drawing", steps=2, ranks=2))


def test_devices_that_ranks_cannot_have_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaverify.collective.flow.resolve_device", torch.device)
    told = explain_options(Spec(model="mlp", steps=1, ranks=2, device="mps"))
    assert told == "ranks run on CPUs and on CUDA devices, not on mps; write device='cpu', where the same faults show"


@pytest.mark.parametrize(("there", "backend"), [(1, "gloo"), (2, "cpu:gloo,cuda:nccl"), (4, "cpu:gloo,cuda:nccl")])
def test_nccl_takes_a_device_per_rank(there: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    devices = devices_of_ranks("cuda", 2)
    assert backend_of(devices) == backend
    for rank in range(2):  # each of them chooses for itself
        beside, own = devices_beside("cuda", torchrun_variables(rank, 2, 29500))
        assert (backend_of(beside), own) == (backend, devices[rank])
    assert [str(device) for device in devices] == ["cuda:0", f"cuda:{min(1, there - 1)}"]


STARTS = """
import signal, sys, tempfile, time, torch
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
from gaverify.collective.launching import run_on_ranks
def work(progress, tell_end):
    tempfile.mkdtemp()
    print("ready", flush=True)
    time.sleep({seconds})
run_on_ranks(work, 2)
"""


def waiting(folder: Path, seconds: float, *ignored: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS.format(seconds=seconds), *ignored],
        env={**os.environ, "TMPDIR": str(folder)},
        text=True,
        stderr=subprocess.PIPE,  # where the ranks' output goes
        start_new_session=True,
    )
    assert process.stderr is not None
    ready = 0
    while ready < 2:
        ready += "ready" in process.stderr.readline()
        assert process.poll() is None
    return process


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "everybody"), [(signal.SIGINT, True), (signal.SIGTERM, False)], ids=["terminal", "kill"]
)
def test_a_signal_leaves_no_folder(number: int, everybody: bool, folder: Path) -> None:
    """A terminal sends it to all processes, `kill` to one. What goes on would hold the stream that is waited for."""
    process = waiting(folder, 60)
    begun = time.monotonic()
    os.killpg(process.pid, number) if everybody else process.send_signal(number)
    _, told = process.communicate(timeout=30)
    assert process.returncode != 0 and time.monotonic() - begun < 30
    assert "KeyboardInterrupt" in told, told
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_what_the_caller_ignores_ends_no_rank(folder: Path) -> None:
    process = waiting(folder, 0.5, "SIGINT", "SIGHUP")
    for number in (signal.SIGINT, signal.SIGHUP):
        os.killpg(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode == 0 and list(folder.iterdir()) == []


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_no_engine_outlives_the_group_that_it_holds(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that dies after its rank has left the group waits for the group's threads, sometimes for ever."""
    leave = torch.distributed.destroy_process_group

    def left() -> None:
        kept = [held for held in gc.get_objects() if isinstance(held, nn.parallel.DistributedDataParallel)]
        (tmp_path / f"rank {rank()}").write_text(str(len(kept)))
        leave()

    monkeypatch.setattr(torch.distributed, "destroy_process_group", left)
    verdict = verify_spec(Spec(model="problems_ranks:noisy_on_ranks", steps=2, ranks=2, engine=engine, device="cpu"))
    assert verdict.outcome is gaverify.Outcome.EQUIVALENT
    assert [path.read_text() for path in tmp_path.iterdir()] == ["0", "0"]
