"""Which operation is the first whose result for the same samples depends on the batch that they came in?

Shapes: B samples, K micro-batches with samples `start` to `stop - 1`; fingerprints of shape (variants, rows, 3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from gaverify.passes.layouts import LAYOUT_KINDS, LayoutKind
from gaverify.passes.randomness import Dealing
from gaverify.records.accumulation import AccumulationWindow
from gaverify.records.experiment import ModuleDifference, Operation, Suspect
from gaverify.records.facts import Forward
from gaverify.search.bench import Bench
from gaverify.search.trace.matching import Dependence, Matching
from gaverify.search.trace.operations import make_tracer
from gaverify.search.trace.suspects import SuspectFinder
from gaverify.search.trace.traces import Result, Trace, describe_step, takes_other_branch
from gaverify.thresholds import AGREE_FLOAT32, AGREE_FLOAT64, FIT_MAGNIFIES, TINY

_ADDED_UP: tuple[LayoutKind, ...] = ("global",)  # layouts of what adds up over the micro-batches


def trace_divergences(
    bench: Bench, weight_facts: AccumulationWindow, *, foreign: bool = False
) -> tuple[list[Suspect], Forward]:
    """Runs every forward once, from the same state; returns the suspects in the order of execution, and what agrees.

    A first forward of micro-batch 1 records only shapes. Their comparison with the full batch's shapes shows in which
    dimension of each result the samples are.

    Args:
        bench: Where to run, and what has been neutralised already.
        weight_facts: How micro-batches are weighted, for the gap between the full loss and their weighted sum.
        foreign: Whether generators of Python or NumPy advanced differently: rows from outside torch are draws then.
    """
    experiment = bench.experiment
    full, parts, full_loss, losses = _traces(bench)
    agree = AGREE_FLOAT64 if bench.experiment.is_float64 else AGREE_FLOAT32
    shares = [_on_host([1.0] * experiment.steps), _on_host([size / experiment.batch_size for size in experiment.sizes])]
    if len(weight_facts.valid_targets) == experiment.steps and sum(weight_facts.valid_targets) > 0:
        shares.append(_on_host([count / sum(weight_facts.valid_targets) for count in weight_facts.valid_targets]))
    # The loss agrees if it agrees for any usual weighting: wrong weights are found by the gradients, before this trace.
    total = _on_host(losses)
    candidates = [_on_host(weight_facts.used), *shares]
    gaps = [abs(float(share @ total) - full_loss) / max(abs(full_loss), TINY) for share in candidates]
    gap, nearest = min(zip(gaps, candidates, strict=True), key=lambda pair: pair[0])
    matching = Matching(full, parts, agree)
    dependence = Dependence(matching, foreign=foreign, shares=shares, agree=agree)
    finder = SuspectFinder(matching, dependence, experiment.batch_size)
    suspects = list(finder.find_suspects(shares, agree, gap <= agree))
    return suspects, Forward(
        agree=not suspects, loss_gap=gap, shares=tuple(nearest.tolist()), modules=tuple(_modules(matching))
    )


def find_reweighted_operation(bench: Bench, used: Sequence[float], fitted: Sequence[float]) -> Operation | None:
    """Returns the first operation whose results add up with the fitted weights and not with those that are used.

    That is the loss call or division that weights the micro-batches otherwise; None if no single operation does.
    """
    full, parts, _, _ = _traces(bench, _ADDED_UP)
    agree = AGREE_FLOAT64 if bench.experiment.is_float64 else AGREE_FLOAT32
    matching = Matching(full, parts, agree)
    wrong, right, alone = ([_on_host(weights)] for weights in (used, fitted, (1.0, *(0.0 for _ in used[1:]))))
    for index in sorted(full.live()):
        for position in range(len(full.steps[index].results)) if full.steps[index].differentiable else ():
            # A result that is the same for every batch (embedded positions) adds up with any weights whose sum is 1. It
            # equals that of the first micro-batch, which is excluded here.
            away = matching.additive(index, wrong, position) > FIT_MAGNIFIES * agree
            counts = away and matching.additive(index, alone, position) > FIT_MAGNIFIES * agree
            if counts and matching.additive(index, right, position) <= FIT_MAGNIFIES * agree:
                return describe_step(full, full.steps[index])
    return None


def has_diverging_branch(bench: Bench) -> bool:
    """Whether a number that Python code read makes some micro-batch take another branch than the full batch."""
    full, parts, _, _ = _traces(bench, ())
    return any(takes_other_branch(full, part) for part in parts)


def find_one_sided_branch(bench: Bench) -> Operation | None:
    """Returns the first operation from which only the full batch, or only a micro-batch, computes its loss."""
    full, parts, _, _ = _traces(bench, ())
    for trace, other_trace in (pair for part in parts for pair in ((full, part), (part, full))):
        ran = {other_trace.steps[index].signature for index in other_trace.live()}
        strays = (step for step in (trace.steps[index] for index in sorted(trace.live())) if step.signature not in ran)
        if (stray := next(strays, None)) is not None:
            return describe_step(trace, stray)
    return None


def _traces(
    bench: Bench, layouts: Collection[LayoutKind] = LAYOUT_KINDS
) -> tuple[Trace, list[Trace], float, list[float]]:
    """Traces the full batch and every micro-batch, with fingerprints of results in some layouts; and their losses."""
    experiment = bench.experiment

    def trace_forward(k: int | None, template: Trace | None = None, plan: Trace | None = None) -> tuple[Trace, float]:
        tracer = make_tracer(experiment, template, plan, layouts)
        loss = experiment.forward(k, tracer, dealing=dealing).detach()
        return tracer.finish(loss), float(loss)

    experiment.progress("tracing the full batch")
    dealing = experiment.deal()
    # Where something is drawn, the first micro-batch has to run, because its draws are matched as well.
    shapes = getattr(bench.watch, "shapes", None) if not experiment.draws.count else None
    if shapes is None:
        shapes, _ = trace_forward(0)
    full, full_loss = trace_forward(None, template=shapes)
    # The draws start again: the first micro-batch has used its rows already, when its shapes were recorded.
    dealing = Dealing(experiment.draws, experiment.reading, dealing.report.prints)
    parts, losses = [], []
    for k in range(experiment.steps):
        experiment.progress(f"tracing micro-batch {k + 1} of {experiment.steps}")
        trace, loss = trace_forward(k, plan=full)
        parts.append(trace)
        losses.append(loss)
    for trace in (full, *parts):
        _to_host(trace)
    return full, parts, full_loss, losses


def _modules(matching: Matching) -> Iterator[ModuleDifference]:
    """Yields the modules that return rows of samples, in the order of their first calls."""
    worst: dict[str, float] = {}
    for call in matching.full.calls:
        compared = [(at, rows) for at in call.outputs if at is not None and (rows := matching.rows[at]) is not None]
        if call.path and compared:
            differences = [rows[0] if matching.differs(at) else 0.0 for at, rows in compared]
            worst[call.path] = max(worst.get(call.path, 0.0), *differences)
    return (ModuleDifference(path, difference) for path, difference in worst.items())


def _on_host(numbers: Sequence[float]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.float64, device="cpu")


def _to_host(trace: Trace) -> None:
    """Moves all fingerprints of a trace to the CPU, those of one device in one transfer."""
    # One transfer per result would wait for the device thousands of times.
    devices: dict[torch.device, list[tuple[Result, str, torch.Tensor]]] = {}
    for result in (result for step in trace.steps for result in step.results):
        for name in ("prints", "of_folded"):
            numbers = getattr(result, name)
            if numbers is not None:
                devices.setdefault(numbers.device, []).append((result, name, numbers))
    for entries in devices.values():
        joined = torch.cat([numbers.reshape(-1) for _, _, numbers in entries]).to("cpu", torch.float64)
        pieces = joined.split([numbers.numel() for _, _, numbers in entries])
        for (result, name, numbers), piece in zip(entries, pieces, strict=True):
            setattr(result, name, piece.view(numbers.shape))
