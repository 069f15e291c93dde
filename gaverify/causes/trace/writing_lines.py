"""Which line of the user's code changes a value that is neither a tensor of the model nor an attribute of a module?

Lists, counters and objects that a loss keeps are changed without any call that could be watched. One forward runs
under Python's line tracing instead; a value that has changed when a line begins was changed by the line before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gaverify.causes.bench import Bench
from gaverify.causes.trace.state import digests, named_state
from gaverify.passes.gradients import PassProbe
from gaverify.tracebacks import LineHunt, Owner, Place

_MOST_LOOKS = 20_000  # lines after which the search gives up: each looks at every value


def writing_lines(bench: Bench, names: list[str]) -> Mapping[str, Place]:
    """Returns file and line of the first change of each named value in a forward of the full batch."""
    getters = {name: get for name, (_, get) in named_state(bench.task).items() if name in names}
    watch = _LineWatch(getters)
    bench.forward(watch)
    return watch.found


class _LineWatch(PassProbe):
    """Looks at the values whenever a line of the user's or a library's code has run."""

    def __init__(self, getters: Mapping[str, Callable[[], Any]]) -> None:
        self._getters = dict(getters)
        self._before: dict[str, Any] = {}
        self._looks = 0
        self.found: dict[str, Place] = {}

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Watches for the length of a forward."""
        self._before = digests(self._getters)
        hunt = LineHunt(self._all_found, Owner.LIBRARY)
        hunt.start()
        try:
            yield
        finally:
            hunt.stop()
            hunt.look()

    def _all_found(self, last: Place) -> bool:
        """Notes the line for every value that has changed by it; True where nothing is left to look for."""
        self._looks += 1
        for name, value in digests(self._getters).items():
            if value != self._before[name]:
                self.found.setdefault(name, last)
        return len(self.found) == len(self._getters) or self._looks > _MOST_LOOKS
