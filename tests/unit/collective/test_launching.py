"""Jobs in forked and fresh processes: what comes back, what is raised, and that none is left, whatever the signal."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import problems_ranks
import pytest
import torch
from torch import nn

import gaverify
from gaverify.collective import processes
from gaverify.collective.launching import Fresh, report_upwards, run
from gaverify.errors import InternalError, ProblemError
from gaverify.origins import LoadedAfresh
from gaverify.passes.devices import backend_of
from gaverify.preparation import settings_of
from gaverify.spec import Spec
from gaverify.verification import verify_spec

CPU = torch.device("cpu")
FRESH = Fresh(CPU, [CPU, CPU])


def _refuse() -> None:
    raise ProblemError("the batch is too small")


def _break() -> None:
    raise ZeroDivisionError("ours")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leave() -> None:
    os._exit(3)


def _tell() -> str:
    report_upwards("half", 1, 2)
    return "done"


def _tell_through() -> str:
    return str(run([("below", _tell)])[0])


def _sleep() -> int:
    time.sleep(60)
    return os.getpid()


def test_results_come_in_order_whoever_is_first() -> None:
    def slow() -> str:
        time.sleep(0.2)
        return "slow"

    assert run([("a", slow), ("b", lambda: "quick")]) == ["slow", "quick"]


def test_each_task_has_a_process_of_its_own() -> None:
    pids = run([("a", os.getpid), ("b", os.getpid)])
    assert len({*pids, os.getpid()}) == 3


@pytest.mark.parametrize(
    ("task", "error", "words"),
    [
        (_refuse, ProblemError, "the batch is too small"),
        (_break, InternalError, "ZeroDivisionError: ours"),
        (_die, ProblemError, "b was ended by signal SIGKILL"),
        (lambda: os._exit(0), ProblemError, "b left with exit code 0"),
    ],
    ids=["foreseen", "ours", "signal", "exit"],
)
def test_a_failure_ends_the_others_at_once(task: object, error: type[Exception], words: str) -> None:
    begun, before = time.monotonic(), _children()
    with pytest.raises(error, match=words):
        run([("a", _sleep), ("b", task)])  # type: ignore[list-item]
    assert time.monotonic() - begun < 30
    assert _children() <= before  # those of other tests aside


def test_the_earliest_failure_is_told() -> None:
    """A rank that loses its connection because another one failed must not hide the other's sentence."""
    reading, writing = os.pipe()

    def later() -> None:
        os.read(reading, 1)  # the other is about to raise, however late it was started
        time.sleep(0.1)
        raise ProblemError("connection closed by peer")

    def first() -> None:
        os.write(writing, b"!")
        raise ProblemError("the batch is too small")

    with pytest.raises(ProblemError, match="the batch is too small"):
        run([("later", later), ("first", first)])


def test_a_task_that_does_not_end_is_ended() -> None:
    with pytest.raises(ProblemError, match=r"a did not end within 0\.2 s"):
        run([("a", _sleep)], timeout=0.2)


@pytest.mark.slow
def test_what_is_told_of_forked_processes_is_told_of_fresh_ones() -> None:
    with pytest.raises(ProblemError, match="the batch is too small"):
        run([("a", _sleep), ("b", _refuse)], fresh=FRESH)
    with pytest.raises(ProblemError, match="b left with exit code 3"):
        run([("a", _sleep), ("b", _leave)], fresh=FRESH)
    with pytest.raises(ProblemError, match="a, b did not end within 3 s"):
        run([("a", _sleep), ("b", _sleep)], timeout=3.0, fresh=FRESH)


@pytest.mark.parametrize("fresh", [None, pytest.param(FRESH, marks=pytest.mark.slow)], ids=["forked", "fresh"])
def test_what_a_job_tells_is_heard_before_it_ends_and_goes_up_through_others(fresh: Fresh | None) -> None:
    heard: list[tuple[object, ...]] = []
    assert run([("a", _tell), ("b", _tell_through)], None, lambda *words: heard.append(words), fresh) == ["done"] * 2
    assert heard == [("half", 1, 2)] * 2


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_children_end_with_a_parent_that_is_killed() -> None:
    """The middle process is killed as the system kills for memory; its own child must not go on."""
    reading, writing = os.pipe()

    def leaf() -> None:
        os.write(writing, str(os.getpid()).encode())
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    def middle() -> None:
        run([("leaf", leaf)])

    with pytest.raises(ProblemError, match="SIGKILL"):
        run([("middle", middle)])
    started = int(os.read(reading, 32))
    for _ in range(100):
        if not _runs(started):
            break
        time.sleep(0.05)
    else:
        pytest.fail("the leaf goes on")


def _children() -> set[str]:
    """The processes that this one has started and not waited for."""
    lists = Path("/proc/self/task").glob("*/children")
    return {pid for path in lists for pid in path.read_text(encoding="ascii").split()}


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


DRAWING = """
import os, torch
from gaverify import Problem
def drawing():
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
    model = torch.nn.Linear(3, 1)
    return Problem(model, lambda model, batch: model(batch).mean(), torch.ones(8, 3))
"""


@pytest.fixture(name="fresh")
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a CPU are fresh processes, too."""
    monkeypatch.setattr(processes, "needs_fresh", lambda device: True)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("engine", "model"), [("ddp", "problems_ranks:own_count"), ("fsdp2", "mlp")])
def test_fresh_ranks_find_what_forked_ones_find(engine: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`own_count` diverges, so that its loss talks to the ranks, float64 decides, and a control runs."""
    told: list[object] = []
    spec = Spec(model=model, steps=1, ranks=2, engine=engine)
    fresh = verify_spec(spec, progress=lambda *report: told.append(report))
    monkeypatch.setattr(processes, "needs_fresh", lambda device: False)
    forked = verify_spec(spec)
    assert fresh.outcome is forked.outcome and fresh.findings == forked.findings
    assert repr(fresh.parameters) == repr(forked.parameters)
    assert repr(fresh.ranks) == repr(forked.ranks)
    assert told


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_a_live_model_is_handed_over() -> None:
    """Draws of Python, in a loop over the samples, are known again: the second reading goes by places in the code."""
    verdict = gaverify.verify(problems_ranks.drawing_per_sample(), steps=2, ranks=2)
    assert verdict.outcome is gaverify.Outcome.EQUIVALENT


@pytest.mark.usefixtures("fresh")
def test_a_model_that_cannot_be_handed_over_is_told() -> None:
    begun = time.monotonic()
    with pytest.raises(ProblemError, match="fresh processes, to which model, loss and batch cannot be handed") as told:
        gaverify.verify(problems_ranks.own_count(), steps=1, ranks=2)
    assert "CUDA_VISIBLE_DEVICES=" in str(told.value) and "gaverify run --ranks R --model" in str(told.value)
    assert time.monotonic() - begun < 30, "nothing is started"


def test_a_factory_that_draws_anew_is_told(tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(DRAWING, encoding="utf-8")
    spec = Spec(model=f"{tmp_path / 'drawing.py'}:drawing", steps=2, ranks=2)
    origin = LoadedAfresh(settings_of(vars(spec)), spec)
    known = origin.with_digests(origin.problem())
    with ExitStack() as stack, pytest.raises(ProblemError, match="its parameters differ from those of another one"):
        known.experiment(stack, CPU)
    spec = Spec(model="mlp", steps=2, ranks=2)
    twin = LoadedAfresh(settings_of(vars(spec)), spec)
    with ExitStack() as stack:
        assert twin.with_digests(twin.problem()).experiment(stack, CPU).steps == 4


def test_devices_that_ranks_cannot_have_are_told() -> None:
    problem = problems_ranks.noisy_on_ranks()
    settings = settings_of(vars(Spec(model="mlp", steps=1, ranks=2)))
    with pytest.raises(ProblemError, match="ranks run on CPUs and on CUDA devices, not on mps; write device='cpu'"):
        processes.ranks_wanted(2, settings, "ddp", None, problem, torch.device("mps"))


@pytest.mark.parametrize(("there", "backend"), [(1, "gloo"), (2, "cpu:gloo,cuda:nccl"), (4, "cpu:gloo,cuda:nccl")])
def test_nccl_takes_a_device_per_rank(there: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    problem, settings = problems_ranks.noisy_on_ranks(), settings_of(vars(Spec(model="mlp", steps=1, ranks=2)))
    ranks = processes.ranks_wanted(2, settings, "ddp", None, problem, torch.device("cuda", 0))
    assert backend_of(ranks.devices) == backend and ranks.fresh
    assert [str(device) for device in ranks.devices] == ["cuda:0", f"cuda:{min(1, there - 1)}"]


WAITS = """
import sys, tempfile, time
def work(progress):
    folder = tempfile.mkdtemp()
    print("ready", flush=True)
    time.sleep({seconds})
    return folder
"""
STARTS = """
import signal, sys, torch, waits
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
from gaverify.collective.launching import run_in_process
run_in_process(waits.work, None, {device})
"""


def waiting(folder: Path, seconds: float, *ignored: str, device: str = "None") -> subprocess.Popen[str]:
    place = folder.with_name("code")
    place.mkdir()
    (place / "waits.py").write_text(WAITS.format(seconds=seconds), encoding="utf-8")
    paths = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS.format(device=device), *ignored],
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": paths},
        text=True,
        stderr=subprocess.PIPE,  # where a forked process's output goes
        start_new_session=True,
    )
    assert process.stderr is not None
    while "ready" not in process.stderr.readline():
        assert process.poll() is None
    return process


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "everybody", "device"),
    [(signal.SIGINT, True, "None"), (signal.SIGTERM, False, "None"), (signal.SIGTERM, False, "torch.device('cpu')")],
    ids=["terminal", "kill", "fresh"],
)
def test_a_signal_leaves_no_folder(number: int, everybody: bool, device: str, folder: Path) -> None:
    """A terminal sends it to all processes, `kill` to one. What goes on would hold the stream that is waited for."""
    process = waiting(folder, 60, device=device)
    begun = time.monotonic()
    os.killpg(process.pid, number) if everybody else process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0 and time.monotonic() - begun < 30
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_what_the_caller_ignores_ends_no_rank(folder: Path) -> None:
    process = waiting(folder, 0.5, "SIGINT", "SIGHUP")
    for number in (signal.SIGINT, signal.SIGHUP):
        os.killpg(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode == 0 and list(folder.iterdir()) == []


def test_no_engine_outlives_the_group_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that dies after its rank has left the group waits for the group's threads, sometimes for ever."""
    leave = torch.distributed.destroy_process_group

    def left() -> None:
        kept = [held for held in gc.get_objects() if isinstance(held, nn.parallel.DistributedDataParallel)]
        assert not kept
        leave()

    monkeypatch.setattr(torch.distributed, "destroy_process_group", left)
    batch = torch.randn(8, 4), torch.randint(3, (8,))
    verdict = gaverify.verify(nn.Linear(4, 3), nn.CrossEntropyLoss(), batch, steps=2, ranks=2)
    assert verdict.outcome is gaverify.Outcome.EQUIVALENT
