"""Samples of `DataLoader`s that the script reads, and which of them fed a forward.

A loader is known by its number in the order in which loaders are first iterated. The loader's own `collate_fn` makes
a micro-batch from its share of the samples of a batch of the full-batch run. So padding and the offsets of graphs are
those of the micro-batch. A loader without automatic batching gives whole batches: these are cut by rows. So
are, where that is asked for, the batches of a `collate_fn` that draws random numbers, such as the masks of a language
model: it would draw others for a micro-batch.

Shapes: B rows of a forward of the full-batch run, b of a micro-batch; the batch may be any one dimension.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from gaverify.audit.same_data import Fingerprints, ForwardInputs
from gaverify.errors import ProblemError
from gaverify.passes.batching import batch_size_of, micro_batch_sizes, take
from gaverify.passes.layouts import leaves, summaries
from gaverify.torch_internals import pin_memory

# Which samples fed a forward: a fingerprint of every row of every input tensor.
#
# Shapes: B rows along the batch dimension, T steps along the one after it.
#
# Rows are compared by prefix: a row that one run pads to 20 tokens and the other to 17 has the same first 17 and a
# constant tail. So the running hash after every step is kept, and where the constant tail begins; the same from the
# right, for padding on the left. Rows that the script computes (the output of another model) agree only to
# rounding; for floating point there are two projections beside the hash.
#
# Boxes, edges and nodes of several samples may lie in one list, with columns that count samples (or nodes) within
# their batch: the same box has another number in a smaller batch. So a tensor that may hold such numbers is
# fingerprinted once more. Each number is replaced by the contents of that row of another input, or of all rows with
# the same number.


_LONGEST = 4096  # steps whose running hashes are kept; longer rows are hashed whole
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio: consecutive multiples are spread evenly
_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COUNTING = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
)
_COLUMNS = 16  # of a list, each of which may count something
_INPUTS = 16  # tensors among which pointers are looked for; a longer list holds samples
_INDEX = re.compile(r"\[\d+\]")


def input_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ForwardInputs:
    """Returns the fingerprints of every input tensor of a forward by its path; empty where there is no tensor.

    Tensors that gradients flow through are the script's own results and left out. The entries of a list share one path,
    because a list may be the batch itself.
    """
    by_path: dict[str, list[Fingerprints]] = {}
    tensors = list(_tensors(args, kwargs))
    ends = _ends([tensor for _, tensor in tensors])
    hashed = [fingerprints(tensor) for _, tensor in tensors]
    pointing = [_pointing(at, tensor, hashed) for at, (_, tensor) in enumerate(tensors)]
    for (path, tensor), prints, readings in zip(tensors, hashed, pointing, strict=True):
        end, tail = ends.get(tuple(tensor.shape[:2])), prints.tail
        if end is not None and tail is not None:
            # Behind the last valid label all is padding, also where the values go on.
            tail = torch.minimum(tail, end)
        by_path.setdefault(path, []).append(replace(prints, tail=tail, readings=readings))
    return {
        path if len(parts) == 1 else f"{path} ({at})": part
        for path, parts in by_path.items()
        for at, part in enumerate(parts)
    }


def _ends(tensors: list[torch.Tensor]) -> dict[tuple[int, ...], torch.Tensor]:
    """For each shape (B, T) of labels, how many steps of each row there are up to its last valid one, shape (B,).

    Steps behind the last valid label are padding, whatever their value. The inputs of a decoder are its labels moved by
    one; they keep the last label of a row only where a longer row stands beside it. Labels that do not count are
    negative (-100), as no index of an embedding is.
    """
    last_steps: dict[tuple[int, ...], torch.Tensor] = {}
    for tensor in tensors:
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype is not torch.bool:
            values = tensor.detach().cpu()
            if not values.is_complex() and bool((values < 0).any()):
                steps = torch.arange(1, values.shape[1] + 1, device=values.device)
                last_steps[tuple(values.shape)] = torch.where(values < 0, 0, steps).amax(1)
    return last_steps


def input_shapes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Returns the shapes of all input tensors, in order."""
    return [tuple(tensor.shape) for _, tensor in _tensors(args, kwargs, computed=True)]


def _tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], computed: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    entries = [(f"argument {at + 1}", value) for at, value in enumerate(args)] + list(kwargs.items())
    for name, value in entries:
        for path, leaf in leaves(value, name):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.dim() > 0 and leaf.numel() > 0:
                if (leaf.grad_fn is not None or isinstance(leaf, torch.nn.Parameter)) and not computed:
                    continue
                yield _INDEX.sub("[*]", path), leaf


@torch.no_grad()
def fingerprints(tensor: torch.Tensor) -> Fingerprints:
    """Returns the rows of one tensor, along its first dimension and, hashed whole, along its second."""
    values = tensor.detach().cpu()
    # The batch may be the second dimension, as of sequences in shape (T, B).
    second = _along(values.transpose(0, 1), prefixes=False) if values.dim() > 1 else None
    return replace(_along(values, prefixes=True), shape=tuple(values.shape), second=second)


@torch.no_grad()
def _pointing(at: int, tensor: torch.Tensor, inputs: list[Fingerprints]) -> dict[str, Fingerprints]:
    """Returns fingerprints of a list whose numbers are replaced by the rows of another input that they may count.

    Args:
        at: Where the tensor stands among the inputs.
        tensor: A tensor of shape (N,), (N, C) or, as edges are, (2, N).
        inputs: The fingerprints of all inputs of the forward.
    """
    if tensor.dim() > 2 or len(inputs) > _INPUTS or tensor.dtype not in _COUNTING:
        return {}
    values = tensor.detach().cpu()
    values = values.unsqueeze(1) if values.dim() == 1 else values
    # Edges of graphs are columns of two nodes each: all their numbers count nodes, however many edges there are.
    edges = values.shape[0] == 2 < values.shape[1]
    if values.shape[1] > _COLUMNS and not edges:
        return {}
    bits = values.contiguous().view(_VIEWS[values.element_size()]).to(torch.int64)
    readings = {}
    for position, prints in enumerate(inputs):
        rows = prints.hash[:, -1]
        # Floats as well: the number of a box's image stands in one table with the coordinates of the box.
        counts = ((values >= 0) & (values < len(rows)) & (values == values.floor())).all(0)
        columns = {str(column): [column] for column in counts.nonzero().flatten().tolist() if not edges}
        if bool(counts.all()) and len(columns) != 1:
            columns["all"] = list(range(len(counts)))
        for name, picked in columns.items() if position != at else ():
            numbers = values[:, picked].long()
            for reading, contents in _meanings(numbers, rows).items():
                used = contents[numbers.unique()]
                if len(used.unique()) < len(used) and not edges:
                    continue  # rows that are all the same would make all numbers the same
                resolved = bits.clone()
                resolved[:, picked] = contents[numbers]
                if edges:  # nodes may be the same: how far apart they are counts, too
                    resolved += _mix(numbers - numbers[0])
                readings[f"{name} of {position}{reading}"] = fingerprints(resolved)
    return readings


def _meanings(numbers: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The rows that each number may stand for: its own, or all that have it, as the nodes of one graph do."""
    meant = {"": rows}
    if len(rows) == len(numbers) and numbers.shape[1] == 1:
        meant[" together"] = torch.zeros_like(rows).index_add(0, numbers[:, 0], rows)
    return meant


def _along(values: torch.Tensor, *, prefixes: bool) -> Fingerprints:
    steps = _steps(values)
    projections = summaries(values.reshape(values.shape[0], -1).double()) if values.is_floating_point() else None
    if not prefixes or steps.shape[1] > _LONGEST:
        return Fingerprints(_running(steps)[:, -1:], projections=projections)
    backwards = steps.flip(1)
    return Fingerprints(_running(steps), _tail(steps), _running(backwards), _tail(backwards), projections)


def _steps(values: torch.Tensor) -> torch.Tensor:
    """One hash for each step of each row, shape (B, T)."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    values = values.contiguous()
    if values.dtype is torch.bool:
        values = values.to(torch.uint8)
    bits = values.view(_VIEWS[values.element_size()]).to(torch.int64)
    # Hashes are made of bits, in which NaN equals itself.
    bits = bits.reshape(bits.shape[0], bits.shape[1] if bits.dim() > 1 else 1, -1)
    # A zero hashes to zero and would count nothing: hence bits + 1.
    return _mix((_mix(bits + 1) * _factors(bits.shape[2])).sum(2))


def _running(steps: torch.Tensor) -> torch.Tensor:
    return (steps * _factors(steps.shape[1])).cumsum(1)


def _factors(count: int) -> torch.Tensor:
    # Odd factors, because a product with an odd number modulo 2^64 loses no bits.
    return (2 * torch.arange(count, dtype=torch.int64, device="cpu") + 1) * _ODD


def _mix(values: torch.Tensor) -> torch.Tensor:
    return (values ^ (values >> 29)) * _ODD


def _tail(steps: torch.Tensor) -> torch.Tensor:
    """For each row the first step from which all steps are equal, shape (B,)."""
    tail_lengths = (steps == steps[:, -1:]).flip(1).to(torch.int64).cumprod(1).sum(1)
    return steps.shape[1] - tail_lengths


# Samples of `DataLoader`s and inputs of forwards, kept in one run and given to the others.


Quiet = Callable[[], AbstractContextManager[None]]


@dataclass
class BatchWithSamples:
    """A batch on its way to the script, and what it was collated from."""

    samples: Any
    batch: Any

    def pin_memory(self) -> BatchWithSamples:
        """Returns the same with a pinned batch: torch calls this method of objects whose class it does not know."""
        return BatchWithSamples(self.samples, pin_memory(self.batch))


@dataclass
class Collate:
    """Collates as the loader would, and sends the samples along; also in a worker process."""

    original: Callable[[Any], Any]

    def __call__(self, samples: Any) -> BatchWithSamples:
        """Returns the batch and its samples."""
        return BatchWithSamples(samples, self.original(samples))


class Loaders:
    """Follows every loader that the script iterates; subclasses decide what the script gets in place of a batch.

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
            # A forked worker inherits this patch: a loader inside a data set is not iterated by the script.
            if os.getpid() != loaders._process or torch.utils.data.get_worker_info() is not None:
                return original(self)
            return loaders._follow(self, original)

        DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]

    def _follow(self, loader: Any, original: Callable[[Any], Any]) -> Any:
        number, _ = self._known.setdefault(id(loader), (len(self._known), loader))
        self._passes[number] += 1
        with self._quiet():
            # Making the iterator draws a seed for the workers, which is no draw of the script's loop.
            inner = self._open_loader(loader, original)
        return _Followed(inner, self._batches(loader, number, self._passes[number], inner))

    def _open_loader(self, loader: Any, original: Callable[[Any], Any]) -> Any:
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


class _WithSamples(Loaders):
    """Loaders that hand over the samples of each batch; the base of both sides of a replay.

    Args:
        quiet: As for `Loaders`.
        length: Batches of a pass at most, as `len` of a loader tells; None leaves that alone.
        collated: Batches are kept, and cut, as they were collated.
    """

    def __init__(self, quiet: Quiet, length: int | None = None, *, collated: bool = False) -> None:
        super().__init__(quiet)
        self._length, self._collated = length, collated

    def install(self) -> None:
        """Puts itself between loaders and whoever iterates or measures them."""
        super().install()
        # A script may plan its epoch by `len(loader)`, which has to agree with the shortened pass.
        longest, original = self._length, DataLoader.__len__
        if longest is not None:
            DataLoader.__len__ = lambda loader: min(longest, original(loader))  # type: ignore[method-assign]

    def _open_loader(self, loader: Any, original: Callable[[Any], Any]) -> Any:
        if isinstance(loader.collate_fn, Collate):
            return original(loader)
        plain = loader.collate_fn
        # The iterator copies the function when it is made, so that the script's own is restored at once.
        loader.collate_fn = Collate(plain)
        try:
            return original(loader)
        finally:
            loader.collate_fn = plain

    def _single(self, loader: Any) -> bool:
        """Whether the samples of a batch are kept, and not the collated batch."""
        return bool(loader._auto_collation) and not self._collated

    def _choose_content(self, pair: BatchWithSamples) -> Any:
        return pair.batch if self._collated else pair.samples

    def _take_samples(self, samples: Any, loader: Any, start: int, stop: int, total: int) -> Any:
        return samples[start:stop] if self._single(loader) else take(samples, start, stop, total)

    def _size(self, samples: Any, loader: Any) -> int:
        if self._single(loader):
            return len(samples)
        try:
            return batch_size_of(samples)
        except ProblemError:
            return 1

    def _make_batch(self, loader: Any, samples: Any) -> Any:
        if self._collated:
            return samples
        with self._quiet():
            batch = loader.collate_fn(samples)
        batch = batch.batch if isinstance(batch, BatchWithSamples) else batch
        # The loader's pinning thread has pinned the batch that this one replaces.
        return pin_memory(batch) if loader.pin_memory and torch.cuda.is_available() else batch


class KeptSamples(_WithSamples):
    """The full-batch run: one file for every batch that the script is given.

    Args:
        folder: The run's folder.
        quiet: As for `Loaders`.
        tail: Share of a batch that is left of the second one, which then ends the pass; 0 leaves passes alone.
        collated: Batches are kept as they were collated.
    """

    def __init__(self, folder: Path, quiet: Quiet, tail: float = 0.0, *, collated: bool = False) -> None:
        super().__init__(quiet, 2 if tail else None, collated=collated)
        self._folder, self._tail = folder, tail

    def _batches(self, loader: Any, number: int, passing: int, inner: Any) -> Iterator[Any]:
        at, complete = 0, True
        for pair in super()._batches(loader, number, passing, inner):
            # A loader with an iterator of its own has not called `Collate`: the samples of its batch are not known.
            if not isinstance(pair, BatchWithSamples):
                yield pair
                continue
            samples, last = self._choose_content(pair), self._tail and at == 1
            if last:
                total = self._size(samples, loader)
                samples = self._take_samples(samples, loader, 0, max(1, round(total * self._tail)), total)
            # `_keep` stands first: batches behind one that could not be stored are stored all the same.
            complete = self._keep(f"loader-{number}-{passing}-{at}", samples) and complete
            at += 1
            yield self._make_batch(loader, samples) if last else pair.batch
            if last:
                self.ended += 1
                break
        # Without this mark a missing file means a batch that could not be stored, and not the end of the pass.
        if complete:
            (self._folder / f"loader-{number}-{passing}-end").touch()

    def _keep(self, name: str, samples: Any) -> bool:
        with self._quiet():
            try:
                torch.save(samples, self._folder / f"{name}.pt")
            except (TypeError, AttributeError, RuntimeError, ValueError):  # cannot be stored: stays the run's own
                (self._folder / f"{name}.pt").unlink(missing_ok=True)
                return False
        return True


class GivenSamples(_WithSamples):
    """The other runs: micro-batches are cut from the samples that the full-batch run kept.

    Args:
        source: Folder of the full-batch run.
        parts: Micro-batches per batch of that run; 0 where that is not known, 1 for a repetition of it.
        quiet: As for `Loaders`.
        length: Batches of a pass at most; None where that run left passes alone.
        collated: That run kept its batches as they were collated.
    """

    def __init__(
        self, source: Path, parts: int, quiet: Quiet, length: int | None = None, *, collated: bool = False
    ) -> None:
        super().__init__(quiet, length, collated=collated)
        self._source, self._parts = source, parts

    def _batches(self, loader: Any, number: int, passing: int, inner: Any) -> Iterator[Any]:
        at, sizes, start, samples, total = -1, list[int](), 0, None, 0
        first_size, unit = 0, 0  # the size of the first batch, and of its first micro-batch
        for pair in super()._batches(loader, number, passing, inner):
            if not isinstance(pair, BatchWithSamples):
                yield pair
                continue
            if not sizes:
                at += 1
                path = self._source / f"loader-{number}-{passing}-{at}.pt"
                if not path.exists():
                    if at and (self._source / f"loader-{number}-{passing}-end").exists():
                        self.ended += 1
                        return  # the full-batch run's pass over its loader ended here
                    yield pair.batch
                    continue
                samples, start = torch.load(path, weights_only=False), 0
                total = self._size(samples, loader)
                natural = self._size(self._choose_content(pair), loader)
                # The shortened batch is cut by the first one's size: its window is to be short, not its micro-batches.
                sizes = self._cut(total, natural) if self._length is None or total >= first_size else _cut(total, unit)
                first_size, unit = (total, sizes[0]) if not first_size else (first_size, unit)
            count = sizes.pop(0)
            batch = self._make_batch(loader, self._take_samples(samples, loader, start, start + count, total))
            start += count
            yield batch

    def _cut(self, total: int, natural: int) -> list[int]:
        """The sizes of the micro-batches of one batch: those of the run's own loader where they fit."""
        if self._parts and total >= self._parts and (total % natural or total // natural != self._parts):
            return list(micro_batch_sizes(total, self._parts))
        return _cut(total, natural)


def _cut(total: int, unit: int) -> list[int]:
    full, remainder = divmod(total, unit)
    return [unit] * full + ([remainder] if remainder else [])
