"""One search for the cause of a divergence: draws, weights, state, operations, backward; each with control runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from gaverify.control import failure_sentence
from gaverify.gradients import PassProbe, PassResult, full_batch_gradients
from gaverify.measurements import (
    ControlRun,
    Measurements,
    Operation,
    Repeatability,
    StateChange,
    StateProbe,
    WeightFit,
    are_shares,
    is_constant,
)
from gaverify.probes import blame, proof
from gaverify.probes.backward_divergence import backward_culprit
from gaverify.probes.causes import CauseSearch
from gaverify.probes.controls import Bench
from gaverify.probes.fingerprints import sketch
from gaverify.probes.first_divergence import Divergences, trace_divergences
from gaverify.probes.micro_batch_weights import fitted
from gaverify.probes.sample_coupling import sample_coupling
from gaverify.probes.state import StateRestored, StateWatch
from gaverify.probes.writing_lines import writing_lines
from gaverify.tracebacks import shown

# A fit that leaves less than this over explains the divergence by weights alone: float64 fits of additive losses
# leave 1e-12 or less, a coupled loss more than 1e-4 (design, section 6: 3e-8 in float32).
EXPLAINED_FLOAT64, EXPLAINED_FLOAT32 = 1e-6, 1e-3
_NOTHING_LEFT = 0.01  # of the divergence: a fit that leaves more of a small one does not explain it
_NO_WEIGHT = 1e-6  # of the largest fitted weight: what has a gradient and counts for less is left out on purpose
_NO_EFFECT = 1e-6  # relative change of the difference below which a control changed nothing
T = TypeVar("T")


class Search:
    """One investigation: what has been neutralised so far, and what is left."""

    def __init__(self, bench: Bench, measured: Measurements) -> None:
        self.bench, self.measured = bench, measured
        self.failures: dict[str, str] = {}
        self.shares: tuple[float, ...] = ()  # micro-batch weights that fit the losses
        self.restoring: PassProbe | None = None  # neutralises the state that forwards change
        self.record = bench.record  # the draws as they were made, where a control holds them constant
        explained = EXPLAINED_FLOAT64 if bench.rounding < 1e-5 else EXPLAINED_FLOAT32
        self.explained = min(explained, _NOTHING_LEFT * measured.total)

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
                changes, left = watch.changes(), measured.left
                blamed = self._attempt("state", lambda: blame.blame_state(self.bench, changes, left))
                measured.state, self.restoring = blamed or (None, None)
                measured.coupling = self._attempt("coupling of samples", lambda: sample_coupling(self.bench))
                if not self._state_explains() and not self._weights(self._joint(fit, self.bench)):
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

    def _joint(self, fit: WeightFit | None, bench: Bench) -> WeightFit | None:
        """The weights that hold for moved parameters too; None where there are none."""
        if fit is None or fit.vacuous or not fit.residual < self.explained:
            return None
        if fit.determined and min(map(abs, fit.weights)) < _NO_WEIGHT * max(map(abs, fit.weights)):
            return None  # a loss that picks some samples and forgets the others: a maximum, a worst group
        joint = self._attempt("weights at moved parameters", lambda: proof.joint_fit(bench))
        return joint if joint is not None and joint.residual < self.explained else None

    def _weights(self, fit: WeightFit | None, bench: Bench | None = None) -> bool:
        """Runs the accumulation with fitted weights; whether that was done."""
        if fit is None:
            return False
        self.measured.fit = fit
        remedy = self._attempt("weights", lambda: proof.weights_remedy(bench or self.bench, fit))
        self.measured.weight_remedy = remedy
        if remedy is not None:
            self.measured.left = remedy.left
        return True

    def _fitted(self, watch: StateWatch | None, before: PassResult | None) -> WeightFit:
        bench = self.bench
        probe = bench.with_probe(watch)
        if watch is not None and (before is None or bench.record.constant):
            before, _ = full_batch_gradients(bench.task, bench.state, bench.record, lift=bench.lift, probe=probe)
        earlier = None
        if watch is not None and before is not None:  # a sketch of it is enough, and leaves room for the next pass
            earlier = sketch(list(before.gradients.values()))
            before.gradients = dict.fromkeys(before.gradients)
        full, _ = full_batch_gradients(bench.task, bench.state, bench.record, lift=bench.lift, probe=probe)
        if earlier is not None and before is not None:
            norm = float(torch.linalg.vector_norm(earlier)) or 1.0
            backward = float(torch.linalg.vector_norm(sketch(list(full.gradients.values())) - earlier)) / norm
            forward = abs(full.loss - before.loss) / max(abs(before.loss), 1e-300)
            self.measured.repeatability = Repeatability(forward, backward)
        return fitted([bench.sketched(full, probe, release=True)[0]])

    def _state_explains(self) -> bool:
        state = self.measured.state
        if state is None or state.control is None:
            return False
        if state.control.rounding:
            self.measured.left = state.control.left
            return True
        return False

    def _operations(self) -> None:
        """Looks for operations that couple samples, beside state and draws that may be causes as well."""
        measured = self.measured
        base = self.bench
        state = measured.state.control if measured.state is not None else None
        if state is not None and self.restoring is not None:
            # on probation: what is changed may matter only once something else does not
            base = replace(base, neutral=(*base.neutral, self.restoring))
            fit, left = state.fit, state.left
        else:
            fit, left = measured.fit, measured.left
        residual = fit.residual if fit is not None and not fit.vacuous else 0.0
        search = CauseSearch(base, self._trace, self._weighed, left, residual)
        self._attempt("first diverging operation", lambda: search.run(state.fit if state is not None else None))
        self.failures |= search.failures
        first = search.first
        if first is not None:
            measured.forwards_agree, measured.loss_gap = first.forwards_agree, first.loss_gap
            self.shares = first.shares
        measured.causes, measured.ruled_out = search.causes, tuple(search.ruled_out)
        if search.weights is not None and search.cleared:
            measured.fit, measured.weight_remedy = search.weights, search.remedy
        if search.cleared or search.causes:
            measured.left = search.left
        if search.cleared:
            self._others(search, base if state is not None else None)

    def _others(self, search: CauseSearch, restored: Bench | None) -> None:
        """Releases state and draws while everything else stays neutralised: do they matter by themselves?"""
        measured = self.measured
        if restored is not None or self.bench.record.constant:
            search.close()
        if restored is not None and measured.state is not None:
            alone = self._attempt("state released", lambda: search.final(bench=self.bench))
            if alone is not None and not alone.rounding:
                there, left = search.others_neutralised(self.bench), alone.left
                read = blame.read_changes(measured.state.changes)
                found = None
                if there is not None:
                    found = self._attempt("state held", lambda: blame.blamed(there, read, left))
                measured.state = replace(measured.state, blamed=found or read, alone=left)
        if self.bench.record.constant:
            live = replace(restored or self.bench, record=self.record)
            alone = self._attempt("draws released", lambda: search.final(bench=live))
            measured.draws_alone = alone.left if alone is not None and not alone.rounding else 0.0

    def _weighed(self, bench: Bench, fit: WeightFit | None) -> WeightFit | None:
        """The fitted weights, where they explain everything and are more than a coincidence of these parameters."""
        if self._means(fit):
            return fit
        return self._joint(fit, bench)

    def locate_writers(self) -> None:
        """Finds the lines that change blamed state which is no tensor of the model and no attribute of a module."""
        state = self.measured.state
        if state is None:
            return
        open_ = [c for c in state.blamed if c.writer is None or c.writer.file is None]
        unknown = [change.name for change in open_ if change.place in ("closure", "attribute")]
        lines = self._attempt("writing lines", lambda: writing_lines(self.bench, unknown)) if unknown else None
        if not lines:
            return
        placed = []
        for change in state.blamed:
            if change.name in lines:
                file, line = lines[change.name]
                writer = change.writer or Operation("")
                change = replace(change, writer=replace(writer, file=shown(file), line=line))
            placed.append(change)
        self.measured.state = replace(state, blamed=tuple(placed))

    def _hidden_state(self) -> None:
        """Restores all known state before each micro-batch: what moves it may have no name, or move in a backward."""
        measured = self.measured
        if measured.causes or not measured.forwards_agree:
            return
        restored = self._attempt("state restored", lambda: blame.state_restored(self.bench))
        if restored is None:
            return
        unnamed = StateChange("state", "unnamed", True)
        found = StateProbe((unnamed,), restored, (unnamed,), (restored,))
        if restored.rounding:
            measured.state, measured.left = found, restored.left
        elif abs(restored.left - measured.left) > _NO_EFFECT * measured.left:
            there = replace(self.bench, neutral=(*self.bench.neutral, StateRestored(self.bench.state)))
            if self._weights(self._weighed(there, restored.fit), there):
                measured.state = replace(found, alone=measured.total)

    def _backward(self) -> None:
        """Looks for the place where gradients part, where all forwards agree, with weights that fit the losses."""
        measured = self.measured
        if measured.causes or not measured.forwards_agree or measured.left <= self.bench.rounding:
            return
        shares = self.shares or measured.weights
        bench = replace(self.bench, task=replace(self.bench.task, weighting=list(shares)))
        found = self._attempt("backward", lambda: backward_culprit(bench, self._means))
        if found is None:
            return
        measured.backward_culprit, measured.backward_control = found.operation, found.control
        if found.control is None or not found.control.rounding:
            return
        fit = found.control.fit
        right = fit.weights if fit is not None and self._means(fit) else shares
        measured.left = found.control.left
        if any(not math.isclose(c, w, rel_tol=1e-7) for c, w in zip(right, measured.weights, strict=True)):
            noise = measured.fit.noise if measured.fit is not None else math.nan
            measured.fit = WeightFit(tuple(right), measured.left, determined=True, noise=noise)
            measured.weight_remedy = ControlRun("with these weights", measured.left, True)

    def _trace(self, bench: Bench) -> Divergences:
        measured = self.measured
        return trace_divergences(
            bench, weights=measured.weights, valid_targets=measured.valid_targets, foreign=measured.foreign_draws_differ
        )
