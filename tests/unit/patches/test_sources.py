"""Edits keep every character that they do not replace, and diffs name files of the working folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaverify.errors import ProblemError
from gaverify.patches import apply, read_context, render_diff
from gaverify.patches.code import Code
from gaverify.patches.sources import decode_source, edit_text, encode_source
from gaverify.records.audit import Record
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


@pytest.mark.parametrize(
    "raw",
    [
        b"x = 1  # \xc3\xa9",
        b"\xef\xbb\xbfx = 1\r\n",
        b"# coding: latin-1\nx = 1  # \xe9\n",
        "# -*- coding: cp932 -*-\nx = '表'\n".encode("cp932"),
    ],
)
def test_sources_are_read_and_written_in_the_encoding_that_they_declare(raw: bytes) -> None:
    text = decode_source(raw)
    assert encode_source(text) == raw
    (assigned,) = Code("f", text).tree.body
    edit = Code("f", text).replace(assigned.value, "2")  # type: ignore[attr-defined]
    changed = encode_source(edit_text(text, [edit]))
    names: dict[str, object] = {}
    exec(compile(changed, "f", "exec"), names)
    assert names["x"] == 2 and len(changed) <= len(raw)


@pytest.mark.parametrize("raw", [b"# coding: klingon\n", b"x = '\xe9'\n", b"# coding: ascii\nx = '\xc3\xa9'"])
def test_sources_that_python_cannot_read_are_left_out(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "train.py").write_bytes(raw)
    assert not read_context(str(tmp_path / "train.py"), Record()).sources
