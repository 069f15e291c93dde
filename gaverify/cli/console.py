"""The console that commands print on."""

from __future__ import annotations

from typing import Any


def console(**options: Any) -> Any:
    """Returns a rich console whose reader may leave: rich itself would exit with 1, which reads as divergent."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Quiet(**options)
