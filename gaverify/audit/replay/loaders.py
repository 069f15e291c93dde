"""The samples of `DataLoader`s: kept as they come to be collated, and given in the same order to the other runs.

A loader is known by its number in the order in which loaders are first iterated. A micro-batch is made by the loader's
own `collate_fn` from its share of the samples of a batch of the full-batch run, so that padding and the offsets of
graphs are those of the micro-batch. A loader without automatic batching gives whole batches: these are cut by rows. So
are, where that is asked for, the batches of a `collate_fn` that draws random numbers, such as the masks of a language
model: it would draw others for a micro-batch.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

Quiet = Callable[[], AbstractContextManager[None]]


class Both:
    """A batch on its way to the script, and what it was collated from."""

    def __init__(self, samples: Any, batch: Any) -> None:
        self.samples, self.batch = samples, batch

    def pin_memory(self) -> Both:
        """What a loader's pinning thread does with a batch."""
        return Both(self.samples, pin_memory(self.batch))


class Collate:
    """Collates as the loader would, and sends the samples along; also in a worker process."""

    def __init__(self, original: Callable[[Any], Any]) -> None:
        self.original = original

    def __call__(self, samples: Any) -> Both:
        """Returns the batch and its samples."""
        return Both(samples, self.original(samples))


class Loaders:
    """Follows every loader that the script iterates; what to do with its batches the roles decide.

    Args:
        quiet: Surrounds the loaders' own work, whose draws are not the loop's.
    """

    def __init__(self, quiet: Quiet) -> None:
        self.ended = 0  # passes over a loader that came to their end
        self._quiet = quiet
        self._known: dict[int, tuple[int, Any]] = {}  # by id; the loader is held, so that no other one gets its id
        self._passes: Counter[int] = Counter()
        self._process = os.getpid()

    @property
    def count(self) -> int:
        """How many loaders were iterated."""
        return len(self._known)

    def install(self) -> None:
        """Puts itself between loaders and whoever iterates them."""
        original = DataLoader.__iter__
        loaders = self

        @functools.wraps(original)
        def iterate(self: Any) -> Any:
            if os.getpid() != loaders._process or torch.utils.data.get_worker_info() is not None:
                return original(self)
            return loaders._followed(self, original)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]

    def _followed(self, loader: Any, original: Callable[[Any], Any]) -> Any:
        number, _ = self._known.setdefault(id(loader), (len(self._known), loader))
        self._passes[number] += 1
        with self._quiet():
            inner = self._opened(loader, original)
        return _Followed(inner, self._batches(loader, number, self._passes[number], inner))

    def _opened(self, loader: Any, original: Callable[[Any], Any]) -> Any:
        return original(loader)

    def _batches(self, loader: Any, number: int, passing: int, inner: Any) -> Iterator[Any]:
        while True:
            try:
                with self._quiet():
                    batch = next(inner)
            except StopIteration:
                self.ended += 1
                return
            yield batch


class _Followed:
    """Stands for the loader's iterator; attributes that are asked for are that iterator's."""

    def __init__(self, inner: Any, batches: Iterator[Any]) -> None:
        self._inner, self._batches = inner, batches

    def __iter__(self) -> _Followed:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
