"""Does state that a forward changes, and the next micro-batch reads, make the difference? Which line changes it?

Lists, counters and objects that a loss keeps are changed without any call that could be watched. One forward runs
under Python's line tracing instead; a value that has changed when a line begins was changed by the line before it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import Gradients, PassProbe
from gaverify.passes.isolation import StatePlace
from gaverify.records.comparison import Comparison, NextUpdate, State, StateChange
from gaverify.records.experiment import ControlKind, ControlRun, Operation
from gaverify.rules.rule import quote_names
from gaverify.search import weights
from gaverify.search.bench import Bench, Intervention, find_needed
from gaverify.search.neutral import LeftState, PinnedState, PrimedState, RestoredState
from gaverify.search.trace.state import StateWatch, find_state, take_digests
from gaverify.search.trace.traces import Frame
from gaverify.thresholds import HELPS, SAME_IN_FLOAT32, TINY
from gaverify.tracebacks import LineHunt, Owner, Place, display_path

_MOST_LOOKS = 20_000  # lines after which the search gives up: each looks at every value


def find_writing_lines(bench: Bench, names: list[str]) -> Mapping[str, Place]:
    """Returns file and line of the first change of each named value in a forward of the full batch."""
    watch = _LineWatch({name: place for name, place in find_state(bench.experiment).items() if name in names})
    bench.experiment.forward(None, watch)
    return watch.found


class _LineWatch(PassProbe):
    """Looks at the values whenever a line of the user's or a library's code has run."""

    def __init__(self, named: Mapping[str, StatePlace]) -> None:
        self._named = dict(named)
        self._before: dict[str, Any] = {}
        self._looks = 0
        self.found: dict[str, Place] = {}

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Watches for the length of a forward."""
        self._before = take_digests(self._named)
        hunt = LineHunt(self._note_changes, Owner.LIBRARY)
        hunt.start()
        try:
            yield
        finally:
            hunt.stop()
            hunt.look()  # no line begins after the last one, whose change would be missed

    def _note_changes(self, last: Place) -> bool:
        """Notes the line for every value that has changed by it; returns whether nothing is left to look for."""
        self._looks += 1
        for name, value in take_digests(self._named).items():
            if value != self._before[name]:
                self.found.setdefault(name, last)
        return len(self.found) == len(self._named) or self._looks > _MOST_LOOKS


UNNAMED = StateChange("state", "unnamed")
_FARTHEST = 5  # forwards between the two farthest ones of the same batch that are compared
_MANY = 5  # changed values from which on those that a known line writes, or those of one kind, are tried together


def ask(bench: Bench, comparison: Comparison) -> Comparison:
    """Restores what a forward changed before each micro-batch, then lets writes to it have no effect at all."""
    changes = read_changes(comparison.state.changes if comparison.state is not None else ())
    if comparison.state is None or not changes:
        return comparison
    nearest = bench.attempt("state", lambda: _run_nearest_control(bench, comparison, changes))
    if nearest is None:
        return comparison
    control, set_once = nearest
    state = replace(comparison.state, control=control)
    # A control that leaves something blames nothing yet: the state may matter beside another cause. It stays in the
    # facts, because the next questions have to neutralise the state.
    if not control.rounding:
        return replace(comparison, state=state)
    blamed = tuple(c for c in set_once if c.place in ("parameter", "buffer")) or set_once
    together = False
    if not blamed:
        blame = find_blamed(changes, comparison.left, control.kind, partial(run_some, bench, kind=control.kind))
        blamed, together = blame.changes, blame.together
        # everything that was restored proves none of its parts
        control = blame.control if blame.control and control.kind is ControlKind.STATE_RESTORED else control
    if control.kind is ControlKind.STATE_PINNED:
        primed = bench.attempt("state initialised", lambda: _run_primed_and_pinned(bench, changes, blamed))
        control = primed or control
    # Writes without effect prove a cause and repair nothing: the training needs the state to change.
    remedies = () if control.kind is ControlKind.STATE_PINNED else (control,)
    state = replace(state, control=control, blamed=blamed, together=together, remedies=remedies)
    if control.kind is ControlKind.STATE_PINNED:
        # An update of the state once per window changes the reference as well: by how much is part of the answer.
        pinned_run = bench.possible(lambda: bench.run(replace(pin(changes), in_reference=False)))
        state = replace(state, new_state_difference=math.nan if pinned_run is None else pinned_run.left)
    return replace(comparison, state=state, left=control.left, cleared=True)


def ask_unnamed(bench: Bench, comparison: Comparison) -> Comparison:
    """Restores everything before each micro-batch: state may have no name, or change in a backward."""
    if not comparison.forward.shows_nothing or _may_be_weights(bench, comparison):
        return comparison
    return _restore_everything(bench, comparison)


def ask_unnamed_before_weights(bench: Bench, comparison: Comparison) -> Comparison:
    """Restores everything where weights explain the difference: a counter scales losses as weights do."""
    is_restored = (
        comparison.state is not None and comparison.state.control is not None
    )  # named state: that control was run
    return (
        _restore_everything(bench, comparison) if _may_be_weights(bench, comparison) and not is_restored else comparison
    )


def _may_be_weights(bench: Bench, comparison: Comparison) -> bool:
    """Whether weights explain the difference that have no meaning yet."""
    fit = comparison.window.fit
    return fit is not None and not comparison.weights_first and weights.is_explanation(bench, comparison, fit)


def _restore_everything(bench: Bench, comparison: Comparison) -> Comparison:
    """Blames state without a name where restoring everything changes the difference."""
    restored = bench.attempt("state restored", lambda: bench.run(restore(), fit=True))
    if restored is None:
        return comparison
    unnamed_state = State((UNNAMED,), restored, (UNNAMED,), (restored,))
    if restored.rounding:
        forward = replace(comparison.forward, causes=())
        return replace(comparison, forward=forward, state=unnamed_state, left=restored.left, cleared=True)
    # Restoring that changes the difference shows that there is state; what it leaves may be wrong weights beside it.
    if abs(restored.left - comparison.left) > SAME_IN_FLOAT32 * comparison.left:
        restored_bench = bench.neutralise(restore())
        fit = weights.choose_fit(restored_bench, comparison, restored.fit)
        if fit is not None:
            return replace(
                weights.try_weights(restored_bench, comparison, fit),
                state=replace(unnamed_state, difference_alone=comparison.compared.total),
            )
    return comparison


def ask_lines(bench: Bench, comparison: Comparison) -> Comparison:
    """Finds the lines that change blamed state where no watched call has named one."""
    state = comparison.state
    if state is None:
        return comparison
    # Under line tracing every line of a forward costs a look at every value: only state without a known line is traced.
    placeless = [c for c in state.blamed if c.writer is None or c.writer.file is None]
    unknown = [change.name for change in placeless if change.place in ("closure", "attribute", "buffer")]
    lines = bench.attempt("writing lines", lambda: find_writing_lines(bench, unknown)) if unknown else None
    if not lines:
        return comparison
    placed = []
    for change in state.blamed:
        if change.name in lines:
            file, line = lines[change.name]
            writer = change.writer or Operation("")
            change = replace(change, writer=replace(writer, file=display_path(file), line=line))
        placed.append(change)
    return replace(comparison, state=replace(state, blamed=tuple(placed)))


def measure_repetition(bench: Bench, comparison: Comparison) -> float:
    """Returns the relative difference of the full batch's losses in forwards that all start from the restored state.

    Args:
        bench: Where to run.
        comparison: Say how much equal runs may differ.

    Returns:
        The first difference that is more than equal runs may show; 0 without one.
    """
    first = float(bench.experiment.forward(None, PassProbe()).detach())
    # State that cannot be restored may take the same values again after some forwards (a schedule): one repetition
    # shows nothing where that period divides the distance between the two. Six in a row have all distances from 1 to 5.
    for _ in range(_FARTHEST):
        difference = abs(float(bench.experiment.forward(None, PassProbe()).detach()) - first) / max(abs(first), TINY)
        if difference > comparison.repeats:
            return difference
    return 0.0


def restore(changes: Sequence[StateChange] = ()) -> Intervention:
    """Some values restored before each micro-batch; without any, all of the state."""
    names = [change.name for change in changes]
    which = f" of {quote_names(names)}" if names else ""
    # the full batch starts from the restored state anyway
    return Intervention(
        f"state{which} restored before each micro-batch",
        ControlKind.STATE_RESTORED,
        partial(RestoredState, names=names or None),
        in_reference=False,
    )


def pin(changes: Sequence[StateChange], what: str = "state kept fixed") -> Intervention:
    """Writes to some values without effect."""
    names = [change.name for change in changes]
    return Intervention(what, ControlKind.STATE_PINNED, partial(PinnedState, names=names))


_PRIMED = Intervention("one forward of the full batch first", ControlKind.STATE_PRIMED, PrimedState)


def _prime_and_pin(changes: Sequence[StateChange]) -> tuple[Intervention, Intervention]:
    """One forward of the full batch, and writes without effect after it."""
    # pinned after the priming forward, whose writes have to stay
    pinned = pin(changes, f"{_PRIMED.what}, and the state kept fixed from then on,")
    return _PRIMED, replace(pinned, kind=ControlKind.STATE_PRIMED_AND_PINNED)


@contextmanager
def start_from(bench: Bench, put_state: Callable[[], None]) -> Iterator[Bench]:
    """Gives a bench whose passes start from another state."""
    put_state()
    later = replace(bench, experiment=bench.experiment.with_current_state(), reference=None)
    try:
        yield later
    finally:
        bench.experiment.state.restore()
        later.experiment.state.forget()


def measure_next_update(bench: Bench, state_facts: State) -> tuple[NextUpdate, LeftState | None] | None:
    """Runs a second update after a first one, with the state restored before each micro-batch of both.

    The weights stay, so that only the state can make a difference.

    Returns:
        The distance of the second update's gradients from the full batch's, and the state that the first full batch
        left, if micro-batches can start from it; None where the state that is blamed has no name.
    """
    names = [change.name for change in state_facts.changes]
    blamed = [change.name for change in state_facts.blamed]
    if UNNAMED in state_facts.blamed:
        return None
    experiment = bench.experiment
    full_left, micro_left, forward_left = (LeftState(experiment, names) for _ in range(3))
    full = experiment.full_batch(full_left)
    experiment.micro_batches(full, RestoredState(experiment, blamed), micro_left)

    def repeat_update(state_left: LeftState) -> Gradients:
        with start_from(bench, state_left.put) as later:
            return later.experiment.micro_batches(second, RestoredState(later.experiment, blamed)).gradients

    with start_from(bench, full_left.put) as later:
        second = later.experiment.full_batch()
    first_left = (
        bench.relative_difference(repeat_update(state_left), second.gradients) for state_left in (micro_left, full_left)
    )
    next_update = NextUpdate(bench.rounding, *first_left)
    if next_update.from_full_batch <= bench.rounding < next_update.left:
        _without_gradients(experiment).forward(None, forward_left)
        difference = bench.relative_difference(repeat_update(forward_left), second.gradients)
        next_update = replace(next_update, from_forward=difference)
    # a state with a row per sample of the full batch is not one that a micro-batch could start from
    return next_update, full_left if full_left.shapes == micro_left.shapes else None


def _without_gradients(experiment: Experiment) -> Experiment:
    """The experiment with forwards whose loss has no graph."""
    loss = experiment.problem.loss

    def run_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            loss(model, batch)
        return torch.zeros((), device="cpu", requires_grad=True)  # a forward pass has to return a loss with a graph

    return replace(experiment, problem=replace(experiment.problem, loss=run_loss))


def neutralise_state(comparison: Comparison) -> tuple[Intervention, ...]:
    """Returns interventions that neutralise the state in later questions; none where no control run did."""
    if comparison.state is None or comparison.state.control is None:
        return ()
    if comparison.state.control.kind is ControlKind.STATE_RESTORED:
        return (restore(),)
    return (pin(read_changes(comparison.state.changes)),)


def blame_beside_control(bench: Bench, state_facts: State) -> State:
    """Blames state that changes the gradient where the control of another cause hides that.

    A loss that is computed once, or statistics that are constant, do not show that state changes.
    """
    change = bench.attempt("state beside", lambda: measure_restoring(bench))
    if change is None or not bench.rounding < change < math.inf:  # infinite: without gradients nothing is compared
        return state_facts
    read = read_changes(state_facts.changes)
    named = tuple(each for each in read if each.place in ("parameter", "buffer")) or read
    return replace(state_facts, blamed=named, accumulated_change=change)


def measure_restoring(bench: Bench) -> float:
    """How far restoring the state before each micro-batch moves the accumulated gradient, everything else as it is."""
    full = bench.experiment.full_batch()
    changing = bench.experiment.micro_batches(full).gradients
    restored = bench.experiment.micro_batches(full, RestoredState(bench.experiment)).gradients
    return bench.relative_difference(changing, restored)


def read_changes(changes: tuple[StateChange, ...]) -> tuple[StateChange, ...]:
    """The changes that a forward may read."""
    # In training a fused normalisation only writes its running statistics: every BatchNorm would cost control runs of
    # state. Statistics that something else reads have no writer here (`StateWatch`).
    read = tuple(c for c in changes if c.writer is None or "batch_norm" not in c.writer.name)
    return tuple(c for c in read if not c.name.endswith("num_batches_tracked"))


@dataclass(frozen=True)
class Blame:
    """The changes that matter."""

    changes: tuple[StateChange, ...]
    """The one change that removes the difference without the others, or all that are needed beside each other."""
    control: ControlRun | None = None
    """The run without the effect of these alone; None where none left only rounding."""
    together: bool = False
    """Whether they were proven only together with everything else, so that some of them may be innocent."""


def find_blamed(
    changes: tuple[StateChange, ...],
    left: float,
    kind: ControlKind,
    run_some: Callable[[Sequence[StateChange]], ControlRun | None],
) -> Blame:
    """Neutralises the changes one by one, then those that are needed together; of a process or of a script.

    Args:
        changes: State that a forward may read.
        left: The relative difference with none of them neutralised.
        kind: How all of them were neutralised: restored before each micro-batch, or pinned.
        run_some: Makes the control with some neutralised; None where there is none.
    """
    if len(changes) > _MANY:  # one run for each of many values costs too much: whole groups are tried first
        kinds = {change.place: tuple(c for c in changes if c.place == change.place) for change in changes}
        written = tuple(c for c in changes if c.writer is not None and c.writer.name)
        for some in (written, *kinds.values()):
            if 0 < len(some) < len(changes) and _is_enough(run_some(some)):
                return find_blamed(some, left, kind, run_some)
    # The likeliest come last: parameters and buffers with a known writer. An attribute that every forward computes anew
    # is no state, although holding it may help as well.
    ordered = sorted(changes, key=lambda c: (c.writer is not None, c.place in ("parameter", "buffer")))
    candidates = [ordered]
    if len(changes) <= _MANY:
        runs = {}
        for change in reversed(ordered):
            runs[change] = run_some([change])
            if _is_enough(runs[change]):  # the other changed values are computed from this one
                return Blame((change,), runs[change])
        # what changes nothing by itself mostly needs no run together with others
        active = [c for c in ordered if (run := runs[c]) is None or abs(run.left - left) > SAME_IN_FLOAT32 * left]
        candidates = [active, ordered] if len(active) < len(ordered) else candidates
    for listed in candidates:
        run = run_some(listed) if len(listed) > 1 else None
        if run is None or not run.rounding:
            continue
        released = find_needed(listed, run_some)
        needed = [entry.item for entry in released]
        blamed = tuple(change for change in changes if change in needed)
        together = any(math.isnan(entry.alone) for entry in released)
        return Blame(blamed, run if len(needed) == len(listed) else run_some(blamed), together)
    # Restoring everything helped, and restoring all that has a name did not.
    if kind is ControlKind.STATE_RESTORED:
        return Blame((UNNAMED,))
    return Blame(changes, together=len(changes) > 1)


def _run_nearest_control(
    bench: Bench, comparison: Comparison, changes: Sequence[StateChange]
) -> tuple[ControlRun, tuple[StateChange, ...]]:
    """The control run that leaves least, and what is set only once where that control is one forward before both runs.

    The state is initialised once, or restored before each micro-batch, or kept constant where that leaves less.
    """
    primed, set_once = _run_primed(bench, changes)
    if primed is not None and primed.rounding and set_once:
        return primed, set_once
    restored = bench.run(restore(), fit=True)
    if restored.rounding:
        return restored, ()
    pinned_run = bench.possible(lambda: bench.run(pin(changes), fit=True))
    if pinned_run is None:  # constant state may stop a model: a counter that stays at zero
        return restored, ()
    # Weights may remain as a second cause after either control; those with a meaning show the right one.
    if pinned_run.rounding or weights.is_meaningful(bench, comparison, pinned_run.fit):
        return pinned_run, ()
    leaves_less = _unexplained_difference(pinned_run) < HELPS * _unexplained_difference(restored)
    return pinned_run if leaves_less else restored, ()


def _run_primed(bench: Bench, changes: Sequence[StateChange]) -> tuple[ControlRun | None, tuple[StateChange, ...]]:
    """Lets both runs start from what one forward of the full batch leaves; no run where that is impossible.

    State that initialises itself from the first batch (scales, a codebook) agrees then.
    """
    watch = StateWatch(bench.experiment)

    # State that later forwards still change is not set once, even where that makes no difference by chance: a
    # threshold that moves between two samples.
    def find_set_once() -> tuple[StateChange, ...]:
        changed_again = {change.name for change in watch.changes()}
        return tuple(change for change in changes if change.name not in changed_again)

    # one forward more is cheap, and mostly all state changes again in it: then both runs can be saved
    bench.possible(lambda: bench.neutralise(_PRIMED).experiment.forward(None, watch))
    watched = replace(_PRIMED, probe=lambda _: watch)
    run = bench.possible(lambda: bench.run(_PRIMED, watched)) if find_set_once() else None
    return run and replace(run, interventions=(_PRIMED,)), find_set_once()


def _run_primed_and_pinned(
    bench: Bench, changes: Sequence[StateChange], blamed: Sequence[StateChange]
) -> ControlRun | None:
    """Lets both runs start from one forward of the full batch, and keeps the state constant from there on.

    Args:
        bench: Where to run.
        changes: Everything that a forward changes and may read.
        blamed: The part of it that matters.

    Returns:
        The control run; None where it leaves something, or where the first forward writes as every later one does.
    """
    names = {change.name for change in blamed}

    def writes(watched_bench: Bench) -> Counter[tuple[str, str, Frame]]:
        watch = StateWatch(watched_bench.experiment)
        watched_bench.experiment.forward(None, watch)
        return Counter({key: count for key, count in watch.writes.items() if key[0] in names})

    # State that is constant from the beginning is never initialised: a codebook that k-means sets from the first batch,
    # and a moving average changes later, would stay the zeros that it begins as. Writes that only happen in a first
    # forward show such state.
    if not writes(bench) - writes(bench.neutralise(_PRIMED)):
        return None
    run = bench.run(*_prime_and_pin(changes))
    return run if run.rounding else None


def _unexplained_difference(control: ControlRun) -> float:
    """The difference that a control leaves with the best weights."""
    return control.left if control.fit is None or control.fit.vacuous else control.fit.residual


def _is_enough(run: ControlRun | None) -> bool:
    return run is not None and run.rounding


def run_some(bench: Bench, changes: Sequence[StateChange], kind: ControlKind) -> ControlRun | None:
    """The control run with some values neutralised; None without values, or where that stops the model."""
    if not changes:
        return None
    if kind is ControlKind.STATE_RESTORED:
        return bench.possible(lambda: bench.run(restore(changes)))
    pinned = pin(changes, f"{quote_names([change.name for change in changes])} kept fixed")
    return bench.possible(lambda: bench.run(replace(pinned, kind=kind)))
