"""Module names for files whose own name belongs to another module: a user's `random.py` must not become `random`.

The name holds the file's path, and this module finds it again: a worker process that was spawned, and that gets an
object of such a file, imports the name as it would any other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

__path__: list[str] = []  # the import system asks only packages for submodules


def alias(file: Path) -> str:
    """Returns the module name of an absolute path."""
    return f"{__name__}.{file.stem.replace('.', '_')}_{str(file).encode().hex()}"


class _Finder:
    """Finds `gaverify.loading.aliases.NAME_PATH`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns how to load the file that the name holds; None for every other name."""
        if not name.startswith(f"{__name__}."):
            return None
        try:
            file = bytes.fromhex(name.rpartition("_")[2]).decode()
        except ValueError:
            return None
        return spec_from_file_location(name, file)


if not any(getattr(finder, "__qualname__", "") == "_Finder" for finder in sys.meta_path):
    sys.meta_path.append(_Finder)
