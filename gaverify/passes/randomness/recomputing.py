"""Random draws that a backward makes again: activation checkpointing runs parts of earlier forwards once more."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gaverify.passes.randomness.dealing import Dealer
from gaverify.passes.randomness.operations import generator_key
from gaverify.passes.randomness.recording import Recorder


class Recomputing:
    """Gives each draw of a backward to the forward that made it first; the generator's state before it tells which.

    Args:
        handlers: Those of the window's forwards, in order.
    """

    def __init__(self, handlers: Sequence[Recorder | Dealer]) -> None:
        self._handlers = handlers

    def watching(self) -> AbstractContextManager[None]:
        """Returns a context that does nothing: a backward draws nothing from Python's or NumPy's generators."""
        return nullcontext()

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: torch.Tensor | None = None
    ) -> Any:
        """Runs the operation under the handler that knows it; the last forward's where none does."""
        key = generator_key(args, kwargs)
        first = next((handler for handler in self._handlers if key in handler.known), self._handlers[-1])
        return first(func, args, kwargs, like)
