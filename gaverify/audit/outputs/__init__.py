"""What the runs of an audit write: no run shall see another's files, and none of the user's may change.

Two ways, the first that works: a *view* of the files of its own for every run, made by the kernel (Linux with user
namespaces), whose changes go with the run; else a *guard* in Python that ends a run before it changes a file that was
there before, and that takes away again what the run added. No torch.
"""

from __future__ import annotations

import os
from pathlib import Path

IMPOSSIBLE = 94
"""Exit status of a child for which no view could be made; it ran nothing of the script."""

REFUSED = 95
"""Exit status of a child that the guard ended."""


def shared_folders() -> list[Path]:
    """Returns the caches of downloads and compilers: they are the same for all runs, and too costly to fill thrice."""
    named = [os.environ.get(name) for name in ("HF_HOME", "HF_DATASETS_CACHE", "TORCH_HOME", "TRITON_CACHE_DIR")]
    home = Path.home()
    caches = [os.environ.get("XDG_CACHE_HOME") or home / ".cache", home / ".triton", home / ".nv", *named]
    return [Path(cache) for cache in caches if cache and os.path.isdir(cache)]
