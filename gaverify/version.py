"""The versions of gaverify and of what it runs on, and of the user's code; imports nothing heavy."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

__version__ = "0.1.0"
HOME = "https://github.com/gaverify/gaverify"
"""Where the source and the rules' pages can be read."""


def installed_version(package: str) -> str:
    """Returns the version of a package, or "not installed"; its metadata is read, as importing torch takes long."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def current_time() -> str:
    """Returns the time in UTC to the second, as ISO 8601 writes it: "2026-11-25T07:00:00Z"."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def git_commit() -> str:
    """Returns the commit that is checked out in the working folder, 40 hex digits; "" outside a repository of git.

    The files of git are read: the program may not be installed, and takes as long as a small verdict.
    """
    try:
        folder = Path.cwd()
        repository = next((each / ".git" for each in (folder, *folder.parents) if (each / ".git").exists()), None)
        if repository is None:
            return ""
        if repository.is_file():  # a worktree or a submodule: the file names the folder
            repository = (repository.parent / repository.read_text("utf-8").removeprefix("gitdir:").strip()).resolve()
        return _commit_of(repository)
    except (OSError, ValueError):
        return ""


def _commit_of(repository: Path) -> str:
    head = (repository / "HEAD").read_text("utf-8").strip()
    if not head.startswith("ref:"):
        return head
    name = head.removeprefix("ref:").strip()
    shared = repository / "commondir"  # a worktree keeps its branches with the others of the repository
    folders = (
        [repository, (repository / shared.read_text("utf-8").strip()).resolve()] if shared.exists() else [repository]
    )
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).read_text("utf-8").strip()
    for folder in folders:
        packed = folder / "packed-refs"
        for line in packed.read_text("utf-8").splitlines() if packed.is_file() else ():
            commit, _, reference = line.partition(" ")
            if reference == name:
                return commit
    return ""
