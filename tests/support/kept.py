"""Audits whose runs were kept: `tests/kept/audits.tar.xz` has a folder of `audit --keep` for each row that is kept.

`python tests/support/kept.py` makes them anew. An audit is reported again from its folder, where no process runs.
"""

from __future__ import annotations

import re
import runpy
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from audits import Audited, audit, gaverify
from mutated_loops import path_of

ARCHIVE = Path(__file__).parent.parent / "kept" / "audits.tar.xz"
ADVICE = "its runs were kept: if the records are right in another form now, run `python tests/support/kept.py`"
# Where scripts and records lie in an archive: on any machine these are replaced by where they lie there.
_SCRIPTS, _RECORDS = "/kept-scripts", "/kept-records"


class Row(Protocol):
    """What an audit is made of; see `test_audit_answers`."""

    script: str
    common: str
    options: tuple[str, ...]
    full: str
    accumulated: str


def name_of(row: Row) -> str:
    """The folder of a row's audit."""
    return re.sub(r"[^\w.=+-]+", "_", " ".join((row.script, row.common, *row.options)))


def report_again(folder: Path) -> Audited:
    """Reports an audit again from its folder."""
    return gaverify(["audit", "--from", str(folder), "--format", "json"])


def kept_audit(row: Row) -> Audited:
    """Reports a row again from the archive that is shipped."""
    return report_again(unpack(row, Path(_unpacked().name)))


def unpack(row: Row, archive: Path) -> Path:
    """Gives the records of a row the places that its script and they have on this machine."""
    folder = archive / name_of(row)
    _move(folder, {_SCRIPTS: str(path_of(row.script).parent), _RECORDS: str(folder)})
    return folder


def write_archive(rows: Iterable[Row], path: Path) -> None:
    """Audits each row, and writes what a report reads of its runs."""
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gaverify-kept-") as made:
        for name, row in {name_of(row): row for row in rows}.items():
            folder = Path(made, name).resolve()
            audit(row.script, row.full, row.accumulated, row.common, (*row.options, "--keep", str(folder)))
            opened = _note_opened_files()
            opened.clear()
            report_again(folder)
            for file in set(filter(Path.is_file, folder.rglob("*"))) - set(map(Path, opened)):
                file.unlink()
            _move(folder, {str(path_of(row.script).parent): _SCRIPTS, str(folder): _RECORDS})
        with tarfile.open(path, "w:xz", preset=9) as archive:
            # Files of one kind beside each other: equal parts of different audits are stored once.
            files = filter(Path.is_file, Path(made).rglob("*"))
            for file in sorted(files, key=lambda file: (file.suffix, file.name, file.parent)):
                archive.add(file, str(file.relative_to(made)), filter=_without_owner)


@cache
def _unpacked() -> tempfile.TemporaryDirectory[str]:
    """Unpacks the archive that is shipped, into a folder that goes with this process."""
    folder = tempfile.TemporaryDirectory(prefix="gaverify-kept-")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder.name, filter="data")
    return folder


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    return member.replace(mtime=0, mode=0o644, uid=0, gid=0, uname="", gname="", deep=False)


def _move(folder: Path, places: Mapping[str, str]) -> None:
    """Replaces the beginnings of paths in all records of a folder."""
    for file in filter(Path.is_file, folder.rglob("*")):
        if file.suffix != ".pt":
            file.write_text(_replace(file.read_text("utf-8"), places), "utf-8")
        elif file.name in ("outputs.pt", "trace.pt"):  # no other tensors lie beside paths
            torch.save(_replace(torch.load(file, weights_only=True), places), file)


def _replace(content: Any, places: Mapping[str, str]) -> Any:
    if isinstance(content, str):
        for place, other in places.items():
            content = content.replace(place, other)
        return content
    if isinstance(content, dict):
        return {_replace(key, places): _replace(value, places) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(_replace(part, places) for part in content)
    return content


@cache
def _note_opened_files() -> set[str]:
    """Notes, from now on, which files this process opens."""
    opened: set[str] = set()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str):
            opened.add(arguments[0])

    sys.addaudithook(note)
    return opened


def main() -> None:
    """Makes the archive anew, of all rows that are kept."""
    from forking import forked_runs

    table = runpy.run_path(str(ARCHIVE.parent.parent / "end_to_end/test_audit_answers.py"))
    with forked_runs():
        write_archive(table["KEPT"], ARCHIVE)


if __name__ == "__main__":
    main()
