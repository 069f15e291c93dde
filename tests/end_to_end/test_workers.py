"""Specs in processes of their own: a limit that holds in any code, the order of rows, what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch  # noqa: F401 — here, as pytester unloads what its tests import, and torch cannot be loaded twice

from gaverify.cli import main

MODELS = """
import ctypes, os, subprocess, sys, time
import torch
from torch import nn


class Hanging(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open(os.environ["PIDS"], "a") as stream:
            stream.write(f"{os.getpid()} {started.pid} ")
        open(os.path.join(os.environ["TMPDIR"], "left"), "w").close()
        ctypes.CDLL(None).sleep(600)  # holds no lock of Python's, and no signal handler of Python's runs
        return self.layer(x)


def hanging():
    return Hanging(), lambda model, batch: model(batch).mean(), torch.randn(8, 4)


def crashing():
    ctypes.string_at(0)


def slow():
    time.sleep(1.5)
    return nn.Linear(4, 1), lambda model, batch: model(batch).mean(), torch.randn(8, 4)


def lacking():
    import nobody_has_this


def raising():
    raise ValueError("for a reason")
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PIDS": str(folder / "pids"), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gaverify", "run", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="asks the system for processes")
def test_a_verification_that_hangs_is_ended_with_all_that_it_started(folder: Path) -> None:
    begun = time.monotonic()
    done = run(folder, "models.py:hanging", "--timeout", "1.5")
    assert done.returncode == 2 and time.monotonic() - begun < 60
    sentence = "gaverify: error: did not finish within 1.5 s and was stopped during: the full batch; give a larger"
    assert sentence in done.stderr and "Traceback" not in done.stderr
    processes = [int(word) for word in (folder / "pids").read_text().split()]
    assert len(processes) == 2 and not any(map(lives, processes))
    assert {file.name for file in folder.iterdir()} - {"__pycache__"} == {"models.py", "pids"}, (
        "its temporary files are gone"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(folder: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "PIDS": str(folder / "pids"), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gaverify", "run", "models.py:hanging", "--timeout", "300"]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        limit = time.monotonic() + 60
        while not (folder / "pids").exists() and time.monotonic() < limit:
            time.sleep(0.1)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "interrupted" in err and "Traceback" not in err
    assert not list(folder.glob("gaverify-run-*"))
    assert not any(lives(int(word)) for word in (folder / "pids").read_text().split())


def test_rows_stand_in_the_order_of_the_files_whoever_is_done_first(folder: Path) -> None:
    specs = {
        "a": "models.py:slow",
        "b": "mlp",
        "c": "models.py:crashing",
        "d": "models.py:raising",
        "e": "mlp-batchnorm",
    }
    specs["f"] = "models.py:lacking"
    (folder / "all").mkdir()
    for name, model in specs.items():
        (folder / "all" / f"{name}.toml").write_text(f'model = "{"../" if "py" in model else ""}{model}"\n')
    (folder / "all" / "c.toml").write_text('model = "../models.py:crashing"\ntimeout = 60\n')
    done = run(folder, "-q", "-j", "2", "all")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[1].strip(",") for row in rows] == [f"all/{name}.toml" for name in "abcdef"], done.stderr
    assert [row[0] for row in rows] == ["EQUIVALENT", "EQUIVALENT", "ERROR", "ERROR", "DIVERGENT", "SKIPPED"]
    assert done.returncode == 2
    assert "the verification's process was ended by signal SIGSEGV" in done.stdout
    assert "raised ValueError at models.py:" in done.stdout


def test_workers_are_as_silent_about_a_missing_numpy_as_one_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "without" / "numpy").mkdir(parents=True)
    (folder / "without" / "numpy" / "__init__.py").write_text("raise ModuleNotFoundError('No module named numpy')")
    monkeypatch.setenv("PYTHONPATH", str(folder / "without"), prepend=os.pathsep)
    for words in (["-j", "2"], ["--timeout", "300"]):
        done = run(folder, "-q", "mlp", "mlp-batchnorm", *words)
        assert (done.returncode, done.stderr) == (1, "")


def test_a_limit_that_is_not_reached_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for words in ([], ["--timeout", "300"]):
        assert main(["run", "mlp-batchnorm", "--no-diagnose", *words]) == 1
        outputs.append(capsys.readouterr())
    assert outputs[0] == outputs[1]
