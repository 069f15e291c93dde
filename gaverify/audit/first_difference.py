"""Finds the first place where a script's two runs differ for the same samples, and tries whether that is the cause.

It is asked where gradients differ and nothing proves why. Both runs are made once more and trace every call of torch.
Walked back from what is differentiated, in both runs, and not behind calls that agree: the first call that differs, and
reads nothing that differs, is where the runs part. Where no value differs, hooks and changes of gradients are left.

The first difference is no proof. A control gives every micro-batch the full batch's value there, in both runs without
its gradient: where only rounding is left then, and every parameter that differs can still be seen, that is the cause.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch

from gaverify.audit.bench import ScriptBench, difference_allowed, explained_share
from gaverify.audit.job import DisableCompilation, PinArguments, TraceScript
from gaverify.audit.outcome import is_proven
from gaverify.audit.reading import RecordedRun
from gaverify.audit.recording.script_calls import INPUT, PARAMETER, RESULT, PinnedCall, PlacesOfPart
from gaverify.audit.running import Trial
from gaverify.audit.same_data import Matcher
from gaverify.audit.script_trace import (
    Agreement,
    Node,
    RowPair,
    TraceComparison,
    assigning_lines,
    key_of,
    read_trace,
)
from gaverify.audit.source_lines import deciding_line, is_kept, test_lines
from gaverify.passes.calls import walk_from
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.comparison import State, StateChange
from gaverify.records.events import Forward
from gaverify.records.experiment import (
    MOVES_ROWS,
    Cause,
    ControlKind,
    DifferenceKind,
    DifferingNumber,
    FirstDifference,
    LossValue,
    Operation,
    Suspect,
)
from gaverify.search.bench import Intervention
from gaverify.thresholds import SMALL_PART, TINY
from gaverify.tracebacks import Place, display_path

_ARITHMETIC = frozenset(
    {"mul", "div", "add", "sub", "pow", "rsub", "clamp", "lerp", "__rdiv__", "__rsub__", "__rpow__"}
)
_MOVING = MOVES_ROWS | {"__getitem__"}
_SCALING = frozenset({"mul", "div", "__mul__", "__rmul__", "__truediv__", "true_divide", "mul_", "div_"})


def find_first_difference(trial: Trial, record: Record) -> Record:
    """Returns the record with the first difference of both runs, if nothing proves why an update differs.

    Where its control proves it, it is a cause like those that other controls find, and replaces what they suspect.
    """
    update = record.divergent
    if update is None or not _is_open(record, update):
        return record
    bench = ScriptBench(trial, record, update, "trace", (DisableCompilation(),))
    runs = bench.make_runs(watch=(TraceScript(),))
    traces = read_trace(runs.full), read_trace(runs.accumulated)
    parts = parts_of(runs.full, runs.accumulated, update.number)
    if traces[0] is None or traces[1] is None or len(parts) < 2:
        return record
    comparison = TraceComparison(traces[0], traces[1], parts, difference_allowed(record.unit))
    walk = Walk(comparison, after_passes=update.differs_after_passes)
    first = walk.find()
    if first is None:
        return record
    pins, value = walk.pins_of(first), walk.value_of(first)
    control = None
    if pins:  # other values may not fit there: then nothing is shown
        pin = _replace_value(first.difference, value, PinArguments(tuple(pins), parts))
        control = bench.attempt("its control", lambda: bench.run(pin, fit=value is not None))
    # A number that is the cause is the cause whatever is drawn; of values, other draws are seen first.
    if record.unaligned and (first.difference.number is None or control is None or not control.proves):
        return record
    difference = replace(first.difference, control=control)
    record = replace(record, controls=replace(record.controls, first_difference=difference))
    if control is None or record.edit is not None:  # an edit is judged by what was found
        return record
    # beside another cause, as a wrong weight, a value explains a part
    explained = explained_share(control, update.relative_difference)
    if not control.proves and (value is None or explained <= SMALL_PART):
        return record
    return _with_cause(record, difference, value, explained, is_meeting=walk.acts_on_rows(first))


def _is_open(record: Record, update: UpdateComparison) -> bool:
    """Whether a trace can tell why an update differs, and nothing has told it yet."""
    if record.ranks > 1 or update.step.may_take_factor or record.controls.first_difference is not None:
        return False
    # of gradients that agree when the last pass ends, no cause is known yet
    return update.differs_after_passes or not (record.unaligned or is_proven(record))


def parts_of(full: RecordedRun, accumulated: RecordedRun, update: int) -> tuple[PlacesOfPart, ...]:
    """Returns which rows of the full batch each micro-batch holds, by the forwards of the first model."""
    sides = [
        [event for event in run.events if isinstance(event, Forward) and event.update == update]
        for run in (full, accumulated)
    ]
    rows_of_full, rows_of_micro = full.rows(update), accumulated.rows(update)
    if not all(sides) or len(rows_of_full) != len(sides[0]) or len(rows_of_micro) != len(sides[1]):
        return ()
    matcher, first, parts = Matcher(rows_of_full), sides[1][0].model, list[PlacesOfPart]()
    among = [at for at, event in enumerate(sides[0]) if event.model == sides[0][0].model]
    for event, prints in zip(sides[1], rows_of_micro, strict=True):
        if event.model != first:
            continue
        spot = matcher.find(among, prints) if prints else None
        if spot is None:
            return ()
        if spot.forward == among[0]:
            parts.append((sides[0][among[0]].rows or 0, tuple(spot.places)))
    places = [place for _, part in parts for place in part]
    # a model that is called twice for the same rows would count them twice
    return tuple(parts) if sorted(places) == list(range(parts[0][0] if parts else 0)) else ()


class HandedValue(NamedTuple):
    """A value without gradient that is handed to a computation with one, and that the first difference leads to."""

    reader: Node
    path: str
    """The path of the argument."""
    maker: Node
    """The call that made it."""


class Found(NamedTuple):
    """The first difference, and the calls behind it."""

    difference: FirstDifference
    node: Node
    """The call that differs; of a branch the one that reads the number by which it is decided."""
    source: Node | None
    """The call without a row for each sample that it reads."""
    handed: tuple[HandedValue, ...] = ()
    """The arguments by which it reaches what is differentiated, where it has no gradient itself."""


class Walk:
    """Walks back through both traces from what is differentiated.

    A call of the full-batch run is a node by its position; one of the accumulated run by -1 - its position.

    Args:
        comparison: The traces.
        after_passes: Walk back from what changes gradients after the last backward pass instead, up to what the passes
            made.
    """

    def __init__(self, comparison: TraceComparison, *, after_passes: bool = False) -> None:
        self.comparison, self._after_passes = comparison, after_passes
        self._roots = comparison.edits if after_passes else comparison.roots
        self._tainted: dict[Node, bool] = {}
        self._places = {
            -1 - at: (node, part)
            for node, partners in comparison.partners.items()
            for at, part in zip(partners.calls, partners.parts or (0,), strict=True)
        }

    def inputs(self, node: Node) -> list[Node]:
        """Returns the calls of the same run that a call reads."""
        call = self.comparison.call(node)
        positions = dict.fromkeys((*call["arguments"].values(), *call["read"]))
        return [at if node >= 0 else -1 - at for at in positions]

    def agreement(self, node: Node) -> Agreement:
        """Returns how a call is related to the same call of the other run; for a micro-batch by its own rows."""
        agreement = self._compare_results(node)
        return Agreement.UNKNOWN if agreement is Agreement.DIFFERS and self._computes_places(node) else agreement

    def _compare_results(self, node: Node) -> Agreement:
        call = self.comparison.call(node)
        if call["name"] == PARAMETER or (self._after_passes and call["is_gradient"]):
            return Agreement.AGREES
        full = self._places.get(node)
        if node >= 0:
            return self.comparison.agreement(node)
        return Agreement.UNKNOWN if full is None else self.comparison.agreement_of_part(*full)

    def _computes_places(self, node: Node) -> bool:
        """Whether a call computes integers: places in a micro-batch are others than in the full batch, and right."""
        call = self.comparison.call(node)
        described = [result for result in call["results"] if result is not None]
        is_from_outside = call["name"] == INPUT or (not call["arguments"] and "from_numpy" in call["name"])
        is_integer = bool(described) and all(result["is_integer"] for result in described)
        return is_integer and not is_from_outside and not self._moves_data(node)

    def _moves_data(self, node: Node) -> bool:
        """Whether a call puts integers, as labels, elsewhere or shifts them, which all of the update shares."""

        def is_shared(at: Node) -> bool:
            partners = self.comparison.partners.get(self._places.get(at, (at, 0))[0])
            is_once = partners is not None and not partners.is_split
            return self.comparison.call(at)["name"] == INPUT or (
                is_once and self._compare_results(at) is Agreement.AGREES
            )

        calls = list(walk_from([node], lambda at: [] if is_shared(at) else self.inputs(at)))
        names = [self.comparison.call(at)["name"].rpartition(".")[2] for at in calls if not is_shared(at)]
        return len(names) < len(calls) and set(names) <= _MOVING | _ARITHMETIC

    def is_alone(self, node: Node) -> bool:
        """Whether one run alone makes a call, or some micro-batches do not."""
        if self.comparison.call(node)["name"] in (INPUT, PARAMETER):
            return False
        if node < 0:
            return node not in self._places
        partners = self.comparison.partners.get(node)
        return partners is None or (partners.is_split and len(partners.parts) < len(self.comparison.parts))

    def trace_back(self, starts: Sequence[Node]) -> list[Node]:
        """Returns the calls that some depend on, back to the nearest that agree, in the order of the run."""

        def onwards(node: Node) -> list[Node]:
            is_end = self.agreement(node) is Agreement.AGREES and node not in starts
            return [] if is_end else self.inputs(node)

        return sorted(walk_from(starts, onwards), key=abs)

    def is_tainted(self, node: Node) -> bool:
        """Whether a call reads what differs already, or what one run alone makes."""
        for each in sorted(walk_from([node], lambda at: [] if at in self._tainted else self.inputs(at)), key=abs):
            if each not in self._tainted:
                self._tainted[each] = any(map(self._carries, self.inputs(each)))
        return self._tainted[node]

    def _carries(self, node: Node) -> bool:
        agreement = self.agreement(node)
        if agreement is Agreement.AGREES:
            return False
        return agreement is Agreement.DIFFERS or self.is_alone(node) or self._tainted.get(node, False)

    def _origins(self, nodes: Sequence[Node]) -> list[Node]:
        """Returns the calls of the accumulated run that differ, and read nothing that differs already."""
        alone = [at for at in nodes if self._differs_by_itself(at) and not self.is_tainted(at)]
        candidates = set(alone)
        return [at for at in alone if not any(self._reads_another(each, candidates) for each in self._beside(at))]

    def _reads_another(self, node: Node, candidates: Collection[Node]) -> bool:
        """Whether a call depends on a candidate that is another call.

        A value that each micro-batch computes from that of the one before, as a moving average, depends on itself.
        """
        full = self._places[node][0]
        behind = self.trace_back(self.inputs(node)) if self.is_tainted(node) else []
        return any(self._places[at][0] != full for at in behind if at in candidates)

    def _differs_by_itself(self, node: Node) -> bool:
        """Whether a call differs, or cannot be compared and is given another number."""
        if self.agreement(node) is not Agreement.UNKNOWN or node not in self._places:
            return self.agreement(node) is Agreement.DIFFERS
        return self._is_given_number(node)

    def _is_given_number(self, node: Node) -> bool:
        return self._computes(node) and bool(self.comparison.numbers(self._places[node][0]))

    def _beside(self, node: Node) -> list[Node]:
        """Returns the calls of all micro-batches, for a result without rows: any of them may keep it from adding up."""
        full, _ = self._places[node]
        return [] if self.comparison.rows_of(full) else [-1 - at for at in self.comparison.partners[full].calls]

    def find(self) -> Found | None:
        """Returns the first difference; None where nothing that can be compared differs."""
        comparison = self.comparison
        roots = list(self._roots[0]), [-1 - at for at in self._roots[1]]
        in_micro = self.trace_back(roots[1])
        origins = self._origins(in_micro)
        alone = [at for at in (*self.trace_back(roots[0]), *in_micro) if self.is_alone(at) and not self.is_tainted(at)]
        alone = [at for at in alone if not self._only_scales(at)]
        first_alone = min(alone, key=self._time_of, default=None)
        if first_alone is not None and (not origins or self._time_of(first_alone) < self._time_of(origins[0])):
            return self._branch(first_alone)
        if origins:
            decisions = (self._decision_before(at) for at in (origins[0], *self._beside(origins[0])))
            decision = next(filter(None, decisions), None)
            if decision is not None:
                return decision
            comparable = (at for at in origins if self._is_given_number(at) or not self._is_padded(at))
            origin = next(comparable, None)
            kind = DifferenceKind.AFTER_PASSES if self._after_passes else DifferenceKind.VALUES
            return None if origin is None else self._describe(origin, kind)
        if self._after_passes:
            return None
        micro = [-1 - at for at in range(len(comparison.micro))]
        hooks = [at for at in micro if comparison.call(at)["in_backward"] and comparison.call(at)["name"] != INPUT]
        origin = next(iter(self._origins(hooks)), None)
        if origin is not None:
            return self._describe(origin, DifferenceKind.BACKWARD)
        return next(self._changes_between_passes(micro), None)

    def _decision_before(self, node: Node) -> Found | None:
        """Returns the last decision before a call that is given what another line made than in the full-batch run."""
        full, part = self._places[node]
        full_args, micro = self.comparison.call(full)["arguments"], self.comparison.call(node)["arguments"]
        paths = [
            path
            for path, at in micro.items()
            if self._places.get(-1 - at, (full_args.get(path),))[0] != full_args.get(path)
        ]
        if not paths or self._state_behind(node) is not None:
            return None
        decisions = [
            (at, each)
            for each, partners in self.comparison.partners.items()
            if partners.is_split and part in partners.parts
            for at in [partners.calls[partners.parts.index(part)]]
            if at < -1 - node and self._decides_otherwise(each)
        ]
        return self._describe_branch(max(decisions)[1], None) if decisions else None

    def _is_padded(self, node: Node) -> bool:
        """Whether a call reads rows of other lengths than in the full batch, which cannot be compared."""
        for source in self._sources(node):
            for full, micro in zip(
                self.comparison.call(source)["results"], self.comparison.micro_calls(source)[0]["results"], strict=False
            ):
                if full is None or micro is None or len(full["shape"]) != len(micro["shape"]):
                    continue
                if math.prod(full["shape"]) == math.prod(micro["shape"]):  # as many numbers in another shape
                    continue
                rows, places = self.comparison.parts[0]
                changed = [(a, b) for a, b in zip(full["shape"], micro["shape"], strict=True) if a != b]
                if len(changed) > 1 and any(a * len(places) != b * rows for a, b in changed):
                    return True
        return False

    def _changes_between_passes(self, micro: Sequence[Node]) -> Iterator[Found]:
        last = len(self.comparison.parts)
        for node in micro:
            call = self.comparison.call(node)
            if call["changes_gradient"] and 0 < call["passes"] + call["in_backward"] < last:
                difference = FirstDifference(DifferenceKind.BETWEEN_PASSES, self._operation(node))
                yield Found(difference, node, None)

    def _only_scales(self, node: Node) -> bool:
        """Whether a call multiplies a number, as the division of a loss by K does, which one run may leave out."""
        call = self.comparison.call(node)
        is_number = all(result is not None and math.prod(result["shape"]) == 1 for result in call["results"])
        return is_number and call["name"].rpartition(".")[2] in _SCALING

    def _time_of(self, node: Node) -> tuple[int, int]:
        """When a call is made in the accumulated run; one of the full-batch run alone behind the call before it."""
        if node < 0:
            return -node, 0
        for at in range(node, -1, -1):
            partners = self.comparison.partners.get(at)
            if partners is not None and at != node:
                return partners.calls[0] + 1, 1
        return 0, 1

    def _branch(self, node: Node) -> Found | None:
        """Returns the branch that decides whether a call is made; None where no line does."""
        comparison = self.comparison
        call = comparison.call(node)
        line = next((test for place in call["lines"] if (test := deciding_line(place, self._lines_of_runs))), None)
        if line is None:
            return None
        decision = next(self._decisions(line), None)
        return self._describe_branch(node if decision is None else decision, line)

    def _describe_branch(self, node: Node, line: Place | None) -> Found:
        """Returns the branch at a line, or at that of the call which reads the number that decides."""
        call = self.comparison.call(node)
        operation = self._operation(node)
        if line is not None:
            operation = replace(operation, file=display_path(line[0]), line=line[1], source=_source_of(line))
        parts: tuple[int, ...] = ()
        if call["value"] is not None and node >= 0:
            values = [each["value"] for each in self.comparison.micro_calls(node)]
            parts = tuple(part for part, value in enumerate(values) if value != call["value"])
        difference = FirstDifference(DifferenceKind.BRANCH, operation, in_model=call["module"] is not None)
        return Found(replace(difference, micro_batches=parts), node, None)

    def _decides_otherwise(self, node: Node) -> bool:
        value = self.comparison.call(node)["value"]
        values_of_parts = [each["value"] for each in self.comparison.micro_calls(node)]
        is_decision = self.comparison.call(node)["name"].endswith("__bool__")
        return is_decision and value is not None and any(each != value for each in values_of_parts)

    def _decisions(self, line: Place) -> Iterator[Node]:
        """Yields the calls that read another number in some micro-batches, where a condition stands."""
        lines = test_lines(line)
        for node, partners in self.comparison.partners.items():
            call = self.comparison.call(node)
            value, (file, number) = call["value"], call["place"]
            if value is None or file != line[0] or number not in lines or not partners.is_split:
                continue
            if any(each["value"] != value for each in self.comparison.micro_calls(node)):
                yield node

    @cached_property
    def _lines_of_runs(self) -> list[frozenset[Place]]:
        """The user's lines of the full-batch run, and of each backward pass of the accumulated run."""
        full = frozenset(line for call in self.comparison.full for line in call["lines"])
        by_pass: dict[int, set[Place]] = {}
        for call in self.comparison.micro:
            by_pass.setdefault(call["passes"], set()).update(call["lines"])
        count = len(self.comparison.parts)
        return [full, *(frozenset(lines) for at, lines in by_pass.items() if at < count)]

    def _describe(self, node: Node, kind: DifferenceKind) -> Found:
        comparison = self.comparison
        full, _ = self._places[node]
        call = comparison.call(full)
        rows = comparison.rows_of(full)
        differing = [part for part in comparison.partners[full].parts if self._differs(full, part)]
        ratios: tuple[float, ...] = ()
        difference, samples = math.nan, 0
        if rows and len(rows) == len(comparison.partners[full].parts):
            ratios = tuple(float(b[..., 2].norm() / a[..., 2].norm().clamp_min(TINY)) for a, b in rows)
            difference, samples = self._compare_rows(rows)
        sources = [at for at in self._sources(node) if at >= 0]
        number, assigned = self._number_of(full)
        state = self._state_behind(node) if number is None else None
        reader, path, writer = state or (full, "", full)
        kind = kind if not path else DifferenceKind.STATE
        difference_found = FirstDifference(
            kind,
            self._operation(writer),
            self._operation(reader) if path else None if rows else self._reader_of(full),
            comparison.name_of(reader, path),
            in_model=call["module"] is not None,
            sources=tuple(self._operation(at) for at in sources),
            difference=difference,
            samples=samples,
            ratios=ratios,
            micro_batches=tuple(differing),
            number=number,
            assigned=assigned,
        )
        handed = self._find_handed(full) if kind is DifferenceKind.VALUES and not _is_state(difference_found) else []
        rows_of_maker = comparison.rows_of(handed[0].maker) if handed else []
        if rows_of_maker and not samples:  # it is made of several lines, and only in the last one it has rows
            difference, samples = self._compare_rows(rows_of_maker)
            difference_found = replace(difference_found, difference=difference, samples=samples)
        return Found(difference_found, full, next(iter(sources), None), tuple(handed))

    def _compare_rows(self, rows: Sequence[RowPair]) -> tuple[float, int]:
        """Returns the largest relative difference of rows, and how many differ."""
        a, b = (torch.cat(side).flatten(1) for side in zip(*rows, strict=True))
        each = (a - b).abs().amax(1) / a.abs().max().clamp_min(TINY)
        return float(each.max()), int((each > self.comparison.allowed).sum())

    def _left_behind(self, full: Node) -> Iterator[tuple[str, Node]]:
        """Yields arguments that an earlier micro-batch made, and of which the full-batch run has none, or another."""
        comparison = self.comparison
        partners = comparison.partners[full]
        for at, part in zip(partners.calls, partners.parts, strict=False):
            for path, maker in comparison.micro[at]["arguments"].items():
                making_call, in_full = comparison.micro[maker], comparison.call(full)["arguments"].get(path)
                full_maker, other_part = self._places.get(-1 - maker, (None, making_call["passes"]))
                # what is made once, before all micro-batches, is left by none of them
                is_split = full_maker is None or comparison.partners[full_maker].is_split
                is_earlier = is_split and other_part < part and making_call["name"] not in (INPUT, PARAMETER)
                if is_earlier and full_maker != in_full:
                    yield path, -1 - maker

    def _state_behind(self, node: Node) -> tuple[Node, str, Node] | None:
        """Returns the call at or behind one that reads what an earlier micro-batch left, with argument and maker."""
        full, _ = self._places[node]
        calls = [full, *(self._places[at][0] for at in self.trace_back(self.inputs(node)) if at in self._places)]
        left_values = ((each, *left) for each in dict.fromkeys(calls) for left in self._left_behind(each))
        return next(left_values, None)

    def _differs(self, full: Node, part: int) -> bool:
        return self.comparison.agreement_of_part(full, part) is Agreement.DIFFERS

    def _operation(self, node: Node) -> Operation:
        call = self.comparison.call(node)
        # a reader can change the own line that leads into a library
        place = next(iter(call["lines"]), call["place"])
        inside = display_path(call["place"][0])
        return Operation(
            call["name"].removeprefix("torch."),
            call["module"],
            file=display_path(place[0]),
            line=place[1],
            source=_source_of(place),
            caller="" if tuple(place) == tuple(call["place"]) else f"{inside}:{call['place'][1]}",
        )

    def _sources(self, node: Node) -> list[Node]:
        """Returns the calls behind one that read what agrees, and that return other shapes, or sums."""
        behind = self.trace_back(self.inputs(node))
        origins = []
        for each in behind:
            inputs = self.inputs(each)
            is_first = bool(inputs) and all(self.agreement(at) is Agreement.AGREES for at in inputs)
            if is_first and self.agreement(each) is not Agreement.AGREES and each in self._places:
                origins.append(self._places[each][0])
        return list(dict.fromkeys(origins))

    def _reader_of(self, full: Node) -> Operation | None:
        """Returns the first call that reads a result without rows, at another line; None where there is none."""
        readers = (at for at, call in enumerate(self.comparison.full) if full in call["arguments"].values())
        reading_operations = (self._operation(at) for at in readers)
        place = self._operation(full).place[2:]
        return next((operation for operation in reading_operations if operation.place[2:] != place), None)

    def _number_of(self, full: Node) -> tuple[DifferingNumber | None, tuple[Operation, ...]]:
        """Returns the first number of a call that differs, and the lines that assign what it is computed from."""
        for path, number, numbers in self.comparison.numbers(full):
            name = self.comparison.name_of(full, path)
            return DifferingNumber(name, number, tuple(numbers)), assigning_lines(self.comparison, full, name)
        return None, ()

    def _find_handed(self, origin: Node) -> list[HandedValue]:
        """Returns the arguments by which a call without gradient reaches what is differentiated."""
        comparison = self.comparison
        if comparison.call(origin)["graded"]:
            return []
        found_values = []
        for node in self.trace_back(comparison.roots[0]):
            call, partners = comparison.call(node), comparison.partners.get(node)
            if not call["graded"] or partners is None or not partners.is_split:
                continue
            for path, maker in call["arguments"].items():
                readings = [each["arguments"].get(path) for each in comparison.micro_calls(node)]
                makers = [-1 - at for at in readings if at is not None]
                is_plain = not any(comparison.call(each)["graded"] for each in (maker, *makers))
                if is_plain and any(self._leads_to(each, origin) for each in makers):
                    found_values.append(HandedValue(node, path, maker))
        return found_values

    def _leads_to(self, node: Node, origin: Node) -> bool:
        """Whether a call of the accumulated run returns what a call, or what another one makes of it."""
        return any(self._places.get(at, (None, 0))[0] == origin for at in self.trace_back([node]))

    def value_of(self, found: Found) -> LossValue | None:
        """Returns what the first handed value is called, who reads it, and how it differs; None where there is none."""
        if not found.handed:
            return None
        value, difference = found.handed[0], found.difference
        names = (self.comparison.name_of(found.node, path) for path in self.comparison.call(found.node)["arguments"])
        return LossValue(
            self.comparison.name_of(value.reader, value.path) or next(filter(None, names), ""),
            self._operation(value.reader),
            difference.samples > 0 and not self._computes(found.node) and self._are_reordered(value.maker),
            difference.number,
            difference.assigned,
        )

    def _computes(self, node: Node) -> bool:
        """Whether a call makes new values: those of ranks, for one, may be among the full batch's."""
        return self.comparison.call(node)["name"].rpartition(".")[2] in _ARITHMETIC

    def _are_reordered(self, node: Node) -> bool:
        """Whether the micro-batches hold the full batch's values at other rows; not known where these are alike."""
        rows = self.comparison.rows_of(node)
        if not rows:
            return False
        full, micro = (torch.cat(side).flatten(1) for side in zip(*rows, strict=True))
        scale = full.abs().max().clamp_min(TINY)
        among_themselves = torch.cdist(full, full, p=math.inf).fill_diagonal_(math.inf).amin(1) / scale
        to_nearest = torch.cdist(micro, full, p=math.inf).amin(1) / scale
        return float(to_nearest.max()) <= self.comparison.allowed < float(among_themselves.min())

    def acts_on_rows(self, found: Found) -> bool:
        """Whether a call differs because rows of a micro-batch act on each other, and not by what it is given."""
        return found.difference.kind is DifferenceKind.VALUES and self.comparison.acts_on_rows(found.node)

    def pins_of(self, found: Found) -> tuple[PinnedCall, ...]:
        """Returns the calls that a control gives the full batch's value; empty where there is no such control."""
        comparison, kind = self.comparison, found.difference.kind
        if kind is DifferenceKind.BRANCH:
            return self._pin(found.node, [RESULT]) if comparison.call(found.node)["value"] is not None else ()
        if kind is DifferenceKind.AFTER_PASSES:
            return self._pin_after_passes(found)
        if kind not in (DifferenceKind.VALUES, DifferenceKind.STATE, DifferenceKind.BACKWARD):
            return ()
        paths = list(dict.fromkeys(path for path, _ in self._left_behind(found.node)))
        if paths and comparison.rows_of(found.node):
            return self._pin(found.node, paths)
        if handed := found.handed:
            readers = dict.fromkeys(each.reader for each in handed)
            paths_of = {reader: [each.path for each in handed if each.reader == reader] for reader in readers}
            return tuple(pin for reader, paths in paths_of.items() for pin in self._pin(reader, paths))
        if found.difference.number is not None:
            return self._pin(found.node, [path for path, _, _ in comparison.numbers(found.node)])
        maker = found.node if found.source is None or kind is DifferenceKind.STATE else found.source
        return () if maker in comparison.roots[0] else self._pin_readers([maker])

    def _pin_readers(self, makers: Sequence[Node]) -> tuple[PinnedCall, ...]:
        """Returns the calls that read the results of some calls; behind the passes those of the whole update alone."""
        pins: list[PinnedCall] = []
        for node in range(min(makers) + 1, len(self.comparison.full)):
            call = self.comparison.full[node]
            paths = [path for path, at in call["arguments"].items() if at in makers]
            if paths and (not self._after_passes or self._is_once(node)):
                pins += self._pin(node, paths)
        return tuple(pins)

    def _pin_after_passes(self, found: Found) -> tuple[PinnedCall, ...]:
        # a loop over parameters makes the calls of a line once for each
        key = key_of(self.comparison.call(found.node))
        nodes = [at for at, call in enumerate(self.comparison.full) if key_of(call) == key]
        if found.difference.number is not None:
            paths = [path for path, _, _ in self.comparison.numbers(found.node)]
            return tuple(pin for node in nodes for pin in self._pin(node, paths))
        # also what else is computed from the last micro-batch's numbers
        nodes += self._numbers_of_last(nodes)
        return self._pin_readers(nodes) if all(map(self._leaves_gradients, nodes)) else ()

    def _is_once(self, node: Node) -> bool:
        """Whether both runs make a call once per update."""
        partners = self.comparison.partners.get(node)
        return partners is not None and not partners.is_split

    def _numbers_of_last(self, nodes: Sequence[Node]) -> list[Node]:
        """Returns the calls of every micro-batch whose numbers, as its loss, some calls after the passes read."""
        makers = dict.fromkeys(at for node in nodes for at in self.comparison.call(node)["arguments"].values())
        split = [at for at in makers if at in self.comparison.partners and not self._is_once(at)]
        return [
            at
            for at in split
            if all(result is not None and not result["shape"] for result in self.comparison.call(at)["results"])
        ]

    def _leaves_gradients(self, maker: Node) -> bool:
        """Whether all changes of gradients after the last pass still depend on the passes if a result is replaced."""

        def onwards(node: Node) -> list[Node]:
            return [at for at in self.inputs(node) if at != maker]

        edits = [at for at in self._roots[0] if at == maker or maker in walk_from([at], self.inputs)]
        return all(any(self.comparison.call(at)["is_gradient"] for at in walk_from([edit], onwards)) for edit in edits)

    def _pin(self, node: Node, paths: Sequence[str]) -> tuple[PinnedCall, ...]:
        call, partners = self.comparison.call(node), self.comparison.partners.get(node)
        # what is done once per update, after all passes, is no part of a micro-batch
        is_once = self._after_passes and self._is_once(node)
        if partners is None or (len(partners.parts) < len(self.comparison.parts) and not is_once):
            return ()
        where, module = call["place"], call["module"]
        paths = tuple(paths)
        calls_before = partners.in_full if is_once else partners.once
        return (PinnedCall(call["name"], *where, partners.in_full, call["number"], paths, module, calls_before),)


def _source_of(place: Place) -> str:
    return linecache.getline(*place).strip()


def _replace_value(difference: FirstDifference, value: LossValue | None, change: PinArguments) -> Intervention:
    """Returns the intervention that gives every micro-batch the full batch's value at the first difference."""
    number = difference.number
    sources = difference.sources if difference.kind is not DifferenceKind.AFTER_PASSES else ()
    what = f"the result of `{(sources or (difference.operation,))[0].source}` replaced by the full batch's"
    kind = ControlKind.RESULT_PINNED
    if _is_state(difference):
        name = difference.name or (number.name if number is not None else "")
        what = f"value of {f'`{name}`' if name else 'that state'} taken from the full batch"
    elif difference.kind is DifferenceKind.BRANCH:
        what, kind = "the full batch's decision taken in every micro-batch", ControlKind.DECISIONS
    elif value is not None:
        what = f"{f'`{value.name}`' if value.name else 'that value'} replaced by the full batch's for the same rows"
    elif number is not None:
        what = f"{f'`{number.name}`' if number.name else 'that number'} replaced by the full batch's"
    return Intervention(what, kind, changes=(change,))


def _with_cause(
    record: Record, found: FirstDifference, handed: LossValue | None, explained: float, *, is_meeting: bool
) -> Record:
    """Returns the record with a first difference as its cause.

    Args:
        record: The facts so far.
        found: The difference.
        handed: The value that it reaches the loss by, if that has no gradient.
        explained: The share of the gradients' difference that went away with it.
        is_meeting: Whether samples act on each other there.
    """
    control, number, operation = found.control, found.number, found.operation
    if control is None or found.kind is DifferenceKind.BACKWARD:
        return record  # judged by what was found
    controls = replace(record.controls, coupling=() if control.proves else record.controls.coupling)
    if _is_state(found):
        name = found.name or (number.name if number is not None else "") or operation.source
        where = found.assigned[0] if len(found.assigned) == 1 else operation
        change = StateChange(name, "attribute" if "." in name else "closure", replace(where, name=""))
        return replace(record, controls=replace(controls, state=State((change,), control, (change,))))
    source = next(iter(found.sources), None)
    kind = "control-flow" if found.kind is DifferenceKind.BRANCH else "rows" if is_meeting else "values"
    name = number.name if number is not None else ""
    value = handed or LossValue(name, operation, made_with=number, assigned=found.assigned)
    measured = 1.0 if math.isnan(found.difference) else found.difference
    suspect = Suspect(
        kind,  # type: ignore[arg-type]
        operation,
        source,
        measured,
        found.samples,
        found.in_model,
        False,
        value=value if kind == "values" else None,
    )
    # a value without gradient is the same constant in both runs: to give it to the micro-batches repairs the script
    is_repair = kind == "rows" and handed is not None and control.rounding
    remedies = (replace(control, kind=ControlKind.FULL_BATCH_VALUE),) if is_repair else ()
    cause = Cause(suspect, control, remedies, explained)
    return replace(record, controls=replace(controls, coupling=(*controls.coupling, cause)))


def _is_state(found: FirstDifference) -> bool:
    """Whether one known line changes what both runs read otherwise, which outlives the function that reads it."""
    number, place = found.number, (found.operation.file or "", found.operation.line or 0)
    is_kept_number = number is not None and bool(number.name) and is_kept(number.name, place)
    return found.kind is DifferenceKind.STATE or (is_kept_number and len(found.assigned) == 1)
