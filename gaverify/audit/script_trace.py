"""Compares the calls of torch that a script's own code made in both runs, and finds where values first differ.

Walked back from what is differentiated, in both runs at once, and not behind calls whose results agree row by row. The
first call that differs, and reads nothing that differs, is where a fault begins. A sum over the batch that adds up says
nothing of its addends, and rows of zeros say nothing of their factors: the walk goes on behind them.

Shapes: n rows of a micro-batch, which lie at n places among the N rows of the full batch; K micro-batches.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from gaverify.audit.reading import RecordedRun
from gaverify.audit.recording.script_calls import (
    PARAMETER,
    CallKey,
    Description,
    PlacesOfPart,
    ScriptTrace,
    TracedCall,
    locate_rows,
)
from gaverify.audit.source_lines import assignments_of
from gaverify.passes.calls import walk_from
from gaverify.records.experiment import Operation
from gaverify.thresholds import COMPUTED_FLOAT32, TINY
from gaverify.tracebacks import display_path

Node = int
"""A call of the full-batch run by its position; -1 - position for one that the accumulated run alone makes."""


RowPair = tuple[torch.Tensor, torch.Tensor]
"""Fingerprints of the same rows in both runs."""


class Agreement(Enum):
    """How the results of a call in the accumulated run are related to the full batch's."""

    AGREES = "the same values for the same rows"
    ADDS_UP = "a number of each micro-batch, whose sum or mean is the full batch's"
    DIFFERS = "other values"
    UNKNOWN = "of shapes that cannot be compared, or zero"


def read_trace(run: RecordedRun) -> ScriptTrace | None:
    """Returns the trace of a run; None where it left none."""
    path = run.folder / "trace.pt"
    return torch.load(path, weights_only=True) if path.exists() else None


@dataclass(frozen=True)
class Partners:
    """The calls of the accumulated run that correspond to one of the full-batch run."""

    calls: tuple[int, ...]
    """Their positions."""
    parts: tuple[int, ...]
    """The micro-batch of each; not all of them where a branch leaves the call out."""
    is_split: bool
    """Whether there is one for each micro-batch; else it is made once per update in both runs."""
    in_full: int
    """How often the full-batch run makes the call in an update."""
    once: int = 0
    """How many of these both runs make once per update, before those of micro-batches."""


class TraceComparison:
    """The traces of both runs, aligned.

    Calls of one name and line correspond in their order, if the accumulated run has as many as the full-batch run, or K
    times as many.

    Args:
        full: The trace of the full-batch run.
        accumulated: That of the accumulated run.
        parts: Which rows of the full batch each micro-batch holds.
        allowed: The relative difference that rounding may leave between fingerprints.
    """

    def __init__(
        self, full: ScriptTrace, accumulated: ScriptTrace, parts: Sequence[PlacesOfPart], allowed: float
    ) -> None:
        self.full, self.micro, self.parts, self.allowed = full["calls"], accumulated["calls"], tuple(parts), allowed
        self.roots = full["roots"], accumulated["roots"]
        self._passes = accumulated["passes"]
        self.edits = _edits_in(full), _edits_in(accumulated)
        """Calls that write to gradients after the last backward pass, in both runs."""
        self.partners = dict(self._align())
        self._nodes = {micro: at for at, partners in self.partners.items() for micro in partners.calls}
        self._parts_compared: dict[tuple[Node, int], Agreement] = {}
        self._agreements: dict[Node, Agreement] = {}

    def _align(self) -> Iterator[tuple[int, Partners]]:
        places: list[dict[CallKey, list[int]]] = [{}, {}]
        for by_key, calls in zip(places, (self.full, self.micro), strict=True):
            for at, call in enumerate(calls):
                by_key.setdefault(key_of(call), []).append(at)
        count = len(self.parts)
        for key, in_full in places[0].items():
            in_micro = places[1].get(key, [])
            calls_before = self._count_once(in_full, in_micro)
            for position, at in enumerate(in_full):
                if calls_before is not None and position < calls_before:
                    yield at, Partners((in_micro[position],), (), False, len(in_full))
                elif calls_before is not None:
                    split = in_micro[position:][:: len(in_full) - calls_before]
                    yield at, Partners(tuple(split), tuple(range(count)), True, len(in_full), calls_before)
                elif self._passes == count:
                    by_pass = [[each for each in in_micro if self.micro[each]["passes"] == k] for k in range(count)]
                    parts = tuple(part for part, each in enumerate(by_pass) if len(each) == len(in_full))
                    if parts:
                        yield at, Partners(tuple(by_pass[part][position] for part in parts), parts, True, len(in_full))

    def _count_once(self, in_full: Sequence[int], in_micro: Sequence[int]) -> int | None:
        """Returns how many calls of a name and line both runs make once per update, before those of micro-batches.

        None where the numbers of calls fit no such loop: a branch leaves some of them out.
        """
        count = len(self.parts)
        if count < 2:
            return len(in_full) if len(in_full) == len(in_micro) else None
        calls_before, remainder = divmod(count * len(in_full) - len(in_micro), count - 1)
        if remainder or not 0 <= calls_before <= len(in_full):
            return None
        is_seen = self._passes == count and calls_before == len(in_full)
        # A call that one micro-batch makes is as frequent as one that is made for the whole batch.
        is_late = all(self.micro[each]["passes"] == count for each in in_micro)  # no micro-batch makes it
        if (
            is_seen
            and not is_late
            and not all(_has_as_many(self.full[a], self.micro[b]) for a, b in zip(in_full, in_micro, strict=True))
        ):
            return None
        return calls_before

    def call(self, node: Node) -> TracedCall:
        """Returns the call of a node."""
        return self.full[node] if node >= 0 else self.micro[-1 - node]

    def micro_calls(self, node: Node) -> list[TracedCall]:
        """Returns the calls of the accumulated run that correspond to a node."""
        return [self.micro[at] for at in self.partners[node].calls] if node in self.partners else []

    def inputs(self, node: Node) -> set[Node]:
        """Returns the calls that a call reads in either run."""
        call_of_node = self.call(node)
        makers = {*call_of_node["arguments"].values(), *call_of_node["read"]} if node >= 0 else set()
        for call in self.micro_calls(node) if node >= 0 else [call_of_node]:
            makers |= {self._node_of(at) for at in (*call["arguments"].values(), *call["read"])}
        return makers - {node}

    def _node_of(self, at: int) -> Node:
        return self._nodes.get(at, -1 - at)

    def name_of(self, node: Node, path: str) -> str:
        """Returns the script's variable that holds an argument in both runs; empty where there is none."""
        first, *other_names = (call["names"].get(path, []) for call in (self.call(node), *self.micro_calls(node)))
        return next((name for name in first if all(name in names for names in other_names)), "")

    def acts_on_rows(self, node: Node) -> bool:
        """Whether a call differs because rows of a micro-batch act on each other: all that it reads agrees.

        It reads rows of the micro-batch, and beside them nothing that holds the rows of others.
        """
        calls = self.micro_calls(node)
        full_call = self.call(node)
        if not calls or not self.partners[node].is_split or any(self._other_numbers(full_call, call) for call in calls):
            return False
        sources = set(walk_from(self.inputs(node), lambda each: () if self._is_settled(each) else self.inputs(each)))
        settled = [each for each in sources if self._is_settled(each)]
        if not settled or any(not self.inputs(each) and each not in settled for each in sources):
            return False
        return any(self._has_rows(each) for each in settled) and not any(map(self._holds_other_rows, settled))

    def _is_settled(self, node: Node) -> bool:
        return node >= 0 and self.agreement(node) is Agreement.AGREES

    def _has_rows(self, node: Node) -> bool:
        """Whether the results of a call that agrees have one entry for each row of the micro-batch."""
        full, micro = self._shapes(node)
        return not full <= micro

    def _holds_other_rows(self, node: Node) -> bool:
        """Whether a call may return rows that are not the micro-batch's: it is made once per update, for all rows."""
        full, micro = self._shapes(node)
        is_made_once = not self.partners[node].is_split or len(self.parts) == 1
        return is_made_once and any(math.prod(shape) > 1 for shape in full & micro)

    def _shapes(self, node: Node) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
        """Returns the shapes of a call's results in the full-batch run, and in the accumulated run."""
        full, *micro = (
            {result["shape"] for result in call["results"] if result is not None}
            for call in (self.call(node), *self.micro_calls(node))
        )
        return full, set().union(*micro)

    def numbers(self, node: Node) -> list[tuple[str, float, list[float]]]:
        """Returns the Python numbers of a call that differ: their path, the full batch's, the micro-batches'."""
        full_call, calls = self.call(node), self.micro_calls(node)
        differing = []
        for path, number in full_call["numbers"].items():
            numbers = [call["numbers"].get(path, number) for call in calls]
            if any(each != number for each in numbers):
                differing.append((path, number, numbers))
        return differing

    def changing(self, node: Node) -> list[str]:
        """Returns the attributes and entries whose numbers change from one micro-batch to the next before a call."""
        numbers_held = [call["held"] for call in self.micro_calls(node)]
        names = [name for name in numbers_held[0] if all(name in each for each in numbers_held)] if numbers_held else []
        return [name for name in names if len({each[name] for each in numbers_held}) > 1]

    def _other_numbers(self, own: TracedCall, call: TracedCall) -> bool:
        # A number that was read out of a tensor is an input of the call like any other.
        return own["numbers"] != call["numbers"] and not (own["read"] and call["read"])

    def rows_of(self, node: Node) -> list[RowPair]:
        """Returns the fingerprints of a call's rows, of the full batch and of each micro-batch; empty without rows."""
        calls = self.micro_calls(node)
        if not calls or not self.partners[node].is_split:
            sides = [call["results"] for call in (self.call(node), *calls)]
            described = [[each for each in side if each is not None] for side in sides]
            rows = _rows_of_lists(*described) if len(described) > 1 else None
            return [rows] if rows else []
        parts = self._parts_of(node)
        for position, result in enumerate(self.full[node]["results"]):
            pairs = [_rows(result, _result(call, position), part) for call, part in zip(calls, parts, strict=True)]
            if all(pair is not None for pair in pairs):
                return [pair for pair in pairs if pair is not None]
        return []

    def agreement(self, node: Node) -> Agreement:
        """Returns how the results of a call are related."""
        if node not in self._agreements:
            self._agreements[node] = self._compare(node)
        return self._agreements[node]

    def agreement_of_part(self, node: Node, part: int) -> Agreement:
        """Returns how the results of a call for one micro-batch are related to the full batch's."""
        agreement = self.agreement(node)
        if agreement not in (Agreement.DIFFERS, Agreement.ADDS_UP) or not self.partners[node].is_split:
            return agreement
        if (node, part) not in self._parts_compared:
            partners = self.partners[node]
            call, places = self.micro[partners.calls[partners.parts.index(part)]], self.parts[part]
            full_value, value = self.full[node]["value"], call["value"]
            agreements = {
                self._compare_alone(result, _result(call, position), places)
                for position, result in enumerate(self.full[node]["results"])
            }
            if full_value is not None and value is not None:
                agreements = {Agreement.AGREES if _is_same_number(full_value, value) else Agreement.DIFFERS}
            is_same = _worst(agreements) is Agreement.AGREES
            self._parts_compared[node, part] = Agreement.AGREES if is_same else agreement
        return self._parts_compared[node, part]

    def _compare_alone(self, full: Description | None, micro: Description | None, part: PlacesOfPart) -> Agreement:
        if full is None or micro is None:
            return Agreement.UNKNOWN
        if not float(full["whole"][2]) and not float(micro["whole"][2]):
            return Agreement.AGREES  # zeros, of which every row is the same
        if full["shape"] == micro["shape"]:
            return self._judge(full["whole"][None], micro["whole"][None])
        rows = _rows(full, micro, part)
        return Agreement.UNKNOWN if rows is None else self._judge(*rows)

    def _compare(self, node: Node) -> Agreement:
        calls = self.micro_calls(node)
        if self.call(node)["name"] == PARAMETER:
            return Agreement.AGREES
        if not calls:
            return Agreement.UNKNOWN
        results = self.full[node]["results"]
        values = [call["value"] for call in (self.full[node], *calls)]
        if not results and all(value is not None for value in values):
            return self._compare_values([value for value in values if value is not None], self._parts_of(node))
        if not self.partners[node].is_split:
            return self._compare_once(results, calls[0]["results"])
        agreements = {
            self._compare_parts(result, [_result(call, position) for call in calls], self._parts_of(node))
            for position, result in enumerate(results)
        }
        return _worst(agreements)

    def _parts_of(self, node: Node) -> list[PlacesOfPart]:
        return [self.parts[part] for part in self.partners[node].parts]

    def _compare_parts(
        self, full: Description | None, micro: Sequence[Description | None], parts: Sequence[PlacesOfPart]
    ) -> Agreement:
        descriptions = [each for each in micro if each is not None]
        if full is None or len(descriptions) < len(micro):
            return Agreement.UNKNOWN
        if all(each["shape"] == full["shape"] for each in descriptions):
            return self._compare_numbers(full["whole"], torch.stack([each["whole"] for each in descriptions]), parts)
        pairs = [_rows(full, each, part) for each, part in zip(descriptions, parts, strict=True)]
        rows = [pair for pair in pairs if pair is not None]
        if len(rows) < len(pairs):
            return Agreement.UNKNOWN
        return self._judge(torch.cat([a for a, _ in rows]), torch.cat([b for _, b in rows]))

    def _compare_numbers(self, full: torch.Tensor, micro: torch.Tensor, parts: Sequence[PlacesOfPart]) -> Agreement:
        """Compares results of one shape in both runs, micro of shape (K, 3)."""
        agreement = self._judge(full.expand_as(micro), micro)
        if agreement is not Agreement.DIFFERS:
            return agreement
        if len(parts) < len(self.parts):  # some micro-batches have none: nothing tells whether they would add up
            return Agreement.UNKNOWN
        sizes = torch.tensor([len(places) / rows for rows, places in parts], dtype=torch.float64, device="cpu")
        scale = micro[:, 2].max().clamp_min(TINY)
        # Only the two projections are linear in the values; the norm of a sum is no sum of norms.
        for weights in (torch.ones_like(sizes), torch.full_like(sizes, 1 / len(sizes)), sizes):
            if float(((weights @ micro)[:2] - full[:2]).abs().max() / scale) <= self.allowed:
                return Agreement.ADDS_UP
        return Agreement.DIFFERS

    def _compare_values(self, values: Sequence[float], parts: Sequence[PlacesOfPart]) -> Agreement:
        """Compares Python numbers that a call reads out of tensors: the full batch's, then the micro-batches'."""
        full, *micro = values
        if all(_is_same_number(full, each) for each in micro):
            return Agreement.AGREES
        shares = [len(places) / rows for rows, places in parts]
        sums = sum(micro), sum(micro) / len(micro), sum(a * b for a, b in zip(shares, micro, strict=False))
        adds_up = len(micro) == len(self.parts) > 1 and any(_is_same_number(full, each) for each in sums)
        return Agreement.ADDS_UP if adds_up else Agreement.DIFFERS

    def _compare_once(self, full: Sequence[Description | None], micro: Sequence[Description | None]) -> Agreement:
        """Compares what both runs make once per update, such as the whole batch, or its list of micro-batches."""
        ours, theirs = ([each for each in side if each is not None] for side in (full, micro))
        if not ours or len(ours) < len(full) or len(theirs) < len(micro):
            return Agreement.UNKNOWN
        if [each["shape"] for each in ours] == [each["shape"] for each in theirs]:
            pairs = zip(ours, theirs, strict=True)
            agreements = {self._judge(a["whole"][None], b["whole"][None]) for a, b in pairs}
            return next(each for each in (Agreement.DIFFERS, Agreement.UNKNOWN, Agreement.AGREES) if each in agreements)
        if rows := _rows_of_lists(ours, theirs):
            return self._judge(*rows)
        if len(ours) == len(theirs) == 1 and _count(ours[0]) == _count(theirs[0]):  # in another shape
            return self._judge(ours[0]["whole"][None], theirs[0]["whole"][None])
        return Agreement.UNKNOWN

    def _judge(self, full: torch.Tensor, micro: torch.Tensor) -> Agreement:
        scale = torch.maximum(full[..., 2].abs().max(), micro[..., 2].abs().max())
        if not float(scale) > TINY:
            return Agreement.UNKNOWN
        is_same = float((full - micro).abs().max() / scale) <= self.allowed
        return Agreement.AGREES if is_same else Agreement.DIFFERS


def _edits_in(trace: ScriptTrace) -> list[int]:
    calls = enumerate(trace["calls"])
    return [
        at
        for at, call in calls
        if call["changes_gradient"] and call["passes"] == trace["passes"] and not call["in_backward"]
    ]


def key_of(call: TracedCall) -> CallKey:
    """Returns by what a call is found in another run."""
    return CallKey(call["name"], call["place"], call["module"])


def _worst(found: Collection[Agreement]) -> Agreement:
    order = (Agreement.DIFFERS, Agreement.UNKNOWN, Agreement.ADDS_UP, Agreement.AGREES)
    return next((each for each in order if each in found), Agreement.UNKNOWN)


def _is_same_number(full: float, micro: float) -> bool:
    return full == micro or math.isclose(full, micro, rel_tol=COMPUTED_FLOAT32) or (full != full and micro != micro)


def _result(call: TracedCall, position: int) -> Description | None:
    return call["results"][position] if position < len(call["results"]) else None


def _rows_of_lists(full: Sequence[Description], micro: Sequence[Description]) -> RowPair | None:
    """Returns the rows of two lists of tensors, each list in its order; None where they have not as many."""
    if not all(each["along"] for each in (*full, *micro)) or len({each["shape"][1:] for each in (*full, *micro)}) != 1:
        return None
    rows = [torch.cat([each["along"][0] for each in side]) for side in (full, micro)]
    return (rows[0], rows[1]) if rows[0].shape == rows[1].shape else None


def _has_as_many(call: TracedCall, other: TracedCall) -> bool:
    """Whether the results of two calls hold as many numbers: both are of the whole batch then, or of no samples."""
    counts = [sum(_count(result) for result in each["results"] if result is not None) for each in (call, other)]
    return counts[0] == counts[1]


def _count(described: Description) -> int:
    return int(torch.Size(described["shape"]).numel())


def _rows(full: Description | None, micro: Description | None, part: PlacesOfPart) -> RowPair | None:
    """Returns the fingerprints of the same rows in both runs, shape (n, entries, 3) each; None without rows."""
    located = None if full is None or micro is None else locate_rows(full["shape"], micro["shape"], part)
    if full is None or micro is None or located is None:
        return None
    layout, (rows, places) = located
    at, fold = layout.first.at, layout.first.fold
    in_full, in_micro = full["along"][at].reshape(rows, fold, 3), micro["along"][at].reshape(len(places), fold, 3)
    return in_full[list(places)], in_micro


def assigning_lines(comparison: TraceComparison, node: Node, name: str) -> tuple[Operation, ...]:
    """Returns the lines that assign what holds a number which differs at a call, or what it may be computed from.

    Args:
        comparison: The calls of both runs.
        node: The call that is given the number.
        name: The name that holds it; empty where none does.
    """
    call = comparison.call(node)
    files = sorted({line[0] for each in comparison.micro for line in each["lines"]})
    place = next(iter(call["lines"]), call["place"])
    names = dict.fromkeys((*([name] if name else []), *comparison.changing(node)))
    lines = [line for each in names for line in assignments_of(each, place, files)]
    return tuple(
        Operation("assignment", file=display_path(file), line=line, source=linecache.getline(file, line).strip())
        for file, line in dict.fromkeys(lines)
    )
