"""FAULTS.md shows what is found now."""

from __future__ import annotations

import readme


def test_fault_table_is_what_is_found_now() -> None:
    shown = readme.FAULTS.read_text(encoding="utf-8").partition("<!-- faults -->\n")[2].partition("<!-- /faults -->")[0]
    assert readme.skeleton(readme.fault_table()) == readme.skeleton(shown)
    assert "FLAGGED" not in shown
