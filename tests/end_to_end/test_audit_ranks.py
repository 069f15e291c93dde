"""Audits of several gloo ranks, whoever starts them: faults are named, right loops stay quiet, failures are told."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from audits import SCRIPTS, audit, folder, gaverify, refused

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
    pytest.mark.slow,
]
SCRIPT = "loops_ranks.py"
TORCHRUN = ("--launcher", "torchrun --standalone --nproc-per-node 2")
RANKS = ("--ranks", "2")
FULL, CUT = "--batch-size 8", "--batch-size 2 --accum 2"

# (options, batch of one process, ranks, batch of a rank, K, faults)
SAID = {
    "compressed": "this error is in both runs and cannot show",
    "tensor parallelism": "share their rows, which are counted once",
}
CASES = {
    "right": ("", 16, 2, 4, 2, set()),
    "right on four ranks": ("--dropout 0.2", 16, 4, 2, 2, set()),
    "dropout": ("--dropout 0.3", 16, 2, 4, 2, set()),
    "dropout where ranks take turns": ("--dropout 0.3 --strided", 16, 2, 4, 2, set()),
    "forgotten division where ranks take turns": ("--loop undivided --strided --dropout 0.3", 16, 2, 4, 2, {"GAV201"}),
    "noise of the loop where ranks take turns": ("--noise 0.5 --strided", 16, 2, 4, 2, set()),
    "forgotten division beside noise of the loop": ("--noise 0.5 --loop undivided", 16, 2, 4, 2, {"GAV201"}),
    "clipping": ("--clip 0.05", 16, 2, 4, 2, set()),
    "synchronised every time": ("--loop always", 16, 2, 4, 2, set()),
    "tokens of all ranks": ("--loop all_tokens", 8, 2, 4, 1, set()),
    "sharded": ("--loop sharded", 16, 2, 4, 2, set()),
    "never reduced": ("--loop never", 16, 2, 4, 2, {"GAV701"}),
    "never reduced, and clipped": ("--loop never --clip 0.05", 16, 2, 4, 2, {"GAV701"}),
    "the model in place of its wrapper": ("--loop unwrapped", 16, 2, 4, 2, {"GAV701"}),
    "each rank's own tokens": ("--loop own_tokens", 8, 2, 4, 1, {"GAV703"}),
    "reduced by hand": ("--loop by_hand", 16, 2, 4, 2, set()),
    "reduced by hand, but for one": ("--loop by_hand_forgotten", 16, 2, 4, 2, {"GAV701"}),
    "clipped, then reduced by hand": ("--loop by_hand_clipped --clip 0.05", 16, 2, 4, 2, {"GAV706"}),
    "reduced by hand, then clipped": ("--loop by_hand --clip 0.05", 16, 2, 4, 2, set()),
    "reduced by hand to the sum": ("--loop by_hand_sum", 8, 2, 4, 1, {"GAV704"}),
    "clipped on rank 0 alone": ("--loop clipped_on_zero", 16, 2, 4, 2, {"GAV701"}),
    "gathered without gradient": ("--loop gathers", 8, 2, 4, 1, {"GAV705"}),
    "gathered with gradient": ("--loop gathers_right", 8, 2, 4, 1, set()),
    "each rank's own tokens, sharded": ("--loop sharded_tokens", 8, 2, 4, 1, {"GAV703"}),
    "each micro-batch's own tokens, sharded": ("--loop sharded_tokens --period 12", 16, 2, 4, 2, {"GAV703"}),
    "each rank's own window, sharded": ("--loop sharded_window_tokens --period 16", 16, 2, 4, 2, {"GAV703"}),
    "divided by all samples, sharded": ("--loop sharded_parts", 8, 2, 4, 1, {"GAV704"}),
    "a sum by hand": ("--loop whole_sum", 8, 2, 4, 1, {"GAV704"}),
    "never reduced, sharded": ("--loop sharded_never", 16, 2, 4, 2, {"GAV702"}),
    "reduced too early, sharded": ("--loop sharded_first", 16, 2, 4, 2, {"GAV702"}),
    "compressed": ("--loop compressed", 16, 2, 4, 2, set()),
    "tensor parallelism": ("--loop tensor", 8, 2, 2, 4, set()),
    "forgotten division in tensor parallelism": ("--loop tensor_undivided", 8, 2, 2, 4, {"GAV201"}),
    "clipped by norms of shards": ("--loop sharded_norm", 16, 2, 4, 2, {"GAV706"}),
    "clipped by the whole norm": ("--loop sharded --clip 0.05", 16, 2, 4, 2, set()),
    "statistics of each rank": ("--loop statistics", 16, 2, 8, 1, {"GAV707"}),
    "statistics of each rank, sharded": ("--loop sharded_statistics", 16, 2, 8, 1, {"GAV707"}),
    "no statistics": ("--loop no_statistics", 16, 2, 8, 1, set()),
    "synchronised every time, sharded": ("--loop sharded_always", 16, 2, 4, 2, set()),
    "statistics of all ranks, of one micro-batch": ("--loop synchronised_statistics", 16, 2, 4, 2, {"GAV101"}),
    "statistics of all ranks": ("--loop synchronised_statistics", 16, 2, 8, 1, set()),
    "contrasted on each rank": ("--loop gathers_nothing", 8, 2, 4, 1, {"GAV103"}),
    "contrasted in each micro-batch": ("--loop gathers_right", 16, 2, 4, 2, {"GAV103"}),
    "tokens of rank 0 alone": ("--loop tokens_of_zero --period 16", 16, 2, 4, 2, {"GAV704"}),
    "tokens of all ranks' windows": ("--loop tokens_of_all --period 16", 16, 2, 4, 2, set()),
    "forgotten division": ("--loop undivided", 32, 2, 4, 4, {"GAV201"}),
}


@pytest.mark.parametrize("name", CASES)
def test_loops_of_several_ranks(name: str) -> None:
    options, whole, ranks, size, steps, faults = CASES[name]
    full, accumulated = f"--batch-size {whole} --accum 1", f"--batch-size {size} --accum {steps}"
    result = audit(SCRIPT, full, accumulated, options, ("--ranks", str(ranks)))
    assert result.faults == faults, result
    assert result.outcome == ("divergent" if faults else "equivalent"), result
    assert all(finding["proven"] for finding in result.document["findings"]), result
    assert SAID.get(name, "") in result.document["reason"], result
    assert ("GAV708" in result.notes) == ("every time" in name), result
    assert result.document["ranks"]["ranks"] == ranks
    backwards = [
        (call["rank"], call["update"]) for call in result.document["calls"]["timeline"] if call["kind"] == "backward"
    ]
    assert set(backwards) == {(rank, update) for rank in range(ranks) for update in (1, 2)}, result
    assert len(backwards) == 2 * ranks * steps


@pytest.mark.parametrize(
    ("options", "code"),
    [("--skip 1", 3), ("", 0), ("--loop undivided", 1)],
    ids=["other rows", "right", "forgotten division"],
)
def test_rows_that_cannot_be_compared_accuse_nobody(options: str, code: int) -> None:
    result = audit(
        SCRIPT, "--batch-size 16 --accum 1", "--batch-size 4 --accum 2", f"--named {options}", ("--ranks", "2")
    )
    assert (result.code, result.faults) == (code, {"GAV201"} if code == 1 else set()), result
    assert ("cannot check that both runs saw the same samples" in result.document["reason"]) is (code == 3), result
    assert "GAV000" not in result.notes, result


def test_ranks_in_both_runs_hide_their_faults_and_it_is_said() -> None:
    options = (*TORCHRUN, "--full-launcher", TORCHRUN[1])
    result = audit(SCRIPT, "--batch-size 8 --accum 1", "--batch-size 4 --accum 2", "--loop always", options)
    assert (result.code, result.outcome) == (0, "equivalent"), result
    assert "both runs trained in 2 ranks, so errors between ranks cannot show" in result.document["reason"]


VALUES = """import argparse, os, sys, torch
import torch.distributed as dist
from sizes import SIZE

ACCUM = 1
parser = argparse.ArgumentParser()
parser.add_argument("--divisor", type=int, default=1)
args = parser.parse_args()

if __name__ == "__main__":
    assert not sys.argv[1:] and sys.path[0] == os.path.dirname(os.path.abspath(__file__)), sys.path
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, 32, SIZE * ACCUM * ranks):
        for k in range(ACCUM):
            model.require_backward_grad_sync = k == ACCUM - 1
            at = start + (k * ranks + rank) * SIZE
            (model(x[at : at + SIZE]).square().mean() / args.divisor).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("divisor", "name", "module", "told"),
    [
        (2, "ACCUM", False, set()),
        (2, "ACCUM", True, set()),
        (1, "ACCUM", False, {"GAV201"}),
        (2, "ACUM", False, "did you mean `ACCUM` (line 5)?"),
    ],
    ids=["right", "module", "forgotten division", "no such name"],
)
def test_values_are_replaced_beside_a_launcher(
    tmp_path: Path, divisor: int, name: str, module: bool, told: str | set[str]
) -> None:
    """A constant of the script, one of a module that it imports, and the default of an option."""
    (tmp_path / "made.py").write_text(VALUES, encoding="utf-8")
    (tmp_path / "sizes.py").write_text("SIZE = 16\n", encoding="utf-8")
    values = (f"{name}=2", "sizes.SIZE=4", f"divisor={divisor}")
    options = [word for value in values for word in ("--accumulated-set", value)]
    words = [*(["-m", "made"] if module else ["made.py"]), *options, "--full-env", "GLOO_SOCKET_IFNAME=lo", *TORCHRUN]
    full = ["--full-launcher", "torchrun --standalone --nproc-per-node 1", "--format", "json"]
    with folder(tmp_path):
        result = gaverify(["audit", *words, *full])
    if isinstance(told, str):
        refused(result, told)
    else:
        assert result.faults == told and result.outcome == ("divergent" if told else "equivalent"), result


def test_values_that_spawned_ranks_do_not_see_are_refused() -> None:
    values = ("batch_size=2", "accum=2", "ranks=2")
    options = [word for value in values for word in ("--accumulated-set", value)]
    result = audit("ranks_spawned.py", None, None, "", ("--full-set", "batch_size=8", *options, "--launcher", "python"))
    refused(result, "`batch_size` was changed in the process that `python` started, and not in the ranks")


SHARDED = """import argparse, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--undivided", action="store_true")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(16, 768)
model = torch.nn.Sequential(torch.nn.Linear(768, 768), torch.nn.Tanh(), torch.nn.Linear(768, 768))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for k in range(args.accum):
    model.set_requires_gradient_sync(k == args.accum - 1)
    at = (k * ranks + rank) * args.size
    loss = model(x[at : at + args.size]).square().mean()
    (loss if args.undivided else loss / args.accum).backward()
optimizer.step()
"""
WHOLE_GRADIENT = 4 * 2 * (768 * 768 + 768)  # bytes


@pytest.mark.parametrize("fault", ["", "--undivided"])
def test_a_sharded_gradient_is_never_whole_where_both_runs_are_launched(tmp_path: Path, fault: str) -> None:
    """Each rank stores the sketch of its shards: they add up over ranks, and no process puts shards together."""
    (tmp_path / "sharded.py").write_text(SHARDED, encoding="utf-8")
    kept = tmp_path / "kept"
    options = (*TORCHRUN, "--full-launcher", TORCHRUN[1], "--updates", "1", "--keep", str(kept))
    result = audit(tmp_path / "sharded.py", "--size 8", "--size 4 --accum 2", fault, options)
    assert result.faults == ({"GAV201"} if fault else set()), result
    assert result.outcome == ("divergent" if fault else "equivalent"), result
    runs = [run for run in kept.iterdir() if run.is_dir()]
    assert len(runs) >= 2
    for run in runs:
        stored = [path.stat().st_size for path in run.rglob("*.pt")]
        assert stored and sum(stored) < WHOLE_GRADIENT / 2, (run, sum(stored))


def test_one_process_without_a_launcher_is_told(tmp_path) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "alone.py"
    script.write_text(
        "import argparse, torch\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--n', type=int)\n"
        "n = parser.parse_args().n\n"
        "torch.manual_seed(0)\n"
        "model, x = torch.nn.Linear(4, 1), torch.randn(8, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for part in x.split(n):\n"
        "    (model(part).square().mean() * n / 8).backward()\n"
        "optimizer.step()\n"
    )
    result = audit(script, "--n 8", "--n 4", "", ("--ranks", "2"))
    assert result.code == 2 and "init_process_group" in result.err, result


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    scripts = [os.fsencode(SCRIPTS / name) for name in ("ranks_failing.py", "ranks_spawned.py")]
    ours = os.environ.get("PYTEST_XDIST_WORKER", "").encode()  # another process of pytest has ranks of its own
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            line, environment = ((process / name).read_bytes() for name in ("cmdline", "environ"))
            assert not (any(script in line for script in scripts) and ours in environment), line


def test_a_script_that_spawns_its_ranks_and_never_reduces() -> None:
    result = audit("ranks_spawned.py", FULL, f"{CUT} --ranks 2", "--never", ("--launcher", "python"))
    assert (result.code, result.outcome, result.faults) == (1, "divergent", {"GAV701"}), result


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
    refused(result, "(rank 1 of 2) failed: it was ended by signal SIGKILL")


def test_a_rank_that_leaves_early() -> None:
    result = audit("ranks_failing.py", FULL, CUT, "--fault leave", RANKS)
    refused(result, "rank 1 had ended after 1 of 2 updates")


@pytest.mark.parametrize(("options", "limit"), [(RANKS, 15), (TORCHRUN, 30)], ids=["ranks", "torchrun"])
def test_a_rank_that_hangs(options: tuple[str, ...], limit: int) -> None:
    begun = time.monotonic()
    result = audit("ranks_failing.py", FULL, CUT, "--fault hang", (*options, "--timeout", str(limit)))
    refused(result, f"was still running after {limit} s", "of 2 updates")
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
