"""How long the search for a cause may take: its passes are not begun when the time is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class TimeUp(BaseException):
    """Ends a search whose time is over: no error of anybody's, so that nobody takes it for one."""


@dataclass
class TimeLimit:
    """Seconds since a verification began, None for no limit; only a search is ended by it, never a verdict."""

    seconds: float | None = None
    begun: float = field(default_factory=time.monotonic)
    _searching: bool = False

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Ends with `TimeUp` what runs in it when the time is over."""
        self._searching = True
        try:
            yield
        finally:
            self._searching = False

    def check(self) -> None:
        """Raises `TimeUp` where a search has had its time."""
        if self._searching and self.seconds is not None and time.monotonic() - self.begun >= self.seconds:
            raise TimeUp
