"""The verdict of all ranks: they agree on what is verified, and compare the whole batch with their window.

    reference   every rank runs the same whole batch. A model that the user's code put under an engine stays under it:
                the mean of R equal gradients is the full batch's. A model that gaverify wraps runs it before, alone
    window      K micro-batches of its own on each rank, reduced as the engine does

Every number that decides something is one of all ranks (`Experiment.ranks`), so that all ask the same next question.
The cause is looked for where a window diverges: with the same micro-batches, all of them on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from gaverify.collective.engines import PlainModel, of_every_rank
from gaverify.collective.facts import facts_of_ranks
from gaverify.collective.membership import Member
from gaverify.collective.window import RankedExperiment, Trained, bare, description, users_engine
from gaverify.errors import Agreed
from gaverify.passes.batching import Problem, batch_size_of, micro_batch_sizes
from gaverify.passes.experiment import Experiment
from gaverify.passes.layouts import children, digest_of, leaves, with_children
from gaverify.passes.precision import RANKED, resolve_device, unit_roundoff
from gaverify.passes.wrappers import dividing, hooks_left_out
from gaverify.preparation import Progress, prepare_experiment, reporter, settings_of
from gaverify.records.comparison import Comparison
from gaverify.records.outcomes import Method, Outcome, relative_total
from gaverify.records.ranks import Engine
from gaverify.search.investigation import collect_facts, investigate
from gaverify.spec import Spec
from gaverify.thresholds import CAPPED_UNITS
from gaverify.verdict.comparison import measure
from gaverify.verdict.criteria import record
from gaverify.verdict.decision import Decision, measure_and_decide
from gaverify.verdict.measurement import Measurement
from gaverify.verdict.settings import Settings


def judge_together(
    experiment: Experiment, trained: Trained, *, diagnose: bool, exact: bool
) -> tuple[Measurement, Decision, Comparison]:
    """Returns the verdict on the gradient that the ranks end up with, and everything that was measured.

    Args:
        experiment: With the batch of all ranks, cut into K · R micro-batches, and the model as the ranks hold it.
        trained: How they train.
        diagnose: Whether to look for the cause of a divergence.
        exact: In float64 whatever working precision says.

    Raises:
        ProblemError: The problem cannot be verified by ranks.
    """
    with dividing(experiment.modules) as factors:
        ranked = RankedExperiment.of(experiment, replace(trained, factors=factors))
        measurement, decision = measure_and_decide(ranked, exact=exact, keep_gradients=True)
        assert isinstance(measurement.experiment, RankedExperiment)
        trained, meter = measurement.experiment.trained, measurement.experiment.meters[0]
        experiment = measurement.experiment.by_one_process()
        measurement = replace(measurement, experiment=experiment)
        if decision.float64 is not None and trained.has_own_hooks(experiment):
            decision = _decide_hooks(trained, measurement, decision)
        own_sizes = tuple(experiment.sizes[k] for k in trained.own(experiment))
        own = replace(measurement, experiment=replace(experiment, sizes=own_sizes))
        if not decision.is_divergent:
            facts = replace(collect_facts(own, decision), ranks=facts_of_ranks(trained, measurement, decision, meter))
            return measurement, decision, facts
        one, one_decision = _measure_alone(experiment, trained)
        ranks = facts_of_ranks(trained, measurement, decision, meter, one)
        facts = _search_cause(trained, one, one_decision, diagnose)
    if not facts.compared.divergent:
        rows = replace(facts.compared, rows=decision.rows, method=decision.method)
        facts = replace(facts, compared=rows, diagnosed=diagnose)
    return measurement, decision, replace(facts, ranks=ranks)


def _decide_hooks(trained: Trained, measurement: Measurement, decision: Decision) -> Decision:
    """Decides by a control without the user's communication hooks what these change by more than 16 bits round.

    The float64 control runs without them, for one that compresses rounds in any precision. The same window in the same
    arithmetic tells their share exactly, also below float32, where right runs are percents apart.
    """
    window = measurement.accumulated
    with hooks_left_out(measurement.experiment.modules):
        without, _ = trained.window(measurement.experiment, measurement.full)
    rows = measure(window.gradients, without.gradients, measurement.experiment.ranks)
    allowed = CAPPED_UNITS * unit_roundoff(torch.bfloat16)
    if relative_total((row.difference, row.reference) for row in rows if row.why is None) <= allowed:
        return decision
    decided_rows = tuple(
        record(row, Outcome.DIVERGENT, Method.WORKING_PRECISION, allowed * row.reference, row.difference)
        if row.why is None and changed.difference > allowed * changed.reference
        else decided
        for row, changed, decided in zip(measurement.differences.values(), rows, decision.rows, strict=True)
    )
    return replace(decision, rows=decided_rows)


def _measure_alone(experiment: Experiment, trained: Trained) -> tuple[Measurement, Decision]:
    """Measures the micro-batches of all ranks where each rank runs all of them, as one process would.

    Under DDP every rank has the whole model and needs no other one for it; sharded ones run in step.
    """
    if trained.plain is None:
        alone_on_rank = experiment if trained.engine is Engine.FSDP2 else replace(bare(experiment), ranks=None)
        return measure_and_decide(alone_on_rank.with_current_state(), exact=True, keep_gradients=True)
    with trained.plain.alone(experiment) as single:
        measurement, decision = measure_and_decide(single, exact=True, keep_gradients=True)
        asked = _ask_of_one_process(trained, measurement)
        if asked is not single:
            measurement, decision = measure_and_decide(asked, exact=True, keep_gradients=True)
    return measurement, decision


def _ask_of_one_process(trained: Trained, measurement: Measurement) -> Experiment:
    """Returns what one process runs to compute what the ranks compute together.

    Args:
        trained: How the ranks train.
        measurement: Of the K · R micro-batches in one process.
    """
    experiment, count = measurement.experiment, trained.member.count
    weighting = experiment.weighting
    assert trained.without_engine is not None
    if trained.without_engine.calls.count():
        # The code saw the samples of all ranks at once: K micro-batches that hold what the ranks hold together.
        if isinstance(weighting, list | tuple):
            weighting = [sum(weighting[at : at + count]) for at in range(0, len(weighting), count)]
        sizes = micro_batch_sizes(experiment.batch_size, experiment.steps // count)
        return replace(experiment, sizes=sizes, weighting=weighting)
    micro, full = measurement.accumulated.micro_losses, measurement.full.loss
    # Losses that were added up as they are come nearer to K · R times the full batch's than to it: means, whose mean
    # over the ranks is right; of sums it is a fault of the ranks.
    if weighting == "none" and abs(sum(micro)) > math.sqrt(len(micro)) * abs(full):
        return experiment.with_weights([1.0 / count] * experiment.steps)
    return experiment


def _search_cause(trained: Trained, one: Measurement, decision: Decision, diagnose: bool) -> Comparison:
    """Looks for the cause of a divergence in what one process shows.

    Under an engine of the user's all ranks search in step, because sharded ones need each other for every pass. A plain
    model needs none of them: rank 0 searches, and the others have nothing to tell.
    """
    if trained.plain is None:
        return investigate(one, decision, diagnose=diagnose)
    with trained.plain.alone(one.experiment):
        if trained.member.rank:
            return collect_facts(one, decision)
        return investigate(one, decision, diagnose=diagnose)


# Every rank does three things when it is asked for a verdict: agree on the problem, verify it, return rank 0's answer.


Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Asked:
    """The request to all ranks: `fresh` says that gaverify made the model itself and may wrap it as it likes."""

    problem: Problem
    settings: Settings
    engine: Engine
    fresh: bool = False


def verify_together(
    asked: Asked,
    member: Member,
    progress: Progress | None,
    answer: Callable[[Measurement, Decision, Comparison], Answer],
) -> Answer:
    """Returns rank 0's answer on every rank.

    Args:
        asked: With this rank's model and batch, and K of one rank.
        member: This rank.
        progress: Told how far it is; on rank 0 alone.
        answer: Makes the answer of what was judged; called on rank 0 alone.

    Raises:
        ProblemError: On every rank: it cannot be verified, or a rank failed, whose number the sentence says.
    """
    settings = asked.settings
    modules = [module for module in (asked.problem.model, asked.problem.loss) if isinstance(module, nn.Module)]
    engine = users_engine(modules)
    is_plain = engine is None
    member.agree("settings", _explain_refusal(settings, is_plain=is_plain))
    if engine is None:
        engine = asked.engine
        member.agree("wrapping", "" if asked.fresh or engine is Engine.DDP else _WRAP_IT)
    problem, sizes, shared_batch = batch_of_all(asked.problem, settings.steps, member)
    with ExitStack() as stack:
        weighting = _spread_numbers(settings.weighting, settings.steps, member.count, shared_batch=shared_batch)
        experiment = prepare_experiment(stack, problem, replace(settings, steps=len(sizes), weighting=weighting))
        report = reporter(progress if member.rank == 0 else None, len(sizes))
        experiment = replace(experiment, sizes=sizes, progress=report)
        # Ranks that were seeded differently would compare the gradients of different models.
        described = member.everyones("model", (tuple(experiment.parameters), description(experiment), settings.seed))
        odd = next(
            (rank for rank, description_of_rank in enumerate(described) if description_of_rank != described[0]), None
        )
        member.agree("alike", _describe_mismatch(odd, described) if odd is not None else "")
        plain = PlainModel(experiment, member) if is_plain else None
        trained = Trained(member, engine, plain=plain, shared_batch=shared_batch)
        judged = judge_together(experiment, trained, diagnose=settings.diagnose, exact=settings.exact)
        rank_answer = answer(*judged) if member.rank == 0 else None
    # All ranks return the same verdict. How long rank 0 searches says nothing about the ranks: no limit.
    return member.everyones("answer", rank_answer, within=math.inf)[0]  # type: ignore[no-any-return]


def _spread_numbers(weighting: Any, steps: int, ranks: int, *, shared_batch: bool) -> Any:
    """Returns the weights of all K · R micro-batches where the user gave numbers.

    K numbers are those of one rank, each of which counts its share of the mean over the ranks.
    """
    if not isinstance(weighting, list | tuple) or len(weighting) == steps * ranks:
        return weighting
    each = [weight / ranks for weight in weighting]
    return [weight for weight in each for _ in range(ranks)] if shared_batch else each * ranks


def explain_options(spec: Spec) -> str:
    """Returns why the ranks that a spec asks for cannot do what else it asks for; "" where they can."""
    device = resolve_device(spec.device)
    if device is not None and device.type not in RANKED:
        return f"ranks run on CPUs and on CUDA devices, not on {device}; write device='cpu', where the same faults show"
    return _explain_refusal(settings_of(vars(spec)), is_plain=True)


_WRAP_IT = "`engine` fsdp2 would shard your model permanently: call `fully_shard` on it as your training does"


def _describe_mismatch(odd: int, described: list[tuple[tuple[str, ...], str, int]]) -> str:
    first, mismatched = described[0], described[odd]
    if first[2] != mismatched[2]:
        return f"rank {odd} has seed {mismatched[2]}, rank 0 has {first[2]}: give every rank the same"
    what = "other weights" if first[0] == mismatched[0] else "another model"
    return f"rank {odd} has {what} than rank 0: give every rank the same, for example by one seed"


def _explain_refusal(settings: Settings, *, is_plain: bool) -> str:
    """Says what ranks cannot do together; "" where they can. For a plain model rank 0 alone searches for the cause."""
    tried = {
        f"--strategy {settings.strategy}": settings.strategy != "accumulate",
        "--rtol and --atol": settings.rtol is not None,
        "--trace": settings.trace,
    }
    for option in (option for option, is_asked in tried.items() if is_asked):
        return f"{option} cannot be combined with ranks; leave it out, or the launcher or --ranks"
    if settings.time_limit is not None and not is_plain:
        return "--time-limit (time_limit=) would end the search on some ranks before others; leave it out"
    return ""


def batch_of_all(problem: Problem, steps: int, member: Member) -> tuple[Problem, tuple[int, ...], bool]:
    """Returns the problem with the batch of all ranks, the sizes of its K · R micro-batches, and whether it is shared.

    Where every rank was given the same batch that is the batch of all; others are put together, rank after rank.

    Args:
        problem: With this rank's batch.
        steps: K of this rank.
        member: This rank.

    Raises:
        Agreed: The ranks' batches cannot be put together, or K or a size differs.
    """
    size = batch_size_of(problem.batch, steps, problem.batch_size, problem.split)
    said = member.everyones("batch", (steps, size, digest_of(leaves(problem.batch))))
    for what, at in (("steps", 0), ("samples", 1)):
        numbers = [entry[at] for entry in said]
        odd = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
        if odd is not None:
            raise Agreed(f"rank {odd} has {numbers[odd]} {what}, rank 0 has {numbers[0]}: give every rank as many")
    # The same batch on every rank is meant as the full batch, not as R copies of it.
    alike = len({entry[2] for entry in said}) == 1
    if alike:
        member.agree("cuts", explain_small_batch(size, steps, member.count))
        return problem, micro_batch_sizes(size, steps * member.count), True
    problem_here = explain_small_batch(size * member.count, steps, member.count)
    if problem.split is not None:
        problem_here = "the ranks' batches differ, and a `split` cuts them: give every rank the full batch"
    member.agree("cuts", problem_here)
    full_batch = _join_batches(of_every_rank(problem.batch, member.count, member.device), size)
    problem = replace(problem, batch=full_batch, batch_size=size * member.count)
    return problem, micro_batch_sizes(size, steps) * member.count, False


def explain_small_batch(size: int, steps: int, count: int) -> str:
    """Returns why K micro-batches for each of R ranks cannot be cut from so many samples; "" where they can."""
    if steps * count > size:
        each = "1 micro-batch" if steps == 1 else f"{steps} micro-batches"
        return (
            f"{count} ranks with {each} each are {steps * count} parts, which cannot be cut from a batch of "
            f"{size} samples. Lower ranks or steps, or raise the batch size"
        )
    if size < 2 * count:
        return f"{count} ranks need a batch of at least {2 * count} samples, it has {size}"
    return ""


def _join_batches(batches: list[Any], size: int) -> Any:
    """Returns one batch with the samples of several of a size, in order; what carries none is the first one's."""
    first = batches[0]
    entries = children(first)
    if entries is None:
        return torch.cat([batch.to(first.device) for batch in batches]) if _carries(first, size) else first
    if isinstance(first, list) and len(first) == size and not _carries(first[0], size):
        return [sample for batch in batches for sample in batch]
    parts = zip(*([child for _, child in children(batch) or []] for batch in batches), strict=True)
    return with_children(first, [_join_batches(list(part), size) for part in parts])


def _carries(node: Any, size: int) -> bool:
    """Whether a part of a batch holds all samples: a list around it is then a list of fields."""
    return any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == size for _, leaf in leaves(node))
