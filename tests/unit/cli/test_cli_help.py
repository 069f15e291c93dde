"""`--help` is quick: it imports nothing heavy, for the group and for every command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gaverify.cli import COMMANDS, cli
from gaverify.cli.options import _OPTIONS
from gaverify.spec import Spec

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "rich", "pydantic", "numpy")


def imported(words: list[str]) -> tuple[int, set[str]]:
    code = (
        "import sys; from gaverify.cli import main; code = main(sys.argv[1:]);"
        "print('LOADED', *sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    return done.returncode, set(done.stdout.rpartition("LOADED")[2].split())


@pytest.mark.parametrize("words", [["--help"], *([command.name, "--help"] for command in COMMANDS)])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code, modules = imported(words)
    assert code == 0
    assert "click" in modules
    assert modules.isdisjoint(HEAVY)


def test_the_laziness_test_could_fail() -> None:
    _, modules = imported(["run", "--model", "m", "--steps", "0"])
    assert "pydantic" in modules and "torch" not in modules


def test_every_command_is_listed_with_a_line() -> None:
    assert list(cli.commands) == [command.name for command in COMMANDS]
    assert all(command.short_help for command in COMMANDS)


def test_options_and_spec_agree() -> None:
    run = cli.commands["run"]
    flags = {parameter.name for parameter in run.params}
    assert set(Spec.model_fields) - {"accept"} <= flags  # entries with reasons stand in files
    for flag, metavar, _ in _OPTIONS:
        description = Spec.model_fields[flag.strip("-").replace("-", "_")].description or ""
        for word in re.findall(r'"([^"]+)"', description):
            assert word in metavar.split("|"), flag


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "gaverify", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("gaverify ")


def shell(command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    return done


@pytest.mark.parametrize("words", ["schema", "run --help"])
def test_a_reader_that_leaves_is_no_divergence(words: str) -> None:
    done = shell(f"{sys.executable} -m gaverify {words} | true; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_is_no_divergence() -> None:
    done = shell(f"{sys.executable} -m gaverify schema > /dev/full")
    assert done.returncode == 2
    assert done.stderr == "gaverify: error: cannot write: No space left on device\n"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("gaverify mo", ["models"]),
        ("gaverify run --model mlp", ["mlp", "mlp-batchnorm"]),
        ("gaverify run --model configs/o", ["configs/own_model.py"]),
        ("gaverify run --weighting t", ["tokens"]),
        ("gaverify run --device c", ["cpu", "cuda"]),
        ("gaverify run configs/mlp", ["configs/mlp-batchnorm.toml", "configs/mlp.toml"]),
        ("gaverify profile configs/toy", ["configs/toy-linear.toml"]),
        ("gaverify explain GAV10", ["GAV101", "GAV102", "GAV103", "GAV104"]),
        ("gaverify explain buffer", ["buffer-drift"]),
        ("gaverify run --model nothing-like-it", []),
    ],
)
def test_completion(words: str, offered: list[str]) -> None:
    variables = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "gaverify"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **variables, "_GAVERIFY_COMPLETE": "bash_complete", "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout.split()) == (0, [f"plain,{word}" for word in offered])
