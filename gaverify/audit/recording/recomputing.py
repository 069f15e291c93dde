"""Random draws that a backward makes again: activation checkpointing runs parts of earlier forwards once more."""

from __future__ import annotations

from typing import Any

from gaverify.randomness import Dealer, Recorder, _generator_key


class Recomputing:
    """Gives each draw of a backward to the forward that made it first; the generator's state before it tells which.

    Args:
        handlers: Those of the window's forwards, in order.
    """

    def __init__(self, handlers: list[Recorder | Dealer]) -> None:
        self._handlers = handlers

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the operation under the handler that knows it; the last forward's where none does."""
        key = _generator_key(args, kwargs)
        first = next((handler for handler in self._handlers if key in _known(handler)), self._handlers[-1])
        return first(func, args, kwargs)


def _known(handler: Recorder | Dealer) -> Any:
    return handler._seen if isinstance(handler, Recorder) else handler._index
