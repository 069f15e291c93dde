"""The collector rests while torch is imported and at the end of gaverify's own process, and nowhere else."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from gaverify.cli import main
from gaverify.cli.collector import paused


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pause_ends_as_it_began(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError), paused():
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
