"""Which steps of a trace pass a difference on that was there before, and which bring it about.

Shapes: B samples, K micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gaverify.causes.trace.matching import Matching
from gaverify.causes.trace.traces import TracedOperation
from gaverify.passes.walks import reached
from gaverify.records.operations import SuspectKind


class Dependence:
    """Walks the matched steps in order: a step is dirty when what it hands on depends on the batch already.

    Rows that agree are clean, whatever they were made of. A reduction over the batch is clean as well: only what gives
    it back to the samples, or computes with it what is no sum, couples them.
    """

    def __init__(self, matching: Matching, *, foreign: bool, shares: Sequence[torch.Tensor], agree: float) -> None:
        self._m, self._foreign = matching, foreign
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
        """Yields the steps that bring a difference about, in order: their inputs agree, their samples do not."""
        for index, kind in enumerate(self.kinds):
            if kind is not None and index in self.live and not (kind == "matrix" and not self._harms(index)):
                yield index

    def exits(self, index: int) -> list[int]:
        """The next steps downstream whose samples differ: where the difference has the form of the batch again."""
        return sorted(filter(self._m.differs, reached(self.readers[index], self._without_rows)))

    def descendants(self, index: int) -> set[int]:
        """The step itself and everything computed from it."""
        return set(reached([index], self.readers.__getitem__))

    def by_control_flow(self, index: int) -> bool:
        """Whether a step reads what only some of the traces computed."""
        steps = self._m.full.steps
        if any(not self._m.matched(source) for source in steps[index].inputs):
            return True
        return any(
            self._m.whole(k, source) is None
            for k in range(len(self._m.parts))
            for source in self._m.part_inputs(k, index)
        )

    def _judge(self, index: int, step: TracedOperation) -> None:
        downstream = any(self._dirty[source] for source in step.inputs)
        if self._m.matched(index):
            downstream = self._read_dirty(index) or downstream
            if self._m.rows[index] is not None and not self._m.differs(index):
                return
            if not downstream:
                self.kinds[index] = self._kind(index, step)
        self._dirty[index] = downstream or self.kinds[index] is not None

    def _kind(self, index: int, step: TracedOperation) -> SuspectKind | None:
        outside = not step.tensor_inputs
        if self._m.differs(index) and (self._foreign or step.random or not outside):
            if step.random or outside:
                return "random"
            return "control-flow" if self.by_control_flow(index) else "rows"
        matrix = any(result.layout and result.layout.kind == "matrix" and result.floating for result in step.results)
        return "matrix" if matrix and step.differentiable else None

    def _read_dirty(self, index: int) -> bool:
        """Whether a micro-batch's step reads something dirty, through steps that the full batch has not got."""
        found = False
        for k, part in enumerate(self._m.parts):
            while self._done[k] <= self._m.partner(k, index):
                position = self._done[k]
                self._done[k] += 1
                if self._m.whole(k, position) is None:
                    inputs = part.steps[position].inputs
                    self._strays[k][position] = any(self._part_dirty(k, source) for source in inputs)
            found = found or any(self._part_dirty(k, source) for source in self._m.part_inputs(k, index))
        return found

    def _part_dirty(self, k: int, position: int) -> bool:
        whole = self._m.whole(k, position)
        return self._strays[k][position] if whole is None else self._dirty[whole]

    def _harms(self, index: int) -> bool:
        """Whether a cross-sample matrix reaches samples or a loss that is no sum; its diagonal alone does not."""
        return any(
            self._m.differs(step)
            or not self._m.matched(step)
            or (self._m.tainted[step] and self._m.additive(step, self._shares) > self._agree)
            for step in reached(self.readers[index], self._without_rows)
        )

    def _without_rows(self, index: int) -> list[int]:
        """The readers of a step, where its own samples cannot be told apart."""
        return self.readers[index] if self._m.rows[index] is None else []
