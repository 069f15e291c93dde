"""The layers of the house hold, and the rooms behind the wall import no torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("lint-imports")
    if not script.exists():
        pytest.skip("import-linter is not installed")
    return subprocess.run([script, "--no-cache"], capture_output=True, text=True, check=False, cwd=folder)


def test_layers_hold() -> None:
    done = _lint(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "line", ["import torch", "from gaverify import verification"], ids=["torch-in-a-rule", "upwards"]
)
def test_a_wrong_import_is_seen(tmp_path: Path, line: str) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "gaverify", tmp_path / "gaverify", ignore=shutil.ignore_patterns("__pycache__"))
    rule = tmp_path / "gaverify" / "rules" / "wrong_shares.py"
    rule.write_text(rule.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    done = _lint(tmp_path)
    assert done.returncode == 1, done.stdout


@pytest.mark.parametrize(
    "name", ["gaverify", "gaverify.cli", "gaverify.rules", "gaverify.report", "gaverify.report.documents"]
)
def test_no_torch_behind_the_wall(name: str) -> None:
    code = f"import {name}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_torch_could_be_seen_behind_the_wall() -> None:
    code = "import gaverify.passes.gradients, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 1
