"""Finds the cause of a divergence: probes, then suspects, each tried in a control run, until nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

import torch

from gaverify.comparison import measure
from gaverify.control import failure_sentence, in_float64
from gaverify.gradients import PassResult, Task, full_batch_gradients
from gaverify.judging import Judgement
from gaverify.measurements import (
    Cause,
    Measurements,
    Repeatability,
    StateChange,
    StateProbe,
    Suspect,
    WeightFit,
    are_shares,
    is_constant,
)
from gaverify.precision import unit_roundoff
from gaverify.probes import proof
from gaverify.probes.backward_divergence import backward_culprit
from gaverify.probes.batch_quality import identical_samples
from gaverify.probes.controls import Bench, relative_difference
from gaverify.probes.first_divergence import Divergences, trace_divergences
from gaverify.probes.micro_batch_weights import fitted
from gaverify.probes.normalisation import normalises_channels
from gaverify.probes.sample_coupling import sample_coupling
from gaverify.probes.state import StateWatch
from gaverify.results import Outcome

# A fit that leaves less than this over explains the divergence by weights alone: float64 fits of additive losses
# leave 1e-12 or less, a coupled loss more than 1e-4 (design, section 6: 3e-8 in float32).
EXPLAINED_FLOAT64, EXPLAINED_FLOAT32 = 1e-6, 1e-3
_DRIFT_UNITS = 64.0  # of roundoff that K updates of a running average may differ by
_ROUNDS = 4  # causes that are looked for one after the other
_TRIED = 3  # suspects of one round that are tried in a control run
T = TypeVar("T")


def collected(task: Task, judgement: Judgement) -> Measurements:
    """Returns what the two strategies showed already, without another pass."""
    accumulated, record = judgement.accumulated, judgement.record
    counts = [max(seen.target_counts, key=lambda c: c[1]) for seen in accumulated.observed if seen.target_counts]
    valid = tuple(float(total) for total, _, _ in counts) if len(counts) == task.steps else ()
    ignored = bool(valid) and sum(valid) != sum(count for _, count, _ in counts)
    weighting = task.weighting if isinstance(task.weighting, str) else "explicit"
    return Measurements(
        rows=tuple(judgement.rows), steps=task.steps, batch_size=task.batch_size, sizes=task.sizes,
        weights=accumulated.weights, weighting=weighting, micro_losses=accumulated.micro_losses,
        method=judgement.method, valid_targets=valid, ignored_targets=ignored, draws=len(record.draws),
        draws_sliced=record.sliced, draws_unaligned=dict(record.unaligned),
        draw_places=dict(record.places), foreign_draws_differ=accumulated.foreign_draws_differ,
        identical=identical_samples(task.problem.batch, task.batch_size), control_failure=judgement.control_failure,
        precision=judgement.precision, drift=_drift(judgement),
        hooked=tuple(name for name, p in task.parameters.items() if p._backward_hooks or _post_hooks(p)),
    )  # fmt: skip


def _post_hooks(parameter: torch.Tensor) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def _drift(judgement: Judgement) -> dict[str, float]:
    """The buffers that K micro-batches leave otherwise than the full batch, with their relative difference."""
    full, accumulated = judgement.full.buffers, judgement.accumulated.buffers
    common = {name: value for name, value in full.items() if name in accumulated}
    if not common:
        return {}
    least = _DRIFT_UNITS * unit_roundoff(judgement.dtype)
    rows = measure({name: accumulated[name] for name in common}, common)
    return {row.name: row.difference / row.scale for row in rows if row.difference > least * row.scale}


def investigate(task: Task, judgement: Judgement, *, diagnose: bool) -> Measurements:
    """Returns everything that was measured; probes run only after a divergence, and one that fails says so."""
    measured = collected(task, judgement)
    if not diagnose or not any(row.outcome is Outcome.DIVERGENT for row in judgement.rows) or task.steps < 2:
        return measured
    measured.diagnosed = True
    with ExitStack() as stack:
        state, lift = judgement.state, judgement.control is not None
        before = judgement.control.full if judgement.control is not None else None
        if lift:
            task, state = stack.enter_context(in_float64(task, state))
        search = _Search(Bench(task, state, judgement.record, lift), measured)
        if measured.comparable:
            search.run(before)
    return measured


class _Search:
    """One investigation: what has been neutralised so far, and what is left."""

    def __init__(self, bench: Bench, measured: Measurements) -> None:
        self.bench, self.measured = bench, measured
        self.failures: dict[str, str] = {}
        self.residual = 0.0  # what the best weights leave over at this point of the search
        self.explained = EXPLAINED_FLOAT64 if bench.rounding < 1e-5 else EXPLAINED_FLOAT32

    def run(self, before: PassResult | None) -> None:
        """Draws that could not be dealt out, then weights that mean something, state, other weights, operations."""
        measured = self.measured
        measured.left = measured.total
        watch = StateWatch(self.bench.task, self.bench.state)
        if not self._draws():
            fit = self._fit(watch, before)
            twice = measured.repeatability
            if twice is not None and twice.forward > measured.repeats:
                return  # a batch that differs from itself tells nothing about micro-batches
            if not (self._means(fit) and self._weights(fit)):
                measured.state = self._attempt("state", lambda: proof.blame_state(self.bench, watch.changes()))
                measured.coupling = self._attempt("coupling of samples", lambda: sample_coupling(self.bench))
                if not self._state_explains() and not self._weights(self._joint(fit)):
                    self._operations()
                    self._hidden_state()
                    self._backward()
        measured.cleared = measured.left <= self.bench.rounding
        measured.failures = self.failures

    def _attempt(self, name: str, probe: Callable[[], T]) -> T | None:
        try:
            return probe()
        except Exception as error:
            self.failures[name] = failure_sentence(error)
            return None

    def _draws(self) -> bool:
        """Whether draws that could not be dealt out explain everything; the search goes on without them otherwise."""
        if not self.measured.draws_unaligned:
            return False
        tried = self._attempt("random draws", lambda: proof.drawing_constants(self.bench))
        if tried is None or tried[0].left == float("inf"):
            return False
        self.measured.draw_control, self.bench = tried
        self.measured.left = self.measured.draw_control.left
        return self.measured.draw_control.rounding

    def _fit(self, watch: StateWatch | None, before: PassResult | None) -> WeightFit | None:
        """Fits the micro-batch weights to what is left."""
        fit = self._attempt("micro-batch weights", lambda: self._fitted(watch, before))
        self.residual = fit.residual if fit is not None and not fit.vacuous else 0.0
        if fit is not None and (self.measured.fit is None or fit.residual < self.explained):
            self.measured.fit = fit
        return fit

    def _means(self, fit: WeightFit | None) -> bool:
        """Whether weights explain what is left and are shares of something, or one factor: no coincidence."""
        if fit is None or not fit.residual < self.explained:
            return False
        measured = self.measured
        factor = [c / w for c, w in zip(fit.weights, measured.weights, strict=True) if w]
        shares = [measured.valid_targets, tuple(map(float, measured.sizes))]
        known = any(are_shares(fit.weights, share) for share in shares if share)
        return known or is_constant(factor, fit.residual)

    def _joint(self, fit: WeightFit | None) -> WeightFit | None:
        """The weights that hold for moved parameters too; None where there are none."""
        if fit is None or fit.vacuous or not fit.residual < self.explained:
            return None
        joint = self._attempt("weights at moved parameters", lambda: proof.joint_fit(self.bench))
        return joint if joint is not None and joint.residual < self.explained else None

    def _weights(self, fit: WeightFit | None) -> bool:
        """Runs the accumulation with fitted weights; whether that was done."""
        if fit is None:
            return False
        self.measured.fit = fit
        remedy = self._attempt("weights", lambda: proof.weights_remedy(self.bench, fit))
        self.measured.weight_remedy = remedy
        if remedy is not None:
            self.measured.left = remedy.left
        return True

    def _fitted(self, watch: StateWatch | None, before: PassResult | None) -> WeightFit:
        bench = self.bench
        probe = bench.with_probe(watch)
        full, _ = full_batch_gradients(bench.task, bench.state, bench.record, lift=bench.lift, probe=probe)
        if before is not None and not bench.record.constant:
            backward = relative_difference(full.gradients, before.gradients)
            forward = abs(full.loss - before.loss) / max(abs(before.loss), 1e-300)
            self.measured.repeatability = Repeatability(forward, backward)
            before.gradients = dict.fromkeys(before.gradients)
        elif watch is not None:
            again, _ = full_batch_gradients(bench.task, bench.state, bench.record, lift=bench.lift, probe=probe)
            gap = abs(full.loss - again.loss) / max(abs(full.loss), 1e-300)
            self.measured.repeatability = Repeatability(gap, relative_difference(again.gradients, full.gradients))
        return fitted([bench.sketched(full, probe)[0]])

    def _state_explains(self) -> bool:
        state = self.measured.state
        if state is None or state.control is None:
            return False
        if state.control.rounding:
            self.measured.left = state.control.left
            return True
        return False

    def _operations(self) -> None:
        """Round by round: trace, try the suspects, neutralise the one that helps, look at what is left."""
        causes: list[Cause] = []
        for _ in range(_ROUNDS):
            found = self._attempt("first diverging operation", self._trace)
            if found is None:
                return
            if not causes:
                self.measured.forwards_agree, self.measured.loss_gap = found.forwards_agree, found.loss_gap
            tried = self._tried(found, causes)
            if tried is None:
                return
            causes.append(tried.cause)
            self.measured.causes = tuple(causes)
            control = tried.cause.control
            if control is not None:
                self.measured.left = control.left
            if control is None or control.rounding or tried.neutral is None:
                return
            self.bench = replace(self.bench, neutral=(*self.bench.neutral, tried.neutral))
            fit = self._fit(None, None)
            if self._weights(fit if self._means(fit) else self._joint(fit)):
                return

    def _hidden_state(self) -> None:
        """Restores all known state before each micro-batch: what moves it may have no name, or move in a backward."""
        measured = self.measured
        if measured.causes or not measured.forwards_agree:
            return
        restored = self._attempt("state restored", lambda: proof.state_restored(self.bench))
        if restored is not None and restored.rounding:
            unnamed = StateChange("state", "unnamed", True)
            measured.state = StateProbe((unnamed,), restored, (unnamed,), (restored,))
            measured.left = restored.left

    def _backward(self) -> None:
        """Looks for the place where gradients part, where all forwards agree."""
        measured = self.measured
        if measured.causes or not measured.forwards_agree or measured.left <= self.bench.rounding:
            return
        found = self._attempt("backward", lambda: backward_culprit(self.bench))
        if found is not None:
            measured.backward_culprit, measured.backward_control = found.operation, found.control

    def _trace(self) -> Divergences:
        measured = self.measured
        return trace_divergences(
            self.bench, weights=measured.weights, valid_targets=measured.valid_targets,
            foreign=measured.foreign_draws_differ,
        )  # fmt: skip

    def _tried(self, found: Divergences, causes: list[Cause]) -> proof.Tried | None:
        """The first suspect whose control run helps; one whose control could not run, where there is no better."""
        unproven = None
        known = {str(cause.suspect.culprit) for cause in causes}
        fresh = [suspect for suspect in found.suspects if str(suspect.culprit) not in known]
        for suspect in fresh[:_TRIED]:
            suspect = replace(suspect, statistics=suspect.statistics or self._normalises(suspect))
            tried = self._attempt(f"control of {suspect.culprit}", lambda s=suspect: self._try(s))  # type: ignore[misc]
            if tried is not None and tried.cause.control is not None:
                return tried
            if tried is not None and unproven is None:
                unproven = tried
                self.failures[f"control of {suspect.culprit}"] = "; ".join(tried.failures)
            if tried is None:
                self.measured.ruled_out = (*self.measured.ruled_out, str(suspect.culprit))
        return unproven

    def _try(self, suspect: Suspect) -> proof.Tried | None:
        return proof.try_suspect(self.bench, suspect, self.measured.left, self.residual)

    def _normalises(self, suspect: Suspect) -> bool:
        path = suspect.operation.module
        if path is None or not suspect.in_model:
            return False
        return bool(self._attempt("normalisation", lambda: normalises_channels(self.bench, path)))
