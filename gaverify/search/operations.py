"""Which operations of the forward make the difference? Causes are searched one after the other (`_find_causes`).

1. Trace both forwards: the first operations whose results depend on the batch are the suspects.
2. Run the controls of each suspect. The first that helps is a cause, and stays neutralised in both runs.
3. Trace again, until only rounding is left. A suspect that does not help by itself stays neutralised on probation,
   because several causes may hide each other.
4. In the end release every cause alone while the others stay neutralised. The difference that comes back is its own; a
   cause without one is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from gaverify.records.comparison import Comparison, ForwardComparison
from gaverify.records.experiment import Cause, ControlKind, ControlRun, Operation, Suspect, WeightFit
from gaverify.search import backward, counts, proof, state, weights
from gaverify.search.bench import FORESEEN, Bench, Intervention, find_needed
from gaverify.search.counts import WindowCounts
from gaverify.search.neutral import find_live_statistics
from gaverify.search.proof import SuspectTrial
from gaverify.search.trace.first_divergence import find_one_sided_branch, is_normalisation, trace_divergences
from gaverify.verdict.control import failure_sentence

_OTHERS = Intervention("the other causes neutralised", ControlKind.OTHER_CAUSES)
_ROUNDS = 5  # causes that are looked for one after the other
_TRIED = 3  # suspects of one round that are tried in a control run


def ask(bench: Bench, comparison: Comparison) -> Comparison:
    """Searches operations in which samples interact, beside state and draws that may be causes as well."""
    control = comparison.state.control if comparison.state is not None else None
    # State that changes would differ in every trace: it stays neutralised, whether or not it is a cause.
    search_bench = bench.neutralise(*state.neutralise_state(comparison))
    fit = comparison.window.fit if control is None else control.fit
    residual = fit.residual if fit is not None and not fit.vacuous else 0.0
    weights_run = comparison.window.remedy if comparison.weights_first else None
    difference_left = (
        comparison.left if weights_run is None or not comparison.compared.comparable else comparison.compared.total
    )
    difference_left = difference_left if control is None else control.left
    explanation = Explanation(search_bench, comparison, difference_left, residual)
    try:
        # The last explanation counts: if a later run fails, what was found before it stays.
        for step in _find_causes(explanation, control.fit if control is not None else None):
            explanation = step
    except FORESEEN as error:
        bench.failures["first diverging operation"] = failure_sentence(error)
    if control is None and weights_run is None:
        in_backward = _look_in_backward(bench, comparison, explanation)
        if in_backward is not None:
            return in_backward
    comparison, explanation = _pin_restored_state(bench, comparison, explanation)
    comparison = _note_causes(comparison, explanation, weights_run)
    return _release_others(bench, comparison, explanation) if explanation.is_complete else comparison


def ask_next_update(bench: Bench, comparison: Comparison) -> Comparison:
    """Repeats an update with restored state, and searches what differs in the second one alone.

    State that the first forward sets from its own batch hides what else depends on the batch: where that is divided by
    an average that starts as None, the first average is the batch's own.
    """
    state_facts = comparison.state
    control = state_facts.control if state_facts is not None else None
    is_restored = control is not None and control.kind is ControlKind.STATE_RESTORED
    if state_facts is None or control is None or not (is_restored and control.rounding and state_facts.blamed):
        return comparison
    answer = bench.attempt("next update", partial(state.measure_next_update, bench, state_facts))
    if answer is None:
        return comparison
    next_update, state_left = answer
    state_facts = replace(state_facts, next_update=next_update)
    comparison = replace(comparison, state=state_facts)
    if state_left is None or next_update.from_full_batch <= bench.rounding:
        return comparison
    with state.start_from(bench, state_left.put) as later:
        control = replace(control, left=next_update.from_full_batch, rounding=False)
        later_state = replace(state_facts, control=control)
        later_facts = ask(later, replace(comparison, state=later_state, left=control.left, cleared=False))
    if not later_facts.cleared:
        return comparison
    causes = tuple(_mark_second_update(cause) for cause in later_facts.forward.causes)
    return replace(comparison, forward=replace(later_facts.forward, causes=causes), left=later_facts.left)


def _mark_second_update(cause: Cause) -> Cause:
    """The cause with a control that says from which state it ran."""
    if cause.control is None:
        return cause
    return replace(cause, control=replace(cause.control, what=f"{cause.control.what}, in a second update,"))


def _note_causes(comparison: Comparison, explanation: Explanation, weights_run: ControlRun | None) -> Comparison:
    """The comparison with the causes of an explanation.

    Args:
        comparison: Without them.
        explanation: The result of the search.
        weights_run: An earlier run with other weights, if the operations explain the difference that it left.
    """
    forward = explanation.forward or comparison.forward
    ruled_out, causes = tuple(explanation.ruled_out.values()), explanation.causes
    if weights_run is not None and explanation.is_complete and len(causes) == 1:
        # The one cause makes all that the weights leave.
        causes = (replace(causes[0], difference_alone=weights_run.left),)
    comparison = replace(comparison, forward=replace(forward, causes=causes, ruled_out=ruled_out))
    if explanation.is_complete and weights_run is None:
        weight_facts = comparison.window
        if explanation.fit is not None:
            weight_facts = replace(weight_facts, fit=explanation.fit, remedy=explanation.remedy)
        if explanation.counts is not None:
            counted = explanation.counts.counts
            weight_facts = replace(weight_facts, counts=counted, remedy=explanation.remedy, place=counted[0].operation)
        comparison = replace(comparison, window=weight_facts)
    if explanation.is_complete or causes:
        comparison = replace(comparison, left=explanation.left, cleared=explanation.is_complete)
    return comparison


def _look_in_backward(bench: Bench, comparison: Comparison, explanation: Explanation) -> Comparison | None:
    """Looks in the backward, if only cached gradients prove the one cause and the loss differs by a constant."""
    # Cached gradients run the loss and its backward once for all samples. So they also remove the difference of a
    # backward that depends on the batch.
    (control,) = [cause.control for cause in explanation.causes] if len(explanation.causes) == 1 else [None]
    if control is None or control.kind is not ControlKind.CACHED_GRADIENTS or not control.rounding:
        return None
    used = comparison.window.used
    terms = bench.possible(lambda: counts.find_terms_beside_constants(bench))
    if not terms or not weights.is_weighted_sum(terms, used):
        return None
    forward = replace(comparison.forward, agree=True, loss_gap=0.0, shares=used, adds_constant=True)
    with_backward = backward.ask(bench, replace(comparison, forward=forward))
    return with_backward if with_backward.cleared else None


def ask_branch(bench: Bench, comparison: Comparison) -> Comparison:
    """Looks for the operation that only one strategy runs, if a parameter has a gradient in that strategy only."""
    branch = bench.attempt("branch", lambda: find_one_sided_branch(bench))
    return replace(comparison, forward=replace(comparison.forward, branch=branch))


def _pin_restored_state(
    bench: Bench, comparison: Comparison, explanation: Explanation
) -> tuple[Comparison, Explanation]:
    """Keeps the state constant instead of restored, if no counts of the window are needed then."""
    # A forward may update restored state by its batch (the number of samples so far). That number looks like a count
    # of the batch.
    state_facts = comparison.state
    control = state_facts.control if state_facts is not None else None
    is_restored = control is not None and control.kind is ControlKind.STATE_RESTORED
    if state_facts is None or not is_restored or explanation.counts is None:
        return comparison, explanation
    changes = state.read_changes(state_facts.changes)
    without_counts = replace(explanation, counts=None, remedy=None)
    run = bench.possible(lambda: without_counts.run_again(bench.neutralise(state.pin(changes))))
    if run is None or not run.rounding:
        return comparison, explanation
    control = bench.run(state.pin(changes))
    return replace(comparison, state=replace(state_facts, control=control)), replace(without_counts, left=run.left)


def _release_others(bench: Bench, comparison: Comparison, explanation: Explanation) -> Comparison:
    """Releases state and draws while everything else stays neutralised, which shows the difference that they make."""
    neutral_state, state_facts = state.neutralise_state(comparison), comparison.state
    if neutral_state or comparison.draws.control is not None:
        explanation = _give_last_probe(explanation)
    if neutral_state and state_facts is not None:
        alone = bench.attempt("state released", lambda: explanation.run_again(bench))
        if alone is not None and alone.rounding:
            comparison = replace(comparison, state=state.blame_beside_control(bench, state_facts))
        if alone is not None and not alone.rounding:
            neutral_bench, read = explanation.neutralise_all(bench), state.read_changes(state_facts.changes)
            difference_left, blame = alone.left, state.Blame(read, together=len(read) > 1)
            if neutral_bench is not None and state_facts.control is not None:
                kind = state_facts.control.kind
                run_some = partial(state.run_some, neutral_bench, kind=kind)
                ask = partial(state.find_blamed, read, difference_left, kind, run_some)
                blame = bench.attempt("state held", ask) or blame
            state_facts = replace(state_facts, blamed=blame.changes, together=blame.together)
            comparison = replace(comparison, state=replace(state_facts, difference_alone=difference_left))
    if bench.live is not None:
        live_bench = bench.live.neutralise(*neutral_state)
        alone = bench.attempt("draws released", lambda: _run_with_draws(explanation, live_bench))
        difference_alone = alone.left if alone is not None and not alone.rounding else 0.0
        comparison = replace(comparison, draws=replace(comparison.draws, difference_alone=difference_alone))
    return comparison


def _run_with_draws(explanation: Explanation, live_bench: Bench) -> ControlRun:
    """Runs the last control with real draws; with rows found by their contents, where the causes moved them."""
    control_run = explanation.run_again(live_bench)
    if control_run.rounding or live_bench.experiment.reading.by_contents:
        return control_run
    # A cause may have changed the order of the rows: the draws are then matched by the contents of the rows.
    second_reading = replace(live_bench, experiment=live_bench.experiment.with_second_reading())
    by_contents = explanation.run_again(second_reading)
    return by_contents if by_contents.rounding else control_run


@dataclass(frozen=True)
class Explanation:
    """The causes that were found so far, and what they leave of the difference."""

    bench: Bench
    """Runs controls; none of the causes is neutralised on it."""
    comparison: Comparison
    """The comparison from before the search, such as the weights of the micro-batches."""
    left: float
    """The relative difference that is left with these causes neutralised."""
    residual: float
    """The relative difference that is left with the best micro-batch weights as well."""
    left_before: float = math.nan
    """`left` without the last cause."""
    trials: tuple[SuspectTrial, ...] = ()
    """The trials of these causes in the order in which they were found, each beside those before it."""
    forward: ForwardComparison | None = None
    """The result of the first trace; None before it."""
    fit: WeightFit | None = None
    """Weights that explain what the causes leave; None: none are needed, or none do."""
    counts: WindowCounts | None = None
    """Counts of the window that explain what the causes leave; None likewise."""
    remedy: ControlRun | None = None
    """The run with these weights or counts."""
    ruled_out: Mapping[tuple[object, ...], Operation] = field(default_factory=dict)
    """Place → operation whose control did not help by itself."""

    @property
    def is_complete(self) -> bool:
        """Whether what is left is rounding."""
        return self.left <= self.bench.rounding

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes in the order of execution; those on probation only where all together explain everything."""
        return tuple(
            trial.cause
            for trial in self.trials
            if trial.helps or trial.is_suspicion or self.is_complete or _is_branch_of_model(trial)
        )

    @property
    def has_weights(self) -> bool:
        """Whether weights or counts explain what the causes leave."""
        return self.fit is not None or self.counts is not None

    @property
    def ends_openly(self) -> bool:
        """Whether nothing can run beside the last cause's control, so that it cannot be released."""
        return bool(self.trials) and self.trials[-1].intervention is None

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """Interventions that neutralise the causes, as far as others can be looked for beside them."""
        return tuple(trial.intervention for trial in self.trials if trial.intervention is not None)

    @property
    def neutral_bench(self) -> Bench:
        """The bench with the causes neutralised, without weights."""
        return self.bench.neutralise(*self.interventions)

    def neutralise_all(self, bench: Bench) -> Bench | None:
        """Returns a bench without the causes and with the right weights; None where the last one has to run alone."""
        weighted = self.remedy.interventions if self.remedy is not None else ()
        return None if self.ends_openly else bench.neutralise(*self.interventions, *weighted)

    def run_again(self, bench: Bench) -> ControlRun:
        """Runs the last control again on another bench."""
        last_control = self.trials[-1].cause.control if self.ends_openly else self.remedy
        last = last_control.interventions if last_control is not None else ()
        return bench.run(*self.interventions, *(last or (_OTHERS,)))


def _find_causes(explanation: Explanation, fit: WeightFit | None) -> Iterator[Explanation]:
    """Yields the explanation after each step of the search.

    Args:
        explanation: Without a cause.
        fit: The weights that fit what is left in the beginning, where something was neutralised before.
    """
    if fit is not None:
        explanation = _explain_by_weights(explanation, fit)
        if explanation.has_weights:
            yield explanation
            return
    for _ in range(_ROUNDS):
        # Propose: the first operations that depend on the batch, with the causes found so far neutralised.
        comparison, bench = explanation.comparison, explanation.neutral_bench
        suspects, forward = trace_divergences(bench, comparison.window, foreign=comparison.draws.foreign_differ)
        explanation = replace(explanation, forward=explanation.forward or forward)
        # Control: the first suspect that helps; without one, the best that can be neutralised.
        explanation, trial = _try_suspects(explanation, bench, suspects)
        yield explanation
        if trial is None:
            break
        # Keep it neutralised.
        control = trial.cause.control
        explanation = replace(explanation, trials=(*explanation.trials, trial), left_before=explanation.left)
        if control is None or trial.is_suspicion:
            break
        explanation = replace(explanation, left=control.left)
        yield explanation
        # A control that leaves a difference: there is another cause, or the weights are wrong beside this one.
        if not control.rounding and trial.intervention is not None:
            explanation = _explain_by_weights(explanation, control.fit)
        if control.rounding or trial.intervention is None or explanation.has_weights:
            break
        if control.fit is not None and not control.fit.vacuous:
            explanation = replace(explanation, residual=control.fit.residual)
    if not explanation.is_complete:
        explanation = _widen_last_control(explanation)
        explanation = _keep_suspicion(explanation)
    yield _release_causes(explanation) if explanation.is_complete else explanation


def _try_suspects(
    explanation: Explanation, bench: Bench, suspects: Sequence[Suspect]
) -> tuple[Explanation, SuspectTrial | None]:
    """Returns the first suspect whose control helps; else one that has a control, on probation; else an unproven one.

    Args:
        explanation: The causes found before. Suspects on probation are noted in it as ruled out.
        bench: With those causes neutralised.
        suspects: In the order of execution.
    """
    candidates: list[SuspectTrial] = []
    places = {trial.cause.suspect.culprit.place for trial in explanation.trials}
    new_suspects = [suspect for suspect in suspects if suspect.culprit.place not in places]
    # An index as long as the batch differs in a correct loss too: suspects with a gradient are tried before it.
    for suspect in sorted(new_suspects, key=_may_be_index)[:_TRIED]:
        trial = _try_suspect(explanation, bench, suspect)
        if trial is not None and trial.helps:
            return explanation, trial
        if trial is not None:
            candidates.append(trial)
    on_probation = [trial for trial in candidates if trial.intervention is not None]
    unproven = [trial for trial in candidates if trial.is_suspicion]
    ruled_out = dict(explanation.ruled_out)
    ruled_out |= {trial.cause.suspect.culprit.place: trial.cause.suspect.culprit for trial in on_probation}
    return replace(explanation, ruled_out=ruled_out), next(iter([*on_probation, *unproven]), None)


def _try_suspect(explanation: Explanation, bench: Bench, suspect: Suspect) -> SuspectTrial | None:
    """Runs the controls of one suspect; None if that failed, and the failure is noted."""
    used = explanation.comparison.window.used

    def is_counted(trial_bench: Bench) -> bool:
        return trial_bench.possible(lambda: counts.find_counts(trial_bench, used)) is not None

    try:
        suspect = replace(suspect, statistics=suspect.statistics or _normalises(bench, suspect))
        trial = proof.try_suspect(bench, suspect, explanation.left, explanation.residual, counted=is_counted)
    except FORESEEN as error:
        bench.failures[f"control of {suspect.culprit}"] = failure_sentence(error)
        return None
    if trial is not None and trial.cause.control is None and trial.failures:
        why = "; ".join(dict.fromkeys(trial.failures))
        bench.failures[f"control of {suspect.culprit}"] = why
        trial = replace(trial, cause=replace(trial.cause, failure=why))
    return trial


def _explain_by_weights(explanation: Explanation, fit: WeightFit | None) -> Explanation:
    """Returns the explanation with weights or counts of the window that explain the rest, if a run confirms them."""
    comparison, bench = explanation.comparison, explanation.neutral_bench
    # Counts are not tried beside pinned values: a pinned sum that is divided by a micro-batch's own count is an effect
    # of the control. Layers of another class that still mix samples are a cause that comes first.
    runs_live = all(trial.kind is ControlKind.EVALUATION_MODE for trial in explanation.trials)
    runs_live = runs_live and not find_live_statistics(bench.experiment)
    if runs_live and not weights.is_meaningful(bench, comparison, fit):
        window_counts = bench.possible(lambda: counts.find_counts(bench, comparison.window.used))
        if window_counts is not None:
            control = window_counts.control
            return replace(explanation, counts=window_counts, remedy=control, left=control.left)
    chosen_fit = weights.choose_fit(bench, comparison, fit)
    if chosen_fit is None:
        return explanation
    remedy = weights.run_fitted_weights(bench, chosen_fit)
    return replace(explanation, fit=chosen_fit, remedy=remedy, left=remedy.left)


def _widen_last_control(explanation: Explanation) -> Explanation:
    """Tries the other controls of the last cause, if its control left a difference and no further cause was found."""
    if not explanation.trials:
        return explanation
    *before, last = explanation.trials
    # Only cached gradients helped: the samples interact somewhere after the line that is named.
    if last.region is not None and last.region.cause.control is not None:
        return replace(explanation, trials=(*before, last.region), left=last.region.cause.control.left)
    if not last.helps or last.intervention is None:
        return explanation
    bench, suspect = (
        explanation.bench.neutralise(*replace(explanation, trials=tuple(before)).interventions),
        last.cause.suspect,
    )
    # Other samples may enter a module at two places, of which the control pinned one.
    wider = proof.try_suspect(bench, suspect, explanation.left_before, explanation.residual, all_of_it=True)
    control = wider.cause.control if wider is not None else None
    if wider is None or control is None or not control.rounding:
        return explanation
    return replace(explanation, trials=(*before, wider), left=control.left)


def _keep_suspicion(explanation: Explanation) -> Explanation:
    """Keeps an operation that makes a part of the difference, where only a control without power left nothing."""
    suspicion = next((trial.suspicion for trial in explanation.trials if trial.suspicion is not None), None)
    if suspicion is None or explanation.causes:
        return explanation
    return replace(explanation, trials=(suspicion,), left=explanation.comparison.left)


def _give_last_probe(explanation: Explanation) -> Explanation:
    """Gives a last cause that cached gradients repair a probe, so that others can be released beside it."""
    # cached gradients compute the loss once: a change of state that only the loss reads would not show beside them
    if not (explanation.ends_openly and explanation.is_complete):
        return explanation
    *before, last = explanation.trials
    bench, suspect = (
        explanation.neutral_bench,
        last.cause.suspect,
    )  # the last one has no probe yet
    for functions in (suspect.source_functions, suspect.functions):
        pinned = proof.pin_results(functions, "the operations that mix samples kept constant", suspect.order)
        pinned = pinned.share_probe(bench.experiment)
        control_run = bench.possible(partial(bench.run, pinned)) if functions else None
        if control_run is not None and control_run.rounding:
            return replace(explanation, trials=(*before, replace(last, intervention=pinned)))
    return explanation


def _release_causes(explanation: Explanation) -> Explanation:
    """Releases every cause alone: notes the difference that it makes, and drops those on probation that make none."""
    # The last cause was found with all others neutralised: what was left then is its own difference, without a run.
    if explanation.trials and not explanation.has_weights:
        *before, last = explanation.trials
        last = replace(last, cause=replace(last.cause, difference_alone=explanation.left_before))
        explanation = replace(explanation, trials=(*before, last))
    # A last cause without a probe cannot be released: the others are released beside its cached gradients.
    neutral_trials = () if explanation.has_weights else explanation.trials[-1:]
    released = [trial for trial in explanation.trials if trial not in neutral_trials]

    def control(neutralised: list[SuspectTrial]) -> ControlRun | None:
        remaining = tuple(trial for trial in explanation.trials if trial in neutralised or trial in neutral_trials)
        bench, partial_explanation = explanation.bench, replace(explanation, trials=remaining)
        return bench.attempt("release of a cause", lambda: partial_explanation.run_again(bench))

    # Those on probation are released first. A cause that helped by itself stays, even if another one hides it now.
    needed = find_needed(sorted(released, key=lambda e: e.helps), control, keep=lambda e: e.helps)
    differences = {id(entry.item): entry.alone for entry in needed}
    trials = [
        replace(trial, cause=replace(trial.cause, difference_alone=differences[id(trial)]))
        if differences.get(id(trial), 0.0) > 0
        else trial
        for trial in explanation.trials
        if trial in neutral_trials or id(trial) in differences
    ]
    return replace(explanation, trials=tuple(trials))


def _is_branch_of_model(trial: SuspectTrial) -> bool:
    """Whether a suspect is a line of the model that only some forwards run, which is told without a proof as well."""
    return trial.cause.suspect.is_branch_on_shape and trial.cause.suspect.in_model


def _may_be_index(suspect: Suspect) -> bool:
    """Returns whether a suspect is a value of the loss that has no gradient and reads no reduction over the batch."""
    in_loss = suspect.kind == "rows" and not suspect.in_model and suspect.source is None
    return in_loss and not suspect.differentiable


def _normalises(bench: Bench, suspect: Suspect) -> bool:
    path = suspect.operation.module
    if path is None or not suspect.in_model:
        return False
    # A norm of each sample undoes a scaling too, if other padding makes it differ; it reduces nothing over the batch.
    over_batch = (suspect.source_functions or suspect.functions) if suspect.source is not None else ()
    return is_normalisation(bench, path, suspect.culprit.name, over_batch)
