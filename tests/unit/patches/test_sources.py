"""Edits keep every character that they do not replace, and diffs name files of the working folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaverify.errors import ProblemError
from gaverify.patches import apply, render_diff
from gaverify.records.patch import Edit, Patch

TEXT = "a = 1  # é\r\nb = 'x'\x0c\r\nc = 3"


def test_edits_keep_line_ends_and_other_characters() -> None:
    edits = Edit("f", 2, 4, 2, 7, "'y'"), Edit("f", 1, 0, 1, 0, "z = 0\r\n"), Edit("f", 3, 5, 3, 5, "0")
    assert apply(Patch(edits, (), "", ""), {"f": TEXT}) == {"f": "z = 0\r\na = 1  # é\r\nb = 'y'\x0c\r\nc = 30"}


def test_overlapping_edits_are_refused() -> None:
    with pytest.raises(ProblemError, match="overlap"):
        apply(Patch((Edit("f", 1, 0, 1, 3, ""), Edit("f", 1, 2, 1, 4, "")), (), "", ""), {"f": TEXT})


def test_diff_names_paths_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(tmp_path / "train.py")
    diff = render_diff({file: "a\nb"}, {file: "a\nc"})
    assert diff == (
        "--- a/train.py\n+++ b/train.py\n@@ -1,2 +1,2 @@\n a\n"
        "-b\n\\ No newline at end of file\n+c\n\\ No newline at end of file\n"
    )
