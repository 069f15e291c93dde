"""Aligns the operations of the full batch's trace with the micro-batches', and finds those that make a difference.

A loop over the samples or a branch makes traces differ in length. Operations of one signature correspond in their
order if all traces contain equally many of them; the others are strays. A step whose inputs differ already only passes
a difference on.

Shapes: B samples, K micro-batches; fingerprints of shape (variants, rows, 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gaverify.passes.layouts import SampleLayout
from gaverify.passes.walks import walk_from
from gaverify.records.experiment import SuspectKind
from gaverify.search.trace.traces import Result, Trace, TracedOperation
from gaverify.thresholds import SAME_ROWS, TINY

_NAN = 1e30  # stands for NaN in a comparison


class Matching:
    """The traces of the full batch and of the micro-batches, aligned and compared.

    Args:
        full: The trace of the full batch.
        parts: Those of the micro-batches.
        agree: The relative difference that rounding may leave between fingerprints.
    """

    def __init__(self, full: Trace, parts: Sequence[Trace], agree: float) -> None:
        self.full, self.parts, self._agree = full, parts, agree
        self._partners = [self._partners_of(step) for step in full.steps]
        self._backwards = [
            {partners[k]: index for index, partners in enumerate(self._partners) if partners is not None}
            for k in range(len(parts))
        ]
        # Step with several rows per sample → 0 if the samples are the outer index of its rows, 1 if the inner one.
        self.order: dict[int, int] = {}
        # The same by rows per sample, from the last step whose rows agreed in only one order.
        self._known: dict[int, int] = {}
        # (difference, number of differing samples) of every step; None if the step has no row per sample. Which samples
        # a selection of rows comes from is unknown: their number is 0.
        self.rows = [self._rows_of(index) for index in range(len(full.steps))]
        # Whether a step's rows are the same ones in another order: tokens sorted by expert, a batch in reverse.
        self.permuted = [
            self._differs_in_place(index) and self._has_same_rows(index) for index in range(len(full.steps))
        ]
        self.tainted = [self._is_tainted(index) for index in range(len(full.steps))]

    def is_matched(self, index: int) -> bool:
        """Whether all micro-batches ran this step of the full batch."""
        return self._partners[index] is not None

    def differs(self, index: int) -> bool:
        """Whether rows of the same samples differ, and not only by their order."""
        return self._differs_in_place(index) and not self.permuted[index]

    def has_equal_rows(self, index: int) -> bool:
        """Whether a step has a row per sample, and these agree, perhaps in another order."""
        return self.rows[index] is not None and not self.differs(index)

    def _differs_in_place(self, index: int) -> bool:
        """Whether the rows at the position of some sample differ."""
        rows = self.rows[index]
        return rows is not None and rows[0] > self._agree

    def _has_same_rows(self, index: int) -> bool:
        """Whether the micro-batches together have the rows of the full batch, in any order."""
        compared = False
        for position, result in enumerate(self.full.steps[index].results):
            if result.prints is None or result.layout is None or result.layout.kind not in ("rows", "selected"):
                continue
            parts = [self._result(k, index, position) for k in range(len(self.parts))]
            sums = [moments for part in parts if part is not None and (moments := part.moments) is not None]
            full_moments = result.moments
            if full_moments is None or len(sums) != len(self.parts):
                return False
            # The last two entries bound the products of two and of three numbers: the scales of the eight moments.
            twice, thrice = full_moments[-2], full_moments[-1]
            scales = torch.stack([twice] * 5 + [thrice] * 3)
            difference = (torch.stack(sums).sum(0) - full_moments)[:8].abs()
            if not bool((difference <= SAME_ROWS * self._agree * scales).all()):
                return False
            compared = True
        return compared

    def prints(self, index: int, position: int) -> list[torch.Tensor] | None:
        """The micro-batches' fingerprints of one result; None where one of them lacks it."""
        results = [self._result(k, index, position) for k in range(len(self.parts))]
        part_prints = [result.prints for result in results if result is not None and result.prints is not None]
        return part_prints if len(part_prints) == len(self.parts) else None

    def constant(self, index: int) -> bool:
        """Whether a step's results have the same shape and values in all runs."""
        results = self.full.steps[index].results
        compared = all(_is_global(r) and r.prints is not None and self.prints(index, p) for p, r in enumerate(results))
        return compared and not self.tainted[index]

    def part_inputs(self, k: int, index: int) -> tuple[int, ...]:
        """The inputs of a matched step in the trace of micro-batch k."""
        partners = self._partners[index]
        return self.parts[k].steps[partners[k]].inputs if partners is not None else ()

    def partner(self, k: int, index: int) -> int:
        """The position of a matched step in the trace of micro-batch k; -1 of a stray."""
        partners = self._partners[index]
        return partners[k] if partners is not None else -1

    def full_step(self, k: int, position: int) -> int | None:
        """The full batch's step of a step of micro-batch k; None of a stray."""
        return self._backwards[k].get(position)

    def additive(self, index: int, shares: Sequence[torch.Tensor], only: int | None = None) -> float:
        """How far a step's batch-wide results (or `only` one) are from a weighted sum of the micro-batches' results."""
        worst = 0.0
        for position, full_prints, parts in self._batch_wide_prints(index):
            if only not in (None, position) or not self.full.steps[index].results[position].floating:
                continue
            # Only the two projections are linear in the values; the norm of a sum is no sum of norms.
            stacked, target = torch.stack([part[0, 0, :2] for part in parts]), full_prints[0, 0, :2]
            scale = stacked.abs().max().clamp_min(TINY)
            difference = min(float(((share @ stacked) - target).abs().max() / scale) for share in shares)
            worst = max(worst, difference)
        return worst

    def _partners_of(self, step: TracedOperation) -> tuple[int, ...] | None:
        # Unequal counts mean a loop over the samples or a branch: nothing says which of the repetitions correspond.
        counts = {len(trace.places.get(step.signature, ())) for trace in (self.full, *self.parts)}
        if len(counts) > 1:
            return None
        return tuple(part.places[step.signature][step.occurrence] for part in self.parts)

    def _result(self, k: int, index: int, position: int) -> Result | None:
        partners = self._partners[index]
        results = self.parts[k].steps[partners[k]].results if partners is not None else []
        return results[position] if position < len(results) else None

    def _rows_of(self, index: int) -> tuple[float, int] | None:
        worst: tuple[float, int] | None = None
        for position, result in enumerate(self.full.steps[index].results):
            if result.layout is None or result.prints is None or result.layout.kind not in ("rows", "selected"):
                continue
            part_prints = self.prints(index, position)
            compared = (
                self._compare_rows(index, result.prints, part_prints, result.layout)
                if part_prints is not None
                else None
            )
            if compared is not None and (worst is None or compared[0] > worst[0]):
                worst = compared
        return worst

    def _compare_rows(
        self, index: int, full: torch.Tensor, parts: list[torch.Tensor], layout: SampleLayout
    ) -> tuple[float, int] | None:
        if any(part.shape[0] != full.shape[0] for part in parts):
            return None
        joined = torch.cat(parts, dim=1)
        if joined.shape != full.shape:
            return None  # rows selected otherwise, or padded to other lengths
        full, joined = full.nan_to_num(), joined.nan_to_num()  # NaN in both runs is no difference
        scale = full[:, :, 2].amax(1).clamp_min(TINY)
        difference = (joined - full).abs().amax(2) / scale[:, None]
        variant = self._choose_order(index, difference.amax(1), layout.first.fold)
        samples = int((difference[variant] > self._agree).sum()) if layout.kind == "rows" else 0
        return float(difference[variant].max()), samples

    def _choose_order(self, index: int, worst: torch.Tensor, fold: int) -> int:
        """Returns the order of a step's rows: the one that agrees, else that of earlier steps, else the closer one."""
        # If neither order agrees, the closer one is no evidence: dropped tokens can make the wrong order look closer.
        variant = int(worst.argmin())
        if len(worst) > 1:
            agrees = worst <= self._agree
            if int(agrees.sum()) == 1:
                self._known[fold] = variant
            elif not bool(agrees.any()):
                variant = self._known.get(fold, variant)
            if fold in self._known:
                self.order[index] = self._known[fold]
        return variant

    def _is_tainted(self, index: int) -> bool:
        """Whether a result without rows differs between the runs: something was reduced over the batch."""
        return any(
            float((part - full_prints).abs().max() / full_prints[..., 2].max().clamp_min(TINY)) > self._agree
            for _, full_prints, parts in self._batch_wide_prints(index)
            for part in parts
        )

    def _batch_wide_prints(self, index: int) -> Iterator[tuple[int, torch.Tensor, list[torch.Tensor]]]:
        """Yields each result of a step without rows: its position, and its fingerprints in all runs."""
        for position, result in enumerate(self.full.steps[index].results):
            parts = self.prints(index, position)
            if result.prints is not None and parts is not None and _is_global(result):
                yield position, _finite(result.prints), list(map(_finite, parts))


def _finite(prints: torch.Tensor) -> torch.Tensor:
    """Fingerprints in which NaN is replaced by one number, so that it equals another NaN and nothing else."""
    return prints.nan_to_num(nan=_NAN)


def _is_global(result: Result) -> bool:
    return result.layout is not None and result.layout.kind == "global"


class Dependence:
    """Walks the matched steps in order; a step is dirty if its results depend on the batch.

    Rows that agree are clean, whatever their inputs. A reduction over the batch is clean as well: samples interact only
    in an operation that combines it with rows again, or that makes something of it that is no sum over samples.
    """

    def __init__(self, matching: Matching, *, foreign: bool, shares: Sequence[torch.Tensor], agree: float) -> None:
        self._matching, self._foreign = matching, foreign
        self._shares, self._agree = shares, agree
        steps = matching.full.steps
        self.live = matching.full.live()
        self.readers: list[list[int]] = [[] for _ in steps]
        for index, step in enumerate(steps):
            for source in step.inputs:
                self.readers[source].append(index)
        self.kinds: list[SuspectKind | None] = [None] * len(steps)
        self._dirty = [False] * len(steps)
        self._strays: list[list[bool]] = [[False] * len(part.steps) for part in matching.parts]
        self._done = [0] * len(matching.parts)
        for index, step in enumerate(steps):
            self._judge(index, step)

    def origins(self) -> Iterator[int]:
        """Yields the steps that make a difference, in order: their inputs agree and their rows differ."""
        for index, kind in enumerate(self.kinds):
            # Similarities of all pairs of samples are harmless if the loss uses only the diagonal, for example.
            if kind is not None and index in self.live and not (kind == "matrix" and not self._harms(index)):
                yield index

    def exits(self, index: int) -> list[int]:
        """The next steps downstream with a row per sample that differs."""
        return sorted(filter(self._matching.differs, walk_from(self.readers[index], self._without_rows)))

    def descendants(self, index: int) -> set[int]:
        """The step itself and everything computed from it."""
        return set(walk_from([index], self.readers.__getitem__))

    def by_control_flow(self, index: int) -> bool:
        """Whether a step reads something that only some of the traces computed."""
        steps = self._matching.full.steps
        if any(not self._matching.is_matched(source) for source in steps[index].inputs):
            return True
        return any(
            self._matching.full_step(k, source) is None
            for k in range(len(self._matching.parts))
            for source in self._matching.part_inputs(k, index)
        )

    def _judge(self, index: int, step: TracedOperation) -> None:
        downstream = any(self._dirty[source] for source in step.inputs)
        if self._matching.is_matched(index):
            downstream = self._read_dirty(index) or downstream
            if self._matching.has_equal_rows(index):
                return
            if not downstream:
                self.kinds[index] = self._kind(index, step)
        self._dirty[index] = downstream or self.kinds[index] is not None

    def _kind(self, index: int, step: TracedOperation) -> SuspectKind | None:
        outside = not step.tensor_inputs  # its numbers come from outside torch: Python's or NumPy's generators
        if self._matching.differs(index) and (self._foreign or step.random or not outside):
            if step.random or outside:
                return "random"
            return "control-flow" if self.by_control_flow(index) else "rows"
        matrix = any(result.layout and result.layout.kind == "matrix" and result.floating for result in step.results)
        return "matrix" if matrix and step.differentiable else None

    def _read_dirty(self, index: int) -> bool:
        """Whether a micro-batch's step reads something dirty, directly or through strays."""
        reads_dirty = False
        # Each micro-batch's strays are judged once, in order, up to the step that is asked about.
        for k, part in enumerate(self._matching.parts):
            while self._done[k] <= self._matching.partner(k, index):
                position = self._done[k]
                self._done[k] += 1
                if self._matching.full_step(k, position) is None:
                    inputs = part.steps[position].inputs
                    self._strays[k][position] = any(self._part_dirty(k, source) for source in inputs)
            inputs = self._matching.part_inputs(k, index)
            reads_dirty = reads_dirty or any(self._part_dirty(k, source) for source in inputs)
        return reads_dirty

    def _part_dirty(self, k: int, position: int) -> bool:
        full_step = self._matching.full_step(k, position)
        return self._strays[k][position] if full_step is None else self._dirty[full_step]

    def _harms(self, index: int) -> bool:
        """Whether what is computed from a cross-sample matrix differs per sample, or is no sum over the samples."""
        return any(
            self._matching.differs(step)
            or not self._matching.is_matched(step)
            or (self._matching.tainted[step] and self._matching.additive(step, self._shares) > self._agree)
            for step in walk_from(self.readers[index], self._without_rows)
        )

    def _without_rows(self, index: int) -> list[int]:
        """The readers of a step; none if the step has a row per sample, because its rows were compared."""
        return self.readers[index] if self._matching.rows[index] is None else []
