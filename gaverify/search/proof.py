"""Proves a suspect: neutralises it in both runs, then runs the remedies that would be printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from gaverify.passes.experiment import Experiment
from gaverify.records.experiment import Cause, ControlKind, ControlRun, FunctionKey, Suspect
from gaverify.remedies.batch_norm import only_normalises
from gaverify.search.bench import FORESEEN, Bench, ControlFailed, Intervention
from gaverify.search.neutral import (
    EvaluationMode,
    GroupNorms,
    PinnedCode,
    PinnedDecisions,
    PinnedOutputs,
    PinnedResults,
    cached_gradients,
    find_layers_of_class,
    find_live_statistics,
)
from gaverify.search.trace.first_divergence import find_one_sided_branch
from gaverify.thresholds import HELPS, SAME_IN_FLOAT32, TINY
from gaverify.verdict.control import failure_sentence


@dataclass(frozen=True, eq=False)  # two runs of one suspect are two things
class SuspectTrial:
    """A suspect with its control run."""

    cause: Cause
    """The suspect, the control that was run, and its repairs."""
    intervention: Intervention | None
    """It neutralises the suspect while others are looked for; None: only a control that nothing can run beside."""
    failures: tuple[str, ...] = ()
    """Why other controls of it were impossible."""
    helps: bool = True
    """Whether the control explains enough of the difference by itself."""
    region: SuspectTrial | None = None
    """The trial with cached gradients, kept where the suspect's own result changes nothing: they prove a region."""

    suspicion: SuspectTrial | None = None
    """A trial without power that left nothing, where this one, on probation, leaves less than there was before."""

    @property
    def kind(self) -> ControlKind | None:
        """The kind of what neutralises it."""
        return self.intervention.kind if self.intervention is not None else None

    @property
    def is_suspicion(self) -> bool:
        """Whether no control was possible, or none that left nothing had power."""
        return self.intervention is None and not self.helps


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
        residual: The relative difference that the best micro-batch weights leave.
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

    for control, neutral in _run_controls(bench, suspect, failures, lambda run: share_explained(run) > 1.0 - HELPS):
        if control.kind is ControlKind.LARGER_MICRO_BATCHES and suspect.lacking is not None:
            # a number was read near the branch, and did not decide it
            suspect = replace(suspect, operation=suspect.lacking, frame=None)
        explained = share_explained(control)
        trial = SuspectTrial(Cause(suspect, control, (), explained), neutral, tuple(failures))
        helps = control.rounding or (explained > 1.0 - HELPS and not all_of_it)
        if control.rounding and not control.has_power:
            powerless = powerless or replace(trial, intervention=None, helps=False)
            continue
        if helps and control.has_power:
            remedies = tuple(_run_remedies(bench, suspect, control, neutral)) if control.rounding else ()
            trial = replace(trial, cause=replace(trial.cause, remedies=remedies))
            is_region = control.kind is ControlKind.CACHED_GRADIENTS
            return _put_on_probation(bench, trial, left) or trial if is_region else trial
        # Layers of another class that still mix samples are the rest of the cause, or may hide that this control helps.
        # Only evaluation mode leaves the loss running as it is. A pinned result cuts off what is counted before it.
        if control.kind is ControlKind.EVALUATION_MODE:
            evaluation_bench = bench.neutralise(*control.interventions)
            live = [len(find_live_statistics(each.experiment)) for each in (evaluation_bench, bench)]
            if (not all_of_it and 0 < live[0] < live[1]) or counted(evaluation_bench):
                return trial
        # These layers stay the best guess: they are a repair, and other suspects can be tried behind them.
        is_best_repair = best is not None and best.kind is ControlKind.EVALUATION_MODE
        if neutral is not None and (best is None or (explained > best.cause.explained and not is_best_repair)):
            best = replace(trial, helps=False)
    if best is not None and best.cause.control is not None and powerless is not None:
        changes = abs(best.cause.control.left - left) > SAME_IN_FLOAT32 * left
        return replace(best, suspicion=powerless if changes else None)
    return best or powerless or SuspectTrial(Cause(suspect, None), None, tuple(failures), helps=False)


def _put_on_probation(bench: Bench, trial: SuspectTrial, left: float) -> SuspectTrial | None:
    """Returns the suspect on probation if pinning its own result changes nothing; None if it does, or is impossible.

    Cached gradients compute all of the loss once, so that they prove a region and not a line. The loss may not depend
    on a value that depends on the batch, such as a centre that is subtracted from all outputs.
    """
    suspect = trial.cause.suspect
    functions = suspect.source_functions if suspect.source is not None else suspect.functions
    pinned = pin_results(functions, f"the result of `{suspect.culprit.name}` kept constant", suspect.order)
    tried = bench.possible(lambda: _run_control(bench, pinned)) if functions else None
    if tried is None or abs(tried[0].left - left) > SAME_IN_FLOAT32 * left:
        return None
    return SuspectTrial(Cause(suspect, tried[0], (), 0.0), tried[1], trial.failures, helps=False, region=trial)


def rerun_cause(bench: Bench, cause: Cause) -> Cause:
    """Runs a cause's own control, and its repairs, on another bench."""
    assert cause.control is not None
    control, neutral = _run_control(bench, *cause.control.interventions)
    remedies = tuple(_run_remedies(bench, cause.suspect, control, neutral)) if control.rounding else ()
    explained = 1.0 - control.left / bench.total
    return replace(cause, control=control, remedies=remedies, explained=explained, difference_alone=bench.total)


_Tried = tuple[ControlRun, Intervention | None]
"""A control run, and what keeps its suspect neutralised beside other controls; None where nothing can."""


def _run_control(bench: Bench, intervention: Intervention, *, fit: bool = False) -> _Tried:
    """Runs a control with a probe that its repairs and later controls share."""
    shared = intervention.share_probe(bench.experiment)
    return bench.run(shared, fit=fit), shared if shared.shared is not None else None


def _run_controls(
    bench: Bench, suspect: Suspect, failures: list[str], helps: Callable[[ControlRun], bool]
) -> Iterator[_Tried]:
    """Yields what the controls of a suspect leave; notes why others were impossible.

    Args:
        bench: Where to run.
        suspect: The operation to neutralise.
        failures: Takes the reasons.
        helps: Whether a control explains enough.
    """
    for make in _list_controls(bench, suspect):
        try:
            control, neutral = make()
        except FORESEEN as error:
            failures.append(failure_sentence(error))
            continue
        probe = neutral.shared if neutral is not None else None
        if not (isinstance(probe, PinnedCode) and helps(control) and (control.cut_off or probe.may_hide_backward)):
            yield control, neutral
            continue
        # A constant cuts what was computed before it off the loss. With the gradients that its code sends back, what
        # is wrong before it shows again: a layer, a hook, a function with a backward of its own.
        try:
            connected = _run_control(bench, _pin_gradients(*control.interventions), fit=True)
        except FORESEEN as error:
            failures.append(failure_sentence(error))
        else:
            yield connected
        if control.cut_off:
            yield control, neutral


def _list_controls(bench: Bench, suspect: Suspect) -> Iterator[Callable[[], _Tried]]:
    """Yields the controls in the order of how much of the model they leave running."""
    path = suspect.operation.module

    def run(intervention: Intervention) -> Callable[[], _Tried]:
        return partial(_run_control, bench, intervention, fit=True)

    if suspect.statistics and path is not None:
        yield partial(_run_in_evaluation_mode, bench, path)
    in_loss = suspect.kind in ("matrix", "non-additive") or (suspect.kind != "random" and not suspect.in_model)
    # Cached gradients leave whole every module that mixes samples. If the model mixes samples itself, they would repair
    # the model too, and prove nothing about the loss.
    if in_loss and not suspect.model_mixes:
        yield partial(_run_control, bench, cached_gradients(frozenset(suspect.calls)))
    if suspect.frame is not None:
        what, decisions = (
            "the full batch's decisions taken by every micro-batch",
            partial(PinnedDecisions, frame=suspect.frame),
        )
        yield run(Intervention(what, ControlKind.DECISIONS, decisions))
    if suspect.lacking is not None and suspect.in_model:
        yield lambda: (_run_larger_micro_batches(bench), None)
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
            yield run(pin_results(functions, what, suspect.order))
    if suspect.in_model and path and path in dict(bench.experiment.named_modules()):
        outputs = partial(PinnedOutputs, path=path, positions=suspect.outputs)
        yield run(Intervention(f"the output of `{path}` kept constant", probe=outputs))


def pin_results(functions: Sequence[FunctionKey], what: str, order: int | None) -> Intervention:
    """The results of some torch calls kept constant."""
    return Intervention(what, probe=partial(PinnedResults, functions=functions, order=order))


def _pin_gradients(pinned: Intervention) -> Intervention:
    """The same values kept constant, and the gradients that their code sends back."""
    assert isinstance(pinned.probe, partial)
    probe = partial(pinned.probe, with_gradients=True)
    return Intervention(f"{pinned.what}, and the gradients of its inputs,", ControlKind.FULL_BATCH, probe)


def _run_larger_micro_batches(bench: Bench) -> ControlRun:
    """Runs neighbouring micro-batches as one, until all forwards run the operations of the full batch.

    Raises:
        ControlFailed: There are too few micro-batches, their weights are a function, or more than rounding is left.
    """
    count = 1
    while (count := 2 * count) <= bench.experiment.steps // 2:
        merge = partial(_merge_micro_batches, count=count)
        merged_bench = replace(bench, experiment=merge(bench.experiment), reference=None)
        if find_one_sided_branch(merged_bench) is None:
            what = f"micro-batches of at least {min(merged_bench.experiment.sizes)} samples"
            run = bench.run(Intervention(what, ControlKind.LARGER_MICRO_BATCHES, change=merge))
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


def _run_in_evaluation_mode(bench: Bench, path: str) -> _Tried:
    """Runs the suspect's module and all others of its class in eval mode; names those that were in training mode."""
    layers = find_layers_of_class(bench.experiment, path)
    several = "both" if len(layers) == 2 else f"all {len(layers)}"
    kind = type(layers[0]).__name__
    names = f"layer `{path}` ({kind})" if len(layers) == 1 else f"{several} {kind} layers"
    active = tuple(name for name, each in bench.experiment.named_modules() if each.training and each in layers)
    evaluate = Intervention(
        f"{names} in evaluation mode", ControlKind.EVALUATION_MODE, partial(EvaluationMode, path=path), modules=active
    )
    if _is_run_on_all(bench, evaluate, layers):
        # Presumed: the control of all of the batch decides, and where it leaves something all of that is searched.
        presumed = ControlRun(evaluate.what, 0.0, True, kind=evaluate.kind, modules=active, interventions=(evaluate,))
        return presumed, evaluate
    return _run_control(bench, evaluate, fit=True)


def _is_run_on_all(bench: Bench, evaluate: Intervention, layers: Sequence[nn.Module]) -> bool:
    """Whether some layers are all that normalise the first samples of a batch, and nothing replaces them.

    Their control then runs on all of the batch. Where GroupNorm replaces them that repair runs there instead, and the
    control of the first samples stays the proof. Layers of one class seldom explain everything where there are others.
    """
    if not bench.in_part or bench.experiment.probes:
        return False
    benches = bench, bench.neutralise(evaluate)
    is_live, stays_live = (bool(find_live_statistics(each.experiment)) for each in benches)
    return is_live and not stays_live and not _are_replaceable(layers)


def _are_replaceable(layers: Sequence[nn.Module]) -> bool:
    return all(isinstance(layer, nn.modules.batchnorm._BatchNorm) and only_normalises(layer) for layer in layers)


def _describe_lines(functions: Sequence[FunctionKey]) -> str:
    """Names torch calls by their lines: "`lt` at line 83, `lt` at line 84"."""
    places = sorted({(name, frame[1] if frame is not None else 0) for name, frame, _ in functions}, key=lambda p: p[1])
    return ", ".join(f"`{name}` at line {line}" for name, line in places)


def _run_remedies(
    bench: Bench, suspect: Suspect, control: ControlRun, neutral: Intervention | None
) -> Iterator[ControlRun]:
    """Runs the repairs that can be made without the user's code.

    Args:
        bench: Where the control ran.
        suspect: It neutralised this.
        control: The run that neutralised it.
        neutral: Its intervention, with a probe that keeps the values of the full batch.
    """
    # A value that cuts divergent parameters off the loss is no repair: they would get no gradient.
    probe = neutral.shared if neutral is not None else None
    if neutral is not None and isinstance(probe, PinnedResults) and not probe.pins_gradients:
        # The control pinned the value in both runs. As a repair of the micro-batches alone it is right only if no
        # gradient of the full batch flows through the value. This run shows that.
        what = "the full batch's value as a constant in every micro-batch"
        repair = replace(neutral, what=what, kind=ControlKind.FULL_BATCH_VALUE, in_reference=False)
        # If it fails, the difference is only drawn in a chart: a sketch is precise enough, and saves a full batch.
        in_the_window = bench.possible(lambda: bench.run(repair, exactly=False))
        if in_the_window is None:
            return
        yield in_the_window
    # a replacement for layers in evaluation mode runs once, on all of the batch
    is_put_off = bench.in_part and control.kind is ControlKind.EVALUATION_MODE
    replaced = None if is_put_off else run_replacement(bench, suspect)
    if replaced is not None:
        yield replaced


def run_replacement(bench: Bench, suspect: Suspect) -> ControlRun | None:
    """Runs GroupNorm in the place of a suspect's layers; None where that would be another layer than they are."""
    path = suspect.operation.module
    if not suspect.statistics or path is None or not _are_replaceable(find_layers_of_class(bench.experiment, path)):
        return None
    make = partial(GroupNorms, path=path)
    try:
        name = make(bench.experiment).name
    except (ControlFailed, ValueError):  # a layer whose channels cannot be grouped: the remedy is not printed
        return None
    return bench.possible(lambda: bench.run(Intervention(name, ControlKind.REPLACED, make)))
