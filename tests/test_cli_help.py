"""`--help` is quick: it imports nothing heavy, for the group and for every command."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from gaverify.cli import COMMANDS, cli
from gaverify.cli.options import _OPTIONS
from gaverify.spec import Spec

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
    assert set(Spec.model_fields) <= flags
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


def test_completion() -> None:
    done = shell(f"COMP_WORDS='gaverify mo' COMP_CWORD=1 _GAVERIFY_COMPLETE=bash_complete {sys.executable} -m gaverify")
    assert (done.returncode, done.stdout) == (0, "plain,models\n")
