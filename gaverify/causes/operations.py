"""Which operations of the forward bring the difference about? Causes are looked for one after the other.

Each is neutralised in both runs, until nothing is left to explain. What does not help by itself may be one of several
causes that hide each other, so it stays neutralised for the time being; in the end every cause is released alone while
the others stay neutralised, which tells what difference it makes, and drops what makes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from gaverify.causes import backward, counts, proof, state, weights
from gaverify.causes.bench import FORESEEN, Bench, find_needed
from gaverify.causes.neutral.cached import cached_gradients
from gaverify.causes.neutral.holding import Evaluated, ResultsHeld
from gaverify.causes.neutral.state import StateHeld
from gaverify.causes.proof import Tried
from gaverify.causes.trace.first_divergence import branch_taken, trace_divergences
from gaverify.causes.trace.normalisation import normalises
from gaverify.records.experiment import Cause, ControlKind, ControlRun, Operation, Suspect, WeightFit
from gaverify.records.facts import Facts, Forward
from gaverify.verdict.control import failure_sentence

_ROUNDS = 5  # causes that are looked for one after the other
_TRIED = 3  # suspects of one round that are tried in a control run


def ask(bench: Bench, facts: Facts) -> Facts:
    """Looks for operations that couple samples, beside state and draws that may be causes as well."""
    state_probe = state.probe_of(bench, facts)
    control = facts.state.control if facts.state is not None and state_probe is not None else None
    search_bench = bench if state_probe is None else bench.without(state_probe)
    fit = facts.weights.fit if control is None else control.fit
    residual = fit.residual if fit is not None and not fit.vacuous else 0.0
    weights_run = facts.weights.remedy if facts.weights_first else None
    difference_left = facts.left if weights_run is None or not facts.compared.comparable else facts.compared.total
    search = _Search(search_bench, facts, difference_left if control is None else control.left, residual)
    bench.attempt("first diverging operation", lambda: search.run(control.fit if control is not None else None))
    in_backward = _in_backward(bench, facts, search) if state_probe is None and weights_run is None else None
    if in_backward is not None:
        return in_backward
    facts = _hold_restored_state(bench, facts, search)
    forward = replace(search.first or facts.forward, coupling=facts.forward.coupling)
    ruled_out = tuple(search.ruled_out.values())
    causes = search.causes
    if weights_run is not None and search.is_explained and len(causes) == 1:  # it alone makes what the weights leave
        causes = (replace(causes[0], alone=weights_run.left),)
    facts = replace(facts, forward=replace(forward, causes=causes, ruled_out=ruled_out))
    if search.weights is not None and search.is_explained and weights_run is None:
        facts = replace(facts, weights=replace(facts.weights, fit=search.weights, remedy=search.remedy))
    if search.counted is not None and search.is_explained and weights_run is None:
        counted = search.counted
        weight_facts = replace(
            facts.weights, counts=counted.counts, remedy=search.remedy, place=counted.counts[0].operation
        )
        facts = replace(facts, weights=weight_facts)
    if search.is_explained or search.causes:
        facts = replace(facts, left=search.left, cleared=search.is_explained)
    return _release_others(bench, facts, search) if search.is_explained else facts


def _in_backward(bench: Bench, facts: Facts, search: _Search) -> Facts | None:
    """Looks in the backward where cached gradients alone prove a cause, and the loss differs by a constant only.

    Cached gradients compute the loss and its backward once: they repair a backward that depends on the batch as well.
    """
    (control,) = [cause.control for cause in search.causes] if len(search.causes) == 1 else [None]
    if control is None or control.kind is not ControlKind.CACHED_GRADIENTS or not control.rounding:
        return None
    used = facts.weights.used
    terms = bench.possible(lambda: counts.terms_beside_constants(bench))
    if not terms or not weights.add_up(terms, used):
        return None
    forward = replace(facts.forward, agree=True, loss_gap=0.0, shares=used, adds_constant=True)
    found = backward.ask(bench, replace(facts, forward=forward))
    return found if found.cleared else None


def ask_branch(bench: Bench, facts: Facts) -> Facts:
    """Looks for the operation that one side alone runs, where a parameter has a gradient on that side alone."""
    branch = bench.attempt("branch", lambda: branch_taken(bench))
    return replace(facts, forward=replace(facts.forward, branch=branch))


def _hold_restored_state(bench: Bench, facts: Facts, search: _Search) -> Facts:
    """Holds the state still where it was restored, and nothing is to be counted then.

    What a forward makes of restored state by its own batch (the number of samples seen) looks like a count of it.
    """
    state_facts = facts.state
    restored = (
        state_facts is not None
        and state_facts.control is not None
        and state_facts.control.kind is ControlKind.STATE_RESTORED
    )
    if state_facts is None or not restored or search.counted is None:
        return facts
    changes, counted = state.read_changes(state_facts.changes), search.counted
    held_bench = bench.without(StateHeld(bench.experiment, [change.name for change in changes]))
    search.counted = None
    run = bench.possible(lambda: search.run_last_control(held_bench))
    if run is None or not run.rounding:
        search.counted = counted
        return facts
    search.left = run.left
    control = state.run_control(bench, ControlKind.STATE_HELD, changes)
    return replace(facts, state=replace(state_facts, control=control))


def _release_others(bench: Bench, facts: Facts, search: _Search) -> Facts:
    """Releases state and draws while everything else stays neutralised: do they matter by themselves?"""
    state_probe = state.probe_of(bench, facts)
    if state_probe is not None or facts.draws.control is not None:
        search.close()
    state_facts = facts.state
    if state_probe is not None and state_facts is not None:
        alone = bench.attempt("state released", lambda: search.run_last_control(bench=bench))
        if alone is not None and alone.rounding:
            facts = replace(facts, state=state.blamed_beside(bench, state_facts))
        if alone is not None and not alone.rounding:
            neutral_bench, read = search.neutralise_causes(bench), state.read_changes(state_facts.changes)
            difference_left, blamed = alone.left, None
            if neutral_bench is not None:
                blamed = bench.attempt("state held", lambda: state.find_blamed(neutral_bench, read, difference_left))
            facts = replace(facts, state=replace(state_facts, blamed=blamed or read, alone=difference_left))
    if bench.live is not None:
        live_bench = bench.live if state_probe is None else bench.live.without(state_probe)
        alone = bench.attempt("draws released", lambda: _run_with_draws(search, live_bench))
        difference_alone = alone.left if alone is not None and not alone.rounding else 0.0
        facts = replace(facts, draws=replace(facts.draws, alone=difference_alone))
    return facts


def _run_with_draws(search: _Search, live_bench: Bench) -> ControlRun:
    """Runs the last control with the draws dealt out; by contents where the causes moved their rows."""
    control_run = search.run_last_control(bench=live_bench)
    if control_run.rounding or live_bench.experiment.draws.inner:
        return control_run
    by_contents = search.run_last_control(
        bench=replace(live_bench, experiment=live_bench.experiment.with_second_reading())
    )
    return by_contents if by_contents.rounding else control_run


class _Search:
    """One search.

    Args:
        bench: Where to run; what is neutralised on it stays so.
        facts: What is known; how micro-batches are weighted, above all.
        left: The relative difference in the beginning.
        residual: What the best weights leave over in the beginning.
    """

    def __init__(self, bench: Bench, facts: Facts, left: float, residual: float) -> None:
        self._bench, self._facts, self._residual = bench, facts, residual
        self._found: list[Tried] = []
        self.left = self._before = left
        self.first: Forward | None = None
        self.weights: WeightFit | None = None
        self.counted: counts.WindowCounts | None = None
        self.remedy: ControlRun | None = None
        self.ruled_out: dict[tuple[object, ...], Operation] = {}

    @property
    def is_explained(self) -> bool:
        """Whether what is left is rounding."""
        return self.left <= self._bench.rounding

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes in the order of execution; those on probation only where all together explain everything."""
        return tuple(
            entry.cause for entry in self._found if entry.helps or entry.cause.control is None or self.is_explained
        )

    def run(self, fit: WeightFit | None = None) -> None:
        """Round by round: trace, try the suspects, neutralise one, look at what is left.

        Args:
            fit: The weights that fit what is left in the beginning, where something was neutralised before.
        """
        if fit is not None and self._explain_by_weights(fit):
            return
        for _ in range(_ROUNDS):
            bench = self._current_bench()
            suspects, forward = trace_divergences(bench, self._facts.weights, foreign=self._facts.draws.foreign_differ)
            self.first = self.first or forward
            tried = self._try_suspects(bench, suspects)
            if tried is None:
                break
            self._found.append(tried)
            self._before = self.left
            control = tried.cause.control
            if control is None:
                break
            self.left = control.left
            if control.rounding or tried.neutral is None or self._explain_by_weights(control.fit):
                break
            if control.fit is not None and not control.fit.vacuous:
                self._residual = control.fit.residual
        if not self.is_explained:
            self._try_all_controls()
        if self.is_explained:
            self._release_causes()

    def _try_all_controls(self) -> None:
        """Tries the other controls of the last cause, where the one that helped left something and no more was found.

        Partners may enter a module at two places, of which that control holds one. Where none but cached gradients
        helped, the samples meet somewhere behind the line that is named.
        """
        last = self._found[-1] if self._found else None
        if last is not None and last.region is not None and last.region.cause.control is not None:
            self._found[-1], self.left = last.region, last.region.cause.control.left
            return
        if last is None or not last.helps or last.neutral is None:
            return
        bench, suspect = self._with(self._found[:-1], self._bench), last.cause.suspect
        wider = proof.try_suspect(bench, suspect, self._before, self._residual, all_of_it=True)
        control = wider.cause.control if wider is not None else None
        if wider is not None and control is not None and control.rounding:
            self._found[-1] = wider
            self.left = control.left

    def close(self) -> None:
        """Gives a last cause that cached gradients repair a probe of its own, so that others can be released beside it.

        A cached gradient computes the loss once: state that only the loss reads would not show.
        """
        if not (self.ends_openly and self.is_explained):
            return
        last, bench = self._found[-1], self._with(self._found[:-1], self._bench)
        suspect = last.cause.suspect
        for functions in (suspect.source_functions, suspect.functions):
            probe = ResultsHeld(bench.experiment, functions, suspect.order)
            what = "what couples the samples held constant"
            control_run = bench.possible(partial(bench.run, what, probe)) if functions else None
            if control_run is not None and control_run.rounding:
                last.neutral = probe
                return

    def run_last_control(self, bench: Bench, neutralised: Sequence[Tried] | None = None) -> ControlRun:
        """Runs the last control again on another bench, or with some of the causes neutralised alone."""
        neutralised = self._found if neutralised is None else neutralised
        control_bench = self._with(neutralised, bench)
        if neutralised and neutralised[-1].neutral is None:
            return cached_gradients(control_bench, frozenset(neutralised[-1].cause.suspect.calls))
        if self.weights is not None:
            return weights.run_fitted_weights(control_bench, self.weights)
        if self.counted is not None:
            control_bench = self.counted.apply_to(control_bench)
        return control_bench.run("the other causes neutralised", kind=ControlKind.OTHERS)

    def neutralise_causes(self, bench: Bench) -> Bench | None:
        """Another bench with all causes neutralised and the right weights; None where the last cause has no probe."""
        if self.ends_openly:
            return None
        neutral_bench = self._with(self._found, bench)
        if self.counted is not None:
            return self.counted.apply_to(neutral_bench)
        if self.weights is None:
            return neutral_bench
        return neutral_bench.with_weights(self.weights.weights)

    def _with(self, entries: Sequence[Tried], bench: Bench) -> Bench:
        probes = tuple(entry.neutral for entry in entries if entry.neutral is not None)
        return bench.without(*probes)

    def _current_bench(self) -> Bench:
        return self._with(self._found, self._bench)

    def _explain_by_weights(self, fit: WeightFit | None) -> bool:
        """Whether weights, or counts of the window, explain the rest; they are run.

        Counts are not tried beside held values: a sum that is held and divided by a micro-batch's own count is the
        control's doing.
        """
        bench, facts = self._current_bench(), self._facts
        live = all(isinstance(entry.neutral, Evaluated) for entry in self._found)
        if live and not weights.means(bench, facts, fit):
            self.counted = bench.possible(lambda: counts.find_counts(bench, facts.weights.used))
        if self.counted is not None:
            self.remedy = self.counted.control
            self.left = self.remedy.left
            return True
        self.weights = weights.choose_fit(self._current_bench(), self._facts, fit)
        if self.weights is None:
            return False
        self.remedy = weights.run_fitted_weights(self._current_bench(), self.weights)
        self.left = self.remedy.left
        return True

    def _try_suspects(self, bench: Bench, suspects: list[Suspect]) -> Tried | None:
        """The first suspect whose control helps; else one that has a control, on probation; else an unproven one."""
        candidates: list[Tried] = []
        known_places = {entry.cause.suspect.culprit.place for entry in self._found}
        new_suspects = [suspect for suspect in suspects if suspect.culprit.place not in known_places]
        # an index of the batch's length differs in every right loss as well: what has a gradient is tried before it
        for suspect in sorted(new_suspects, key=_may_be_index)[:_TRIED]:
            tried = self._try(bench, suspect)
            if tried is not None and tried.helps:
                return tried
            if tried is not None:
                candidates.append(tried)
        on_probation = [tried for tried in candidates if tried.neutral is not None]
        unproven = [tried for tried in candidates if tried.cause.control is None]
        self.ruled_out |= {tried.cause.suspect.culprit.place: tried.cause.suspect.culprit for tried in on_probation}
        return next(iter([*on_probation, *unproven]), None)

    def _try(self, bench: Bench, suspect: Suspect) -> Tried | None:
        try:
            suspect = replace(suspect, statistics=suspect.statistics or _normalises(bench, suspect))
            tried = proof.try_suspect(bench, suspect, self.left, self._residual, counted=self._is_counted)
        except FORESEEN as error:
            self._bench.failures[f"control of {suspect.culprit}"] = failure_sentence(error)
            return None
        if tried is not None and tried.cause.control is None and tried.failures:
            why = "; ".join(dict.fromkeys(tried.failures))
            self._bench.failures[f"control of {suspect.culprit}"] = why
            tried = replace(tried, cause=replace(tried.cause, failure=why))
        return tried

    def _is_counted(self, trial_bench: Bench) -> bool:
        return trial_bench.possible(lambda: counts.find_counts(trial_bench, self._facts.weights.used)) is not None

    def _release_causes(self) -> None:
        """Releases every cause alone: notes what difference it makes, and drops those that make none.

        A cause that helped by itself stays, even where another one hides it now.
        """
        last = self._found[-1] if self._found else None
        if last is not None and not self._has_weights:  # with the causes before it neutralised, this was left
            last.cause = replace(last.cause, alone=self._before)
        # the cached gradient of a last cause without a probe is what the others are released beside
        entries = [entry for entry in self._found if entry is not last or self._has_weights]

        def control(neutralised: list[Tried]) -> ControlRun | None:
            still = [entry for entry in self._found if entry in neutralised or entry not in entries]
            return self._bench.attempt("release of a cause", lambda: self.run_last_control(self._bench, still))

        needed = find_needed(sorted(entries, key=lambda e: e.helps), control, keep=lambda e: e.helps)
        for entry in needed:
            if entry.alone > 0:
                entry.item.cause = replace(entry.item.cause, alone=entry.alone)
        needed_ids = {id(entry.item) for entry in needed}
        self._found = [entry for entry in self._found if entry not in entries or id(entry) in needed_ids]

    @property
    def _has_weights(self) -> bool:
        """Whether weights or counts explain what the causes leave."""
        return self.weights is not None or self.counted is not None

    @property
    def ends_openly(self) -> bool:
        """Whether the last cause has no probe of its own, so that it cannot be released."""
        return bool(self._found) and self._found[-1].neutral is None


def _may_be_index(suspect: Suspect) -> bool:
    """Returns whether a suspect is a value of the loss that has no gradient and reads no reduction over the batch."""
    in_loss = suspect.kind == "rows" and not suspect.in_model and suspect.source is None
    return in_loss and not suspect.differentiable


def _normalises(bench: Bench, suspect: Suspect) -> bool:
    path = suspect.operation.module
    if path is None or not suspect.in_model:
        return False
    # a norm of each sample that sees other padding undoes as much, and reduces nothing over the batch
    over_batch = (suspect.source_functions or suspect.functions) if suspect.source is not None else ()
    return normalises(bench, path, suspect.culprit.name, over_batch)
