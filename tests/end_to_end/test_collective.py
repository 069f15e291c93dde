"""One verdict by all ranks of a launcher, for models as the user's code wraps them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from audits import SCRIPTS
from forking import run_ranks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
    pytest.mark.slow,
    pytest.mark.xdist_group("collective"),  # their cases are answered after one start of the ranks
]
ROUNDING = 1e-6  # relative, of a float32 gradient of a hundred parameters

RIGHT = ("ddp", "fsdp2", "plain", "ddp hook-mean", "ddp hook-half", "ddp apart", "fsdp2 apart", "fsdp2 dropout")

GROWN = {"ddp": ("ddp deep", "ddp many"), "fsdp2": ("fsdp2 deep", "fsdp2 many")}
RIGHT_IN_FLOAT64 = ("ddp exact", "fsdp2 exact", "fsdp2 bfloat16", "ddp hook-mean low")
FAULTY = {
    "ddp batchnorm": {"GAV101"},
    "fsdp2 batchnorm": {"GAV101"},
    "ddp padded": {"GAV202"},
    "ddp padded views": {"GAV202"},
    "fsdp2 padded": {"GAV202"},
    "fsdp2 tripled": {"GAV201"},
    "fsdp2 summed": {"GAV704"},
    "ddp hook-sum": {"GAV704"},
    "ddp hook-sum low": {"GAV704"},
}
REFUSED = {
    "ddp talks": "calls `torch.distributed` itself",
    "ddp other-steps": "rank 1 has 6 steps, rank 0 has 3",
    "ddp other-seed": "rank 1 has seed 1, rank 0 has 0",
    "fsdp1": "use `fully_shard` (FSDP2)",
}


@cache
def answers(ranks: int, *cases: str) -> dict[str, Any]:
    """What the cases showed, all of them after one start of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_ranks(ranks, Path(folder), str(SCRIPTS / "collective.py"), *cases)
    assert [code for code, _, _ in done] == [0] * ranks, done[0][2][-4000:]
    return dict(json.loads(done[0][1].splitlines()[-1]))


def of_two(name: str) -> dict[str, Any]:
    cases = (*RIGHT, *GROWN["ddp"], *GROWN["fsdp2"], *RIGHT_IN_FLOAT64, *FAULTY)
    return dict(answers(2, *cases, *REFUSED)[name])


@pytest.mark.parametrize("name", [*RIGHT, *RIGHT_IN_FLOAT64])
def test_a_right_window_is_equivalent_on_every_rank(name: str) -> None:
    found = of_two(name)
    assert found["outcome"] == ["equivalent"] * 2 and not found["faults"], found
    assert "GAV708" not in found["notes"]


@pytest.mark.parametrize("name", [name for name in RIGHT if "dropout" not in name])
def test_the_reference_is_the_gradient_of_the_plain_model_in_one_process(name: str) -> None:
    assert of_two(name)["reference"] < ROUNDING


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_named_and_proven(name: str) -> None:
    found = of_two(name)
    assert found["outcome"] == ["divergent"] * 2 and found["faults"] == sorted(FAULTY[name]), found
    assert found["proven"]


@pytest.mark.parametrize("name", [*RIGHT, *RIGHT_IN_FLOAT64, *FAULTY])
def test_all_ranks_ask_the_same_questions_and_the_users_wrapper_goes_on(name: str) -> None:
    found = of_two(name)
    assert found["sequences"][0] == found["sequences"][1] and found["reduces"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_the_number_of_sums_over_ranks_does_not_depend_on_parameters_or_steps(engine: str) -> None:
    """An engine's own sums are counted with DDP, whose one bucket is reduced once; FSDP2 scatters."""
    counts = [of_two(name)["sequences"][0].count("c10d::allreduce_") for name in (engine, *GROWN[engine])]
    assert counts[0] and len(set(counts)) == 1, counts


@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_cannot_do_is_one_sentence_on_every_rank(name: str) -> None:
    first, second = of_two(name)["refused"]
    assert first == second and REFUSED[name] in first


def of_four(name: str) -> dict[str, Any]:
    return dict(answers(4, "hsdp", "hsdp batchnorm", "hsdp inner")[name])


def test_shards_of_replicas() -> None:
    found = {name: of_four(name) for name in ("hsdp", "hsdp batchnorm")}
    assert found["hsdp"]["outcome"] == ["equivalent"] * 4 and found["hsdp"]["reference"] < ROUNDING
    assert found["hsdp batchnorm"]["faults"] == ["GAV101"]


def test_ranks_that_reduce_over_a_part_of_the_mesh_hold_different_gradients() -> None:
    found = of_four("hsdp inner")
    assert found["outcome"] == ["divergent"] * 4 and found["faults"] == ["GAV701"], found


FACTORY = """
import os, signal, sys, time, torch
from torch import nn

def factory(fault=""):
    rank = int(os.environ["RANK"])
    if fault == "late" and rank == 1:
        time.sleep(8)
    if fault == "weights":
        torch.manual_seed(rank)
    model, calls = nn.Linear(4, 1), []

    def loss(model, batch):
        calls.append(0)
        if rank == 1 and len(calls) > 1:
            if fault == "raises":
                raise ValueError("no luck")
            if fault == "sleeps":
                time.sleep(60)
            if fault == "dies" or (fault == "dies in float64" and batch.dtype is torch.float64):
                os.kill(os.getpid(), signal.SIGKILL)
        if batch.dtype is torch.float64 and fault in ("float64", f"float64 of {rank}"):
            raise MemoryError("no room")
        return model(batch).square().mean()

    return model, loss, torch.arange(32.0).reshape(8, 4)
"""


def ranks_of(folder: Path, fault: str, *options: str) -> list[tuple[int, str, str]]:
    """The command line on two ranks."""
    (folder / "made.py").write_text(FACTORY)
    command = ["gaverify", "run", "--model", "made.py:factory", "--steps", "2", *options]
    return run_ranks(2, folder, *command, *(("--model-arg", f"fault={fault}") if fault else ()))


def test_one_report_and_one_exit_code(tmp_path: Path) -> None:
    (first, out, _), (second, nothing, _) = ranks_of(tmp_path, "", "--output", "verdict.json", "--engine", "fsdp2")
    assert (first, second, nothing) == (0, 0, "") and "2 × fsdp2, K = 2 each" in out
    assert json.loads((tmp_path / "verdict.json").read_text())["outcome"] == "equivalent"


def test_a_launcher_that_ends_all_ranks_with_the_first_that_failed_takes_no_report(tmp_path: Path) -> None:
    """It looks ten times a second; writing a page takes the first rank longer."""
    command = ["--standalone", "--nproc-per-node", "2", "-m", "gaverify", "run", "mlp-batchnorm", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command, "--output", "page.html", "--output", "a.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )
    assert done.stdout.count("DIVERGENT") == 1, done.stderr[-4000:]
    assert json.loads((tmp_path / "a.json").read_text())["outcome"] == "divergent" and (tmp_path / "page.html").exists()
    assert done.stderr.count("exitcode  : 1 ") == 2, "both ranks leave with the same code"


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("raises", "rank 1: the model or loss raised on micro-batch 4 of 4"),
        ("late", "rank 0 of 2 cannot join the others"),
        ("weights", "rank 1 has other weights than rank 0"),
        ("sleeps", "rank 1 did not come as far as the others within 3 s: every rank has to call this"),
    ],
)
def test_a_rank_that_fails_ends_all_with_one_sentence(tmp_path: Path, fault: str, sentence: str) -> None:
    ranks = ranks_of(tmp_path, fault, *(("--timeout", "3") if fault in ("late", "sleeps") else ()))
    assert [code for code, _, _ in ranks] == [2, 2], ranks
    told = "".join(err for _, _, err in ranks)
    assert told.count(sentence) == 1, ranks
    # where nobody knows more, what the backend said is the only reason that there is
    assert ("backward passes; rank 0: RuntimeError: " in told) is (fault == "sleeps"), ranks


SKIPS = """
import sys, time, torch, gaverify
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Linear(4, 1)
if sys.argv[1] != "fsdp2":
    model = nn.parallel.DistributedDataParallel(model)
else:
    fully_shard(model)

def loss(model, batch):
    if len(batch) == 2 and dist.get_rank() == 1 and sys.argv[1] == "hangs":
        time.sleep(600)
    if len(batch) == 2 and dist.get_rank() == 1:  # rank 1 leaves the model out of every micro-batch
        return torch.ones((), requires_grad=True) * batch.sum()
    return model(batch).square().mean()

try:
    batch = torch.arange(32.0).reshape(8, 4)
    gaverify.verify(model, loss, batch, steps=2, timeout=3)
except gaverify.GaverifyError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_rank_that_skips_a_pass_ends_all(tmp_path: Path, engine: str) -> None:
    """The other one waits in a collective for it, where no exception comes; what follows would meet that collective."""
    (tmp_path / "skips.py").write_text(SKIPS)
    ranks = run_ranks(2, tmp_path, "skips.py", engine)
    assert [code for code, _, _ in ranks] == [2, 2], ranks
    for _, _, err in ranks:
        assert "rank 0 did not come as far as the others within 3 s" in err, ranks


def test_a_rank_that_hangs_ends_all_within_the_timeout_of_a_group_that_the_user_made(tmp_path: Path) -> None:
    (tmp_path / "skips.py").write_text(SKIPS)
    ranks = run_ranks(2, tmp_path, "skips.py", "hangs")
    assert [code for code, _, _ in ranks] == [2, 2], ranks
    assert "rank 1 did not come as far as the others within 3 s" in ranks[0][2], ranks


def test_a_float64_control_that_one_rank_lacks_is_told_by_it(tmp_path: Path) -> None:
    """The others wait for its gradients; where all lack it, all decide as without `--exact`."""
    ranks = ranks_of(tmp_path, "float64 of 1", "--exact")
    assert [code for code, _, _ in ranks] == [2, 2], ranks
    words = "rank 1: the float64 control failed on this rank alone: "
    assert "".join(err for _, _, err in ranks).count(words) == 1, ranks
    (first, out, _), (second, _, _) = ranks_of(tmp_path, "float64", "--exact")
    assert first == second and "float64 was impossible" in out, out


@pytest.mark.parametrize(("fault", "options"), [("dies", ()), ("dies in float64", ("--exact", "--engine", "fsdp2"))])
def test_a_rank_that_dies_is_named_by_the_others(tmp_path: Path, fault: str, options: tuple[str, ...]) -> None:
    (code, _, err), (dead, _, _) = ranks_of(tmp_path, fault, *options)
    assert (code, dead) == (2, -signal.SIGKILL) and "rank 1 ended before there was a verdict" in err
