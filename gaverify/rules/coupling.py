"""Samples act on each other, or the loss reads other values: GAV101 to GAV104, GAV610."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.comparison import BackwardPlace, Comparison
from gaverify.records.experiment import Cause, ControlKind, DifferenceKind, FirstDifference, LossValue, Operation
from gaverify.records.findings import Evidence, Finding, Location
from gaverify.records.outcomes import Outcome
from gaverify.rules.rule import (
    RAN_EQUIVALENT,
    control_evidence,
    find_constant_remedy,
    find_pairing_remedy,
    finding_of,
    group_causes,
    is_proven,
    measured_evidence,
    module_name,
    number_remedy,
    quote_names,
    rule,
    show_control,
    show_first_operation,
    weights_text,
    word_assignments,
    word_control,
    word_difference,
    word_difference_left,
    word_earlier_fixes,
    word_largest,
)
from gaverify.rules.scale import contradict_losses
from gaverify.thresholds import FIT_FLOAT64, SAME_IN_FLOAT32

_IN_LOSS = {
    "matrix": "the loss compares the samples of a batch with each other",
    "rows": "the loss gives each sample a value that depends on the other samples",
    "non-additive": "the loss is not a weighted sum over samples",
    "control-flow": "the loss takes a branch that depends on the batch",
}
"""Sentences about a loss (GAV103), by the kind of its suspect."""

_ONCE = "do once, after the last micro-batch's backward pass, what the hooks do in each micro-batch"
_LOOK_AT_BACKWARD = (
    "check custom `backward` functions and hooks: they get the micro-batch's gradient, not the full batch's"
)
_BACKWARD_REMEDIES = {
    BackwardPlace.MODULE: _LOOK_AT_BACKWARD,
    BackwardPlace.PARAMETER_HOOK: _ONCE,
    BackwardPlace.MODULE_HOOK: _ONCE,
    BackwardPlace.TENSOR_HOOK: "make the hook treat each sample separately; it gets the micro-batch's gradient",
    BackwardPlace.CONSTANT: "compute the constant once over the full batch and use it in every micro-batch (one "
    "constant per sample would change the loss)",
    BackwardPlace.LOSS: _LOOK_AT_BACKWARD,
}
"""Repairs of a backward that depends on the batch (GAV104), by where gradients differ first."""


@rule("GAV101")
def batch_statistics(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding per cause in which a module normalises its channels by statistics of the batch."""
    for cause in comparison.forward.causes:
        suspect = cause.suspect
        # a normalisation inside the loss is GAV103: no layer of the model can be replaced there
        if not (suspect.statistics and suspect.in_model):
            continue
        operation = suspect.culprit
        remedies = [
            f"replace it by {run.what}, which changes the model (gaverify ran it in its place: accumulated and "
            "full-batch gradient agree)"
            for run in cause.remedies
            if run.repairs and run.kind is ControlKind.REPLACED
        ]
        if cause.control is not None and cause.control.kind is ControlKind.EVALUATION_MODE:
            if not comparison.runs_repairs:  # then no run has another layer
                remedies.append(
                    "replace it by GroupNorm, which changes the model (gaverify did not run it; for a BatchNorm, "
                    "`gaverify.remedies.convert_batch_norm(model)` does it)"
                )
            # stored statistics are offered only where they were the control, so that every offered repair has run
            remedies.append(
                "keep it in evaluation mode (`.eval()` on the layer, after every `model.train()`): it then uses its "
                "running statistics, in an untrained model their initial values"
            )
        what = (
            f"layer {module_name(operation.module, operation.kind)} normalises with the statistics of the micro-batch"
        )
        remedy = "; or ".join(remedies) or "use statistics of each sample (LayerNorm, GroupNorm) or stored ones"
        yield _meeting(comparison, cause, what, remedy)


def _meeting(
    comparison: Comparison, cause: Cause, what: str, remedy: str, *more: Evidence, others: Sequence[Cause] = ()
) -> Finding:
    """The finding of a cause in the forward: the trace, more that was measured, and the control run.

    Of several causes each has a repair, and they are tried in the order in which the causes run: so they are told.
    """
    return finding_of(
        what,
        show_first_operation(comparison, cause),
        *more,
        show_control(comparison, _join_causes([cause, *others])),
        location=cause.suspect.culprit.location,
        remedy=number_remedy(comparison, remedy, cause),
        proven=all(is_proven(comparison, each) for each in (cause, *others)),
        together=(*_places(cause), *(each.suspect.culprit.location for each in others)),
    )


def _join_causes(causes: Sequence[Cause]) -> Cause:
    """The last of some causes with one origin, whose control ran with those before it neutralised."""
    *_, last = causes
    runs = [cause.control for cause in causes if cause.control is not None]
    if len(causes) == 1 or last.control is None:
        return last
    what = " and with ".join(run.what for run in runs)
    return replace(last, control=replace(last.control, what=what), difference_alone=math.nan)


def _places(cause: Cause) -> Iterator[Location]:
    """Everything that the control neutralised: layers of one class together, lines that do the same in every layer."""
    place = cause.suspect.culprit.location
    for module in cause.control.modules if cause.control is not None and len(cause.control.modules) > 1 else ():
        if place is None or module != place.module:
            yield Location(module, file=place.file if place is not None else None)


@rule("GAV102")
def cross_sample_operation(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding per operation inside the model that mixes samples."""
    for cause, *others in group_causes(comparison):
        suspect = cause.suspect
        # random draws that depend on the batch are GAV302, and values that are handed over GAV610
        if not suspect.in_model or suspect.statistics or suspect.kind in ("random", "values"):
            continue
        operation = suspect.culprit
        branches = suspect.kind == "control-flow"
        what = "takes a branch that depends on the batch" if branches else "mixes the samples of a batch"
        remedy = (
            "make the operation treat one sample at a time, or use statistics that do not depend on the micro-batch"
        )
        if suspect.is_branch_on_shape:
            remedy = "take the same branch whatever number of samples a batch has"
            run = cause.control
            if run is not None and run.kind is ControlKind.LARGER_MICRO_BATCHES:
                remedy += f"; or use {run.what}{RAN_EQUIVALENT}"
        # a repair that has run comes before one that follows from the kind of operation
        remedy = find_constant_remedy(cause) or find_pairing_remedy(suspect) or remedy
        what = f"{module_name(operation.module, operation.kind)} {what}"
        yield _meeting(comparison, cause, what, remedy, others=others)


@rule("GAV103")
def batch_coupled_loss(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding per operation outside the model's outputs that couples samples."""
    for cause, *others in group_causes(comparison):
        suspect = cause.suspect
        if suspect.in_model or suspect.kind not in _IN_LOSS:
            continue
        fit = comparison.window.fit
        more = []
        # weights that fit would contradict the finding, and no residual says nothing
        if fit is not None and FIT_FLOAT64 < fit.residual < math.inf:
            of = f" of the first {fit.samples} samples" if fit.samples else ""
            text = (
                f"no micro-batch weights reproduce the gradient{of}: the best leave a difference of {fit.residual:.1e}"
            )
            more.append(Evidence("micro-batch-weights", "fit", text, {"residual": fit.residual}))
        yield _meeting(comparison, cause, _IN_LOSS[suspect.kind], _remedy(comparison, cause), *more, others=others)


def _remedy(comparison: Comparison, cause: Cause) -> str:
    """The repair that was run; an audit runs none and names the one that holds for every loss over a model's outputs.

    A run tries cached gradients before anything else: where another control helped, they did not go or left something.
    """
    run = cause.control
    # cached gradients were run in one process only, so nothing is tested for several ranks
    if comparison.ranks is not None:
        return (
            "compute the loss once over the outputs of all micro-batches and ranks: gather them with "
            "`gaverify.remedies.all_gather`, and cache the gradients of micro-batches (not tried here)"
        )
    cached = "two-pass gradient caching (`gaverify.remedies.CachedGradients`)"
    if cause.suspect.kind == "non-additive":
        statistics = "compute what it needs of the batch (a mean, a standard deviation) once over the full batch"
        cached = f"{statistics}; or use {cached}"
    if run is not None and run.kind is ControlKind.CACHED_GRADIENTS and run.repairs:
        # an earlier cause in the model spoils this control unless it is repaired before
        before = comparison.forward.causes[: comparison.forward.causes.index(cause)]
        fixes = word_earlier_fixes(before)
        return f"{cached}; gaverify ran it{fixes}: the full-batch gradient, with the memory of one micro-batch"
    constant_remedy = find_constant_remedy(cause)
    if constant_remedy:
        return constant_remedy
    loss_remedy = "compute the loss once over the outputs of all micro-batches"
    return find_pairing_remedy(cause.suspect) or (
        loss_remedy if comparison.runs_repairs else f"{loss_remedy}: {cached} does it, not tried here"
    )


@rule("GAV610")
def loss_inputs_differ(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding per value that a loop hands to the loss and that differs for the same samples."""
    for cause in comparison.forward.causes:
        suspect, value = cause.suspect, cause.suspect.value
        if value is None:
            continue
        name = f"`{value.name}`" if value.name else f"a value (`{suspect.operation.source}`)"
        reader = module_name(suspect.operation.module) if suspect.in_model else "the loss"
        what = f"{reader} reads {name}, which is another one for the same samples than in the full batch"
        remedy = "compute it once for the full batch, before it is split, and give each micro-batch its own rows of it"
        if value.is_reordered:
            what = f"{reader} reads {name}, which holds the values of other samples"
            remedy = "cut it in the order of the samples, so that each micro-batch gets the values of its own rows"
        elif not suspect.samples or (value.made_with is not None and value.made_with.name == value.name):
            remedy = "use the same value in every micro-batch as in the full batch"
        tested = RAN_EQUIVALENT if cause.control is not None and cause.control.rounding else ""
        yield finding_of(
            what,
            _value_evidence(comparison, cause, value),
            show_control(comparison, cause),
            location=suspect.operation.location,
            remedy=number_remedy(comparison, remedy + tested, cause),
            proven=is_proven(comparison, cause),
        )


def _value_evidence(comparison: Comparison, cause: Cause, value: LossValue) -> Evidence:
    """Where the value differs first, by how much, and where the loss reads it."""
    suspect, reader = cause.suspect, value.reader
    rows = f" for {suspect.samples} samples" if suspect.samples else ""
    text = word_largest(comparison)
    text += "" if suspect.in_model else "; all outputs of the model agree for the same samples"
    text += f"; first value that differs{rows}: `{suspect.operation.source}`"
    number = value.made_with
    if number is not None:
        name = f"`{number.name}`" if number.name else "a number"
        micro_batches = weights_text(number.micro_batches)
        text += f", where {name} is {number.full:.4g} in the full batch and {micro_batches} in the micro-batches"
    if value.assigned:
        text += f"; {word_assignments(value.assigned)}"
    if reader.place[2:] != suspect.operation.place[2:]:
        text += f"; the loss reads it at {reader.file}:{reader.line}"
    return measured_evidence("loss-values", text, difference=suspect.difference, samples=suspect.samples)


@rule("GAV104")
def batch_dependent_backward(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where all forwards and the losses agree, and gradients do not."""
    # no forwards of a script were traced: its losses have to tell
    yield from _judge_losses(comparison.record)
    # a gradient that does not repeat itself is GAV303, and every comparison differs then
    repeats = comparison.repeatability is None or comparison.repeatability.backward <= SAME_IN_FLOAT32
    run = comparison.backward.control
    is_proven = run is not None and run.proves
    agree = (comparison.forward.agree or is_proven) and comparison.forward.loss_gap <= SAME_IN_FLOAT32
    if comparison.forward.causes or not agree or not repeats:
        return
    if comparison.left <= SAME_IN_FLOAT32 and comparison.backward.control is None:
        return
    # parameters that differ in another way (missing, not finite) have findings of their own
    rows = [row for row in comparison.compared.divergent if row.relative_difference > row.relative_allowed]
    hooked = ", ".join(f"`{name}`" for name in comparison.backward.hooked)
    place, culprit = comparison.backward.place, comparison.backward.culprit
    restored = " from the same state" if comparison.state is not None and comparison.state.blamed else ""
    losses = "but for a constant" if comparison.forward.adds_constant else f"to {comparison.forward.loss_gap:.0e}"
    where = f"; gradients first differ in {_word_place(place, culprit)}" if culprit is not None else ""
    where += f"; hooks are registered on {hooked}" if hooked else ""
    alike = "all forward values agree" if comparison.forward.agree else "the losses agree"
    operations = f"all operations of the forward pass agree{restored}, the losses"
    if not comparison.forward.agree:
        operations = f"the losses agree{restored}"
    yield finding_of(
        f"the backward of {quote_names(row.name for row in rows)} depends on the batch, although {alike}",
        measured_evidence(
            "operations",
            f"{comparison.compared.largest}; {operations} {losses}{where}",
            loss_gap=comparison.forward.loss_gap,
        ),
        *([] if run is None else [control_evidence("backward", word_difference_left(run), left=run.left)]),
        remedy=_BACKWARD_REMEDIES[place or BackwardPlace.MODULE],
        location=culprit.location if culprit else Location(rows[0].name.rpartition(".")[0] if rows else None),
        proven=is_proven,
    )


def _judge_losses(record: Record) -> Iterator[Finding]:
    """Yields a finding where a loop's losses add up to the full batch's, and its gradients need other weights."""
    update, cause, first = record.divergent, record.controls.backward, record.controls.first_difference
    if update is not None and first is not None and first.kind is DifferenceKind.BACKWARD:
        yield from _judge_traced_backward(update, first)
        return
    if update is None or update.window.fit is None or not contradict_losses(record, update):
        return
    run, fit = cause.control if cause is not None else None, update.window.fit
    proven = run is not None and run.proves
    text = f"with {run.what} the difference" if run is not None else ""
    losses, losses_fitted = (
        sum(weight * loss for weight, loss in zip(weights, update.window.losses, strict=True))
        for weights in (fit.used, fit.weights)
    )
    names = quote_names(row.name for row in update.parameters if row.outcome is Outcome.DIVERGENT)
    in_model = cause is not None and cause.suspect.in_model
    yield finding_of(
        f"the backward of {names} depends on the batch, although the losses add up to the full batch's",
        measured_evidence(
            "comparison",
            f"{word_difference(update)}; the losses of update {update.number} add up to {losses:.4g} (full batch: "
            f"{update.window.full_loss:.4g}), and to {losses_fitted:.4g} with the weights that fit the gradients",
            losses=losses,
            full_loss=update.window.full_loss,
            losses_fitted=losses_fitted,
        ),
        *([] if run is None else [word_control("control", text, run.left, proven)]),
        remedy=_BACKWARD_REMEDIES[BackwardPlace.MODULE if in_model else BackwardPlace.LOSS],
        location=cause.suspect.operation.location if cause is not None and proven else None,
        proven=proven,
    )


def _judge_traced_backward(update: UpdateComparison, first: FirstDifference) -> Iterator[Finding]:
    """Yields a finding where code that a backward pass runs is proven to be what both runs do otherwise."""
    run = first.control
    if run is None or not run.proves:
        return
    culprit = next(iter(first.sources), first.operation)
    names = quote_names(row.name for row in update.parameters if row.outcome is Outcome.DIVERGENT)
    yield finding_of(
        f"the backward of {names} depends on the batch, although all forward values agree",
        measured_evidence("trace", f"{word_difference(update)}; gradients first differ in `{culprit.source}`"),
        word_control("control", f"with {run.what} the difference", run.left, proven=True),
        remedy=_BACKWARD_REMEDIES[BackwardPlace.TENSOR_HOOK],
        location=culprit.location,
        proven=True,
    )


def _word_place(place: BackwardPlace | None, culprit: Operation) -> str:
    if place is None or place is BackwardPlace.MODULE:
        return f"the backward of {module_name(culprit.module, culprit.kind)}"
    text = {
        BackwardPlace.PARAMETER_HOOK: f"the gradient hooks of the parameters of {module_name(culprit.module)}",
        BackwardPlace.MODULE_HOOK: f"the backward hooks on {module_name(culprit.module)}",
        BackwardPlace.TENSOR_HOOK: "a gradient hook that the forward puts on a tensor",
        BackwardPlace.CONSTANT: "a value that is computed from the batch and detached",
        BackwardPlace.LOSS: "the backward of the loss",
    }[place]
    return text + (f": `{culprit.source}`" if culprit.source else "")
