"""How the command ends where a signal ends it, where Ctrl-C comes late, and where threads are left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch  # noqa: F401 — here, as pytester unloads what its tests import, and torch cannot be loaded twice

from gaverify import report
from gaverify.cli import main

MODELS = """
import ctypes, os, threading, time
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, work):
        super().__init__()
        self.layer, self.work = nn.Linear(4, 1), work

    def forward(self, x):
        self.work()
        return self.layer(x)


def crash():
    ctypes.string_at(0)


def hang():
    open("begun", "w").close()
    ctypes.CDLL(None).sleep(600)  # as a kernel: no handler of Python's runs


def problem(work):
    return Net(work), lambda model, batch: model(batch).mean(), torch.randn(8, 4)


def crashing():
    return problem(crash)


def hanging():
    return problem(hang)


class Stop(BaseException):
    pass


def stop():
    raise Stop("enough")


def stopping():
    return problem(stop)


def stopping_in_a_split():
    import gaverify

    return gaverify.Problem(*problem(lambda: None), split=lambda batch, start, stop_at: stop())


def huge():
    return problem(lambda: {}["x" * 10_000_000])


def closing():
    return problem(lambda: os.closerange(3, 256))


def saying_goodbye():
    import atexit, sys

    atexit.register(lambda: print("print"))
    atexit.register(lambda: print("original", file=sys.__stdout__))
    atexit.register(lambda: os.system("echo child"))
    return problem(lambda: None)


def threaded():
    threading.Thread(target=time.sleep, args=(600,)).start()
    return problem(lambda: None)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


def begin(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gaverify", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_crash_in_a_kernel_leaves_the_line_of_the_model(folder: Path) -> None:
    out, err = (process := begin(folder, "run", "models.py:crashing")).communicate(timeout=100)
    line = MODELS.splitlines().index("    ctypes.string_at(0)") + 1
    assert process.returncode == -signal.SIGSEGV and out == ""
    assert "Fatal Python error: Segmentation fault" in err and f'models.py", line {line} in crash' in err


def test_sigterm_ends_a_run_that_hangs_in_a_kernel(folder: Path) -> None:
    process = begin(folder, "run", "models.py:hanging")
    limit = time.monotonic() + 60
    while not (folder / "begun").exists() and time.monotonic() < limit:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        ("stopping", "the model or loss raised on the full batch: Stop: enough (models.py:"),
        ("stopping_in_a_split", "the model's code raised Stop: enough"),
        ("closing", "the user's code closed a file descriptor that is not its own"),
        ("huge", "xxx … (10,000,002 characters)"),
    ],
)
def test_what_the_users_code_does_to_its_process_is_no_fault_of_gaverify(folder: Path, factory: str, told: str) -> None:
    out, err = (process := begin(folder, "run", f"models.py:{factory}", "--steps", "2")).communicate(timeout=100)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("gaverify: error: ") and told in err and len(err) < 5000


def test_what_is_printed_while_python_ends_does_not_stand_behind_the_report(folder: Path) -> None:
    process = begin(folder, "run", "models.py:saying_goodbye", "--steps", "2", "--format", "json")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0 and json.loads(out)["outcome"] == "equivalent"
    assert err.split() == ["child", "original", "print"]


@pytest.mark.parametrize("command", [("run", "{}.py:threaded"), ("profile", "--model", "{}.py:stopping")])
def test_a_file_name_that_is_no_text(folder: Path, command: tuple[str, ...]) -> None:
    name = os.fsdecode(b"caf\xe9")
    (folder / f"{name}.py").write_text(MODELS)
    process = begin(folder, *(word.format(name) for word in command), "-o", "report.json")
    _, err = process.communicate(timeout=100)
    assert process.returncode in (0, 2) and "internal" not in err
    assert json.loads((folder / "report.json").read_text(encoding="utf-8"))


def test_threads_that_a_model_leaves_are_not_waited_for(folder: Path) -> None:
    out, err = (process := begin(folder, "run", "models.py:threaded")).communicate(timeout=100)
    assert process.returncode == 0 and out.count("EQUIVALENT") == 1, err


def test_ctrl_c_behind_a_verdict_does_not_take_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "write_all", interrupt)
    assert main(["run", "mlp", "-o", str(tmp_path / "page.html")]) == 130
    out, err = capsys.readouterr()
    assert "EQUIVALENT" in out and err == "gaverify: interrupted after 1 verdict\n"
    monkeypatch.setattr("gaverify.cli.running.read_specs", interrupt)
    assert main(["run", "configs"]) == 130
    assert capsys.readouterr().err == "gaverify: interrupted; nothing was decided\n"


@pytest.mark.parametrize("limit", [(), ("--timeout", "60")])
def test_a_numpy_that_cannot_be_imported_is_told(folder: Path, limit: tuple[str, ...]) -> None:
    (folder / "numpy.py").write_text("raise RuntimeError('broken numpy')")
    command = [sys.executable, "-m", "gaverify", "run", "mlp", *limit]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "torch cannot be imported: RuntimeError: broken numpy; `python -c" in done.stderr
