"""Changes between micro-batches: state (GAV401 to GAV403), and draws (GAV301 to GAV303)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from gaverify.records.audit import Calls
from gaverify.records.comparison import Comparison, State, StateChange
from gaverify.records.events import AverageUpdate
from gaverify.records.experiment import ControlKind
from gaverify.records.findings import Evidence, Finding, Location
from gaverify.records.numbers import count_text
from gaverify.rules.rule import (
    RAN,
    RAN_EQUIVALENT,
    control_evidence,
    explain_rest,
    finding_of,
    first_place,
    is_proven,
    join_texts,
    measured_evidence,
    quote_names,
    rule,
    show_control,
    show_first_operation,
    word_difference_left,
    word_times,
    word_trial,
)
from gaverify.thresholds import SAME_IN_FLOAT32

_PLACES = {"closure": "variable"}  # what a place is called in a sentence, where it is not its own name
_PRIMED = (ControlKind.STATE_PRIMED, ControlKind.STATE_PRIMED_AND_PINNED)
_SHOWN = 3  # changed values that are written out


@rule("GAV401")
def state_changed_by_forward(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where parameters or buffers that a forward writes decide the difference."""
    state = comparison.state
    if state is None:
        return
    # state that is initialised once is repaired in the same way wherever it is kept
    places = ("parameter", "buffer", "attribute", "closure") if is_set_once(state) else ("parameter", "buffer")
    blamed = [change for change in state.blamed if change.place in places]
    # what was only proven together with hidden state is one finding, GAV403
    if not blamed or (state.together and len(blamed) < len(state.blamed)):
        return
    named = join_texts([f"{_PLACES.get(change.place, change.place)} `{change.name}`" for change in blamed])
    summary = f"the forward changes {named}, which the next micro-batch reads"
    if is_carried(state):
        summary = _word_carried(named)
    elif is_set_once(state):
        summary = f"the first forward initialises {named} from its batch"
        summary += ", and later forwards update it" if _moves_on(state) else ""
    yield _finding_of_state(comparison, state, blamed, summary)


def is_carried(state: State) -> bool:
    """Whether an update begins with other state than the full batch's, which the script's own code has made."""
    return state.control is not None and state.control.kind is ControlKind.STATE_ALIGNED


def _word_carried(named: str) -> str:
    return f"an update begins with another value of {named} than in the full-batch run"


def _finding_of_state(comparison: Comparison, state: State, blamed: list[StateChange], summary: str) -> Finding:
    return finding_of(
        summary,
        *_evidence(comparison, state, blamed),
        remedy=_remedy(state),
        # proven where the difference falls without the changes, or without all that is named
        proven=state.control is not None and (state.control.rounding or comparison.cleared),
        location=blamed[0].writer.location if blamed[0].writer is not None else None,
        together=[change.writer.location for change in blamed if change.writer is not None],
    )


def _writing(change: StateChange) -> str:
    """Names the operation that wrote a value, and its line; empty where nothing is known."""
    writer = change.writer
    if writer is None or not (writer.name or writer.file):
        return ""
    if not writer.name:
        return f"`{change.name}` changes at {writer.file}:{writer.line}"
    return f"`{change.name}` is written by {writer}"


def _evidence(comparison: Comparison, state: State, blamed: list[StateChange]) -> tuple[Evidence, ...]:
    """Returns the evidence of values that change, and of the control run."""
    written_out = blamed[:_SHOWN]
    writers = "; ".join(text for change in written_out if (text := _writing(change)))
    if len(blamed) > _SHOWN:
        writers += f"; and {len(blamed) - _SHOWN} more"
    evidence = [
        measured_evidence(
            "state",
            f"{comparison.compared.largest}" + (f"; {writers}" if writers else ""),
            changed=[change.name for change in state.changes],
        )
    ]
    if state.control is not None:
        # the name of that control is a clause of its own: `one forward of the full batch before …`
        article = "" if is_set_once(state) else "the "
        text = word_difference_left(state.control, article)
        if state.difference_alone > 0:
            text += (
                f". With the other causes removed, it alone makes a difference of {state.difference_alone:.0e}: proven"
            )
        if state.accumulated_change > 0:
            text += f"; restoring it alone changes the accumulated gradient by {state.accumulated_change:.0e}: proven"
        evidence.append(control_evidence("state", text, left=state.control.left))
    return tuple(evidence)


def is_set_once(state: State) -> bool:
    """Whether what the forward changes is set once, from the first batch, so that one forward before repairs it."""
    run = state.control
    return run is not None and run.kind in _PRIMED and run.rounding


def _moves_on(state: State) -> bool:
    """Whether what the first forward sets is moved by later ones as well, so that it has to be held still, too."""
    return state.control is not None and state.control.kind is ControlKind.STATE_PRIMED_AND_PINNED


def _remedy(state: State) -> str:
    """The repair that was run."""
    if is_carried(state):
        tested = ": with the full-batch run's value every compared update agrees" if state.remedies else ""
        return (
            "compute it from all micro-batches of the window: add up what each of them contributes, and clear that sum "
            f"only after the step{tested}"
        )
    first = "run one forward pass on a full batch first, without a step"
    if is_set_once(state) and _moves_on(state):
        first += ", and update the state once per optimizer step, after it"
        return f"{first}; {RAN} equivalent with the state kept fixed"
    if is_set_once(state):
        return first + RAN_EQUIVALENT
    if state.difference_alone > 0 or state.accumulated_change > 0:
        return (
            "update the state once per optimizer step, after it; gaverify ran it with the state kept fixed, "
            "together with the other repairs"
        )
    if state.remedies:
        once = "or update it once per optimizer step, after the last backward pass (not tested)"
        return f"{_word_restoring(state)}; {once}"
    text = f"update the state once per optimizer step, after it; {RAN} equivalent with the state kept fixed"
    if not state.new_state_difference > SAME_IN_FLOAT32:
        return text
    return (
        f"{text} to a full batch that reads the state from before the update; one that reads its own new state differs "
        f"by {state.new_state_difference:.1e}"
    )


def _word_restoring(state: State) -> str:
    """The repair that restores the state, and for how many updates it holds."""
    restore = "copy the state before the first micro-batch of an update, and put the copy back before each other one"
    trial, following = word_trial(state.remedies[0]), state.next_update
    if following is None:
        return f"{restore} ({trial} in one update)" if state.remedies[0].repairs else f"{restore} ({trial})"
    if following.left <= following.rounding:
        return f"{restore} ({trial})"
    if following.from_forward <= following.rounding:
        restore += " and after the last one; then run one forward pass of the full batch without gradients"
        return f"{restore} ({trial} in two updates; without that pass the second one differs)"
    return f"{restore} ({RAN} it repairs one update, and leaves a difference in the next one)"


@rule("GAV403")
def hidden_state(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where state outside parameters and buffers decides the difference."""
    state, twice = comparison.state, comparison.repeatability
    hidden = ("attribute", "closure", "unnamed")
    blamed = [change for change in state.blamed if change.place in hidden] if state else []
    if state is not None and blamed and not is_set_once(state):  # what the first forward sets once is GAV401
        named = quote_names(change.name for change in blamed if change.place != "unnamed") or "state"
        summary = f"the forward changes {named}, which is no parameter or buffer, and reads it again"
        if state.together and len(state.blamed) > 1:
            blamed = list(state.blamed)
            named = quote_names(change.name for change in blamed)
            summary = f"the forward changes {named}, and reads at least one of them again"
        if is_carried(state):
            summary = _word_carried(named)
        yield _finding_of_state(comparison, state, blamed, summary)
    elif twice is not None and twice.forward > comparison.repeats:
        yield finding_of(
            "the same batch gives another loss in a second run, although all known state was restored",
            measured_evidence("repeatability", f"the loss differs by {twice.forward:.1e}", **vars(twice)),
            remedy="look for state outside the model (files, global objects, own random generators, clocks)",
            proven=False,
        )


@rule("GAV402")
def buffer_drift(comparison: Comparison) -> Iterator[Finding]:
    """Yields a note on buffers that end up different, and one on an average that is updated inside a window."""
    drift = comparison.buffers.drift
    if drift:
        are, end = ("are", "end") if len(drift) > 1 else ("is", "ends")
        worst = max(drift, key=lambda name: drift[name])
        differs = f"`{worst}` differs by {drift[worst]:.1e}"
        # an audit keeps no number, only that buffers differ by more than rounding
        if math.isnan(drift[worst]):
            differs = f"{count_text(len(drift), 'buffer')} differ{'' if len(drift) > 1 else 's'} by more than rounding"
        blamed = [change.name for change in comparison.state.blamed] if comparison.state is not None else []
        # a buffer that is part of the cause GAV401 or GAV403 is read by forwards, and no rate repairs it
        is_read = any(name in drift for name in blamed)
        after = f" after update {comparison.buffers.update}" if comparison.buffers.update is not None else ""
        remedy = "divide their update rate by K (BatchNorm: momentum / K), if evaluation depends on these buffers"
        if is_read:
            remedy = (
                "update these buffers once per optimizer step, after it: the next forward reads "
                f"{quote_names(blamed)}, so another update rate does not help"
            )
        if comparison.state is not None and is_carried(comparison.state):
            remedy = f"repair {quote_names(blamed)} first, as the other finding says; no update rate repairs it"
        yield finding_of(
            f"{quote_names(drift)} {are} updated {word_times(comparison.window.steps)} per optimizer step and {end} up "
            f"different{after}",
            measured_evidence("state", differs, **dict(drift)),
            remedy=remedy,
            severity="note",
            proven=True,
        )
    yield from _judge_average(comparison.calls)


def _judge_average(calls: Calls) -> Iterator[Finding]:
    inside = calls.inside(AverageUpdate)
    if not inside:
        return
    number = inside[0].update
    window = calls.window_of(number)
    often = len(window.of(AverageUpdate)) if window is not None else len(inside)
    yield finding_of(
        f"the moving average of the weights is updated {word_times(often)} in update {number}",
        measured_evidence(
            "events",
            f"{len(inside)} of these calls before the last backward pass of an update",
            inside=len(inside),
        ),
        remedy="update the average once per optimizer step",
        severity="note",
        location=first_place(inside),
        proven=True,
    )


@rule("GAV301")
def aligned_randomness(comparison: Comparison) -> Iterator[Finding]:
    """Yields a note where random draws were dealt out per sample, and one where a draw has no row per sample."""
    draws = comparison.draws
    # draws were split over micro-batches only where each has a row per sample; other rows may be unaligned (GAV302)
    if draws.dealt > 0 and not (draws.uneven and draws.unaligned):
        were = "was" if draws.count == 1 else "were"
        yield finding_of(
            f"{count_text(draws.count, 'random draw')} (such as dropout) {were} aligned: each "
            f"{'row' if draws.uneven else 'sample'} got the same values in both runs",
            measured_evidence("random-draws", _word_split_draws(comparison), draws=draws.count, dealt=draws.dealt),
            remedy="",  # in training the draws differ, and the gradients agree on average
            severity="note",
            proven=True,
        )
    # rows that are not the full batch's may be as many as those by chance: what could not be dealt out is no value
    shared = {name: place for name, place in draws.shared.items() if name not in draws.unaligned}
    # with K = 1 the one micro-batch draws what the full batch draws
    if shared and comparison.window.steps > 1:
        yield _finding_of_shared_draws(comparison, shared)


def _word_split_draws(comparison: Comparison) -> str:
    draws = comparison.draws
    how_often = f" {word_times(draws.dealt)}" if draws.is_counted else ""
    text = f"{count_text(draws.count, 'draw')} of the full batch, reused{how_often} by the micro-batches"
    if not draws.uneven:
        return f"{text}: each got the rows of its own samples"
    rows = "rows that are no samples (time steps of packed sequences, picked elements)"
    return f"{text}; {rows} were matched by what packed them, by their contents, or by their order"


def _finding_of_shared_draws(comparison: Comparison, draws: Mapping[str, tuple[str, int] | None]) -> Finding:
    """A value for the whole batch: K micro-batches draw K of them in training, and are given one and the same here."""
    places = {name: f"`{name}`" + (f" at {place[0]}:{place[1]}" if place else "") for name, place in draws.items()}
    verb, steps = "draws" if len(draws) == 1 else "draw", comparison.window.steps
    return finding_of(
        f"{join_texts(list(places.values()))} {verb} one value for the whole batch, not one per sample",
        measured_evidence(
            "random-draws",
            f"all {steps} micro-batches got the full batch's value; in training each draws its own, with the same mean "
            "and another variance",
            shared=list(draws),
        ),
        remedy="draw one value per sample, or one per optimizer step if a single value is meant",
        severity="note",
        location=_first(draws.values()),
        proven=True,
    )


@rule("GAV302")
def unalignable_randomness(comparison: Comparison) -> Iterator[Finding]:
    """Yields a fault where a draw that cannot be dealt out decides the result, a note where something else does."""
    decisive = next((cause for cause in comparison.forward.causes if cause.suspect.kind == "random"), None)
    if comparison.record.agrees:
        return  # what was drawn made no difference that could be seen
    reasons = dict(comparison.draws.unaligned)
    if comparison.draws.foreign_differ:
        reasons["Python or NumPy generator"] = "the number of draws depends on the batch"
    if not reasons and decisive is None:
        return
    text = "; ".join(f"`{name}`: {why}" for name, why in reasons.items())
    evidence = [measured_evidence("random-draws", text, **dict(reasons))] if reasons else []
    if decisive is not None:
        evidence += [show_first_operation(comparison, decisive), show_control(comparison, decisive)]
    still = comparison.draws.control
    if still is not None:
        without = comparison.draws.difference_alone == 0  # measured, with the causes that are named neutralised
        remainder = "the other causes listed remain, and without them the draws make no difference" if without else ""
        text = word_difference_left(still) + (
            "" if still.rounding else f": {remainder or explain_rest(comparison, still)}"
        )
        if comparison.undecided:  # these draws may be all that differs, or hide what differs only with them
            text = f"with {still.what} in both runs the difference is {still.left:.0e}: nothing else is shown to differ"
        if comparison.draws.difference_alone > 0:
            difference = f"{comparison.draws.difference_alone:.0e}"
            text += f". With the other causes removed, the draws alone make a difference of {difference}: proven"
        evidence.append(control_evidence("random-draws", text, left=still.left))
    decides = decisive is not None or (still is not None and still.rounding) or comparison.draws.difference_alone > 0
    # Draws that no control can keep constant prove nothing: the question stays open.
    fault = (
        comparison.draws.can_be_constant
        and bool(comparison.compared.divergent)
        and (decides or not has_other_cause(comparison))
    )
    # rows that look alike may have got each other's draws, which gaverify did and the user's code did not
    unmatched = comparison.draws.are_unmatched
    summary = "random draws could not be aligned sample by sample between the two runs"
    remedy = "draw one value for each sample (row of the batch), or one per forward"
    if unmatched:
        summary += ", and may be all that differs" if comparison.undecided else ""
        remedy = "verify without these draws: in evaluation mode (`--mode eval`), or with a probability of 0"
    elif not comparison.draws.can_be_constant:
        remedy += ", or switch the randomness off for the audit"
    yield finding_of(
        summary,
        *evidence,
        severity="fault" if fault and not unmatched else "note",
        location=decisive.suspect.operation.location
        if decisive is not None
        else _first(comparison.draws.places.values()),
        remedy=remedy,
        proven=not unmatched
        and (
            (decisive is not None and is_proven(comparison, decisive))
            or (still is not None and still.rounding)
            or comparison.draws.difference_alone > 0
        ),
    )


def _first(places: Iterable[tuple[str, int] | None]) -> Location | None:
    """Where the first draw was made whose line is known."""
    place = next(filter(None, places), None)
    return Location(file=place[0], line=place[1]) if place is not None else None


def has_other_cause(comparison: Comparison) -> bool:
    """Whether another cause was found."""
    state = comparison.state is not None and bool(comparison.state.blamed)
    return bool(comparison.forward.causes) or comparison.window.has_wrong_weights or state


@rule("GAV303")
def unrepeatable_backward(comparison: Comparison) -> Iterator[Finding]:
    """Yields a fault where two runs of one batch agree in the loss alone, a note where a script does not repeat."""
    # nothing is proven about accumulation where equal runs of a script differ: it may only want a seed
    for update in [update for update in comparison.record.updates if update.unrepeatable][:1]:
        yield finding_of(
            f"two full-batch runs differ from each other: {update.unrepeatable}",
            measured_evidence("noise-floor", f"in update {update.number}: {update.unrepeatable}", update=update.number),
            remedy="seed every generator at the start of the script (torch, NumPy, random, workers), or pass it a seed",
            severity="note",
            proven=True,
        )
    twice = comparison.repeatability
    if twice is None or not twice.backward > comparison.repeats or twice.forward > comparison.repeats:
        return
    yield finding_of(
        "computing the full batch's gradient twice gives different results",
        measured_evidence(
            "repeatability",
            f"same weights, samples and random draws: the loss agrees, the gradient differs by {twice.backward:.1e}",
            **vars(twice),
        ),
        remedy="look for a backward function that draws random numbers or keeps state between calls",
        proven=True,
    )
