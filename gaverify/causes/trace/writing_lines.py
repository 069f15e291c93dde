"""Which line of the user's code changes a value that is neither a tensor of the model nor an attribute of a module?

Lists, counters and objects that a loss keeps are changed without any call that could be watched. One forward runs
under Python's line tracing instead; a value that has changed when a line begins was changed by the line before it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gaverify.causes.bench import Bench
from gaverify.causes.trace.digests import digest
from gaverify.causes.trace.state import named_state
from gaverify.passes.gradients import PassProbe, forward_pass
from gaverify.tracebacks import Owner, owner_of

Line = tuple[str, int]
_MOST_EVENTS = 20_000  # lines after which the search gives up: each looks at every value


def writing_lines(bench: Bench, names: list[str]) -> Mapping[str, Line]:
    """Returns file and line of the first change of each named value in a forward of the full batch."""
    getters = {name: get for name, (_, get) in named_state(bench.task).items() if name in names}
    watch = _LineWatch(getters)
    forward_pass(bench.task, bench.state, bench.record, None, lift=bench.lift, probe=bench.with_probe(watch))
    return watch.found


class _LineWatch(PassProbe):
    """Looks at the values whenever a line of the user's code begins, and when a function of it returns."""

    def __init__(self, getters: Mapping[str, Callable[[], Any]]) -> None:
        self._getters = dict(getters)
        self._before: dict[str, Any] = {}
        self._last: Line | None = None
        self._events = 0
        self.found: dict[str, Line] = {}

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Traces for the length of a forward; a debugger's or coverage's own tracing pauses meanwhile."""
        outer = sys.gettrace()
        self._before = self._digests()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(outer)
            self._compare()

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if owner_of(frame.f_code.co_filename) >= Owner.LIBRARY else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event in ("line", "return"):
            self._compare()
            if event == "line":
                self._last = (frame.f_code.co_filename, frame.f_lineno)
        return self._line

    def _compare(self) -> None:
        self._events += 1
        if len(self.found) == len(self._getters) or self._events > _MOST_EVENTS:
            return
        for name, value in self._digests().items():
            if name not in self.found and value != self._before[name] and self._last is not None:
                self.found[name] = self._last

    def _digests(self) -> dict[str, Any]:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return {name: digest(get()) for name, get in self._getters.items()}
