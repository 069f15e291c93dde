"""Controls for a difference that no weights explain: who gives samples values that depend on their neighbours?

Samples of a micro-batch first part from themselves in the full batch in a module, or in a loss. A loss is looked for at
a level: the script's own code between its models (`SCRIPT`), or the own code of modules that hand out a number. What
comes back from such code to the calls that it makes tells whether samples meet in it.

Shapes: n rows of a micro-batch, which lie at n places among the N rows of a forward of the full-batch run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gaverify.audit.changes import (
    Change,
    DisableCompilation,
    FreezeBuffers,
    PinModules,
    WatchModules,
    WeightMicroBatches,
)
from gaverify.audit.job import Role
from gaverify.audit.outcome import is_explained
from gaverify.audit.rank_facts import compare_weighed_run, gradient_difference
from gaverify.audit.ranks import RankedRun
from gaverify.audit.reading import RecordedRun, labels
from gaverify.audit.recording.outputs import (
    SCRIPT,
    Forward,
    ModuleCall,
    PinnedRows,
    RowSummaries,
    Summaries,
    layout_of_rows,
)
from gaverify.audit.running import Trial
from gaverify.audit.same_data import Matcher
from gaverify.audit.stages import fit_of
from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.events import Backward
from gaverify.records.experiment import Cause, ControlKind, ControlRun, Operation, Suspect, WeightFit, is_constant
from gaverify.records.stages import Stage
from gaverify.records.windows import rounds_of
from gaverify.rules.wording import join_texts
from gaverify.thresholds import COMPUTED_FLOAT32, MANY_UNITS, SMALL_PART, TINY
from gaverify.verdict.criteria import floors_allowed

_DEEPEST = 4  # levels below the script at which a loss is looked for

CallKey = tuple[str, int]
"""Path of a module, and how many calls of it came before in the same forward."""

Pair = tuple[Forward, Forward, Sequence[int]]
"""A forward of the full-batch run, one of a micro-batch, and the places of its rows in the first."""


def pairs_of(full: RecordedRun, accumulated: RecordedRun, update: int = 1) -> list[Pair | None]:
    """Returns every forward of an update of the accumulated run with the one of the full batch that holds its rows.

    None stands for a forward that hands out nothing for each row: a loss that is a module with something to train.
    Empty where the rows of any forward are not found.
    """
    full_forwards, micro_forwards = outputs_of(full), outputs_of(accumulated)
    matcher = Matcher(full.rows(update))
    pairs: list[Pair | None] = []
    counts: Counter[frozenset[str]] = Counter()
    for prints, forward in zip(accumulated.rows(update), micro_forwards, strict=False):
        names = _names(forward)
        among = [at for at, full_forward in enumerate(full_forwards) if _names(full_forward) == names]
        counts[names] += 1
        if not among:
            return []
        if prints:
            spot = matcher.find(among, prints)
            matched = (full_forwards[spot.forward], spot.places) if spot is not None else None
        else:  # the script hands on what other models gave it, in the order of the full batch's forwards
            candidate = full_forwards[among[(counts[names] - 1) % len(among)]]
            places = _places(candidate, forward)
            matched = (candidate, places) if places else None
        if not _hands_out_rows(forward):
            pairs.append(None)
        elif matched is None or len(matched[1]) != forward["rows"]:
            return []
        else:
            pairs.append((matched[0], forward, matched[1]))
    return pairs


def pairs_of_ranks(full: RecordedRun, accumulated: RecordedRun, update: int = 1) -> list[list[Pair | None]]:
    """Returns the pairs of each rank's forwards; none where those of any rank are not found."""
    ranks = accumulated.ranks if isinstance(accumulated, RankedRun) else (accumulated,)
    pairs_by_rank = [pairs_of(full, run, update) for run in ranks]
    for rank, pairs in enumerate(pairs_by_rank):
        # A model is known by its address in each rank's process: by its place among the rank's models in all of them.
        numbers: dict[Any, int] = {}
        for pair in filter(None, pairs):
            forward = pair[1]
            forward["rank"], forward["model"] = rank, numbers.setdefault(forward["model"], len(numbers))
    return pairs_by_rank if all(pairs_by_rank) else []


def outputs_of(run: RecordedRun) -> list[Forward]:
    """Returns what the modules of the update that was listened to gave."""
    path = run.folder / "outputs.pt"
    return torch.load(path, weights_only=True) if path.exists() else []  # type: ignore[no-any-return]


def first_module(pairs: Sequence[Pair | None], unit: float) -> Suspect | None:
    """Returns the first call whose inputs agree row by row and whose outputs do not; None where there is none.

    Calls are in the order in which they end, so that a module comes before the one around it. A call that agrees for
    the first micro-batch and only later parts depends on what was there before, and not on who sits beside a row.
    """
    allowed = difference_allowed(unit)
    parted: dict[tuple[int, CallKey], tuple[float, int, ModuleCall, ModuleCall]] = {}
    agreed_first: set[Any] = set()
    parted_first: set[Any] = set()
    models_seen: set[Any] = set()
    for pair in filter(None, pairs):
        model, rank = pair[1]["model"], pair[1].get("rank", 0)
        first = (rank, model) not in models_seen
        models_seen.add((rank, model))
        for at, full_call, micro_call in calls_of_pair(pair):
            key = model, at
            inputs = _row_differences(pair, full_call["inputs"], micro_call["inputs"])
            outputs = _row_differences(pair, full_call["outputs"], micro_call["outputs"])
            if outputs is None or (inputs is not None and float(inputs.max()) > allowed):
                continue
            difference = float(outputs.max())
            if difference <= allowed:
                agreed_first |= {key} if first else set()
                continue
            parted_first |= {key} if first else set()
            most, samples, _, _ = parted.get(key, (0.0, 0, full_call, micro_call))
            parted[key] = max(most, difference), samples + int((outputs > allowed).sum()), full_call, micro_call
    for key, (difference, samples, call, counterpart) in parted.items():
        if key not in agreed_first - parted_first:
            file, line = first_meeting(call["meetings"], counterpart["meetings"]) or call["place"] or (None, None)
            operation = Operation(call["kind"], call["path"], call["kind"], file=file, line=line)
            return Suspect("rows", operation, None, difference, samples, True, bool(call["scales"]))
    return None


def first_meeting(full_places: Sequence[Any], micro_places: Sequence[Any]) -> tuple[str, int] | None:
    """Returns the first line in which rows of the full batch meet; rather one in which those of a micro-batch do."""
    lines = [tuple(place) for place in full_places]
    shared_lines = [place for place in lines if place in {tuple(line) for line in micro_places}]
    return next(iter([*shared_lines, *lines]), None)  # type: ignore[arg-type]


def levels(forwards: Sequence[Forward], inside: Iterable[str] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the levels at which a loss may stand, from the script inwards to modules that hand out a number.

    Last come the modules from whose own code the loss takes what they leave behind and hand out to nobody.
    """
    level: tuple[str, ...] = (SCRIPT,)
    for _ in range(_DEEPEST):
        yield level
        calls = [call for forward in forwards for call in forward["calls"]]
        level = tuple(dict.fromkeys(call["path"] for call in calls if call["numbers"] and call["under"] in level))
        if not level:
            break
    if left_behind := tuple(dict.fromkeys(inside)):
        yield left_behind


def agree(pairs: Sequence[Pair | None], unit: float, level: Collection[str] = (SCRIPT,)) -> bool:
    """Whether what the calls of a level hand out is the full batch's for every micro-batch, row by row."""
    has_compared = False
    for pair in filter(None, pairs):
        for full_call, micro_call in _under(pair, level):
            differences = _row_differences(pair, full_call["outputs"], micro_call["outputs"])
            if differences is not None and float(differences.max()) > difference_allowed(unit):
                return False
            has_compared = has_compared or differences is not None
    return has_compared


def loss_difference(pairs: Sequence[Pair | None], unit: float, level: Collection[str] = (SCRIPT,)) -> float:
    """Returns what a loss gives back for the rows of a micro-batch against the full batch's, but for one factor.

    Relative to the norm of the latter, for the micro-batch where that is largest; 0 where it is rounding for the first.
    """
    differences = [_difference_left(pair, level) for pair in filter(None, pairs)]
    if not differences or not differences[0] > difference_allowed(unit):
        return 0.0
    return max(differences)


def feels_the_rest(
    full: Sequence[Forward], moved: Sequence[Forward], unit: float, level: Collection[str] = (SCRIPT,)
) -> bool:
    """Whether what the loss gives back for the first half of the rows changes with the values of the other half."""
    for forward, moved_forward in zip(full, moved, strict=False):
        half = range(forward["rows"] // 2)
        if len(half) and _difference_left((forward, moved_forward, half), level) > difference_allowed(unit):
            return True
    return False


def writers_of(pairs: Sequence[Pair | None]) -> dict[str, list[str]]:
    """Returns the buffers that modules write in their own forward, by the path of the module."""
    calls = [call for forward, _, _ in filter(None, pairs) for call in forward["calls"] if call["changed"]]
    return {call["path"]: call["changed"] for call in calls}


def difference_allowed(unit: float) -> float:
    """Returns up to which relative difference the same rows of two runs are the same."""
    return max(COMPUTED_FLOAT32, MANY_UNITS * unit)


def _names(forward: Forward) -> frozenset[str]:
    """The paths in a model; which of its modules are called may hang on the samples (experts)."""
    return frozenset(forward["modules"])


def _hands_out_rows(forward: Forward) -> bool:
    """Whether the outermost module, or one of those that it calls, hands out something with as many rows."""
    inner, rows = {SCRIPT, *(call["path"] for call in forward["calls"] if call["under"] == SCRIPT)}, forward["rows"]
    outputs = [output for call in forward["calls"] if call["under"] in inner for output in call["outputs"].values()]
    return any(size and rows and size % rows == 0 for output in outputs for size in output["shape"][:2])


def _places(full: Forward, micro: Forward) -> tuple[int, ...]:
    """The places of rows that are inputs of an outermost module, found by their projections; empty where they are not.

    Shapes: (n, 1, 3) of the micro-batch against (1, N, 3) of the full batch.
    """
    inputs = [forward["calls"][-1]["inputs"] for forward in (full, micro)]
    for path in inputs[0].keys() & inputs[1].keys():
        a, b = (side[path]["along"][0] for side in inputs)
        if len(a) == full["rows"] and len(b) == micro["rows"]:
            differences = (b[:, None] - a[None]).abs().amax(2) / a[:, 2].abs().max().clamp_min(TINY)
            if float(differences.amin(1).max()) <= COMPUTED_FLOAT32:
                return tuple(differences.argmin(1).tolist())
    return ()


def calls_of_pair(pair: Pair) -> Iterator[tuple[CallKey, ModuleCall, ModuleCall]]:
    """The calls of both forwards that belong together: the how-manieth of a module in each."""
    full_calls = {(call["path"], call["number"]): call for call in pair[0]["calls"]}
    for call in pair[1]["calls"]:
        key = call["path"], call["number"]
        if key in full_calls:
            yield key, full_calls[key], call


def _under(pair: Pair, level: Collection[str]) -> Iterator[tuple[ModuleCall, ModuleCall]]:
    """The calls of both forwards that code of a level makes."""
    for _, full_call, micro_call in calls_of_pair(pair):
        if full_call["under"] in level:
            yield full_call, micro_call


def _row_differences(pair: Pair, full_tensors: Summaries, micro_tensors: Summaries) -> torch.Tensor | None:
    """How far the rows of some tensors are apart, relative to the largest row, shape (n,); None where nothing tells."""
    worst: torch.Tensor | None = None
    for path in full_tensors.keys() & micro_tensors.keys():
        row_pair = rows_of_pair(pair, full_tensors[path], micro_tensors[path])
        if row_pair is None:
            continue
        a, b = row_pair
        scale = a[..., 2].abs().max().clamp_min(TINY)
        differences = ((a - b).abs() / scale).flatten(1).amax(1).nan_to_num(math.inf)
        worst = differences if worst is None else torch.maximum(worst, differences)
    return worst


def _difference_left(pair: Pair, level: Collection[str]) -> float:
    """What one factor leaves between the gradients of the same rows, over all that code of a level takes in."""
    pieces = []
    for full_call, micro_call in _under(pair, level):
        full_gradients, micro_gradients = full_call["gradients"], micro_call["gradients"]
        row_pairs = [
            rows_of_pair(pair, full_gradients[path], micro_gradients[path])
            for path in sorted(full_gradients.keys() & micro_gradients.keys())
        ]
        pieces += [(a[..., :2].flatten(), b[..., :2].flatten()) for a, b in filter(None, row_pairs)]
    if not pieces:
        return 0.0
    a, b = (torch.cat(side) for side in zip(*pieces, strict=True))
    size = float(a.norm())
    factor = (a * b).sum() / b.square().sum().clamp_min(TINY)
    return float((a - factor * b).norm()) / size if size else 0.0


def rows_of_pair(pair: Pair, whole: RowSummaries, part: RowSummaries) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What was kept of the same rows in both forwards, shape (n, entries, 3); None where no dimension holds rows."""
    full, micro, places = pair
    layout = layout_of_rows(whole["shape"], part["shape"], full["rows"], micro["rows"])
    if layout is None:
        return None
    full_rows, micro_rows = (
        side["along"][layout.dimension].reshape(forward["rows"], layout.fold, 3)
        for side, forward in ((whole, full), (part, micro))
    )
    return full_rows[list(places)], micro_rows[: len(places)]


_WITH_STATISTICS = frozenset({"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"})  # names of classes
_MOST = 3  # causes that are looked for behind one another


def find_coupling(trial: Trial, record: Record) -> Record:
    """Returns the record with the modules, or the loss, in which samples act on each other.

    Looked for in the first update that differs, where nothing else explains it: both runs again, with what every module
    gives for each row. Where a module that parts keeps statistics, once more with those modules in evaluation mode.
    """
    update = record.divergent
    ranked = record.ranks > 1
    if update is None or record.unaligned or is_explained(record) or (ranked and record.together is None):
        return record
    bench = CouplingBench(trial, record, update)
    return replace(record, coupling=tuple(_causes(bench)), weighed=bench.weighed)


PairsOfRanks = Sequence[Sequence[Pair | None]]
"""The pairs of each rank."""


@dataclass(frozen=True)
class Pins:
    """What both runs of a control do as the full batch did."""

    frozen: tuple[str, ...] = ()
    """Buffers whose modules run in evaluation mode."""
    modules: tuple[str, ...] = ()
    """Paths of code whose outputs and input gradients are the full batch's."""


@dataclass(frozen=True)
class PinnedRuns:
    """Both runs with something pinned, and their forwards that hold the same rows."""

    pins: Pins
    full: RecordedRun
    accumulated: RecordedRun
    each: list[list[Pair | None]]  # by rank

    @property
    def pairs(self) -> list[Pair | None]:
        """Those of all ranks."""
        return [pair for pairs in self.each for pair in pairs]


class CouplingBench:
    """Runs the script again up to the update that differs, with what the search asks for.

    Args:
        trial: The runs that were compared.
        record: What they show.
        update: The first that differs.
        given_back: What gradients are multiplied by that held code gives back in one process.
    """

    def __init__(self, trial: Trial, record: Record, update: UpdateComparison, given_back: float = 1.0) -> None:
        self._trial, self.record, self.update, self._times = trial, record, update, given_back
        self.weighed: ControlRun | None = None

    def run_both(self, pins: Pins, first: PairsOfRanks = ()) -> PinnedRuns:
        """Makes both runs; the pairs of those in which nothing is pinned tell whose rows are given to which forward."""
        full = self._again("full", pins)
        accumulated = self._run_accumulated(full, pins, first)
        return PinnedRuns(pins, full, accumulated, pairs_of_ranks(full, accumulated, self.update.number))

    def weigh(self, runs: PinnedRuns, fit: WeightFit, first: PairsOfRanks) -> None:
        """Runs the losses times the weights that fit what is left, with the same things pinned."""
        # The weights of several ranks' passes stand side by side, and no run multiplies by those of each rank.
        shares = self._trial.shares(self.record, fit.multipliers) if self.record.ranks == 1 else ()
        if shares:
            control_run = self._run_accumulated(runs.full, runs.pins, first, WeightMicroBatches(shares))
            self.weighed = compare_weighed_run(runs.full, control_run, self.record)

    def _run_accumulated(self, full: RecordedRun, pins: Pins, first: PairsOfRanks, *changes: Change) -> RecordedRun:
        rows = tuple(
            tuple(None if pair is None else (pair[0]["number"], tuple(pair[2])) for pair in pairs) for pairs in first
        )
        return self._again("accumulated", pins, *changes, source=full, rows=rows)

    @property
    def _given_back(self) -> float:
        """What a rank's part of the full batch's gradient is multiplied by, so that ranks which average keep it whole.

        A script that reduces by hand may add up instead: what a rank's own gradient counts tells.
        """
        ranks = self.record.together
        if ranks is None:
            return self._times
        fit = ranks.weights
        if fit is None or fit.used_residual > ranks.rounding or not is_constant(fit.used, ranks.rounding):
            return float(ranks.ranks)
        return 1 / fit.used[0]

    def feels(self, runs: PinnedRuns, level: tuple[str, ...]) -> bool:
        """Whether a loss gives other gradients to half of the rows where the other half has other values."""
        moved = self._again("full", Pins(runs.pins.frozen), WatchModules(level))
        return feels_the_rest(outputs_of(runs.full), outputs_of(moved), self.record.unit, level)

    def control(self, runs: PinnedRuns, what: str, kind: ControlKind) -> ControlRun:
        """Returns what a control leaves, apart from parameters that the held code reads without a call of a module.

        It leaves rounding where it is no more than two runs of equal gradients are apart; else weights may explain it.
        """
        path, number, unit = runs.accumulated.folder / "pinned.pt", self.update.number, self.record.unit
        own_parameters = torch.load(path, weights_only=True) if path.exists() else {}
        left_out = {(at, position) for at, positions in own_parameters.items() for position in positions}
        if left_out:
            names = labels(runs.full, runs.accumulated)
            what += f" (but for its own {join_texts([f'`{names[place]}`' for place in sorted(left_out)], 1)})"
        summed = self.update.decided is Stage.SUMMED
        difference_left = gradient_difference(runs.full, runs.accumulated, left_out, summed=summed, update=number)
        if difference_left <= max(MANY_UNITS * unit, floors_allowed(unit) * self.update.noise):
            return ControlRun(what, difference_left, True, kind=kind)
        round_ = rounds_of(runs.accumulated.events)[number - 1]
        fit = fit_of(runs.full.samples(round_), runs.accumulated.samples(round_), summed=summed)
        explains = fit is not None and not fit.vacuous and fit.residual <= self.record.tolerance
        return ControlRun(what, difference_left, False, fit if explains else None, kind)

    def _again(
        self, role: Role, pins: Pins, *changes: Change, source: RecordedRun | None = None, rows: PinnedRows = ()
    ) -> RecordedRun:
        every_change = [DisableCompilation(), WatchModules()]
        every_change += [FreezeBuffers(pins.frozen)] if pins.frozen else []
        every_change += [PinModules(pins.modules, rows, self._given_back)] if pins.modules else []
        every_change += changes
        number = self.update.number
        return self._trial.run(
            self._trial.control(role, *every_change, source=source, updates=number, shown_as="coupling")
        )


def _causes(bench: CouplingBench) -> Iterator[Cause]:
    """Yields what parts first, then with that held what parts next, until nothing but rounding is left."""
    runs, unit, difference = (
        bench.run_both(Pins()),
        bench.record.unit,
        bench.update.relative_difference,
    )
    first = runs.each
    if not first:
        return
    for _ in range(_MOST):
        before, suspect = runs, first_module(runs.pairs, unit)
        if suspect is None:
            yield from _loss_causes(bench, runs, first)
            return
        pins, what, kind = _pin_module(suspect, before, writers_of(before.pairs))
        runs = bench.run_both(pins, first)
        following = first_module(runs.pairs, unit)
        if following is not None and following.operation == suspect.operation and kind is ControlKind.FROZEN:
            # It does the same in evaluation mode: its buffers are not what couples.
            pins, what, kind = _pin_module(suspect, before, {})
            runs = bench.run_both(pins, first)
        control = bench.control(runs, what, kind)
        statistics = suspect.statistics or kind is ControlKind.FROZEN
        control = replace(control, modules=_owners(pins.frozen) if kind is ControlKind.FROZEN else ())
        yield Cause(replace(suspect, statistics=statistics), control, explained=_explained_share(control, difference))
        if control.fit is not None and not control.rounding:
            bench.weigh(runs, control.fit, first)
        if control.rounding or control.fit is not None:
            return


def _explained_share(control: ControlRun, difference: float) -> float:
    """The share of a difference that went with what is held; what weights explain beside it may be larger than that."""
    share = 1 - control.left / difference
    return 1 - control.fit.residual / difference if control.fit is not None and share <= SMALL_PART else share


def _loss_causes(bench: CouplingBench, runs: PinnedRuns, first: PairsOfRanks) -> Iterator[Cause]:
    """Yields the loss, where it gives back to samples what depends on the others, or on what the loop computes of them.

    The second is only known by the control, and where no scale of a term can be behind it.
    """
    pairs, pins, record = runs.pairs, runs.pins, bench.record
    terms = [backward.terms for window in record.windows for backward in window.of(Backward)]
    weights_excluded = max(terms, default=0) < 2 or bool(record.terms)
    backwards = [e for e in runs.full.events if isinstance(e, Backward) and e.update == bench.update.number]
    inside = [path for backward in backwards for path in backward.origin.inside]
    for level in levels(outputs_of(runs.full), inside):
        difference = loss_difference(pairs, record.unit, level) if agree(pairs, record.unit, level) else 0.0
        feels = difference > 0 and bench.feels(runs, level)
        if not feels and not (difference and weights_excluded):
            continue
        more = replace(pins, modules=tuple(dict.fromkeys((*pins.modules, *level))))
        what, kind = "the loss computed once over all outputs", ControlKind.CACHED_GRADIENTS
        control = bench.control(bench.run_both(more, first), what, kind)
        if feels or control.rounding:
            loss = _loss(bench.update.number, runs, level)
            suspect = Suspect("rows" if feels else "non-additive", loss, None, difference, 0, False, False)
            yield Cause(suspect, control, explained=_explained_share(control, bench.update.relative_difference))
            return


def _pin_module(suspect: Suspect, runs: PinnedRuns, writers: dict[str, list[str]]) -> tuple[Pins, str, ControlKind]:
    """What holds a module as well: evaluation mode where it keeps statistics, else what it does for the full batch."""
    path, pins = suspect.operation.module or "", runs.pins
    if path in writers:  # in their forwards modules write the buffers with these names
        # a codebook that moves is state, and no statistics of the batch: what is named is held, and nothing else
        kinds = {call["path"]: call["kind"] for pair in runs.pairs if pair is not None for call in pair[0]["calls"]}
        writers = {at: names for at, names in writers.items() if kinds[at] in {kinds[path], *_WITH_STATISTICS}}
        names = {f"{path}.{name}" if path else name for path, members in writers.items() for name in members}
        steps = runs.full.samples(rounds_of(runs.full.events)[0]).steps.values()
        frozen = tuple(key for step in steps for key in step.get("buffers", {}) if key.partition(":")[2] in names)
        if frozen:
            return replace(pins, frozen=frozen), _describe_modules(frozen), ControlKind.FROZEN
    what = f"what `{path or '(root)'}` gives and gives back held at the full batch's"
    return replace(pins, modules=(*pins.modules, path)), what, ControlKind.FULL_BATCH


def _owners(frozen: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key.partition(":")[2].rpartition(".")[0] for key in frozen))


def _describe_modules(frozen: tuple[str, ...]) -> str:
    owners = _owners(frozen)
    if len(owners) > 3:
        return f"`{owners[0]}` and {len(owners) - 1} other modules with statistics in evaluation mode"
    return ", ".join(f"`{owner or '(root)'}`" for owner in owners) + " in evaluation mode"


def _loss(update: int, runs: PinnedRuns, level: tuple[str, ...]) -> Operation:
    """The loss, at the line in which rows first meet; else where it is made, or differentiated."""
    lines: list[list[Any]] = []
    for run in (runs.full, runs.accumulated):
        event = next(event for event in run.events if isinstance(event, Backward) and event.update == update)
        calls = [call for forward in outputs_of(run) for call in forward["calls"] if call["path"] in level]
        inside = [place for call in calls for place in call["meetings"]]
        lines.append([*inside, *event.origin.met, event.place])
    file, line = first_meeting(*lines) or (None, None)
    return Operation("gradient of the loss", file=file, line=line)
