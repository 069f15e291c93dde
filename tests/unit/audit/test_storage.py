"""What a recorded run leaves on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
