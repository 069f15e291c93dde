"""Audits of ranks that a launcher starts, and of ranks that fail: everything ends, and the first failure is told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from audits import SCRIPTS, audit, refused

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
    pytest.mark.slow,
]
TORCHRUN = ("--launcher", "torchrun --standalone --nproc-per-node 2")
RANKS = ("--ranks", "2")
FULL, CUT = "--batch-size 8", "--batch-size 2 --accum 2"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    if Path("/proc/self/cmdline").exists():
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _is_there(path)]
        scripts = [os.fsencode(SCRIPTS / name) for name in ("ranks_failing.py", "ranks_spawned.py")]
        assert not [line for line in lines if any(script in line for script in scripts)]


def _is_there(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


def test_torchrun_with_a_right_loop() -> None:
    result = audit("loops_ranks.py", "--batch-size 16", "--batch-size 4 --accum 2", "--dropout 0.2", TORCHRUN)
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), result


def test_torchrun_with_ranks_that_are_never_reduced() -> None:
    result = audit("loops_ranks.py", "--batch-size 16", "--batch-size 4 --accum 2", "--loop never", TORCHRUN)
    assert (result.code, result.outcome, result.faults) == (1, "divergent", {"GAV701"}), result


@pytest.mark.parametrize(("options", "faults"), [("", set()), ("--never", {"GAV701"})], ids=["right", "never"])
def test_a_script_that_spawns_its_ranks(options: str, faults: set[str]) -> None:
    result = audit("ranks_spawned.py", FULL, f"{CUT} --ranks 2", options, ("--launcher", "python"))
    assert result.faults == faults and result.outcome == ("divergent" if faults else "equivalent"), result


def test_a_spawned_rank_that_raises() -> None:
    result = audit("ranks_spawned.py", FULL, f"{CUT} --ranks 2 --raises", "", ("--launcher", "python"))
    refused(result, "Process 1 terminated", "ValueError: a file is missing")


def test_ranks_in_both_runs_are_refused() -> None:
    """Two ranks that never synchronise would agree with two ranks that never synchronise."""
    result = audit("ranks_spawned.py", "--batch-size 4 --ranks 2", f"{CUT} --ranks 2", "", ("--launcher", "python"))
    refused(result, "the full-batch run trained in 2 processes", "--full-launcher")


@pytest.mark.parametrize("options", [RANKS, TORCHRUN], ids=["ranks", "torchrun"])
def test_a_rank_that_raises(options: tuple[str, ...]) -> None:
    result = audit("ranks_failing.py", FULL, CUT, "--fault raise", options)
    refused(result, "rank 1", "ValueError: a file is missing", "# here: raised")


def test_a_rank_that_is_killed() -> None:
    result = audit("ranks_failing.py", FULL, CUT, "--fault die", RANKS)
    refused(result, "(rank 1 of 2) failed: it was killed by SIGKILL")


@pytest.mark.parametrize("options", [RANKS, TORCHRUN], ids=["ranks", "torchrun"])
def test_a_rank_that_leaves_early(options: tuple[str, ...]) -> None:
    result = audit("ranks_failing.py", FULL, CUT, "--fault leave", options)
    refused(result, "rank 1 had left with 1 of 2 updates")


@pytest.mark.parametrize("options", [RANKS, TORCHRUN], ids=["ranks", "torchrun"])
def test_a_rank_that_hangs(options: tuple[str, ...]) -> None:
    begun = time.monotonic()
    result = audit("ranks_failing.py", FULL, CUT, "--fault hang", (*options, "--timeout", "45"))
    refused(result, "was still running after 45 s", "of 2 updates")
    assert time.monotonic() - begun < 200


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("other_parameters", "appears not to match sizes"),
        ("other_code", "DDP expects same model across all ranks"),
        ("static_graph", "please report a bug to PyTorch"),
    ],
)
def test_what_torch_refuses_is_told_as_torchs(fault: str, words: str) -> None:
    """Ranks of other shapes or other code, and `no_sync` with a static graph: an assertion of torch's own."""
    refused(audit("ranks_failing.py", FULL, CUT, f"--fault {fault}", RANKS), "of 2) failed: RuntimeError", words)
