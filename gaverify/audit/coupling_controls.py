"""Controls for a difference that no weights explain: in which code do samples interact?

The values of a micro-batch's samples first differ from those in the full batch in a module, or in a loss. A loss is
looked for in the script's own code between its models (`SCRIPT`), then in the own code of modules that return a number.
The gradients that such code gives back to the calls that it makes tell whether samples interact in it.

Shapes: n rows of a micro-batch, which lie at n places among the N rows of a forward of the full-batch run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from gaverify.audit.bench import ControlledRuns, ScriptBench, difference_allowed, explained_share
from gaverify.audit.first_difference import find_first_difference
from gaverify.audit.job import (
    Blamed,
    Changes,
    DisableCompilation,
    PinModules,
    UseEvaluationMode,
    WatchModules,
)
from gaverify.audit.outcome import is_explained, is_proven
from gaverify.audit.ranks import RankedRun
from gaverify.audit.reading import RecordedRun
from gaverify.audit.recording.outputs import (
    SCRIPT,
    RecordedCall,
    RecordedForward,
    RowSummaries,
    Summaries,
)
from gaverify.audit.running import Trial
from gaverify.audit.same_data import Matcher
from gaverify.errors import TimeUp
from gaverify.passes.layouts import SampleLayout
from gaverify.records.audit import Record
from gaverify.records.events import Backward
from gaverify.records.experiment import (
    Cause,
    ControlKind,
    DifferenceKind,
    FirstDifference,
    Operation,
    Suspect,
    is_constant,
)
from gaverify.records.windows import rounds_of
from gaverify.search.bench import Intervention
from gaverify.thresholds import COMPUTED_FLOAT32, TINY
from gaverify.tracebacks import display_path

_DEEPEST = 4  # levels below the script at which a loss is looked for

CallKey = tuple[str, int]
"""Path of a module, and how many calls of it came before in the same forward."""

Pair = tuple[RecordedForward, RecordedForward, Sequence[int]]
"""A forward of the full-batch run, one of a micro-batch, and the places of its rows in the first."""


def pairs_of(full: RecordedRun, accumulated: RecordedRun, update: int = 1) -> list[Pair | None]:
    """Returns every forward of an update of the accumulated run with the full batch's that holds its rows.

    None stands for a forward that returns nothing per row: a loss that is a module with parameters. Empty if the rows
    of any forward are not found.
    """
    full_forwards, micro_forwards = outputs_of(full), outputs_of(accumulated)
    matcher = Matcher(full.rows(update))
    pairs: list[Pair | None] = []
    counts: Counter[frozenset[str]] = Counter()
    for prints, forward in zip(accumulated.rows(update), micro_forwards, strict=False):
        names = _names(forward)
        # the same model, by its modules: addresses differ between the runs
        among = [at for at, full_forward in enumerate(full_forwards) if _names(full_forward) == names]
        counts[names] += 1
        if not among:
            return []
        if prints:
            spot = matcher.find(among, prints)
            matched = (full_forwards[spot.forward], spot.places) if spot is not None else None
        else:  # its input is an output of another model: forwards come in the full batch's order
            candidate = full_forwards[among[(counts[names] - 1) % len(among)]]
            places = _places(candidate, forward)
            matched = (candidate, places) if places else None
        if not _returns_rows(forward):
            pairs.append(None)
        # One forward whose rows are not found could hold the fault: no pair of this update is used then.
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
        # `model` is an address in the rank's process: its place among the rank's models is the same in all ranks
        numbers: dict[Any, int] = {}
        for pair in filter(None, pairs):
            forward = pair[1]
            forward["rank"], forward["model"] = rank, numbers.setdefault(forward["model"], len(numbers))
    return pairs_by_rank if all(pairs_by_rank) else []


def outputs_of(run: RecordedRun) -> list[RecordedForward]:
    """Returns the forwards whose modules a run has watched."""
    path = run.folder / "outputs.pt"
    return torch.load(path, weights_only=True) if path.exists() else []  # type: ignore[no-any-return]


class _CallDifference(NamedTuple):
    """How the outputs of one call of a module differ, over all micro-batches."""

    largest: float
    samples: int
    full_call: RecordedCall
    micro_call: RecordedCall


def first_module(pairs: Sequence[Pair | None], unit: float) -> Suspect | None:
    """Returns the first call whose inputs agree row by row and whose outputs do not; None if there is none.

    Calls are in the order in which they end, so that a module comes before the one around it. If only later
    micro-batches differ, the cause is state from earlier ones, not the other samples.
    """
    allowed = difference_allowed(unit)
    differing: dict[tuple[int, CallKey], _CallDifference] = {}
    agree_at_first: set[tuple[int, CallKey]] = set()
    differ_at_first: set[tuple[int, CallKey]] = set()
    models_seen: set[tuple[int, int]] = set()
    for pair in filter(None, pairs):
        model, rank = pair[1]["model"], pair[1].get("rank", 0)
        first = (rank, model) not in models_seen
        models_seen.add((rank, model))
        for at, full_call, micro_call in calls_of_pair(pair):
            key = model, at
            inputs = _row_differences(pair, full_call["inputs"], micro_call["inputs"])
            outputs = _row_differences(pair, full_call["outputs"], micro_call["outputs"])
            if outputs is None or (inputs is not None and float(inputs.max()) > allowed):
                continue  # other inputs: an earlier call is at fault
            largest, samples = float(outputs.max()), int((outputs > allowed).sum())
            if first:
                (agree_at_first if largest <= allowed else differ_at_first).add(key)
            if largest > allowed:
                before = differing.get(key, _CallDifference(0.0, 0, full_call, micro_call))
                differing[key] = _CallDifference(
                    max(before.largest, largest), before.samples + samples, full_call, micro_call
                )
    for key, (largest, samples, call, counterpart) in differing.items():
        # On the first micro-batch of every rank there is no state from earlier ones: one rank that differs is enough.
        if key not in agree_at_first - differ_at_first:
            file, line = first_meeting(call["meetings"], counterpart["meetings"]) or call["place"] or (None, None)
            operation = Operation(call["kind"], call["path"], call["kind"], file=file and display_path(file), line=line)
            return Suspect("rows", operation, None, largest, samples, True, bool(call["scales"]))
    return None


def _are_inputs_compared(pairs: Sequence[Pair | None], path: str) -> bool:
    """Whether all tensors that a module is given hold rows that can be compared."""
    return all(
        rows_of_pair(pair, full_call["inputs"][name], micro_call["inputs"][name]) is not None
        for pair in filter(None, pairs)
        for (module, _), full_call, micro_call in calls_of_pair(pair)
        if module == path
        for name in full_call["inputs"].keys() & micro_call["inputs"].keys()
    )


def first_meeting(full_places: Sequence[Any], micro_places: Sequence[Any]) -> tuple[str, int] | None:
    """Returns the first line in which rows interact: in both runs, else in the full-batch run."""
    lines = [tuple(place) for place in full_places]
    shared_lines = [place for place in lines if place in {tuple(line) for line in micro_places}]
    return next(iter([*shared_lines, *lines]), None)  # type: ignore[arg-type]


def levels(forwards: Sequence[RecordedForward], inside: Iterable[str] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the code in which a loss may stand, from the script inwards to modules that return a number.

    Last come the modules that leave a tensor behind, which no call returns and which flows into the loss.
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
    """Whether the calls of a level return the full batch's rows for every micro-batch."""
    has_compared = False
    for pair in filter(None, pairs):
        for full_call, micro_call in _under(pair, level):
            differences = _row_differences(pair, full_call["outputs"], micro_call["outputs"])
            if differences is not None and float(differences.max()) > difference_allowed(unit):
                return False
            has_compared = has_compared or differences is not None
    return has_compared


def loss_difference(pairs: Sequence[Pair | None], unit: float, level: Collection[str] = (SCRIPT,)) -> float:
    """Returns the difference of a loss's gradients of a micro-batch's rows from the full batch's, up to one factor.

    It is relative to the norm of the latter, of the micro-batch with the largest; 0 if it is rounding for the first
    micro-batch.
    """
    differences = [_difference_left(pair, level) for pair in filter(None, pairs)]
    # As for modules: a loss that agrees for the first micro-batch and differs later depends on state.
    if not differences or not differences[0] > difference_allowed(unit):
        return 0.0
    return max(differences)


def _differs_at_all(pairs: Sequence[Pair | None], unit: float, level: Collection[str]) -> bool:
    """Whether a loss's gradients of any micro-batch's rows differ from the full batch's by more than one factor."""
    return any(_difference_left(pair, level) > difference_allowed(unit) for pair in filter(None, pairs))


def depends_on_other_rows(
    full: Sequence[RecordedForward], moved: Sequence[RecordedForward], unit: float, level: Collection[str] = (SCRIPT,)
) -> bool:
    """Whether a loss's gradients of the first half of the rows change with the values of the second half."""
    for forward, moved_forward in zip(full, moved, strict=False):
        half = range(forward["rows"] // 2)
        if len(half) and _difference_left((forward, moved_forward, half), level) > difference_allowed(unit):
            return True
    return False


def writers_of(pairs: Sequence[Pair | None]) -> dict[str, list[str]]:
    """Returns the buffers that modules write in their own forwards, by the paths of the modules."""
    calls = [call for forward, _, _ in filter(None, pairs) for call in forward["calls"] if call["changed"]]
    return {call["path"]: call["changed"] for call in calls}


def _names(forward: RecordedForward) -> frozenset[str]:
    """The paths in a model: which of its modules are called may depend on the samples (experts)."""
    return frozenset(forward["modules"])


def _returns_rows(forward: RecordedForward) -> bool:
    """Whether the outermost module, or one that it calls, returns a tensor with as many rows."""
    inner, rows = {SCRIPT, *(call["path"] for call in forward["calls"] if call["under"] == SCRIPT)}, forward["rows"]
    outputs = [output for call in forward["calls"] if call["under"] in inner for output in call["outputs"].values()]
    return any(size and rows and size % rows == 0 for output in outputs for size in output["shape"][:2])


def _places(full: RecordedForward, micro: RecordedForward) -> tuple[int, ...]:
    """Returns the places of rows that are inputs of an outermost module, by their projections; empty if not found.

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


def calls_of_pair(pair: Pair) -> Iterator[tuple[CallKey, RecordedCall, RecordedCall]]:
    """Yields the calls of both forwards that belong together: the first of a module, the second, and so on."""
    full_calls = {(call["path"], call["number"]): call for call in pair[0]["calls"]}
    for call in pair[1]["calls"]:
        key = call["path"], call["number"]
        if key in full_calls:
            yield key, full_calls[key], call


def _under(pair: Pair, level: Collection[str]) -> Iterator[tuple[RecordedCall, RecordedCall]]:
    """Yields the calls of both forwards that code of a level makes."""
    for _, full_call, micro_call in calls_of_pair(pair):
        if full_call["under"] in level:
            yield full_call, micro_call


def _row_differences(pair: Pair, full_tensors: Summaries, micro_tensors: Summaries) -> torch.Tensor | None:
    """Returns the largest difference of each row, relative to the largest row, shape (n,); None without rows."""
    worst: torch.Tensor | None = None
    for path in full_tensors.keys() & micro_tensors.keys():
        row_pair = rows_of_pair(pair, full_tensors[path], micro_tensors[path])
        if row_pair is None:
            continue
        a, b = row_pair
        # Relative to the largest row: a row of zeros consists of rounding. NaN compares false and would count as equal.
        scale = a[..., 2].abs().max().clamp_min(TINY)
        differences = ((a - b).abs() / scale).flatten(1).amax(1).nan_to_num(math.inf)
        worst = differences if worst is None else torch.maximum(worst, differences)
    return worst


def _difference_left(pair: Pair, level: Collection[str]) -> float:
    """Returns the difference that one factor leaves between the gradients of the same rows, over a level's inputs."""
    pieces = []
    for full_call, micro_call in _under(pair, level):
        full_gradients, micro_gradients = full_call["gradients"], micro_call["gradients"]
        row_pairs = [
            rows_of_pair(pair, full_gradients[path], micro_gradients[path])
            for path in sorted(full_gradients.keys() & micro_gradients.keys())
        ]
        # Only the two projections are linear: the norm in the third entry does not follow a negative factor.
        pieces += [(a[..., :2].flatten(), b[..., :2].flatten()) for a, b in filter(None, row_pairs)]
    if not pieces:
        return 0.0
    a, b = (torch.cat(side) for side in zip(*pieces, strict=True))
    size = float(a.norm())
    factor = (a * b).sum() / b.square().sum().clamp_min(TINY)
    return float((a - factor * b).norm()) / size if size else 0.0


def rows_of_pair(pair: Pair, in_full: RowSummaries, in_micro: RowSummaries) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns summaries of the same rows in both forwards, shape (n, entries, 3); None if no dimension holds rows."""
    full, micro, places = pair
    layout = SampleLayout.find_leading(in_full["shape"], in_micro["shape"], full["rows"], micro["rows"])
    if layout is None:
        return None
    full_rows, micro_rows = (
        side["along"][layout.first.at].reshape(forward["rows"], layout.first.fold, 3)
        for side, forward in ((in_full, full), (in_micro, micro))
    )
    return full_rows[list(places)], micro_rows[: len(places)]


_WITH_STATISTICS = frozenset({"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"})  # names of classes
_MOST_CAUSES = 3  # that are looked for one after the other


def find_coupling(trial: Trial, record: Record) -> Record:
    """Returns the record with the modules, or the loss, in which samples interact, if nothing else explains the update.

    Both runs are made again and record the outputs of all modules row by row. If a module that differs has running
    statistics, its control is evaluation mode, else the full batch's outputs.
    """
    update = record.divergent
    ranked = record.ranks > 1
    if update is None or record.unaligned or is_explained(record) or (ranked and record.together is None):
        return record
    bench = ScriptBench(trial, record, update, "coupling", WATCHED)
    coupling, weighted_run = list[Cause](), record.controls.weighted_run
    with suppress(TimeUp):  # what was found until then stands
        runs = watch_modules(bench)
        if _is_code_of_script(first_module(runs.pairs, record.unit)):
            traced = find_first_difference(trial, record)
            if _mixes_in_model(traced):
                return traced
            if not is_proven(traced):
                record = traced
        for cause in _causes(bench, runs):
            coupling.append(_name_branch(cause, record.controls.first_difference))
        control = coupling[-1].control if coupling else None
        # weights explain the rest of the difference: they are tried beside what was neutralised
        weighing = bench.weigh(control.fit.multipliers) if control is not None and control.fit is not None else None
        if control is not None and weighing is not None:
            weighted_run = bench.run(*control.interventions, weighing)
    return replace(record, controls=replace(record.controls, coupling=tuple(coupling), weighted_run=weighted_run))


def _is_code_of_script(suspect: Suspect | None) -> bool:
    """Whether a module that differs has lines of the script's, or of a library's, of which one may be the cause."""
    return suspect is not None and not suspect.statistics and not hasattr(nn, suspect.operation.kind)


def _name_branch(cause: Cause, first: FirstDifference | None) -> Cause:
    """Returns a proven module with the branch in it, where that is what both runs first do otherwise."""
    suspect, control = cause.suspect, cause.control
    if first is None or first.kind is not DifferenceKind.BRANCH or control is None or not control.proves:
        return cause
    path, module = suspect.operation.module or "", first.operation.module
    if module is None or (path and not f"{module}.".startswith(f"{path}.")):
        return cause
    branch = replace(first.operation, module=suspect.operation.module, kind=suspect.operation.kind)
    return replace(cause, suspect=replace(suspect, kind="control-flow", operation=branch))


def _mixes_in_model(record: Record) -> bool:
    """Whether a line of a model is proven to be the cause, which makes samples interact or takes another branch."""
    causes = [(cause.suspect, cause.control) for cause in record.controls.coupling]
    return any(
        suspect.in_model and suspect.kind != "values" and control is not None and control.proves
        for suspect, control in causes
    )


# Compiled code calls no submodules that could be watched.
WATCHED: Changes = (DisableCompilation(), WatchModules())
"""Changes with which every call of a module is recorded."""

PairsOfRanks = Sequence[Sequence[Pair | None]]
"""The pairs of each rank."""


@dataclass(frozen=True)
class WatchedRuns(ControlledRuns):
    """Both runs of a control whose modules are watched, and their forwards that hold the same rows."""

    pairs_by_rank: PairsOfRanks

    @property
    def pairs(self) -> list[Pair | None]:
        """The pairs of all ranks."""
        return [pair for pairs in self.pairs_by_rank for pair in pairs]


def watch_modules(bench: ScriptBench, *interventions: Intervention) -> WatchedRuns:
    """Makes both runs with something changed, and matches their forwards."""
    runs = bench.make_runs(*interventions)
    pairs = pairs_of_ranks(runs.full, runs.accumulated, bench.update.number)
    return WatchedRuns(interventions, runs.full, runs.accumulated, pairs)


def pin_code(
    bench: ScriptBench,
    what: str,
    paths: tuple[str, ...],
    first: PairsOfRanks,
    *,
    kind: ControlKind = ControlKind.FULL_BATCH,
    blamed: Blamed = "values",
    factor: float = 1.0,
) -> Intervention:
    """Returns the intervention that replaces what code gives and gives back by the full batch's.

    Args:
        bench: Makes the runs.
        what: It in words.
        paths: The modules whose code it is, or `SCRIPT`.
        first: The pairs of the runs without pins, which tell the rows of each forward.
        kind: The control for rules.
        blamed: The pinned values that have to differ before.
        factor: On the gradients that the code gives back in one process.
    """
    rows = tuple(
        tuple(None if pair is None else (pair[0]["number"], tuple(pair[2])) for pair in pairs) for pairs in first
    )
    change = PinModules(paths, rows, _factor_of_gradients(bench.record, factor), blamed)
    return Intervention(what, kind, changes=(change,))


def _factor_of_gradients(record: Record, factor: float) -> float:
    """Returns the factor on a rank's part of the full batch's gradient; `factor` in one process.

    Ranks that average need as many times the gradient. A script that reduces by hand may add up instead: the weight of
    a rank's own gradient tells.
    """
    ranks = record.together
    if ranks is None:
        return factor
    fit = ranks.shares.fit
    if fit is None or fit.used_residual > ranks.rounding or not is_constant(fit.used, ranks.rounding):
        return float(ranks.ranks)
    return 1 / fit.used[0]


def _is_evaluation(intervention: Intervention) -> bool:
    return intervention.kind is ControlKind.EVALUATION_MODE


def _loss_depends_on_other_rows(bench: ScriptBench, runs: WatchedRuns, level: tuple[str, ...]) -> bool:
    """Whether a loss gives half of the rows other gradients when the values of the other half change."""
    moved = bench.make_full_run(*filter(_is_evaluation, runs.interventions), watch=(WatchModules(level),))
    return depends_on_other_rows(outputs_of(runs.full), outputs_of(moved), bench.record.unit, level)


def _mixes_rows(bench: ScriptBench, runs: WatchedRuns, suspect: Suspect) -> bool:
    """Whether the outputs of a module for half of the rows change with what it is given in the other half.

    In the first update a module whose first micro-batch differs has no state of others. Later it may read what an
    earlier update left. Inputs whose rows are padded to other lengths are not compared: they may be mixed before.
    """
    path = suspect.operation.module or ""
    if bench.record.ranks > 1 or (bench.update.number == 1 and _are_inputs_compared(runs.pairs, path)):
        return True
    repeated = bench.make_full_run(*filter(_is_evaluation, runs.interventions), watch=(WatchModules(repeated=path),))
    pairs = [
        (full, moved, range(full["rows"] // 2))
        for full, moved in zip(outputs_of(runs.full), outputs_of(repeated), strict=False)
        if full["rows"] > 1
    ]
    interacting = first_module(pairs, bench.record.unit)
    return interacting is not None and interacting.operation.module == suspect.operation.module


def _causes(bench: ScriptBench, runs: WatchedRuns) -> Iterator[Cause]:
    """Yields the first code that differs, then with that pinned the next, until only rounding is left."""
    unit, difference = bench.record.unit, bench.update.relative_difference
    first = runs.pairs_by_rank
    # Without places for the micro-batches' rows there is nothing to compare row by row.
    if not first:
        return
    for _ in range(_MOST_CAUSES):
        before, suspect = runs, first_module(runs.pairs, unit)
        if suspect is None:
            yield from _loss_causes(bench, runs, first)
            return
        if not _mixes_rows(bench, runs, suspect):
            if not _are_inputs_compared(runs.pairs, suspect.operation.module or ""):
                yield Cause(suspect, None, failure=_NOT_COMPARED)
            return
        pin = _pin_module(bench, suspect, before, first, writers_of(before.pairs))
        runs = watch_modules(bench, *before.interventions, pin)
        following = first_module(runs.pairs, unit)
        if following is not None and following.operation == suspect.operation and _is_evaluation(pin):
            # It differs in evaluation mode, too: its buffers are not the cause.
            pin = _pin_module(bench, suspect, before, first, {})
            runs = watch_modules(bench, *before.interventions, pin)
        control = bench.compare(runs, fit=True)
        statistics = suspect.statistics or _is_evaluation(pin)
        yield Cause(replace(suspect, statistics=statistics), control, explained=explained_share(control, difference))
        # The difference is gone, or weights explain its rest: a further suspect would have nothing to explain.
        if control.rounding or control.fit is not None:
            return


_NOT_COMPARED = "its inputs may differ before it: padded to other lengths or without rows, they cannot be compared"


def _loss_causes(bench: ScriptBench, runs: WatchedRuns, first: PairsOfRanks) -> Iterator[Cause]:
    """Yields the loss, if its gradients depend on other samples.

    The loss computed once for all outputs repairs any fault between the outputs and the loss. So it proves that samples
    act on each other only where that was seen: in gradients that follow the outputs of other samples.
    """
    pairs, unit = runs.pairs, bench.record.unit
    backwards = [e for e in runs.full.events if isinstance(e, Backward) and e.update == bench.update.number]
    inside = [path for backward in backwards for path in backward.origin.inside]
    every_level = list(levels(outputs_of(runs.full), inside))
    differing = [level for level in every_level if agree(pairs, unit, level) and _differs_at_all(pairs, unit, level)]
    for level in differing:
        # It costs a run of its own, so it is asked only of a loss whose gradients differ.
        if loss_difference(pairs, unit, level) > 0 and _loss_depends_on_other_rows(bench, runs, level):
            yield _cause_in_loss(bench, runs, first, level)
            return


def _cause_in_loss(bench: ScriptBench, runs: WatchedRuns, first: PairsOfRanks, level: tuple[str, ...]) -> Cause:
    """Returns the code of a level as the cause, with the control that computes the loss once for all outputs."""
    what, kind = "the loss computed once for all outputs", ControlKind.CACHED_GRADIENTS
    pin = pin_code(bench, what, level, first, kind=kind, blamed="gradients")
    control = bench.run(*runs.interventions, pin, fit=True)
    difference = loss_difference(runs.pairs, bench.record.unit, level)
    suspect = Suspect("rows", _loss(bench.update.number, runs, level), None, difference, 0, False, False)
    return Cause(suspect, control, explained=explained_share(control, bench.update.relative_difference))


def _pin_module(
    bench: ScriptBench, suspect: Suspect, runs: WatchedRuns, first: PairsOfRanks, writers: dict[str, list[str]]
) -> Intervention:
    """Returns how a module is neutralised: by evaluation mode if it has running statistics, else by its outputs."""
    path = suspect.operation.module or ""
    if path in writers:
        # modules of the same class, and batch norms: a codebook that moves is state, and no statistics of the batch
        kinds = {call["path"]: call["kind"] for pair in runs.pairs if pair is not None for call in pair[0]["calls"]}
        writers = {at: names for at, names in writers.items() if kinds[at] in {kinds[path], *_WITH_STATISTICS}}
        names = {f"{path}.{name}" if path else name for path, members in writers.items() for name in members}
        steps = runs.full.samples(rounds_of(runs.full.events)[0]).steps.values()
        buffers = tuple(key for step in steps for key in step.buffers if key.partition(":")[2] in names)
        if buffers:
            owners = tuple(dict.fromkeys(key.partition(":")[2].rpartition(".")[0] for key in buffers))
            changes = DisableCompilation(), UseEvaluationMode(buffers)
            what = _describe_modules(owners)
            return Intervention(what, ControlKind.EVALUATION_MODE, modules=owners, changes=changes)
    what = f"outputs and gradients of `{path or '(root)'}` replaced by the full batch's"
    return pin_code(bench, what, (path,), first)


def _describe_modules(owners: tuple[str, ...]) -> str:
    if len(owners) > 3:
        return f"`{owners[0]}` and {len(owners) - 1} other modules with statistics in evaluation mode"
    return ", ".join(f"`{owner or '(root)'}`" for owner in owners) + " in evaluation mode"


def _loss(update: int, runs: WatchedRuns, level: tuple[str, ...]) -> Operation:
    """Returns the loss, at the line in which rows first interact; else where it is made, or differentiated."""
    lines: list[list[Any]] = []
    for run in (runs.full, runs.accumulated):
        event = next(event for event in run.events if isinstance(event, Backward) and event.update == update)
        calls = [call for forward in outputs_of(run) for call in forward["calls"] if call["path"] in level]
        inside = [place for call in calls for place in call["meetings"]]
        lines.append([*inside, *event.origin.met, event.place])
    file, line = first_meeting(*lines) or (None, None)
    return Operation("gradient of the loss", file=file and display_path(file), line=line)
