"""The batch of all ranks: the one that each of them was given, or, where they differ, all of them in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from gaverify.collective.membership import Member
from gaverify.errors import Agreed
from gaverify.passes.batching import batch_size_of, micro_batch_sizes
from gaverify.passes.fingerprints import digest_of
from gaverify.passes.nesting import children, leaves, with_children
from gaverify.passes.problem import Problem
from gaverify.ranks.groups import of_every_rank


def batch_of_all(problem: Problem, steps: int, member: Member) -> tuple[Problem, tuple[int, ...]]:
    """Returns the problem with the batch of all ranks, and the sizes of its K · R micro-batches, rank after rank.

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
    alike = len({entry[2] for entry in said}) == 1
    if alike:
        member.agree("cuts", _too_small(size, steps, member.count))
        return problem, micro_batch_sizes(size, steps * member.count)
    problem_here = _too_small(size * member.count, steps, member.count)
    if problem.split is not None:
        problem_here = "the ranks' batches differ and are cut by a `split`: give every rank the whole batch"
    member.agree("cuts", problem_here)
    whole = _joined(of_every_rank(problem.batch, member.count, member.device), size)
    return replace(problem, batch=whole, batch_size=size * member.count), micro_batch_sizes(size, steps) * member.count


def _too_small(size: int, steps: int, count: int) -> str:
    if steps * count <= size:
        return ""
    return (
        f"{count} ranks with {steps} micro-batches each are {steps * count} parts, which cannot be cut from a batch of "
        f"{size} samples; lower the steps, start fewer ranks, or raise the batch size"
    )


def _joined(batches: list[Any], size: int) -> Any:
    """Returns one batch with the samples of several of a size, in order; what carries none is the first one's."""
    first = batches[0]
    entries = children(first)
    if entries is None:
        carries = isinstance(first, torch.Tensor) and first.dim() and len(first) == size
        return torch.cat([batch.to(first.device) for batch in batches]) if carries else first
    if isinstance(first, list) and len(first) == size and not _carries(first[0], size):
        return [sample for batch in batches for sample in batch]
    parts = zip(*([child for _, child in children(batch) or []] for batch in batches), strict=True)
    return with_children(first, [_joined(list(part), size) for part in parts])


def _carries(node: Any, size: int) -> bool:
    """Whether a part of a batch holds all samples, so that the list around it is a list of fields."""
    return any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == size for _, leaf in leaves(node))
