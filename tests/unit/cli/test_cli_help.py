"""`--help` and `doctor`: quick, known here, and offering what they read; the collector rests around them."""

from __future__ import annotations

import gc
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

from gaverify import checkup
from gaverify.cli import COMMANDS, cli, main
from gaverify.cli.auditing import audit
from gaverify.cli.options import HELP_GROUPS
from gaverify.cli.streams import pause_collector

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
    _, modules = imported(["schema"])
    assert "pydantic" in modules and "torch" not in modules


@pytest.mark.smoke
def test_every_command_is_listed_with_a_line() -> None:
    assert list(cli.commands) == [command.name for command in COMMANDS]
    assert all(command.short_help for command in COMMANDS)


@pytest.mark.smoke
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
        ("gaverify run --select GAV50", ["GAV501", "GAV503"]),
        ("gaverify run --ignore GAV30", ["GAV301", "GAV302", "GAV303"]),
        ("gaverify run --model nothing-like-it", []),
        ("gaverify run mlp", ["mlp", "mlp-batchnorm"]),
        ("gaverify profile mnist-m", ["mnist-mlp"]),
        ("gaverify run configs/own", ["configs/own-model.toml", "configs/own_model.py"]),
        ("gaverify run tests/unit/cli/test_cli_help.py:imp", ["tests/unit/cli/test_cli_help.py:imported"]),
        ("gaverify run --model gone.py:a", []),
        ("gaverify run --loss cross", ["cross_entropy"]),
        ("gaverify run --format js", ["json"]),
        # bash hands on what it breaks at colons, and replaces what stands behind the last of them
        ("gaverify run --model tests/unit/cli/test_cli_help.py : imp", ["imported"]),
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


@pytest.mark.parametrize(("name", "kind"), [("script", "file"), ("full_script", "file"), ("keep", "dir")])
def test_the_shell_completes_paths_of_an_audit(name: str, kind: str) -> None:
    (parameter,) = [parameter for parameter in audit.params if parameter.name == name]
    assert [item.type for item in parameter.shell_complete(click.Context(audit), "t")] == [kind]


def test_completion_offers_every_loss() -> None:
    from gaverify.loading.bare import LOSSES as CALLED
    from gaverify.spec.fields import LOSSES

    assert list(LOSSES) == list(CALLED)


@pytest.mark.smoke
def test_doctor_prints_versions_and_what_a_device_computes_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out and "for float64 checks: yes" in out and "WRONG" not in out
    assert out.endswith("All checks passed.\n")
    assert all(len(line) <= 80 for line in out.splitlines()) and "…" not in out and platform.python_version() in out


def test_a_failed_check_exits_70(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checkup, "_backward", lambda device, dtype: torch.rand(3))
    assert main(["doctor", "--device", "cpu"]) == 70
    out = capsys.readouterr().out
    assert "WRONG" in out and "2 checks failed" in out
    lines = {subject: (found, fine) for subject, found, fine in checkup.support(torch.device("cpu"))}
    assert lines["repeatable"] == ("the same backward twice, bit for bit: no", False)


def test_what_a_device_cannot_do_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("no kernel for float64\nand more")

    monkeypatch.setattr(checkup, "_backward", refuses)
    lines = {subject: (found, fine) for subject, found, fine in checkup.support(torch.device("cpu"))}
    assert lines["float64"] == ("for float64 checks: no kernel for float64", False)


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cuda:99"]) == 2
    assert "this machine has no device `cuda:99`" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--reference", "--expect", "--memory", "--wanted-batch"])
def test_an_option_that_profile_does_not_read_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--model", "mlp", option, "word"]) == 2
    assert option in capsys.readouterr().err


def test_the_help_names_what_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--autocast" in text
    assert not any(option in text for option in ("--reference", "--memory", "--wanted-batch"))


def test_an_unknown_name_is_answered_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gaverify.profiling.launching.open_group", None)
    assert main(["profile", "--model", "nope"]) == 2
    assert "there is no built-in `nope`" in capsys.readouterr().err


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pause_ends_as_it_began(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError), pause_collector():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_a_caller_of_main_keeps_what_the_collector_sees() -> None:
    frozen = gc.get_freeze_count()
    assert main(["rules"]) == 0
    assert gc.get_freeze_count() == frozen


def test_the_own_process_ends_without_a_last_look() -> None:
    code = "import gc; from gaverify.cli import main; main(); print(gc.get_freeze_count())"
    done = subprocess.run([sys.executable, "-c", code, "rules"], check=True, capture_output=True, text=True)
    assert int(done.stdout.split()[-1]) > 1000


def test_the_model_of_a_run_is_collected(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factory sees a collector that works."""
    (tmp_path / "seeing.py").write_text(
        "import gc\nfrom gaverify.zoo.mlp import build as inner\n"
        "def build():\n    assert gc.isenabled()\n    return inner()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "gaverify", "run", "--model", "seeing.py:build"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["check"], "did you mean `run`?"),
        (["frobnicate"], "the commands are run, audit"),
        (["run", "--model", "mlp", "--step", "3"], "No such option '--step'. Did you mean '--steps'?"),
        (["run", "--model", "mlp", "--device", "gpu"], 'did you mean "cuda"?'),
        (["run", "--model", "mlp", "--device", "GPU:1"], 'did you mean "cuda:1"?'),
        (["run", "--model", "mlp", "--device", "cpuu"], 'did you mean "cpu"?'),
        (["profile", "mlpp", "--steps", "1"], "did you mean `mlp`"),
    ],
)
def test_a_word_of_other_tools_is_answered_with_ours(
    words: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert advice in capsys.readouterr().err


def test_the_help_of_run_groups_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    run = cli.commands["run"]
    names = {parameter.name for parameter in run.params}
    assert {name for group in HELP_GROUPS.values() for name in group} <= names, "a heading lists no option of the past"
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["What to verify:", "How to verify:", "Several ranks:", "Report:"]
    shown = [option.opts[0] for option in run.params if isinstance(option, click.Option)]
    assert [flag for flag in shown if not re.search(rf"^  .*{flag}\b", text, re.MULTILINE)] == []
    report = text[text.index("\nReport:") :]
    assert "--format" in report and "[MODEL" not in report and "--trace" in report and "--steps" not in report
