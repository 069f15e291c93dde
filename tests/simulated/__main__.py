"""Runs pytest, or any command, on the simulated device: `python tests/simulated [pytest's arguments | -- COMMAND …]`.

The device has to be loaded before torch, so everything runs in a process of its own, and so do its children.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ACTIVE = "GAVERIFY_SIMULATED_DEVICE"
HERE = Path(__file__).parent
SOURCES = HERE / "device"
LIBRARY = "libsimulated.so"


class CannotBuild(Exception):
    """There is nothing to build it with; the message says what is missing."""


def library() -> Path:
    """Returns the built library; builds it where this torch and these sources have not been met before.

    Raises:
        CannotBuild: No C++ compiler, or a torch without its headers.
        subprocess.CalledProcessError: The compiler refused the sources, which it has printed its reasons for.
    """
    torch = _torch()
    compiler = _compiler()
    built = _cache() / _fingerprint(torch, compiler) / LIBRARY
    if not built.exists():
        _build(torch, compiler, built)
    return built


def _torch() -> Path:
    """The folder of torch, found without importing it: the device has to be loaded first."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotBuild("torch is not installed")
    folder = Path(spec.origin).parent
    if not (folder / "include" / "ATen" / "ATen.h").exists():
        raise CannotBuild(f"this torch has no C++ headers: {folder / 'include'}")
    if any((folder / "lib").glob("libtorch_cuda*")):
        raise CannotBuild("this torch has the real CUDA device built in: take a CPU build")
    return folder


def _compiler() -> str:
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else ("c++", "g++", "clang++"):
        found = shutil.which(name)
        if found:
            return found
    raise CannotBuild(f"no C++ compiler: looked for {asked or 'c++, g++, clang++ (or say which in CXX)'}")


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "gaverify" / "simulated"


def _fingerprint(torch: Path, compiler: str) -> str:
    """Changes with whatever the library is made of."""
    told = hashlib.sha256()
    for path in (torch / "version.py", *sorted(SOURCES.iterdir()), Path(__file__)):
        told.update(path.read_bytes())
    told.update(f"{torch}\n{compiler}\n{sys.version}".encode())
    return told.hexdigest()[:16]


def _build(torch: Path, compiler: str, built: Path) -> None:
    built.parent.mkdir(parents=True, exist_ok=True)
    headers = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]

        def compile_one(source: Path, target: str) -> None:
            subprocess.run(
                [compiler, "-std=c++20", "-O1", "-fPIC", "-w", *headers, "-c", str(source), "-o", target], check=True
            )

        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(compile_one, sources, objects))
        whole = str(Path(folder) / LIBRARY)
        libraries = [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
        subprocess.run([compiler, "-shared", *objects, "-o", whole, *libraries], check=True)
        os.replace(whole, built)  # whole or not at all: another process may be building the same


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
