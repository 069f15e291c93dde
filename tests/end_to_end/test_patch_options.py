"""`--diff` and `--fix` of a script as it lies on a disk: in any encoding, through a pipe to git, written and undone."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from audits import HEAD, folder, gaverify

UNDIVIDED = """
# {comment}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(batches):
\tmse_loss(model(x), y).backward()
\tif (i + 1) % args.accum == 0:
\t\toptimizer.step()
\t\toptimizer.zero_grad()
"""
WORDS = ["audit", "train.py", "--full", "--batch-size 8", "--accumulated", "--batch-size 2 --accum 4"]
BEFORE, AFTER = b"\tmse_loss(model(x), y).backward()", b"\t(mse_loss(model(x), y) / args.accum).backward()"


def git(path: Path, *words: str, text: str = "") -> None:
    subprocess.run(["git", *words], cwd=path, check=True, input=text.encode())


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git")


@needs_git
@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1"])
def test_a_script_is_fixed_and_the_fix_undone(tmp_path: Path, encoding: str) -> None:
    text = f"# coding: {encoding.removesuffix('-sig')}\n{HEAD}{UNDIVIDED.format(comment='Größe')}"
    raw = text.replace("\n", "\r\n").encode(encoding)
    script = tmp_path / "train.py"
    script.write_bytes(raw)
    script.chmod(0o750)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "x")
    with folder(tmp_path):
        fixed = gaverify([*WORDS, "--fix", "--format", "json"])
    assert fixed.code == 0 and "undo it with `git checkout -- train.py`" in fixed.err
    assert fixed.document["patch"]["codes"] == ["GAV201"]
    assert script.read_bytes() == raw.replace(BEFORE, AFTER)
    assert script.stat().st_mode & 0o777 == 0o750
    git(tmp_path, "checkout", "-q", "--", "train.py")
    assert script.read_bytes() == raw


@needs_git
@pytest.mark.slow
def test_a_diff_goes_through_a_pipe_from_the_folder_of_a_repository(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    script = project / "train.py"
    script.write_text(HEAD + UNDIVIDED.format(comment="x"), encoding="utf-8")
    git(tmp_path, "init", "-q")
    with folder(project):
        report = gaverify([*WORDS, "--diff"])
    assert report.code == 1 and BEFORE in script.read_bytes()
    git(project, "apply", text=report.out)
    assert AFTER in script.read_bytes()
    with folder(project):
        assert gaverify([*WORDS, "-q", "--diff"]).code == 0


@pytest.mark.slow
def test_the_source_of_somebody_else_is_not_written(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + UNDIVIDED.format(comment="x"), encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    with folder(tmp_path / "elsewhere"):
        words = [os.path.join("..", word) if word == "train.py" else word for word in WORDS]
        report = gaverify([*words, "--fix"])
    assert report.code == 1 and "lies outside of the working folder" in " ".join(report.out.split())
    assert BEFORE in script.read_bytes()
