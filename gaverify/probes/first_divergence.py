"""Which operation is the first whose result for the same samples depends on the batch that they came in?

Shapes: B samples, K micro-batches with samples `start` to `stop - 1`; fingerprints of shape (variants, rows, 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gaverify.gradients import forward_pass
from gaverify.measurements import Operation, Suspect
from gaverify.probes.controls import Bench
from gaverify.probes.fingerprints import Layout
from gaverify.probes.operations import ModuleCall, OperationTracer, Step, Trace, source_line
from gaverify.tracebacks import shown

# In float64 rows agree to about 1e-12; a float32 fallback to about 1e-5. Faults lie far above (design, section 6).
AGREE_FLOAT64, AGREE_FLOAT32 = 1e-9, 1e-3
_ITEM = ("_local_scalar_dense", "item", "is_nonzero", "nonzero")


@dataclass
class Divergences:
    """The traces of the full batch and of the micro-batches, and what differs between them."""

    full: Trace
    suspects: list[Suspect]
    aligned: int
    loss_gap: float

    @property
    def forwards_agree(self) -> bool:
        """Whether no operation mixed samples and all forwards took the same way."""
        return not self.suspects and self.aligned == len(self.full.steps)


def trace_divergences(
    bench: Bench, *, weights: Sequence[float], valid_targets: Sequence[float] = (), foreign: bool = False
) -> Divergences:
    """Runs every forward once, from the same state, and returns the suspects in the order of execution.

    A first short run of micro-batch 1 only takes shapes: comparing them with the full batch's tells in which dimension
    of each result the samples lie.

    Args:
        bench: Where to run, and what has been neutralised already.
        weights: The micro-batch weights, for the gap between the full loss and their weighted sum.
        valid_targets: Valid targets per micro-batch, where the loss counts them.
        foreign: Generators of Python or NumPy moved differently; rows that come from outside torch are then draws.
    """
    task, record = bench.task, bench.record
    names = {module: name for root in task.modules for name, module in root.named_modules()}

    def traced(k: int | None, template: Trace | None = None, plan: Trace | None = None) -> tuple[Trace, float]:
        tracer = OperationTracer(names, task.batch_size, task.sizes[0], template, plan)
        probe = bench.with_probe(tracer)
        loss = forward_pass(task, bench.state, record, k, lift=bench.lift, probe=probe)
        return tracer.trace, float(loss)

    task.progress("tracing the full batch")
    record.rewind()
    shapes, _ = traced(0)
    full, whole = traced(None, template=shapes)
    record.rewind()
    parts, losses = [], []
    for k in range(task.steps):
        task.progress(f"tracing micro-batch {k + 1} of {task.steps}")
        trace, loss = traced(k, plan=full)
        parts.append(trace)
        losses.append(loss)
    for trace in (full, *parts):
        _to_host(trace)
    agree = AGREE_FLOAT64 if bench.rounding < 1e-5 else AGREE_FLOAT32
    reader = _Reader(full, parts, list(task.bounds()), task.batch_size, agree, foreign)
    wide = torch.float64
    shares = [torch.ones(task.steps, dtype=wide), torch.tensor(task.sizes, dtype=wide) / task.batch_size]
    if len(valid_targets) == task.steps and sum(valid_targets) > 0:
        shares.append(torch.tensor(valid_targets, dtype=wide) / sum(valid_targets))
    gap = abs(sum(w * loss for w, loss in zip(weights, losses, strict=True)) - whole) / max(abs(whole), 1e-300)
    return Divergences(full, list(reader.suspects(shares)), reader.aligned, gap)


def _to_host(trace: Trace) -> None:
    """Moves all fingerprints of a trace to the CPU in one transfer."""
    kept = [result for step in trace.steps for result in step.results if result.prints is not None]
    prints = [result.prints for result in kept if result.prints is not None]
    if not prints:
        return
    numbers = torch.cat([p.reshape(-1) for p in prints]).to("cpu", torch.float64)
    for result, piece, shaped in zip(kept, numbers.split([p.numel() for p in prints]), prints, strict=True):
        result.prints = piece.view(shaped.shape)


class _Reader:
    """Aligns the traces and finds what differs."""

    def __init__(
        self, full: Trace, parts: list[Trace], bounds: list[tuple[int, int]], batch_size: int, agree: float,
        foreign: bool,
    ) -> None:
        self._full, self._parts, self._bounds, self._size, self._agree = full, parts, bounds, batch_size, agree
        self._foreign = foreign
        self.aligned = self._aligned()
        # (difference, samples) of every step's rows; None where its samples cannot be told apart
        self._rows = [self._rows_of(index) for index in range(self.aligned)]
        self._tainted = [self._is_tainted(index) for index in range(self.aligned)]

    def suspects(self, shares: list[torch.Tensor]) -> Iterator[Suspect]:
        """Yields the suspects: mixed rows and cross-sample matrices first, then reductions that are not sums."""
        found = False
        lines: set[tuple[str, int] | None] = set()
        for index in range(self.aligned):
            kind = self._kind(index)
            if kind is None or (self._full.steps[index].frame in lines and lines):
                continue
            if self._is_downstream(index):
                continue
            found = True
            suspect = self._suspect(index, kind)
            lines.add(self._full.steps[index].frame)
            yield suspect
        if self.aligned < len(self._full.steps) or any(len(part.steps) > self.aligned for part in self._parts):
            yield self._control_flow()
        if not found:
            yield from self._non_additive(shares)

    def _aligned(self) -> int:
        """How many steps all traces have in common."""
        for index, step in enumerate(self._full.steps):
            for part in self._parts:
                if index >= len(part.steps) or part.steps[index].name != step.name:
                    return index
        return len(self._full.steps)

    def _kind(self, index: int) -> str | None:
        step = self._full.steps[index]
        rows = self._rows[index]
        outside = not step.tensor_inputs
        if rows is not None and rows[0] > self._agree and (self._foreign or step.random or not outside):
            return "random" if step.random or outside else "rows"
        matrix = any(result.layout and result.layout.kind == "matrix" and result.floating for result in step.results)
        return "matrix" if matrix and step.differentiable else None

    def _is_downstream(self, index: int) -> bool:
        """Whether an input has differed already, so that this step only passes the difference on."""
        return any(self._kind(writer) is not None for writer in self._full.steps[index].inputs if writer < self.aligned)

    def _rows_of(self, index: int) -> tuple[float, int] | None:
        worst: tuple[float, int] | None = None
        for position, result in enumerate(self._full.steps[index].results):
            if result.layout is None or result.prints is None or result.layout.kind not in ("rows", "selected"):
                continue
            others = [self._print(part, index, position) for part in self._parts]
            seen = self._compared(result.prints, others, result.layout)
            if seen is not None and (worst is None or seen[0] > worst[0]):
                worst = seen
        return worst

    def _print(self, part: Trace, index: int, position: int) -> torch.Tensor | None:
        results = part.steps[index].results
        return results[position].prints if position < len(results) else None

    def _compared(
        self, full: torch.Tensor, parts: list[torch.Tensor | None], layout: Layout
    ) -> tuple[float, int] | None:
        present = [part for part in parts if part is not None]
        if len(present) < len(parts) or any(part.shape[0] != full.shape[0] for part in present):
            return None
        joined = torch.cat(present, dim=1)
        if joined.shape != full.shape:
            return None  # rows selected otherwise, or padded to other lengths
        full, joined = full.nan_to_num(), joined.nan_to_num()
        scale = full[:, :, 2].amax(1).clamp_min(1e-300)
        difference = (joined - full).abs().amax(2) / scale[:, None]
        variant = difference.amax(1).argmin()
        return float(difference[variant].max()), int((difference[variant] > self._agree).sum())

    def _is_tainted(self, index: int) -> bool:
        """Whether a result without rows differs between the runs: something was reduced over the batch."""
        for position, result in enumerate(self._full.steps[index].results):
            if result.layout is None or result.layout.kind != "global" or result.prints is None:
                continue
            for part in self._parts:
                seen = self._print(part, index, position)
                scale = result.prints[..., 2].max().clamp_min(1e-300)
                if seen is not None and float((seen - result.prints).abs().max() / scale) > self._agree:
                    return True
        return False

    def _suspect(self, index: int, kind: str) -> Suspect:
        step = self._full.steps[index]
        sources = self._sources(index)
        same = [i for i in range(self.aligned) if self._kind(i) is not None and self._scope(i) == self._scope(index)]
        held = sorted({source for i in same for source in self._sources(i)})
        functions = {s.function for i in same if (s := self._full.steps[i]).frame == step.frame}
        difference, samples = self._rows[index] or (1.0, self._size)
        return Suspect(
            kind=kind,  # type: ignore[arg-type]
            operation=self.operation(index),
            source=self.operation(sources[0]) if sources else None,
            difference=difference, samples=samples, in_model=self._in_model(index),
            statistics="batch_norm" in step.name,
            functions=tuple(sorted(functions)),
            source_functions=tuple(sorted({f for i in held if (f := self._held_function(i)) is not None})),
            calls=self._chain_indices(step),
        )  # fmt: skip

    def _sources(self, index: int) -> list[int]:
        """The reductions over the batch that a step reads: back along tainted steps to those that read samples."""
        found, queue, seen = [], [i for i in self._full.steps[index].inputs if self._reduced(i)], set()
        while queue:
            current = queue.pop()
            if current in seen:
                continue
            seen.add(current)
            earlier = [i for i in self._full.steps[current].inputs if self._reduced(i)]
            if earlier:
                queue.extend(earlier)
            else:
                found.append(current)
        return sorted(found)

    def _reduced(self, index: int) -> bool:
        return index < self.aligned and self._tainted[index]

    def _held_function(self, index: int) -> int | None:
        """The torch call whose result is the reduction's, so that it can be held constant; None inside a larger one."""
        function = self._full.steps[index].function
        last = max(i for i, step in enumerate(self._full.steps) if step.function == function)
        layout = self._full.steps[last].results[0].layout if self._full.steps[last].results else None
        return function if function >= 0 and layout is not None and layout.kind == "global" else None

    def _scope(self, index: int) -> tuple[str, str]:
        """Steps of one scope are held together: the same module class, or the same file outside of modules."""
        step = self._full.steps[index]
        call = self._call(step)
        return ("module", call.kind) if call is not None else ("file", step.frame[0] if step.frame else "")

    def _call(self, step: Step) -> ModuleCall | None:
        """The innermost call of a module of the task."""
        return next((call for call in self._chain(step) if call.path is not None), None)

    def _chain_indices(self, step: Step) -> tuple[int, ...]:
        return () if step.call is None else (step.call, *self._full.calls[step.call].parents)

    def _chain(self, step: Step) -> list[ModuleCall]:
        if step.call is None:
            return []
        innermost = self._full.calls[step.call]
        return [innermost, *(self._full.calls[parent] for parent in reversed(innermost.parents))]

    def _in_model(self, index: int) -> bool:
        """Whether a module around the step hands out samples that differ."""
        for call in self._chain(self._full.steps[index]):
            for output in call.outputs:
                rows = self._rows[output] if output < self.aligned else None
                if call.path is not None and rows is not None and rows[0] > self._agree:
                    return True
        return False

    def operation(self, index: int) -> Operation:
        """Where a step is, for people."""
        step = self._full.steps[index]
        chain = self._chain(step)
        known = self._call(step)
        library = bool(chain) and chain[0].library
        # Inside a library's module the user's line is the call of it: worth naming in a module's forward only.
        named = step.frame is not None and (not library or any(not call.library for call in chain))
        return Operation(
            step.name, known.path if known else None, known.kind if known else "", library,
            shown(step.frame[0]) if named and step.frame else None, step.frame[1] if named and step.frame else None,
            source_line(step.frame) if named else "",
        )  # fmt: skip

    def _control_flow(self) -> Suspect:
        index = min(self.aligned, len(self._full.steps) - 1)
        for earlier in range(index - 1, max(index - 6, -1), -1):
            if self._full.steps[earlier].name in _ITEM:
                index = earlier
                break
        step = self._full.steps[index]
        in_model = self._call(step) is not None
        return Suspect("control-flow", self.operation(index), None, 1.0, self._size, in_model, False,
                       calls=self._chain_indices(step))  # fmt: skip

    def _non_additive(self, shares: list[torch.Tensor]) -> Iterator[Suspect]:
        """The first differentiable result that is no weighted sum of the micro-batches' results."""
        for index in range(self.aligned):
            step = self._full.steps[index]
            if not (self._tainted[index] and step.differentiable):
                continue
            for position, result in enumerate(step.results):
                parts = [self._print(part, index, position) for part in self._parts]
                if result.prints is None or not result.floating or any(part is None for part in parts):
                    continue
                stacked = torch.stack([part[0, 0, :2] for part in parts if part is not None])
                target = result.prints[0, 0, :2]
                scale = stacked.abs().max().clamp_min(1e-300)
                left = min(float(((share @ stacked) - target).abs().max() / scale) for share in shares)
                if left > self._agree:
                    yield Suspect("non-additive", self.operation(index), None, left, self._size, False, False,
                                  (step.function,), calls=self._chain_indices(step))  # fmt: skip
                    return
