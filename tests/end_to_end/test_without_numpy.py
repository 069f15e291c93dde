"""NumPy is optional: torch runs without it, and so does gaverify."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
{block}
from gaverify.cli import main
code = main(["run", "--model", "causal-lm", "--weighting", "tokens", "--format", "json"])
assert ("numpy" in sys.modules and sys.modules["numpy"] is not None) is False
sys.exit(code)
"""


def _run(block: str) -> subprocess.CompletedProcess[str]:
    code = CODE.format(block=block)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_dropout_is_replayed_without_numpy() -> None:
    done = _run("sys.modules['numpy'] = None  # importing it raises ImportError")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert '"equivalent"' in done.stdout


def test_ranks_exchange_what_they_reach_without_numpy() -> None:
    code = CODE.replace('"--weighting", "tokens"', '"--weighting", "tokens", "--steps", "2", "--ranks", "2"')
    block = "sys.modules['numpy'] = None"
    done = subprocess.run([sys.executable, "-c", code.format(block=block)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"equivalent"' in done.stdout
