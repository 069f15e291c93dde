"""A patch is written into all of its files or into none, and nothing else of them changes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from gaverify.errors import ProblemError
from gaverify.patches import write
from gaverify.records.patch import Edit, Patch

TEXT = "\ufeff# é\r\n\tb = 'x'\x0c\r\nc = 3"
"""A byte-order mark, line ends of Windows, a tab, a form feed, and no last line end."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project that the user works in."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    return project


def patch_of(*files: Path) -> Patch:
    """Replaces the 3 of each file."""
    edits = tuple(Edit(str(file), 3, 4, 3, 5, "4") for file in files)
    digests = {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return Patch(edits, ("GAV201",), "A test.", "", digests=digests)


def file_in(folder: Path, name: str = "train.py") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(TEXT.encode())
    return folder / name


@pytest.mark.parametrize("mode", [0o755, 0o640])
def test_all_but_the_edit_stays(folder: Path, mode: int) -> None:
    file = file_in(folder)
    file.chmod(mode)
    write(patch_of(file))
    assert file.read_bytes() == TEXT.replace("3", "4").encode()
    assert file.stat().st_mode & 0o777 == mode
    assert os.listdir(folder) == ["train.py"]


def test_a_declared_encoding_and_other_names_of_the_file_stay(folder: Path) -> None:
    file = folder / "train.py"
    file.write_bytes(b"# coding: latin-1\n# \xe9\nc = 3\n")
    os.link(file, folder / "other.py")
    write(patch_of(file))
    assert (folder / "other.py").read_bytes() == b"# coding: latin-1\n# \xe9\nc = 4\n"


def test_a_link_is_followed_and_stays(folder: Path) -> None:
    file = file_in(folder, "real.py")
    link = folder / "train.py"
    link.symlink_to(file)
    write(patch_of(link))
    assert link.is_symlink() and "c = 4" in file.read_text(encoding="utf-8")


def read_only(file: Path) -> None:
    file.chmod(0o444)


def changed(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b" ")


def removed(file: Path) -> None:
    file.unlink()


def linked_outside(file: Path) -> None:
    outside = file.parent.parent / "shared.py"
    file.rename(outside)
    file.symlink_to(outside)


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (read_only, "`b.py` is read-only; make it writable with `chmod u\\+w`; no file was changed"),
        (changed, "`b.py` has changed since it was read; no file was changed"),
        (removed, "`b.py` cannot be read: No such file or directory; no file was changed"),
        (linked_outside, "`b.py` lies outside of the working folder; start gaverify in the project's folder"),
    ],
)
def test_no_file_is_written_if_one_cannot_be(folder: Path, happens, words: str) -> None:
    files = [file_in(folder, name) for name in ("a.py", "b.py")]
    patch = patch_of(*files)
    happens(files[1])
    before = files[1].read_bytes() if files[1].exists() else None
    with pytest.raises(ProblemError, match=words):
        write(patch)
    assert files[0].read_bytes() == TEXT.encode()
    assert (files[1].read_bytes() if files[1].exists() else None) == before


def test_an_installed_package_in_the_folder_is_not_written(folder: Path) -> None:
    file = file_in(folder, ".venv/lib/python3.12/site-packages/trainer/loop.py")
    with pytest.raises(ProblemError, match="belongs to an installed package"):
        write(patch_of(file))


def test_files_are_restored_if_a_later_one_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [file_in(folder, name) for name in ("a.py", "b.py")]
    replace_file = os.replace

    def fails_once(source: str, target: Path) -> None:
        if Path(target).name == "b.py":
            raise OSError(28, "No space left on device")
        replace_file(source, target)

    monkeypatch.setattr("os.replace", fails_once)
    with pytest.raises(ProblemError, match="No space left on device; no file was changed"):
        write(patch_of(*files))
    assert [file.read_bytes() for file in files] == [TEXT.encode()] * 2
    assert sorted(os.listdir(folder)) == ["a.py", "b.py"]
