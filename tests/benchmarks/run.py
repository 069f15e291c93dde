"""Runs every benchmark of this folder in turn: `python tests/benchmarks/run.py [NAME …]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main(names: list[str]) -> int:
    """Runs `bench_NAME.py` for each name, all of them without one; returns 1 where one could not run."""
    scripts = [HERE / f"bench_{name}.py" for name in names] or sorted(HERE.glob("bench_*.py"))
    return int(any(subprocess.run([sys.executable, str(script)], check=False).returncode for script in scripts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
