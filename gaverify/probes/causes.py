"""Looks for causes one after the other: each is neutralised in both runs, until nothing is left to explain.

What does not help by itself may be one of several causes that hide each other. Such a suspect stays neutralised on
probation; in the end every cause is released alone while the others stay neutralised, which tells what it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gaverify.control import failure_sentence
from gaverify.errors import GaverifyError
from gaverify.gradients import PassProbe
from gaverify.measurements import Cause, ControlRun, Suspect, WeightFit
from gaverify.probes import proof
from gaverify.probes.controls import Bench, cached_gradients
from gaverify.probes.first_divergence import Divergences
from gaverify.probes.holding import Held
from gaverify.probes.normalisation import normalises_channels

_ROUNDS = 5  # causes that are looked for one after the other
_TRIED = 3  # suspects of one round that are tried in a control run
Weighed = Callable[[Bench, WeightFit | None], WeightFit | None]


@dataclass
class Neutralised:
    """A cause with the probe that neutralises it."""

    cause: Cause
    neutral: PassProbe | None
    helps: bool


class CauseSearch:
    """One search.

    Args:
        bench: Where to run; what is neutralised on it stays so.
        trace: Traces the forwards on a bench.
        weighed: Returns those of the fitted weights that mean something, which end the search; None where they do not.
        left: The relative difference in the beginning.
        residual: What the best weights leave over in the beginning.
    """

    def __init__(
        self, bench: Bench, trace: Callable[[Bench], Divergences], weighed: Weighed, left: float, residual: float
    ) -> None:
        self._bench, self._trace, self._weighed = bench, trace, weighed
        self._residual = residual
        self._found: list[Neutralised] = []
        self.left = self._before = left
        self.first: Divergences | None = None
        self.weights: WeightFit | None = None
        self.remedy: ControlRun | None = None
        self.ruled_out: list[str] = []
        self.failures: dict[str, str] = {}

    @property
    def cleared(self) -> bool:
        """Whether what is left is rounding."""
        return self.left <= self._bench.rounding

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes in the order of execution; those on probation only where all together explain everything."""
        return tuple(entry.cause for entry in self._found if entry.helps or entry.cause.control is None or self.cleared)

    def run(self, fit: WeightFit | None = None) -> None:
        """Round by round: trace, try the suspects, neutralise one, look at what is left.

        Args:
            fit: The weights that fit what is left in the beginning, where something was neutralised before.
        """
        if fit is not None and self._settled(fit):
            return
        for _ in range(_ROUNDS):
            bench = self._now()
            found = self._trace(bench)
            self.first = self.first or found
            tried = self._tried(bench, found)
            if tried is None:
                break
            self._found.append(Neutralised(tried.cause, tried.neutral, tried.helps))
            self._before = self.left
            control = tried.cause.control
            if control is None:
                break
            self.left = control.left
            if control.rounding or tried.neutral is None or self._settled(control.fit):
                break
            if control.fit is not None and not control.fit.vacuous:
                self._residual = control.fit.residual
        if self.cleared:
            self._released()

    def close(self) -> None:
        """Gives a last cause that cached gradients repair a probe of its own, so that others can be released beside it.

        A cached gradient computes the loss once: state that only the loss reads would not show.
        """
        if not (self._ends_openly() and self.cleared):
            return
        last, bench = self._found[-1], self._with(self._found[:-1], self._bench)
        suspect, bounds = last.cause.suspect, list(bench.task.bounds())
        for functions in (suspect.source_functions, suspect.functions):
            probe = Held(functions, bounds, bench.task.batch_size)
            try:
                held = functions and bench.run("what couples the samples held constant", probe)
            except GaverifyError:
                continue
            if held and held.rounding:
                last.neutral = probe
                return

    def final(self, without: Neutralised | None = None, bench: Bench | None = None) -> ControlRun:
        """Runs the last control again, without one of the neutralised causes or on another bench."""
        kept = [entry for entry in self._found if entry is not without]
        there = self._with(kept, bench or self._bench)
        if kept and kept[-1].neutral is None:
            return cached_gradients(there, frozenset(kept[-1].cause.suspect.calls))
        if self.weights is not None:
            return proof.weights_remedy(there, self.weights)
        return there.run("the other causes neutralised")

    def others_neutralised(self, bench: Bench) -> Bench | None:
        """Another bench with all causes neutralised and the right weights; None where the last cause has no probe."""
        if self._ends_openly():
            return None
        there = self._with(self._found, bench)
        if self.weights is None:
            return there
        return replace(there, task=replace(there.task, weighting=list(self.weights.weights)))

    def _with(self, entries: Sequence[Neutralised], bench: Bench) -> Bench:
        probes = tuple(entry.neutral for entry in entries if entry.neutral is not None)
        return replace(bench, neutral=(*bench.neutral, *probes))

    def _now(self) -> Bench:
        return self._with(self._found, self._bench)

    def _settled(self, fit: WeightFit | None) -> bool:
        """Whether weights explain the rest; they are run."""
        self.weights = self._weighed(self._now(), fit)
        if self.weights is None:
            return False
        self.remedy = proof.weights_remedy(self._now(), self.weights)
        self.left = self.remedy.left
        return True

    def _tried(self, bench: Bench, found: Divergences) -> proof.Tried | None:
        """The first suspect whose control helps; else one that has a control, on probation; else an unproven one."""
        candidates: list[proof.Tried] = []
        known = {str(entry.cause.suspect.culprit) for entry in self._found}
        for suspect in [s for s in found.suspects if str(s.culprit) not in known][:_TRIED]:
            tried = self._try(bench, suspect)
            if tried is not None and tried.helps:
                return tried
            if tried is not None:
                candidates.append(tried)
        on_probation = [tried for tried in candidates if tried.neutral is not None]
        unproven = [tried for tried in candidates if tried.cause.control is None]
        self.ruled_out += [str(tried.cause.suspect.culprit) for tried in on_probation]
        return next(iter([*on_probation, *unproven]), None)

    def _try(self, bench: Bench, suspect: Suspect) -> proof.Tried | None:
        try:
            suspect = replace(suspect, statistics=suspect.statistics or _normalises(bench, suspect))
            tried = proof.try_suspect(bench, suspect, self.left, self._residual)
        except Exception as error:
            self.failures[f"control of {suspect.culprit}"] = failure_sentence(error)
            return None
        if tried is not None and tried.cause.control is None and tried.failures:
            self.failures[f"control of {suspect.culprit}"] = "; ".join(tried.failures)
        return tried

    def _released(self) -> None:
        """Releases every cause alone: notes what the others leave, and drops those on probation that change nothing."""
        if not self._found:
            return
        last = self._found[-1]
        if self.weights is None:  # with the causes before it neutralised, this was left
            last.cause = replace(last.cause, alone=self._before)
        rest = [entry for entry in self._found if entry is not last or self.weights is not None]
        for entry in sorted(rest, key=lambda entry: entry.helps):
            try:
                alone = self.final(without=entry)
            except Exception as error:
                self.failures[f"release of {entry.cause.suspect.culprit}"] = failure_sentence(error)
                continue
            if not alone.rounding:
                entry.cause = replace(entry.cause, alone=alone.left)
            elif not entry.helps and entry.cause.suspect.kind != "rows":
                self._found.remove(entry)  # rows that differ and reach the loss couple samples, hidden or not

    def _ends_openly(self) -> bool:
        """Whether the last cause has no probe of its own, so that it cannot be released."""
        return bool(self._found) and self._found[-1].neutral is None


def _normalises(bench: Bench, suspect: Suspect) -> bool:
    path = suspect.operation.module
    return path is not None and suspect.in_model and normalises_channels(bench, path)
