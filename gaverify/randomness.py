"""Random draws: recorded in the full batch's pass, dealt out again sample by sample in the micro-batches' passes.

Shapes: B samples, rows `start` to `stop - 1` of a micro-batch of n; a draw may hold m rows per sample (folded heads).

A draw is keyed by the state of its generator before it. Activation checkpointing restores that state and draws again,
so a repeated key is the same draw. The real operation always runs, so that the generator moves as the user's code
expects; only its result is replaced.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gaverify.tracebacks import calling_frame, shown

MASKED = ("native_dropout", "_fused_dropout")


@dataclass
class Draw:
    """One random operation of the full batch: its result, and what is needed to tell how the samples lie in it."""

    operation: str
    value: torch.Tensor
    arguments: tuple[Any, ...]
    input_shape: tuple[int, ...] | None
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    # Where the rows of the micro-batch that starts at a sample begin, and how many are handed out so far: rows that a
    # graph's nodes or a selection drew do not lie at a fixed multiple of the sample's number.
    offsets: dict[int, int] = field(default_factory=dict)
    dealt: int = 0


@dataclass
class DrawRecord:
    """Every draw of a full-batch pass, in order, and what came of dealing them out."""

    draws: list[Draw] = field(default_factory=list)
    fused: set[str] = field(default_factory=set)
    unaligned: dict[str, str] = field(default_factory=dict)
    places: dict[str, tuple[str, int]] = field(default_factory=dict)  # file and line of what could not be dealt out
    sliced: int = 0
    ambiguous: bool = False
    inner: bool = False  # the folded dimension holds the batch as its inner index
    constant: bool = False  # every draw gives one typical value instead (a control run)

    def rewind(self) -> None:
        """Starts dealing anew, for another pass over the micro-batches."""
        self.sliced = 0
        self.unaligned.clear()
        for draw in self.draws:
            draw.dealt = 0
            draw.offsets.clear()


class Recorder:
    """Handles the random operations of the full batch: keeps each result."""

    def __init__(self, batch_size: int) -> None:
        self.record = DrawRecord()
        self._size = batch_size
        self._seen: set[Any] = set()

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the operation and keeps what it drew."""
        operation = _name(func)
        before = _generator_key(args, kwargs)
        result = func(*args, **kwargs)
        drawn = _drawn(operation, args, result)
        if drawn is None:
            if _generator_key(args, kwargs) != before:
                self.record.fused.add(operation)
            return result
        if before in self._seen or (_generator_key(args, kwargs) == before and drawn.numel() > 0):
            return result
        self._seen.add(before)
        self.record.draws.append(_keep(operation, drawn, args, self._size))
        return result


class Dealer:
    """Handles the random operations of one micro-batch: replaces each result by the rows of its own samples."""

    def __init__(self, record: DrawRecord, start: int, stop: int, batch_size: int) -> None:
        self.record = record
        self._start, self._stop, self._size = start, stop, batch_size
        self._index: dict[Any, int] = {}
        self._next = 0

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the operation and returns the full batch's draw for these samples."""
        operation = _name(func)
        before = _generator_key(args, kwargs)
        result = func(*args, **kwargs)
        drawn = _drawn(operation, args, result)
        if drawn is None:
            return result
        if self.record.constant:
            return _replaced(operation, args, result, drawn, _typical(operation, args, kwargs, drawn))
        if before not in self._index or drawn.numel() == 0:
            if _generator_key(args, kwargs) == before and drawn.numel() > 0:
                return result
            self._index[before] = self._next
            self._next += 1
        index = self._index[before]
        dealt = self._deal(index, operation, drawn, args)
        return result if dealt is None else _replaced(operation, args, result, drawn, dealt)

    def finish(self) -> None:
        """Notes when the micro-batch made fewer draws than the full batch, or the last one left rows over."""
        if self._stop == self._size:
            for draw in self.record.draws:
                if draw.dealt and draw.dealt not in draw.value.shape:
                    self._refuse(draw.operation, "the rows that the micro-batches drew are not the full batch's")
        if self._next < len(self.record.draws):
            draw = self.record.draws[self._next]
            self.record.unaligned.setdefault(draw.operation, "the micro-batch made fewer draws than the full batch")

    def _deal(self, index: int, operation: str, drawn: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor | None:
        if index >= len(self.record.draws):
            return self._refuse(operation, "the micro-batch made more draws than the full batch")
        draw = self.record.draws[index]
        if draw.operation != operation:
            return self._refuse(operation, f"the full batch drew `{draw.operation}` in its place")
        if operation == "randperm" and drawn.shape != draw.value.shape:
            return self._refuse(operation, "a permutation of the batch has no rows of its own for a micro-batch")
        if not _same_arguments(draw, _scalars(args), drawn):
            return self._refuse(operation, f"its arguments depend on the batch: {draw.arguments} and {_scalars(args)}")
        if operation == "multinomial" and _rows_differ(draw.input_shape, args):
            return self._refuse(operation, "it draws samples of the batch itself")
        return self._rows_of(draw, index, drawn, args)

    def _refuse(self, operation: str, why: str) -> torch.Tensor | None:
        """Notes why a draw cannot be dealt out, and where it was made; the micro-batch then keeps its own draw."""
        self.record.unaligned.setdefault(operation, why)
        frame = calling_frame()
        if frame is not None:
            self.record.places.setdefault(operation, (shown(frame[0]), frame[1]))
        return None

    def _rows_of(self, draw: Draw, index: int, drawn: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor | None:
        full, micro = draw.value.shape, drawn.shape
        if full == micro:
            return draw.value
        if len(full) != len(micro):
            return self._refuse(draw.operation, f"shapes {list(full)} and {list(micro)} do not correspond")
        count = self._stop - self._start
        value = draw.value
        changed = [dim for dim in range(len(full)) if full[dim] != micro[dim]]
        for dim in changed:
            whole, part = full[dim], micro[dim]
            fold = whole // self._size if whole % self._size == 0 and part == whole // self._size * count else 0
            if fold and (fold == 1 or len(changed) > 1 or self._batch_is_inner(draw, dim, fold, args)):
                value = self._narrow(draw, value, dim, fold, args)
            elif len(changed) == 1 and self._offset(draw, part) + part <= whole:
                value = value.narrow(dim, self._offset(draw, part), part)
            elif part < whole:
                value = value.narrow(dim, 0, part)  # padded to the longest row of a shorter micro-batch
            else:
                return self._refuse(draw.operation, f"shapes {list(full)} and {list(micro)} do not correspond")
        self.record.sliced += 1
        return value

    def _offset(self, draw: Draw, part: int) -> int:
        """The first row of rows that were selected out of the batch in its order; a repeated draw keeps its own."""
        if self._start not in draw.offsets:
            draw.offsets[self._start] = draw.dealt
            draw.dealt += part
        return draw.offsets[self._start]

    def _narrow(self, draw: Draw, value: torch.Tensor, dim: int, fold: int, args: tuple[Any, ...]) -> torch.Tensor:
        """Takes the samples' rows of one dimension; folded ones hold the batch as outer or as inner index."""
        count = self._stop - self._start
        if fold == 1:
            return value.narrow(dim, self._start, count)
        if self._batch_is_inner(draw, dim, fold, args):
            split: torch.Tensor = value.unflatten(dim, (fold, self._size))
            return split.narrow(dim + 1, self._start, count).flatten(dim, dim + 1)
        return value.narrow(dim, self._start * fold, count * fold)

    def _batch_is_inner(self, draw: Draw, dim: int, fold: int, args: tuple[Any, ...]) -> bool:
        """Decides by the operation's input, whose rows must match the full batch's; without one by `record.inner`."""
        source = _source(draw.operation, args)
        kept = draw.rows.get(dim)
        if source is None or kept is None or source.dim() <= dim:
            self.record.ambiguous = True
            return self.record.inner
        rows = _row_sums(source, dim)
        count = self._stop - self._start
        outer = kept.narrow(0, self._start * fold, count * fold)
        inner = kept.unflatten(0, (fold, self._size)).narrow(1, self._start, count).flatten()
        return bool((rows - inner).norm() < (rows - outer).norm())


def _name(func: Any) -> str:
    return str(func._schema.name.split("::")[-1].rstrip("_"))


def _generator_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bytes]:
    """Identifies the state of the generator that an operation will draw from."""
    generator = kwargs.get("generator")
    if generator is None:
        generator = next((arg for arg in args if isinstance(arg, torch.Generator)), None)
    if generator is not None:
        return id(generator), raw(generator.get_state())
    device = kwargs.get("device")
    if device is None:
        device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cpu"))
    device = torch.device(device)
    if device.type == "cuda":
        return device.index or 0, raw(torch.cuda.get_rng_state(device))
    if device.type == "mps":
        return -2, raw(torch.mps.get_rng_state())
    return -1, raw(torch.get_rng_state())


def raw(state: torch.Tensor) -> bytes:
    """The bytes of a generator's state, a contiguous CPU tensor; NumPy, which torch does not need, is not asked."""
    return ctypes.string_at(state.data_ptr(), state.numel())


def _drawn(operation: str, args: tuple[Any, ...], result: Any) -> torch.Tensor | None:
    """The random tensor in an operation's result; None where it stays inside the kernel."""
    if operation in MASKED:
        return result[1]  # type: ignore[no-any-return]
    if operation.startswith("rrelu_with_noise"):
        return args[1]  # type: ignore[no-any-return]
    return result if isinstance(result, torch.Tensor) and "attention" not in operation else None


def _source(operation: str, args: tuple[Any, ...]) -> torch.Tensor | None:
    """The input whose rows the drawn rows belong to; an in-place draw overwrites its own and has none."""
    if operation in MASKED or operation.startswith("rrelu_with_noise") or operation in ("normal", "multinomial"):
        return args[0] if args and isinstance(args[0], torch.Tensor) else None
    return None


def _keep(operation: str, drawn: torch.Tensor, args: tuple[Any, ...], batch_size: int) -> Draw:
    value = drawn.detach()
    value = value.to(torch.bool) if operation.startswith("bernoulli") or operation in MASKED else value.clone()
    value = value.clone() if value is drawn else value
    source = _source(operation, args)
    shape = tuple(source.shape) if source is not None else None
    rows = {}
    if source is not None and operation != "multinomial":
        folded = [dim for dim, size in enumerate(source.shape) if size > batch_size and size % batch_size == 0]
        rows = {dim: _row_sums(source, dim) for dim in folded}
    return Draw(operation, value, _scalars(args), shape, rows)


def _row_sums(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A fingerprint per row along `dim`, of length `shape[dim]`."""
    others = [other for other in range(tensor.dim()) if other != dim]
    values = tensor.detach().to(torch.float64 if tensor.device.type != "mps" else torch.float32)
    return values.sum(others) if others else values


def _scalars(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(arg for arg in args if isinstance(arg, int | float | bool))


def _typical(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any], drawn: torch.Tensor) -> torch.Tensor:
    """A value that the operation might have drawn, the same for every sample."""
    if operation == "randperm":
        # not the identity: it would hide that samples meet through a permutation
        return torch.arange(drawn.numel() - 1, -1, -1, device=drawn.device, dtype=drawn.dtype)
    if operation in ("multinomial", "random"):
        return torch.zeros_like(drawn)
    if operation.startswith("randint"):
        numbers = [arg for arg in args if isinstance(arg, int)]
        return torch.full_like(drawn, min(numbers) if len(numbers) > 1 else 0)
    if operation in ("uniform", "rand", "rand_like"):
        low, high = (*_scalars(args), 0.0, 1.0)[:2] if len(_scalars(args)) > 1 else (0.0, 1.0)
        return torch.full_like(drawn, (low + high) / 2)
    return torch.ones_like(drawn)


def _same_arguments(draw: Draw, arguments: tuple[Any, ...], drawn: torch.Tensor) -> bool:
    """Whether two draws were asked for the same; an argument that is a size may follow the batch."""
    if len(arguments) != len(draw.arguments):
        return False
    return all(
        ours == full or (full in draw.value.shape and ours in drawn.shape)
        for ours, full in zip(arguments, draw.arguments, strict=True)
    )


def _rows_differ(shape: tuple[int, ...] | None, args: tuple[Any, ...]) -> bool:
    """Whether the categories of a `multinomial` (its last dimension) depend on the batch."""
    return shape is not None and shape[-1] != args[0].shape[-1]


def _replaced(
    operation: str, args: tuple[Any, ...], result: Any, drawn: torch.Tensor, value: torch.Tensor
) -> Any:
    """Puts the dealt rows into the result of the real operation."""
    drawn.copy_(value)
    if operation in MASKED:
        keep = 1.0 - args[1]
        result[0].copy_(args[0] * value.to(args[0].dtype) / keep if keep > 0 else torch.zeros_like(args[0]))
    elif operation.startswith("rrelu_with_noise"):
        (result if isinstance(result, torch.Tensor) else result[0]).copy_(args[0] * args[1])
    return result
