"""Aligns two traces, and turns their differences into suspects: which line each is on, what a control has to pin.

Shapes: B samples, K micro-batches.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from gaverify.passes.calls import walk_from
from gaverify.passes.layouts import SampleLayout, changed_dimensions
from gaverify.records.experiment import MOVES_ROWS, FunctionKey, Operation, Suspect, SuspectKind
from gaverify.search.trace.traces import (
    DECISIONS,
    INPUT,
    Frame,
    ModuleCall,
    OperationTrace,
    Result,
    TracedOperation,
    describe_step,
    find_decisions,
    find_named_call,
    find_strays,
    first_difference,
)
from gaverify.thresholds import SAME_ROWS, TINY

# Aligns the operations of the full batch's trace with the micro-batches', and finds those that make a difference.
#
# A loop over the samples or a branch makes traces differ in length. Operations of one signature correspond in their
# order if all traces contain equally many of them; the others are strays. A step whose inputs differ already only
# passes a difference on.
#
# Shapes: B samples, K micro-batches; fingerprints of shape (variants, rows, 3).


_NAN = 1e30  # stands for NaN in a comparison


class Matching:
    """The traces of the full batch and of the micro-batches, aligned and compared.

    Args:
        full: The trace of the full batch.
        parts: Those of the micro-batches.
        agree: The relative difference that rounding may leave between fingerprints.
    """

    def __init__(self, full: OperationTrace, parts: Sequence[OperationTrace], agree: float) -> None:
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
            compared = self._compare_rows(index, position, result.prints, result.layout)
            if compared is not None and (worst is None or compared[0] > worst[0]):
                worst = compared
        return worst

    def _compare_rows(
        self, index: int, position: int, full: torch.Tensor, layout: SampleLayout
    ) -> tuple[float, int] | None:
        parts = self.prints(index, position)
        if parts is None or any(part.shape[0] != full.shape[0] for part in parts):
            return None
        joined = torch.cat(parts, dim=1)
        if joined.shape != full.shape:
            return None  # rows selected otherwise, or padded to other lengths
        full, joined = full.nan_to_num(), joined.nan_to_num()  # NaN in both runs is no difference
        scale = full[:, :, 2].amax(1).clamp_min(TINY)
        difference = (joined - full).abs().amax(2) / scale[:, None]
        # A row that was padded to another length has other entries, which may agree (zeros add nothing) but not differ.
        lengths = [self._has_equal_lengths(k, index, position) for k in range(len(parts))]
        comparable_parts = [
            torch.full(part.shape[1:2], ok, device=part.device) for part, ok in zip(parts, lengths, strict=True)
        ]
        is_comparable = torch.cat(comparable_parts)
        differing = difference > self._agree
        if bool(differing[:, ~is_comparable].any()) and not bool(differing[:, is_comparable].any()):
            return None
        difference[:, ~is_comparable] = 0.0
        variant = self._choose_order(index, difference.amax(1), layout.first.fold)
        samples = int((difference[variant] > self._agree).sum()) if layout.kind == "rows" else 0
        return float(difference[variant].max()), samples

    def _has_equal_lengths(self, k: int, index: int, position: int) -> bool:
        """Whether the rows of a micro-batch have the shape of the full batch's."""
        full, part = self.full.steps[index].results[position], self._result(k, index, position)
        if full.layout is None or part is None or len(full.shape) != len(part.shape):
            return False
        return set(changed_dimensions(full.shape, part.shape)) <= {full.layout.first.at}

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
        self._ends = {index for index, step in enumerate(steps) if step.name in DECISIONS}
        self._ends.add(len(steps) - 1 if matching.full.loss is None else matching.full.loss)
        # what a micro-batch alone makes of a step is in no list of readers
        self._read_by_strays = {
            read
            for k, part in enumerate(matching.parts)
            for position, step in enumerate(part.steps)
            if matching.full_step(k, position) is None
            for source in step.inputs
            if (read := matching.full_step(k, source)) is not None
        }
        for index, step in enumerate(steps):
            self._judge(index, step)

    def origins(self) -> Iterator[int]:
        """Yields the steps that make a difference, in order: their inputs agree and their rows differ."""
        for index, kind in enumerate(self.kinds):
            if kind is None or index not in self.live:
                continue
            # Similarities of all pairs of samples are harmless if the loss uses only the diagonal, for example.
            if self._harms(index) if kind == "matrix" else self._is_used(index):
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
        # Numbers that NumPy or Python made of the batch: samples met there, and not in the module that receives them.
        # Whole numbers are left out, because a right loss may count its samples.
        if self._matching.differs(index) and step.name == INPUT and step.results[0].floating:
            return "rows"
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

    def _is_used(self, index: int) -> bool:
        """Whether rows that differ reach the loss, or code that decides, through anything but rows that agree.

        Rows with a gradient always count: fresh statistics may cancel in all values, and not in the gradient.
        """
        matching = self._matching
        if matching.full.steps[index].differentiable:
            return True
        steps = walk_from([index], lambda step: () if matching.has_equal_rows(step) else self.readers[step])
        return any(
            step in self._ends or not matching.is_matched(step) or step in self._read_by_strays for step in steps
        )

    def _without_rows(self, index: int) -> list[int]:
        """The readers of a step; none if the step has a row per sample, because its rows were compared."""
        return self.readers[index] if self._matching.rows[index] is None else []


# Turns differences between the traces into suspects: which line each is on, and what a control run has to pin.


class SuspectFinder:
    """Turns the steps that bring a difference about into suspects."""

    def __init__(self, matching: Matching, dependence: Dependence, batch_size: int) -> None:
        self._matching, self._dependence, self._size = matching, dependence, batch_size
        self._full = matching.full
        self._traces = (matching.full, *matching.parts)

    def find_suspects(self, shares: list[torch.Tensor], agree: float, additive: bool) -> Iterator[Suspect]:
        """Yields the suspects: mixed rows and cross-sample matrices first, then reductions that are not sums."""
        lines: set[Frame] = set()
        for index in self._dependence.origins():
            frame = self._full.steps[index].frame
            if frame is None or frame not in lines:  # one suspect per line: its control pins all calls of the line
                lines.add(frame)
                yield from self._suspects_of(index)
        if lines or additive:  # additive: the losses add up, so that nothing in the forward needs an explanation
            return
        for index in sorted(self._dependence.live):
            tainted = self._matching.tainted[index] and self._full.steps[index].differentiable
            if tainted and self._matching.additive(index, shares) > agree:
                yield from self._non_additive(index, self._matching.additive(index, shares))
                return
        last = len(self._full.steps) - 1 if self._full.loss is None else self._full.loss
        if self._dependence.by_control_flow(last) or not self._matching.is_matched(last) or self._other_end():
            yield self._control_flow(last)

    def _other_end(self) -> bool:
        """Whether a micro-batch's loss was written by another operation than the full batch's."""
        return any(
            part.loss is not None and self._matching.full_step(k, part.loss) != self._full.loss
            for k, part in enumerate(self._matching.parts)
        )

    def _suspects_of(self, index: int) -> Iterator[Suspect]:
        kind = self._dependence.kinds[index]
        if kind != "control-flow":  # rows, a matrix or draws: the operation itself is the suspect
            yield self._suspect(index, kind or "rows")
            return
        if self._sources(index):  # a branch or loop that also reads what was reduced over the batch
            yield self._suspect(index, "rows")
        yield self._control_flow(index)

    def _non_additive(self, index: int, left: float) -> Iterator[Suspect]:
        step = self._full.steps[index]
        if self._dependence.by_control_flow(index):  # a loop over the samples, or a branch
            yield self._suspect(index, "rows") if self._sources(index) else self._control_flow(index)
        functions, calls = _function_of(step), self._find_uncut_calls(step)
        suspect = Suspect("non-additive", self.operation(index), None, left, self._size, False, False, functions)
        yield replace(suspect, calls=calls, pairs=self._moves_targets(index))

    def _moves_targets(self, index: int) -> bool:
        """Whether a loss reads whole numbers whose rows an operation has moved: the targets of partners."""
        inputs = walk_from(self._full.steps[index].inputs, lambda step: self._full.steps[step].inputs)
        moved = (self._full.steps[step] for step in inputs if self._full.steps[step].name in MOVES_ROWS)
        return any(not result.floating and result.layout is not None for step in moved for result in step.results)

    def _suspect(self, index: int, kind: SuspectKind) -> Suspect:
        step = self._full.steps[index]
        sources = self._sources(index)
        # All calls of one scope are pinned together: one layer of a class normalises as the next one does, and the next
        # would differ as soon as the first is neutralised.
        scope = self._scope(index)
        scope_steps = [i for i, k in enumerate(self._dependence.kinds) if k is not None and self._scope(i) == scope]
        reductions = sorted(
            {source for i in scope_steps for source in self._sources(i)} | self._find_returned_reductions(scope)
        )
        functions = {f for i in scope_steps if (s := self._full.steps[i]).frame == step.frame for f in _function_of(s)}
        suspect = self._make_suspect(index, kind, self.operation(index), self._in_model(index))
        return replace(
            suspect,
            source=self._choose_source(sources),
            statistics="batch_norm" in step.name,
            functions=_sort_functions(functions),
            source_functions=_sort_functions({f for i in reductions if (f := self._held_function(i)) is not None}),
            functions_on_equal_lines=_sort_functions(self._functions_of_lines(scope_steps) - functions),
            order=self._matching.order.get(index),
        )

    def _make_suspect(self, index: int, kind: SuspectKind, operation: Operation, in_model: bool) -> Suspect:
        """Makes a suspect with everything that depends only on the step."""
        step, (difference, samples) = self._full.steps[index], self._matching.rows[index] or (1.0, self._size)
        exits = {function for i in self._dependence.exits(index) for function in _function_of(self._full.steps[i])}
        calls, outputs = self._find_uncut_calls(step), self._outputs(index)
        suspect = Suspect(kind, operation, None, difference, samples, in_model, False, _function_of(step))
        suspect = replace(suspect, calls=calls, outputs=outputs, differentiable=step.differentiable)
        pairs = any(self._matching.permuted[source] for source in step.inputs)
        suspect = replace(suspect, pairs=pairs and kind == "rows")
        return replace(suspect, exits=_sort_functions(exits), model_mixes=self._model_mixes_beside(index))

    def _model_mixes_beside(self, index: int) -> bool:
        """Whether a module of the model returns rows that depend on the batch, and not by way of this step."""
        downstream = self._dependence.descendants(index)
        outputs = {output for call in self._full.calls if call.path is not None for output in call.outputs}
        return any(o is not None and o not in downstream and self._matching.differs(o) for o in outputs)

    def _functions_of_lines(self, scope_steps: Sequence[int]) -> set[FunctionKey]:
        """The torch calls of the lines of one scope where differences begin, in the layers behind them as well."""
        scope, steps = self._scope(scope_steps[0]), self._full.steps
        lines = {(steps[i].name, steps[i].frame) for i in scope_steps}
        differing = (i for i, s in enumerate(steps) if (s.name, s.frame) in lines and self._matching.differs(i))
        return {function for i in differing if self._scope(i) == scope for function in _function_of(steps[i])}

    def _outputs(self, index: int) -> tuple[int, ...]:
        """Positions of the outputs of the module around a step that depend on the batch."""
        call = find_named_call(self._full, self._full.steps[index])
        if call is None:
            return ()
        agreeing = [output is not None and self._matching.has_equal_rows(output) for output in call.outputs]
        return tuple(position for position, agrees in enumerate(agreeing) if not agrees)

    def _choose_source(self, sources: list[int]) -> Operation | None:
        """The first reduction that has a gradient, a mean rather than the count it is divided by; else the first."""
        with_gradient = [source for source in sources if self._full.steps[source].differentiable]
        return next((self.operation(source) for source in (*with_gradient, *sources)), None)

    def _find_returned_reductions(self, scope: tuple[str, str]) -> set[int]:
        """All reductions over the batch in one scope whose result is combined with rows of samples again."""
        return {
            index
            for index in self._dependence.live
            if self._matching.tainted[index]
            and self._scope(index) == scope
            and not self._reductions(index)
            and self._dependence.exits(index)
        }

    def _sources(self, index: int) -> list[int]:
        """The reductions over the batch that a step reads: back along tainted steps to those that read samples."""
        steps = walk_from(self._reductions(index), self._reductions)
        return sorted(step for step in steps if not self._reductions(step))

    def _reductions(self, index: int) -> list[int]:
        """The inputs of a step that were reduced over the batch; through steps that not all traces have."""
        tainted, steps = self._matching.tainted, self._full.steps

        def onwards(step: int) -> Iterable[int]:
            return () if tainted[step] or self._matching.is_matched(step) else steps[step].inputs

        return [step for step in walk_from(steps[index].inputs, onwards) if tainted[step]]

    def _held_function(self, index: int) -> FunctionKey | None:
        """The torch call that returns the reduction, so that it can be pinned; None if it is a step inside a call."""
        function = self._full.steps[index].function
        # A call may run several operations, and returns what the last of them wrote.
        last = max(i for i, step in enumerate(self._full.steps) if step.function == function)
        layout = self._full.steps[last].results[0].layout if self._full.steps[last].results else None
        return function if layout is not None and layout.kind == "global" else None

    def _scope(self, index: int) -> tuple[str, str]:
        """The place that steps share which are pinned together: the module's class, or the file outside of modules."""
        step = self._full.steps[index]
        call = find_named_call(self._full, step)
        return ("module", call.kind) if call is not None else ("file", step.frame[0] if step.frame else "")

    def _find_uncut_calls(self, step: TracedOperation) -> tuple[int, ...]:
        """The module calls that a cached gradient cannot cut: those around a step, and those whose outputs couple."""
        around = () if step.call is None else (step.call, *self._full.calls[step.call].parents)
        return tuple(sorted({*around, *(i for i, call in enumerate(self._full.calls) if not self._can_be_cut(call))}))

    def _can_be_cut(self, call: ModuleCall) -> bool:
        """Whether all outputs of a module are rows of samples that agree, or do not depend on the batch."""
        return bool(call.outputs) and all(
            output is None  # a parameter
            or (self._matching.has_equal_rows(output) and not self._matching.permuted[output])
            or (self._matching.rows[output] is None and self._matching.constant(output))
            for output in call.outputs
        )

    def _in_model(self, index: int) -> bool:
        """Whether a module around the step returns samples that come from it, even where they agree by value.

        If that module returns its loss, the answer is whether layers inside it are applied to results of the step.
        """
        around = [call for call in self._full.around(self._full.steps[index].call) if call.path is not None]
        outputs = {o for call in around for o in call.outputs if o is not None and self._matching.rows[o] is not None}
        downstream = self._dependence.descendants(index)
        if bool(outputs) and not outputs.isdisjoint(downstream):
            return True
        if not outputs and any(self._is_layer_behind(call, around, downstream) for call in self._full.calls):
            return True
        # a number that Python code reads decides what the module computes from then on: a step size, a branch
        read = [step for step in downstream if self._full.steps[step].name in DECISIONS]
        return bool(read) and any(output > min(read) and self._matching.differs(output) for output in outputs)

    def _is_layer_behind(self, call: ModuleCall, around: Sequence[ModuleCall], downstream: Container[int]) -> bool:
        """Whether a call within some others is that of a layer with weights whose rows come from a step."""
        within = call.has_weights and any(self._full.calls[parent] in around for parent in call.parents)
        rows = [output for output in call.outputs if output is not None and self._matching.rows[output] is not None]
        return within and any(output in downstream for output in rows)

    def _in_model_of(self, trace: OperationTrace, position: int) -> bool:
        """Whether a module around an unmatched step returns what not all traces computed."""
        k = next((k for k, part in enumerate(self._matching.parts) if part is trace), None)
        matching = self._matching
        stray = (lambda i: not matching.is_matched(i)) if k is None else (lambda i: matching.full_step(k, i) is None)
        return any(
            call.path is not None and any(output is not None and stray(output) for output in call.outputs)
            for call in trace.around(trace.steps[position].call)
        )

    def operation(self, index: int) -> Operation:
        """Where a step is, for people."""
        return describe_step(self._full, self._full.steps[index])

    def _control_flow(self, index: int) -> Suspect:
        """The line of the branch: where a number was read just before the traces differ, else where they differ."""
        trace, start = self._find_first_stray(index)
        is_lacking = any(trace.steps[start].signature not in each.places for each in self._traces)
        lacking = describe_step(trace, trace.steps[start]) if is_lacking else None
        decisions = find_decisions(trace, start)
        # A loop that runs more often for some batches: all its rounds are unmatched, and the first of them may be far
        # from the number that ends the loop. Where the traces first differ, that number was read.
        if not decisions:
            ends = [first_difference(self._full, part) for part in self._matching.parts]
            first = min((end for end in ends if end is not None), default=None)
            decisions = find_decisions(self._full, first) if first is not None else []
            trace, start = (self._full, decisions[-1]) if decisions else (trace, start)
        decisive = trace.steps[decisions[-1] if decisions else start]
        in_model = self._in_model(index) or self._in_model_of(trace, start)
        suspect = self._make_suspect(index, "control-flow", describe_step(trace, decisive), in_model)
        frame = decisive.frame if decisions else None
        return replace(suspect, statistics="batch_norm" in decisive.name, frame=frame, lacking=lacking)

    def _find_first_stray(self, index: int) -> tuple[OperationTrace, int]:
        """The first unmatched step from which a step computes, and its trace."""
        matched = self._matching.is_matched
        strays = find_strays(self._full, index, lambda i: not matched(i))
        if strays:
            return self._full, _first_written(self._full, strays)
        for k, part in enumerate(self._matching.parts):
            end = part.loss if index == self._full.loss else self._matching.partner(k, index)
            strays = find_strays(part, end, lambda i, k=k: self._matching.full_step(k, i) is None)  # type: ignore[misc]
            if strays:
                return part, _first_written(part, strays)
        return self._full, index


def _first_written(trace: OperationTrace, strays: set[int]) -> int:
    """The first of some steps that is an operation: a tensor may enter the trace where a branch alone reads it."""
    return min((step for step in strays if trace.steps[step].name != INPUT), default=min(strays))


def _function_of(step: TracedOperation) -> tuple[FunctionKey, ...]:
    return (step.function,) if step.function is not None else ()


def _sort_functions(functions: set[FunctionKey]) -> tuple[FunctionKey, ...]:
    return tuple(sorted(functions, key=str))
