"""What a recorded run leaves on disk."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gaverify.audit.job import DISK_FULL, ROOM
from gaverify.audit.recording import storage
from gaverify.audit.recording.patches import _loads
from gaverify.audit.recording.storage import Storage


def test_the_closing_record_appears_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent looks for the records of ranks while they are written; half a record would be a fault of ours."""
    seen: list[bool] = []
    write_text = Path.write_text

    def watched(path: Path, *args: object, **options: object) -> int:
        written = write_text(path, *args, **options)  # type: ignore[arg-type]
        seen.append((tmp_path / "meta.json").exists())
        return written

    monkeypatch.setattr(Path, "write_text", watched)
    Storage(tmp_path).finish({"rank": 0})
    assert seen == [False]
    assert json.loads((tmp_path / "meta.json").read_text()) == {"rank": 0}


def test_only_files_of_the_script_are_noted_as_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is given what another run of the audit kept does not resume."""
    noted: list[str] = []
    recorder = SimpleNamespace(
        off=False,
        job=SimpleNamespace(folder=str(tmp_path / "audit" / "1-accumulated")),
        simple=lambda kind, path: noted.append(path),
    )
    monkeypatch.setattr(torch, "load", torch.load)
    _loads(recorder)  # type: ignore[arg-type]
    own, checkpoint = tmp_path / "audit" / "0-full" / "loader-0-1-0.pt", tmp_path / "audited.pt"
    own.parent.mkdir(parents=True)
    for path in (own, checkpoint):
        torch.save([1], path)
        assert torch.load(path) == [1]
    assert noted == [str(checkpoint)]


@pytest.mark.parametrize(("times", "enough"), [(2, True), (3, False)])
def test_room_is_asked_for_before_it_is_used(
    times: int, enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(storage, "leave", left.append)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=90))
    Storage(tmp_path).reserve([torch.ones(10)], times)
    assert left == ([] if enough else [DISK_FULL])
    assert enough or json.loads((tmp_path / ROOM).read_text()) == [120, 90]
