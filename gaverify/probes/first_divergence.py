"""Which operation is the first whose result for the same samples depends on the batch that they came in?

Shapes: B samples, K micro-batches with samples `start` to `stop - 1`; fingerprints of shape (variants, rows, 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gaverify.gradients import forward_pass
from gaverify.measurements import Suspect
from gaverify.probes.controls import Bench
from gaverify.probes.dependence import Dependence
from gaverify.probes.matching import Matching
from gaverify.probes.operations import OperationTracer
from gaverify.probes.suspects import Reader
from gaverify.probes.traces import Trace

# In float64 rows agree to about 1e-12; a float32 fallback to about 1e-5. Faults lie far above (design, section 6).
AGREE_FLOAT64, AGREE_FLOAT32 = 1e-9, 1e-3


@dataclass
class Divergences:
    """The traces of the full batch and of the micro-batches, and what differs between them."""

    full: Trace
    suspects: list[Suspect]
    loss_gap: float
    shares: tuple[float, ...] = ()  # the micro-batch weights that come nearest to the full batch's loss

    @property
    def forwards_agree(self) -> bool:
        """Whether no operation mixed samples and all forwards came to the same."""
        return not self.suspects


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
        return tracer.finish(loss), float(loss)

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
    wide = torch.float64
    shares = [torch.ones(task.steps, dtype=wide), torch.tensor(task.sizes, dtype=wide) / task.batch_size]
    if len(valid_targets) == task.steps and sum(valid_targets) > 0:
        shares.append(torch.tensor(valid_targets, dtype=wide) / sum(valid_targets))
    total = torch.tensor(losses, dtype=wide)
    candidates = [torch.tensor(list(weights), dtype=wide), *shares]
    gaps = [abs(float(share @ total) - whole) / max(abs(whole), 1e-300) for share in candidates]
    gap, nearest = min(zip(gaps, candidates, strict=True), key=lambda pair: pair[0])
    matching = Matching(full, parts, agree)
    dependence = Dependence(matching, foreign=foreign, shares=shares, agree=agree)
    reader = Reader(matching, dependence, task.batch_size)
    return Divergences(full, list(reader.suspects(shares, agree, gap <= agree)), gap, tuple(nearest.tolist()))


def _to_host(trace: Trace) -> None:
    """Moves all fingerprints of a trace to the CPU in one transfer."""
    kept = [result for step in trace.steps for result in step.results if result.prints is not None]
    prints = [result.prints for result in kept if result.prints is not None]
    if not prints:
        return
    numbers = torch.cat([p.reshape(-1) for p in prints]).to("cpu", torch.float64)
    for result, piece, shaped in zip(kept, numbers.split([p.numel() for p in prints]), prints, strict=True):
        result.prints = piece.view(shaped.shape)
