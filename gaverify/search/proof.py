"""Proves a suspect: neutralises it in both runs, then runs the remedies that would be printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter

from torch import nn

from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import PassProbe
from gaverify.passes.modes import mode_set
from gaverify.records.experiment import Cause, ControlKind, ControlRun, FunctionKey, Suspect
from gaverify.remedies.batch_norm import group_norm_for, only_normalises
from gaverify.search.bench import FORESEEN, Bench, ControlFailed
from gaverify.search.neutral import (
    EvaluationMode,
    PinnedCode,
    PinnedDecisions,
    PinnedOutputs,
    PinnedResults,
    cached_gradients,
    find_live_statistics,
)
from gaverify.search.trace.first_divergence import find_one_sided_branch
from gaverify.thresholds import HELPS, SAME_IN_FLOAT32, TINY
from gaverify.torch_internals import submodules_of
from gaverify.verdict.control import failure_sentence


@dataclass(frozen=True, eq=False)  # two runs of one suspect are two things
class SuspectTrial:
    """A suspect with its control run."""

    cause: Cause
    """The suspect, the control that was run, and its repairs."""
    probe: PassProbe | None
    """The probe that neutralises it while others are looked for; None: cached gradients, which have no such probe."""
    failures: tuple[str, ...] = ()
    """Why other controls of it were impossible."""
    helps: bool = True
    """Whether the control explains enough of the difference by itself."""
    region: SuspectTrial | None = None
    """The trial with cached gradients, kept where the suspect's own result changes nothing: they prove a region."""

    suspicion: SuspectTrial | None = None
    """A trial without power that left nothing, where this one, on probation, leaves less than there was before."""

    @property
    def is_suspicion(self) -> bool:
        """Whether no control was possible, or none that left nothing had power."""
        return self.probe is None and not self.helps


def try_suspect(
    bench: Bench,
    suspect: Suspect,
    left: float,
    residual: float,
    *,
    all_of_it: bool = False,
    counted: Callable[[Bench], bool] = lambda _: False,
) -> SuspectTrial | None:
    """Runs the controls that fit the suspect until one helps; returns the best one with `helps` false if none does.

    A control that leaves nothing and had no power comes last: it proves nothing, and has no probe.

    Args:
        bench: Where to run.
        suspect: The operation to neutralise.
        left: The relative difference before.
        residual: What the best micro-batch weights leave of that.
        all_of_it: Go on after a control that helps and leaves something, until one leaves only rounding.
        counted: Whether the window's counts explain what is left on a bench.
    """
    failures: list[str] = []
    best: SuspectTrial | None = None
    powerless: SuspectTrial | None = None

    def share_explained(control: ControlRun) -> float:
        # Wrong weights beside the suspect may hide that the control helps: what the best weights leave shows it then.
        fit = control.fit
        weighted = fit.residual / residual if fit is not None and not fit.vacuous and residual > 0 else 1.0
        return 1.0 - min(control.left / max(left, TINY), weighted)

    for control, probe in _run_controls(bench, suspect, failures, lambda run: share_explained(run) > 1.0 - HELPS):
        if control.kind is ControlKind.LARGER_MICRO_BATCHES and suspect.lacking is not None:
            # a number was read near the branch, and did not decide it
            suspect = replace(suspect, operation=suspect.lacking, frame=None)
        explained = share_explained(control)
        trial = SuspectTrial(Cause(suspect, control, (), explained), probe, tuple(failures))
        helps = control.rounding or (explained > 1.0 - HELPS and not all_of_it)
        if control.rounding and not control.has_power:
            powerless = powerless or replace(trial, probe=None, helps=False)
            continue
        if helps and control.has_power:
            remedies = tuple(_run_remedies(bench, suspect, probe)) if control.rounding else ()
            trial = replace(trial, cause=replace(trial.cause, remedies=remedies))
            is_region = control.kind is ControlKind.CACHED_GRADIENTS
            return _put_on_probation(bench, trial, left) or trial if is_region else trial
        # Layers of another class that still mix samples are the rest of the cause, or may hide that this control helps.
        # Only evaluation mode leaves the loss running as it is. A pinned result cuts off what is counted before it.
        if isinstance(probe, EvaluationMode):
            evaluation_bench = bench.without(probe)
            live = [len(find_live_statistics(each.experiment)) for each in (evaluation_bench, bench)]
            if (not all_of_it and 0 < live[0] < live[1]) or counted(evaluation_bench):
                return trial
        # These layers stay the best guess: they are a repair, and other suspects can be tried behind them.
        is_best_repair = best is not None and isinstance(best.probe, EvaluationMode)
        if probe is not None and (best is None or (explained > best.cause.explained and not is_best_repair)):
            best = replace(trial, helps=False)
    if best is not None and best.cause.control is not None and powerless is not None:
        changes = abs(best.cause.control.left - left) > SAME_IN_FLOAT32 * left
        return replace(best, suspicion=powerless if changes else None)
    return best or powerless or SuspectTrial(Cause(suspect, None), None, tuple(failures), helps=False)


def _put_on_probation(bench: Bench, trial: SuspectTrial, left: float) -> SuspectTrial | None:
    """Returns the suspect on probation if pinning its own result changes nothing; None if it does, or is impossible.

    Cached gradients compute all of the loss once, so that they prove a region and not a line. A value such as a centre
    that is subtracted from all outputs may depend on the batch although the loss does not depend on that value.
    """
    suspect = trial.cause.suspect
    functions = suspect.source_functions if suspect.source is not None else suspect.functions
    probe = PinnedResults(bench.experiment, functions, suspect.order)
    what = f"the result of `{suspect.culprit.name}` kept constant"
    run = bench.possible(lambda: bench.run(what, probe)) if functions else None
    if run is None or abs(run.left - left) > SAME_IN_FLOAT32 * left:
        return None
    return SuspectTrial(Cause(suspect, run, (), 0.0), probe, trial.failures, helps=False, region=trial)


def rerun_cause(bench: Bench, cause: Cause) -> Cause | None:
    """Runs a control of a cause's kind, and its repairs, on another bench; None where that is impossible."""
    if cause.control is None:
        return None
    tries = list[tuple[ControlRun, PassProbe | None]]()
    # several controls have this kind: one that is impossible, or shows nothing, leaves it to the next
    helps = attrgetter("rounding")
    for each in _run_controls(bench, cause.suspect, [], helps, fit=False, kind=cause.control.kind):
        tries.append(each)
        if each[0].proves:
            break
    if not tries:
        return None
    control, probe = tries[-1]
    remedies = tuple(_run_remedies(bench, cause.suspect, probe)) if control.rounding else ()
    explained = 1.0 - control.left / bench.total
    return replace(cause, control=control, remedies=remedies, explained=explained, difference_alone=bench.total)


def put_causes_in_evaluation_mode(bench: Bench, causes: Sequence[Cause]) -> Bench:
    """The bench with the layers of some causes in evaluation mode."""
    paths = [cause.suspect.operation.module for cause in causes]
    layers = [layer for path in paths if path is not None for layer in _find_layers_of_class(bench, path)]
    return bench.without(EvaluationMode(layers)) if layers else bench


def rerun_replacement(bench: Bench, cause: Cause) -> Cause | None:
    """Runs the repair that replaces a cause by other layers, on another bench; None where it leaves a difference.

    It shows what the control would show there: without these layers no difference is left.
    """
    remedies = tuple(_run_remedies(bench, cause.suspect, None))
    if [(run.kind, run.rounding) for run in remedies] != [(ControlKind.REPLACED, True)]:
        return None
    return replace(
        cause, remedies=remedies, explained=1.0 - remedies[0].left / bench.total, difference_alone=bench.total
    )


def _run_controls(
    bench: Bench,
    suspect: Suspect,
    failures: list[str],
    helps: Callable[[ControlRun], bool],
    *,
    fit: bool = True,
    kind: ControlKind | None = None,
) -> Iterator[tuple[ControlRun, PassProbe | None]]:
    """Yields what the controls of a suspect leave, each with its probe; notes why others were impossible.

    Args:
        bench: Where to run.
        suspect: The operation to neutralise.
        failures: Takes the reasons.
        helps: Whether a control explains enough.
        fit: Whether to fit weights.
        kind: The only kind that is run; None runs all.
    """
    for each_kind, make in _list_controls(bench, suspect, fit=fit):
        # a value is pinned before it is pinned with its gradients
        wanted_kind = ControlKind.RESULT_PINNED if kind is ControlKind.FULL_BATCH else kind
        if wanted_kind not in (None, each_kind):
            continue
        try:
            control, probe = make()
        except FORESEEN as error:
            failures.append(failure_sentence(error))
            continue
        if not (isinstance(probe, PinnedCode) and helps(control) and (control.cut_off or probe.may_hide_backward)):
            yield control, probe
            continue
        # A constant cuts what was computed before it off the loss. With the gradients that its code sends back, what
        # is wrong before it shows again: a layer, a hook, a function with a backward of its own.
        what, connected = f"{control.what}, and the gradients of its inputs,", probe.with_gradients()
        try:
            run = bench.run(what, connected, fit=fit, kind=ControlKind.FULL_BATCH)
        except FORESEEN as error:
            failures.append(failure_sentence(error))
        else:
            yield run, connected
        if control.cut_off:
            yield control, probe


_Control = tuple[ControlKind, Callable[[], tuple[ControlRun, PassProbe | None]]]


def _list_controls(bench: Bench, suspect: Suspect, *, fit: bool = True) -> Iterator[_Control]:
    """Yields the controls, each with its kind, in the order of how much of the model they leave running."""
    path, experiment = suspect.operation.module, bench.experiment

    def run(what: str, probe: PassProbe, kind: ControlKind = ControlKind.RESULT_PINNED) -> _Control:
        return kind, lambda: (bench.run(what, probe, fit=fit, kind=kind), probe)

    if suspect.statistics and path is not None:
        yield ControlKind.EVALUATION_MODE, lambda: _run_in_evaluation_mode(bench, path, fit=fit)
    in_loss = suspect.kind in ("matrix", "non-additive") or (suspect.kind != "random" and not suspect.in_model)
    # Cached gradients leave whole every module that mixes samples. If the model mixes samples itself, they would repair
    # the model too, and prove nothing about the loss.
    if in_loss and not suspect.model_mixes:
        yield ControlKind.CACHED_GRADIENTS, lambda: (cached_gradients(bench, frozenset(suspect.calls)), None)
    if suspect.frame is not None:
        what, decisions = (
            "the full batch's decisions taken by every micro-batch",
            PinnedDecisions(experiment, suspect.frame),
        )
        yield run(what, decisions, ControlKind.DECISIONS)
    if suspect.lacking is not None and suspect.in_model:
        yield ControlKind.LARGER_MICRO_BATCHES, lambda: (run_larger_micro_batches(bench), None)
    reduced = (suspect.source_functions, "the reduction over the batch kept constant")
    # With equal calls in modules of the same class; without any there is no such control.
    everywhere = (*suspect.functions, *suspect.functions_on_equal_lines) if suspect.functions_on_equal_lines else ()
    # The reduction comes first: constant statistics leave the rows live, a constant result cuts off what is before it.
    constant_results = (
        *((reduced,) if suspect.source is not None else ()),
        (suspect.functions, f"the result of `{suspect.operation.name}` kept constant"),
        (everywhere, f"{_describe_lines(everywhere)} kept constant in every layer"),
        (suspect.exits, f"the values that samples get from `{suspect.operation.name}` kept constant"),
    )
    for functions, what in constant_results:
        if functions and not (functions is suspect.functions and suspect.kind == "matrix" and suspect.in_model):
            yield run(what, PinnedResults(experiment, functions, suspect.order))
    module = dict(experiment.named_modules()).get(path) if path else None
    if suspect.in_model and module is not None:
        yield run(f"the output of `{path}` kept constant", PinnedOutputs(experiment, module, suspect.outputs))


def run_larger_micro_batches(bench: Bench) -> ControlRun:
    """Runs neighbouring micro-batches as one, until all forwards run the operations of the full batch.

    Raises:
        ControlFailed: There are too few micro-batches, their weights are a function, or more than rounding is left.
    """
    experiment, count = bench.experiment, 1
    while (count := 2 * count) <= experiment.steps // 2:
        merged_bench = replace(bench, experiment=_merge_micro_batches(experiment, count), reference=None)
        if find_one_sided_branch(merged_bench) is None:
            what = f"micro-batches of at least {min(merged_bench.experiment.sizes)} samples"
            run = merged_bench.run(what, kind=ControlKind.LARGER_MICRO_BATCHES)
            if run.rounding:
                return run
    raise ControlFailed("no larger micro-batches run the operations of the full batch")


def _merge_micro_batches(experiment: Experiment, count: int) -> Experiment:
    """The experiment with `count` neighbouring micro-batches as one, the last ones of which may be more."""
    starts = range(0, experiment.steps - count + 1, count)
    groups = [slice(start, start + count if start != starts[-1] else None) for start in starts]
    weighting = experiment.weighting
    if weighting == "uniform":
        weighting = [1 / experiment.steps] * experiment.steps
    if not isinstance(weighting, str | list | tuple):
        raise ControlFailed("the weights of larger micro-batches are not known")
    if not isinstance(weighting, str):
        # weights of 1 are those of losses that are sums
        is_sum = all(weight == 1 for weight in weighting)
        weighting = [1.0 if is_sum else sum(weighting[group]) for group in groups]
    return replace(experiment, sizes=tuple(sum(experiment.sizes[group]) for group in groups), weighting=weighting)


def _run_in_evaluation_mode(bench: Bench, path: str, *, fit: bool) -> tuple[ControlRun, PassProbe]:
    """Runs the suspect's module and all others of its class in eval mode; names those that were in training mode."""
    modules = _find_layers_of_class(bench, path)
    several = "both" if len(modules) == 2 else f"all {len(modules)}"
    kind = type(modules[0]).__name__
    names = f"layer `{path}` ({kind})" if len(modules) == 1 else f"{several} {kind} layers"
    active = tuple(name for name, each in bench.experiment.named_modules() if each.training and each in modules)
    what, probe = f"{names} in evaluation mode", EvaluationMode(modules)
    if _is_run_on_all(bench, probe):
        # Presumed: the control of all of the batch decides, and where it leaves something all of that is searched.
        return ControlRun(what, 0.0, True, kind=ControlKind.EVALUATION_MODE, modules=active), probe
    return replace(bench.run(what, probe, fit=fit, kind=ControlKind.EVALUATION_MODE), modules=active), probe


def _is_run_on_all(bench: Bench, probe: EvaluationMode) -> bool:
    """Whether some layers are all that normalise the first samples of a batch, and nothing replaces them.

    Their control then runs on all of the batch. Where GroupNorm replaces them that repair runs there instead, and the
    control of the first samples stays the proof. Layers of one class seldom explain everything where there are others.
    """
    if not bench.in_part or bench.experiment.probes:
        return False
    is_live, stays_live = (bool(find_live_statistics(each.experiment)) for each in (bench, bench.without(probe)))
    return is_live and not stays_live and not _are_replaceable(probe.modules)


def _are_replaceable(layers: Sequence[nn.Module]) -> bool:
    return all(isinstance(layer, nn.modules.batchnorm._BatchNorm) and only_normalises(layer) for layer in layers)


def _describe_lines(functions: Sequence[FunctionKey]) -> str:
    """Names torch calls by their lines: "`lt` at line 83, `lt` at line 84"."""
    places = sorted({(name, frame[1] if frame is not None else 0) for name, frame, _ in functions}, key=lambda p: p[1])
    return ", ".join(f"`{name}` at line {line}" for name, line in places)


def _find_layers_of_class(bench: Bench, path: str) -> list[nn.Module]:
    """The suspect's module and every other module of its class: they are repaired together."""
    modules = dict(bench.experiment.named_modules())
    kind = type(modules[path])
    return [module for module in modules.values() if type(module) is kind]


def _run_remedies(bench: Bench, suspect: Suspect, probe: PassProbe | None) -> Iterator[ControlRun]:
    """Runs the repairs that can be made without the user's code."""
    path = suspect.operation.module
    # A value that cuts divergent parameters off the loss is no repair: they would get no gradient.
    if isinstance(probe, PinnedResults) and not probe.pins_gradients:
        # The control pinned the value in both runs. As a repair of the micro-batches alone it is right only if no
        # gradient of the full batch flows through the value, which this run shows.
        what, kind = "the full batch's value as a constant in every micro-batch", ControlKind.FULL_BATCH_VALUE
        # If it fails, the difference is only drawn in a chart: a sketch is precise enough, and saves a full batch.
        in_the_window = bench.possible(lambda: bench.run_repair(what, probe, kind=kind, exactly=False))
        if in_the_window is None:
            return
        yield in_the_window
    # a replacement for layers in evaluation mode runs once, on all of the batch
    if not suspect.statistics or path is None or (bench.in_part and isinstance(probe, EvaluationMode)):
        return
    layers = [m for m in _find_layers_of_class(bench, path) if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not layers or not _are_replaceable(layers):
        return
    try:
        with _with_group_norms(bench, layers) as name:
            yield bench.run(name, kind=ControlKind.REPLACED)
    except (*FORESEEN, ValueError):  # a layer whose channels cannot be grouped: the remedy is not printed
        return


@contextmanager
def _with_group_norms(bench: Bench, layers: Sequence[nn.modules.batchnorm._BatchNorm]) -> Iterator[str]:
    """Replaces BatchNorm layers by GroupNorm with the same scale and shift while the context is open."""
    names = set()
    with mode_set(bench.experiment.modules, None):
        for _, parent in list(bench.experiment.named_modules()):
            for name, child in list(submodules_of(parent).items()):
                if isinstance(child, nn.modules.batchnorm._BatchNorm) and any(child is layer for layer in layers):
                    norm = submodules_of(parent)[name] = group_norm_for(child)
                    names.add(f"GroupNorm({norm.num_groups}, {norm.num_channels})")
        if not names:
            raise ValueError("the layer is the model itself")
        yield names.pop() if len(names) == 1 else "GroupNorm"
