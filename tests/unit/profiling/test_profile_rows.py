"""`gaverify profile` from the command line, with real rows: each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import linear_regression
from typing import Any

import pytest
import torch
from documents import only_answer

import gaverify
from gaverify.cli import main
from gaverify.profiling.launching import profile_spec
from gaverify.records.profile import Profile, plans
from gaverify.report.documents.reading import answer_of
from gaverify.spec import Spec

MODEL = """
import os, signal, sys, time
import torch
from torch import nn

print("printed while it was imported")

def problem(loss, norm=nn.Identity):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), norm(8), nn.Linear(8, 1))
    return model, loss, (torch.randn(16, 6), torch.randn(16, 1))

def squared(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()

def batch_norm():
    return problem(squared, nn.BatchNorm1d)

def troubled():
    def loss(model, batch):
        print("printed by the loss")
        if len(batch[0]) > 8:
            torch.empty(10**15)  # more than any machine has
        if len(batch[0]) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(batch[0]) == 2:
            raise ValueError("no pairs")
        if len(batch[0]) == 1:
            sys.exit(0)
        return squared(model, batch)
    return problem(loss)

def grouped():
    import torch.distributed as dist
    def loss(model, batch):
        assert dist.get_world_size() == 1
        return squared(model, batch)
    return problem(loss)

def slow():
    def loss(model, batch):
        if len(batch[0]) == 8:
            open("reached", "w").close()
            time.sleep(300)
        return squared(model, batch)
    return problem(loss)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.py"
    path.write_text(MODEL)
    return path


def profiled(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Profile]:
    code = main(["profile", "--format", "json", "--repeats", "1", *words])
    (document,) = json.loads(capsys.readouterr().out)["answers"]
    answer = answer_of(document)  # nothing but the document: prints go to stderr
    assert isinstance(answer, Profile)
    return code, answer


@pytest.mark.smoke
def test_a_built_in_in_every_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "mnist-mlp", "--steps", "1,4", "--output", "p.svg", "--output", "p.txt"]
    code, document = profiled(capsys, *words)
    assert (code, document.exit_code, document.outcome) == (0, 0, "equivalent")
    full, summed, accumulated = document.rows
    assert [f"{row.strategy} {row.steps}" for row in document.rows] == ["full-batch 1", "summed-loss 4", "accumulate 4"]
    # input, three hidden layers and the log-softmax of 32 samples, their targets, and the number of targets per loss
    counted = 32 * (4 * (784 + 512 + 256 + 128 + 10) + 8)
    assert [row.activation_bytes for row in document.rows] == [counted + 4, counted + 16, counted // 4 + 4]
    assert full.memory is not None and full.memory.peak > full.memory.baseline > 0
    assert all(row.seconds is not None and row.seconds.median > 0 for row in document.rows)
    assert all(row.relative_difference is not None and row.relative_difference < 1e-5 for row in (summed, accumulated))
    assert "prefers-color-scheme" in Path("p.svg").read_text()
    assert "full batch   1 × 32       217 kB" in Path("p.txt").read_text()


def test_rows_that_end_badly_do_not_stop_the_others(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--strategy", "full-batch,accumulate", "--steps", "2,4,8,16,64"]
    code, document = profiled(capsys, "--model", f"{model}:troubled", *words)
    assert [row.status for row in document.rows] == [
        "out-of-memory",
        "measured",
        "out-of-memory",
        "failed",
        "failed",
        "does-not-fit",
    ]
    full, half, killed, pairs, left, unfit = (row.message for row in document.rows)
    assert "out of memory" in full
    assert document.rows[1].activation_bytes and document.rows[1].outcome == "inconclusive"
    assert half.startswith("not compared with the full batch: out of memory")
    assert killed == "the process was ended by signal SIGKILL (out of memory?) while its peak was measured"
    assert "ValueError: no pairs (own.py:" in pairs
    assert "sys.exit(0)" in left
    assert "64 micro-batches cannot be cut from a batch of 16 samples" in unfit
    assert code == document.exit_code == 2  # the user's code raised


def test_the_outcome_is_the_verdict_s_own(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = profiled(capsys, "--model", f"{model}:batch_norm", "--strategy", "accumulate", "--steps", "4")
    namespace: dict[str, Any] = {}
    exec(MODEL, namespace)
    verdict = gaverify.verify(*namespace["batch_norm"](), steps=4, diagnose=False)
    expected = max(row.relative_difference for row in verdict.parameters if row.reference_norm > row.allowed)
    (row,) = document.rows
    assert (code, row.outcome, verdict.outcome.value) == (1, "divergent", "divergent")
    assert row.relative_difference == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--steps", "0,2"], "--steps: must be whole numbers of at least 1, got [0, 2]; write `--steps 1,2,4,8`"),
        (["--strategy", "both"], '--strategy: must be "full-batch", "summed-loss" or "accumulate", got ["both"]'),
        (["--optimizer", "lion"], '--optimizer: must be "sgd", "adam" or "adamw", got "lion"'),
        (["--repeats", "2,3"], '--repeats: must be a whole number of at least 1, got "2,3"'),
        (["--weighting", "0.5,0.5"], "--weighting: numbers fit one K only"),
        (["--output", "plot.png"], "`plot.png` has no ending that says which report to write; known are .txt, .json"),
        (["--repeats", "2,3", "--dtype", "int3"], "--dtype"),  # together with the other problem
    ],
)
def test_bad_words_get_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--model", "mlp", *words]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and "Traceback" not in captured.err and captured.out == ""


def test_what_no_row_could_run_is_an_error(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--model", f"{model}:nope", "--steps", "1,2"]) == 2
    captured = capsys.readouterr()
    assert "has no attribute `nope`" in captured.err and captured.out == ""


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_keeps_the_rows_that_are_done(model: Path, tmp_path: Path) -> None:
    words = ["profile", "--model", f"{model}:slow", "--steps", "1,2,4", "--repeats", "1", "--format", "json"]
    (tmp_path / "earlier.json").write_text("a whole one")
    words += ["-o", "earlier.json", "-o", "new.json"]
    found = subprocess.Popen(
        [sys.executable, "-m", "gaverify", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "reached").exists() and found.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        found.send_signal(signal.SIGINT)
        out, err = found.communicate(timeout=240)
    finally:
        found.kill()
    assert found.returncode == 130
    assert "gaverify: interrupted; the report holds the rows that were done" in err
    assert (tmp_path / "earlier.json").read_text() == "a whole one" and (tmp_path / "new.json").exists()
    document = only_answer(out)
    assert document["interrupted"] is True
    assert [row["status"] for row in document["rows"]] == ["measured"] + ["not-run"] * 4
    assert document["rows"][0]["activation_bytes"] > 0


@pytest.mark.slow
def test_memory_grows_in_a_straight_line() -> None:
    """K = 2, with micro-batches twice as large as those of K = 4, lies on the line through 4 and 16."""
    spec, size = Spec(model="causal-lm", batch_size=256), 128
    rows = profile_spec(spec, plans(["accumulate"], [2, 4, 16]), repeats=1, steps=(2, 4, 16)).rows
    peaks = [row.memory.peak if row.memory else 0 for row in rows]
    activations = [row.activation_bytes or 0 for row in rows]
    for (large, *smaller), rel in ((peaks, 0.15), (activations, 0.03)):
        line = linear_regression([64, 16], smaller)
        # what grows, without the share of libraries and weights
        assert large - line.intercept == pytest.approx(line.slope * size, rel=rel)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_code_of_a_spec_with_ranks_finds_a_group_of_one(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = model.with_name("grouped.toml")
    spec.write_text(f'model = "{model}:grouped"\nsteps = 2\nranks = 2\n')
    code, document = profiled(capsys, str(spec), "--strategy", "accumulate", "--steps", "2")
    assert code == 0 and document.rows[0].status == "measured"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_counts_itself(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "mnist-mlp", "--batch-size", "4096", "--device", "cuda", "--steps", "1,4,8,16"]
    code, document = profiled(capsys, *words)
    on_cpu = profiled(capsys, *words[:4], "--steps", "1,4,8,16")[1]
    assert code == 0 and document.setting is not None and document.setting.device_memory
    # exact and the same on every device
    assert [row.activation_bytes for row in document.rows] == [row.activation_bytes for row in on_cpu.rows]
    for row in document.rows:
        assert row.memory is not None and row.memory.kind == "cuda-allocated" and row.activation_bytes
        assert row.memory.increment >= row.activation_bytes
        assert row.memory.reserved is not None and row.memory.reserved >= row.memory.peak
