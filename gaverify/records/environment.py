"""What an answer was made with: versions, the machine, the moment and the commit."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field

from gaverify.version import __version__, current_time, git_commit


@dataclass(frozen=True)
class Environment:
    """The versions that ran, when the answer was made, and the commit of git in its working folder."""

    torch: str = "not loaded"
    """Version of PyTorch; "not loaded" where nothing ran."""
    gaverify: str = __version__
    """Version of gaverify."""
    # Asked for when an answer is made: git and `platform.platform()` take milliseconds, which an import must not cost.
    python: str = field(default_factory=platform.python_version)
    """Version of Python."""
    platform: str = field(default_factory=platform.platform)
    """Operating system and machine, as `platform.platform()` says."""
    started: str = field(default_factory=current_time)
    """When the answer was made, UTC to the second; "" in documents that older versions wrote."""
    commit: str = field(default_factory=git_commit)
    """Git commit that was checked out in the working folder; "" outside a repository."""
