"""Runs pytest, or any command, on the simulated device: `python tests/simulated [pytest's arguments | -- COMMAND …]`.

The device has to be loaded before torch, so everything runs in a process of its own, and so do its children.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from building import CannotBuild, library

HERE = Path(__file__).parent
ACTIVE = "GAVERIFY_SIMULATED_DEVICE"


def main(arguments: list[str]) -> int:
    try:
        built = library()
    except CannotBuild as error:
        print(f"skipped: the simulated device cannot be built: {error}")
        return 0
    paths = [str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, ACTIVE: str(built), "PYTHONPATH": os.pathsep.join(paths)}
    if arguments[:1] == ["--"]:
        return subprocess.run(arguments[1:], env=environment).returncode
    command = [sys.executable, "-m", "pytest", *(arguments or ["-q", str(HERE), "-m", "not benchmark and not hf"])]
    return subprocess.run(command, env=environment, cwd=HERE.parent.parent).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
