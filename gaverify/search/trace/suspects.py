"""Turns differences between the traces into suspects: which line each is on, and what a control run has to pin.

Shapes: B samples, K micro-batches.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from gaverify.passes.walks import walk_from
from gaverify.records.experiment import FunctionKey, Operation, Suspect, SuspectKind
from gaverify.search.trace.matching import Dependence, Matching
from gaverify.search.trace.traces import (
    DECISIONS,
    Frame,
    ModuleCall,
    Trace,
    TracedOperation,
    describe_step,
    find_decisions,
    find_named_call,
    find_strays,
    first_difference,
)


class SuspectFinder:
    """Turns the steps that bring a difference about into suspects."""

    def __init__(self, matching: Matching, dependence: Dependence, batch_size: int) -> None:
        self._matching, self._dependence, self._size = matching, dependence, batch_size
        self._full = matching.full

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
        yield Suspect(
            "non-additive", self.operation(index), None, left, self._size, False, False, functions, calls=calls
        )

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
        exits, calls, outputs = self._exits(index), self._find_uncut_calls(step), self._outputs(index)
        suspect = Suspect(kind, operation, None, difference, samples, in_model, False, _function_of(step))
        suspect = replace(suspect, exits=exits, calls=calls, outputs=outputs, differentiable=step.differentiable)
        return replace(suspect, model_mixes=self._model_mixes_beside(index))

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

    def _exits(self, index: int) -> tuple[FunctionKey, ...]:
        exits = self._dependence.exits(index)
        return _sort_functions({function for i in exits for function in _function_of(self._full.steps[i])})

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
        """What steps that are pinned together share: the module's class, or the file outside of modules."""
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

        Where that module returns its loss, whether layers inside it are applied to what comes from the step.
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

    def _in_model_of(self, trace: Trace, position: int) -> bool:
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
        return replace(suspect, statistics="batch_norm" in decisive.name, frame=frame)

    def _find_first_stray(self, index: int) -> tuple[Trace, int]:
        """The first unmatched step from which a step computes, and its trace."""
        matched = self._matching.is_matched
        strays = find_strays(self._full, index, lambda i: not matched(i))
        if strays:
            return self._full, min(strays)
        for k, part in enumerate(self._matching.parts):
            end = part.loss if index == self._full.loss else self._matching.partner(k, index)
            strays = find_strays(part, end, lambda i, k=k: self._matching.full_step(k, i) is None)  # type: ignore[misc]
            if strays:
                return part, min(strays)
        return self._full, index


def _function_of(step: TracedOperation) -> tuple[FunctionKey, ...]:
    return (step.function,) if step.function is not None else ()


def _sort_functions(functions: set[FunctionKey]) -> tuple[FunctionKey, ...]:
    return tuple(sorted(functions, key=str))
