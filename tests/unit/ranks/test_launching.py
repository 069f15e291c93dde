"""Jobs in forked and in fresh processes: what comes back, what is raised, and that none is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from gaverify.errors import InternalError, ProblemError
from gaverify.ranks.launching import Fresh, run, told

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
    told("half", 1, 2)
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
