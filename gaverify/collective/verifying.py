"""What every rank does when it is asked for a verdict: agree on what is verified, verify it, return rank 0's answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from gaverify.collective.engines import of_every_rank
from gaverify.collective.flow import judge_together
from gaverify.collective.membership import Member
from gaverify.collective.plain import PlainModel
from gaverify.collective.window import Trained, description, users_engine
from gaverify.errors import Agreed
from gaverify.passes.batching import batch_size_of, micro_batch_sizes
from gaverify.passes.devices import RANKED, resolve_device
from gaverify.passes.fingerprints import digest_of
from gaverify.passes.gradients import Strategy
from gaverify.passes.nesting import children, leaves, with_children
from gaverify.passes.problem import Problem
from gaverify.preparation import Progress, prepare_experiment, reporter
from gaverify.records.facts import Facts
from gaverify.records.ranks import Engine
from gaverify.spec import Spec
from gaverify.verdict.decision import Decision
from gaverify.verdict.measurement import Measurement
from gaverify.verdict.settings import Settings

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Asked:
    """What the ranks were asked: `fresh` says that gaverify made the model itself and may wrap it as it likes."""

    problem: Problem
    settings: Settings
    engine: Engine
    strategy: Strategy | None = None
    fresh: bool = False


def verify_together(
    asked: Asked, member: Member, progress: Progress | None, answer: Callable[[Measurement, Decision, Facts], Answer]
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
    settings, strategy = asked.settings, asked.strategy
    modules = [module for module in (asked.problem.model, asked.problem.loss) if isinstance(module, nn.Module)]
    engine = users_engine(modules)
    is_plain = engine is None and strategy is None
    member.agree("settings", _explain_refusal(settings, is_plain=is_plain))
    if is_plain:
        engine = asked.engine
        member.agree("wrapping", "" if asked.fresh or engine is Engine.DDP else _WRAP_IT)
    problem, sizes, shared_batch = batch_of_all(asked.problem, settings.steps, member)
    with ExitStack() as stack:
        weighting = _spread_numbers(settings.weighting, settings.steps, member.count, shared_batch=shared_batch)
        experiment = prepare_experiment(stack, problem, replace(settings, steps=len(sizes), weighting=weighting))
        report = reporter(progress if member.rank == 0 else None, len(sizes))

        def report_progress(what: str) -> None:
            member.further(f"at {what}")
            report(what)

        experiment = replace(experiment, sizes=sizes, progress=report_progress)
        # Ranks that were seeded differently would compare the gradients of different models.
        described = member.everyones("model", (tuple(experiment.parameters), description(experiment), settings.seed))
        odd = next(
            (rank for rank, description_of_rank in enumerate(described) if description_of_rank != described[0]), None
        )
        member.agree("alike", _describe_mismatch(odd, described) if odd is not None else "")
        plain = PlainModel(experiment, member) if is_plain else None
        trained = Trained(member, engine, strategy, plain=plain, shared_batch=shared_batch)
        judged = judge_together(experiment, trained, diagnose=settings.diagnose, exact=settings.exact)
        # The others wait for rank 0's answer, so that all ranks return the same verdict.
        rank_answer = answer(*judged) if member.rank == 0 else None
    return member.answer_of_first(rank_answer)  # type: ignore[no-any-return]


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
    excluded = "--rtol and --atol" if spec.rtol is not None else f"--strategy {spec.strategy}"
    if spec.rtol is not None or spec.strategy != "accumulate":
        return f"{excluded} cannot be combined with ranks; leave out the one or the other (--ranks)"
    device = resolve_device(spec.device)
    if device is not None and device.type not in RANKED:
        return f"ranks run on CPUs and on CUDA devices, not on {device}; write device='cpu', where the same faults show"
    return ""


_WRAP_IT = "`engine` fsdp2 would shard your model permanently: call `fully_shard` on it as your training does"


def _describe_mismatch(odd: int, described: list[tuple[tuple[str, ...], str, int]]) -> str:
    first, mismatched = described[0], described[odd]
    if first[2] != mismatched[2]:
        return f"rank {odd} has seed {mismatched[2]}, rank 0 has {first[2]}: give every rank the same"
    what = "other weights" if first[0] == mismatched[0] else "another model"
    return f"rank {odd} has {what} than rank 0: give every rank the same, for example by one seed"


def _explain_refusal(settings: Settings, *, is_plain: bool) -> str:
    """What ranks cannot do together; "" where they can. Of a plain model rank 0 alone searches for the cause."""
    if settings.strategy != "accumulate":
        return f"strategy {settings.strategy!r} cannot run on ranks; give a function, or leave it out"
    if settings.rtol is not None:
        return "--rtol and --atol (rtol=, atol=) cannot be used with several ranks: leave them out"
    if settings.trace:
        return "--trace (trace=True) works with one process only: leave it out, or leave out --ranks or the launcher"
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
        carries = isinstance(first, torch.Tensor) and first.dim() and len(first) == size
        return torch.cat([batch.to(first.device) for batch in batches]) if carries else first
    if isinstance(first, list) and len(first) == size and not _carries(first[0], size):
        return [sample for batch in batches for sample in batch]
    parts = zip(*([child for _, child in children(batch) or []] for batch in batches), strict=True)
    return with_children(first, [_join_batches(list(part), size) for part in parts])


def _carries(node: Any, size: int) -> bool:
    """Whether a part of a batch holds all samples, so that the list around it is a list of fields."""
    return any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == size for _, leaf in leaves(node))
