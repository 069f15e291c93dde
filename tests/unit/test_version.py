"""The commit that is checked out is read from the files of git."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gaverify.version import git_commit

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git")
_GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]


def _git(folder: Path, *words: str) -> str:
    return subprocess.run([*_GIT, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_of_a_repository_a_packed_one_and_a_worktree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, worktree = tmp_path / "repository", tmp_path / "worktree"
    (repository / "inside").mkdir(parents=True)
    monkeypatch.chdir(repository / "inside")
    assert git_commit() == ""
    _git(repository, "init", "-q")
    assert git_commit() == ""  # nothing is committed yet
    _git(repository, "commit", "-q", "--allow-empty", "-m", "first")
    commit = _git(repository, "rev-parse", "HEAD")
    assert git_commit() == commit
    _git(repository, "pack-refs", "--all")
    assert git_commit() == commit
    _git(repository, "worktree", "add", "-q", str(worktree))
    monkeypatch.chdir(worktree)
    assert git_commit() == commit
    _git(worktree, "checkout", "-q", "--detach")
    assert git_commit() == commit
