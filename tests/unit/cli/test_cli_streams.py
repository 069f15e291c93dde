"""What the user's code writes, warns of and leaves by; a terminal that obeys; streams that are full or closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from gaverify.cli import main
from gaverify.cli.streams import guests, harmless, tell
from gaverify.errors import HardExit

LOUD = """\
import os
import warnings

import torch
from torch import nn


def loud():
    def loss(model, batch):
        os.write(1, b"raw\\n")
        os.system("echo child")
        print("printed")
        warnings.warn(f"odd shape {len(batch)}", stacklevel=2)
        return model(batch).mean()

    return nn.Linear(3, 1), loss, torch.randn(8, 3)


def leaves():
    os._exit(0)


def leaves_in_the_loss():
    return nn.Linear(3, 1), lambda model, batch: os._exit(0), torch.randn(8, 3)


def forks():
    child = os.fork()
    if child == 0:
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    return nn.Linear(3, 1), lambda model, batch: model(batch).mean(), torch.randn(8, 3)


def wanders():
    os.chdir("/")
    return nn.Linear(3, 1), lambda model, batch: model(batch).mean(), torch.randn(8, 3)


def stops():
    raise GeneratorExit


def stops_in_the_loss():
    def loss(model, batch):
        raise GeneratorExit

    return nn.Linear(3, 1), loss, torch.randn(8, 3)


def unspeakable():
    class Unspeakable(Exception):
        def __str__(self):
            raise ValueError

    raise Unspeakable


def colours():
    raise ValueError("\\x1b[31mred\\x1b[0m\\x1b]0;title\\x07")


def in_itself():
    batch = {"x": torch.randn(8, 3)}
    batch["self"] = [batch]
    return nn.Linear(3, 1), lambda model, batch: model(batch["x"]).mean(), batch


def huge(batch_size=8):
    return nn.Linear(3, 1), lambda model, batch: model(batch).mean(), torch.randn(batch_size, 3)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "loud_model.py"
    path.write_text(LOUD)
    return str(path)


def test_stdout_holds_the_report_alone(file: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--model", f"{file}:loud", "--format", "json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["outcome"] == "equivalent"
    for line in ("raw", "child", "printed"):
        assert f"{line}\n" in err, line


def test_a_warning_is_told_once_and_blamed_on_the_user(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--model", f"{file}:loud"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "odd shape" in line]
    assert len(told) == 1 and told[0].startswith(f"{file}:13: UserWarning: odd shape ")


def test_warnings_outside_are_python_s(capsys: pytest.CaptureFixture[str]) -> None:
    before = warnings.showwarning
    with guests():
        assert warnings.showwarning is not before
    assert warnings.showwarning is before


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("leaves", "called os._exit(0)"),
        ("leaves_in_the_loss", "called os._exit(0); nothing was compared"),
        ("stops", "raised GeneratorExit"),
        ("stops_in_the_loss", "raised on the full batch: GeneratorExit"),
        ("unspeakable", "Unspeakable"),
        ("colours", r"\x1b[31mred\x1b[0m\x1b]0;title\x07"),
        ("in_itself", "the batch contains itself: `batch['self'][0]`"),
    ],
)
def test_a_sentence_and_exit_2(file: str, factory: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--model", f"{file}:{factory}"]) == 2
    err = capsys.readouterr().err
    assert said in err and "\x1b" not in err and "Traceback" not in err and "bug in gaverify" not in err


def test_a_number_of_micro_batches_is_named_as_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "mlp", "--steps", "99"]) == main(["run", "mlp", "--steps=99"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    said = "--steps 99: 99 micro-batches cannot be cut from a batch of 8 samples; lower steps to 8 or less"
    assert said in first == second
    (tmp_path / "spec.toml").write_text('model = "mlp"\nsteps = 99\n')
    assert main(["run", str(tmp_path / "spec.toml")]) == 2
    assert "steps = 99 micro-batches cannot be cut" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["99999999999999", "999999999999999999", "9" * 30])
@pytest.mark.parametrize("model", ["mlp", "{file}:huge"])
def test_sizes_beyond_any_memory(file: str, model: str, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--model", model.format(file=file), "--batch-size", size]) == 2
    err = capsys.readouterr().err
    assert "out of memory" in err and "smaller `--batch-size`" in err and err.count("\n") == 1


def test_a_forked_child_leaves_as_it_likes(file: str) -> None:
    assert main(["run", "--model", f"{file}:forks"]) == 0
    leave = os._exit
    with guests(), pytest.raises(HardExit):
        os._exit(0)
    assert os._exit is leave


def test_a_factory_that_wanders_changes_no_place(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text(f'model = "{os.path.relpath(file)}:wanders"\n')
    assert main(["run", "a.toml", "b.toml", "--output", "report.md"]) == 0
    assert "b.toml" in (tmp_path / "report.md").read_text() and Path.cwd() == tmp_path


def test_harmless_text_keeps_what_people_write() -> None:
    assert harmless("a × ‖b‖\tc\n") == "a × ‖b‖\tc\n"
    assert harmless("\x07\x9b\x7f\r") == r"\x07\x9b\x7f\x0d"


@pytest.mark.parametrize(
    ("words", "code"),
    [("run --model nope 2>/dev/full", 2), ("rnu 2>/dev/full", 2), ("rnu 2>&-", 2), ("rules >/dev/null 2>&-", 0)],
)
def test_a_stderr_that_is_full_or_closed_changes_no_exit_code(words: str, code: int) -> None:
    done = subprocess.run(["bash", "-c", f"{sys.executable} -m gaverify {words}"], check=False)
    assert done.returncode == code


@pytest.mark.slow
def test_a_warning_for_a_full_stderr_changes_no_exit_code(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text('model = "mlp-batchnorm"\nexpect = "divergent"\n')
    project = '[tool.gaverify]\naccept = [{ code = "GAV102", location = "x", reason = "known" }]\n'
    (tmp_path / "pyproject.toml").write_text(project)  # a stale entry, of which a warning tells
    call = f"{sys.executable} -m gaverify run a.toml b.toml 2>/dev/full"
    assert subprocess.run(["bash", "-c", call], check=False, cwd=tmp_path).returncode == 0


def test_a_full_stderr_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        tell("nobody hears this")
        tell("nor this")
