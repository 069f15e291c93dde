"""Reductions of several ranks, their replicas, and the weight of each rank's gradient: GAV701 to GAV708."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.comparison import Comparison
from gaverify.records.events import Backward, Clipping
from gaverify.records.experiment import is_constant
from gaverify.records.findings import Finding, Location
from gaverify.records.ranks import Engine, RankFacts
from gaverify.rules.rule import (
    RAN_EQUIVALENT,
    backward_place,
    beside_one_process,
    control_evidence,
    finding_of,
    join_texts,
    measured_evidence,
    rank_trial,
    rule_of_ranks,
    word_control,
    word_passes,
    word_shares,
)
from gaverify.thresholds import COMPUTED_FLOAT32, FIT_FLOAT32, SMALL_PART
from gaverify.tracebacks import display_path

_SHOWN = 8  # micro-batches of a rank whose targets are listed


@rule_of_ranks("GAV701")
def ranks_hold_different_gradients(comparison: Comparison, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a finding where two ranks step with different gradients, or compute them at different weights."""
    # NaN: no two ranks have a part of the model in common, so there is nothing to compare
    if math.isnan(ranks.replicas.difference):
        return
    # gradients at different weights differ anyway, so other weights are reported alone
    if ranks.replicas.starting_difference > ranks.rounding:
        yield _other_weights(ranks)
    elif ranks.replicas_differ:
        yield _other_gradients(comparison, ranks)


def _other_weights(ranks: RankFacts) -> Finding:
    far = ranks.replicas.starting_difference
    return finding_of(
        f"the {ranks.ranks} ranks compute their gradients at different weights",
        measured_evidence(
            "ranks", f"the ranks' weights differ by {far:.2g} (relative) before the first step", apart=far
        ),
        remedy="copy rank 0's weights to every rank before the first step: DistributedDataParallel does this, and so "
        "does "
        "`torch.distributed.broadcast` of each parameter",
        proven=False,
    )


def _other_gradients(comparison: Comparison, ranks: RankFacts) -> Finding:
    # equal after the reduction and different at the step: the script changed them in between
    after = ranks.replicas.summed_difference <= ranks.rounding
    what = "; after the last backward pass they were equal" if after else ""
    evidence = [
        measured_evidence(
            "ranks",
            f"the ranks' gradients differ by {ranks.replicas.difference:.2g} (relative) at the same step{what}",
            apart=ranks.replicas.difference,
        )
    ]
    difference_left, proven = ranks.shares.mean_left, ranks.is_rounding(ranks.shares.mean_left)
    if proven:
        text = f"the mean of the ranks' gradients equals the full batch's to {difference_left:.0e}: proven"
        evidence.append(control_evidence("rank-weights", text, left=difference_left))
    reduced = ranks.sync_control
    repaired = ranks.is_rounding(reduced) and not after
    # a control that could not run (NaN) is no failed repair
    failed = not math.isnan(reduced) and not repaired and not after
    if repaired or failed:
        text = f"with a reduction in every backward pass, the difference from the full batch is {reduced:.0e}"
        evidence.append(control_evidence("ranks", text, left=reduced))
    why = "each rank changes them differently before the step" if after else "they were not reduced"
    remedy = _remedy(ranks)
    if failed:
        remedy = (
            "reducing in every backward pass does not repair it: look for gradients that the engine does not manage (a "
            "parameter "
        )
        remedy += "outside the wrapper, a gradient made or changed by hand), and all-reduce them yourself"
    if after:
        remedy = "after the reduction, change the gradients in the same way on every rank: clip, scale, add noise"
    of = f" of {join_texts([f'`{name}`' for name in ranks.replicas.parameters])}" if ranks.replicas.parameters else ""
    return finding_of(
        f"the {ranks.ranks} ranks step with different gradients{of}: {why}",
        *evidence,
        # the line that changed them after the reduction is not known
        location=None if after else backward_place(comparison),
        remedy=remedy + (RAN_EQUIVALENT if repaired else ""),
        proven=proven or repaired,
    )


def _remedy(ranks: RankFacts) -> str:
    """The reduction of gradients in words, by how the ranks hold the model."""
    if ranks.tensor_parallel:
        return "give tensor-parallel ranks the same rows, so that their replicated parameters get the same gradients"
    if ranks.engine is Engine.FSDP2:
        return "average the gradients of the parameters that are not sharded, or do not let `fully_shard` ignore these"
    return (
        "call the wrapped model's forward, and run the last backward pass of the accumulation window outside `no_sync`"
    )


@rule_of_ranks("GAV702")
def gradients_never_reduced(comparison: Comparison, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a finding where sharded parameters step without a gradient, or without that of the last backward pass."""
    if not _is_lost(ranks):
        return
    difference_left = ranks.sync_control
    proven = ranks.is_rounding(difference_left)
    # sharded gradients that are never reduced leave `.grad` None, and the optimizer skips these parameters silently
    missing = "any gradient: the sharded gradients are never reduced"
    observation = f"no sharded parameter has a gradient at the step, and {_reducing(ranks)}"
    if not ranks.reduction.stepped_without:
        missing = "the gradient of the last backward pass"
        observation = f"{_reducing(ranks)}, and the last one does not"
    backwards = len(ranks.reduction.bytes_by_pass)
    evidence = [measured_evidence("ranks", observation, backwards=backwards, reductions=ranks.reductions)]
    if difference_left == difference_left:  # not NaN: the control ran
        what = "with a reduction in every backward pass, the difference from the full batch"
        evidence.append(word_control("ranks", what, difference_left, proven))
    yield finding_of(
        f"the {ranks.ranks} ranks step without {missing}",
        *evidence,
        location=backward_place(comparison),
        remedy="call `set_requires_gradient_sync(True)` before the last backward pass of the accumulation window"
        + (", and `set_requires_all_reduce(True)`" if ranks.reduction.stepped_without and ranks.reductions else "")
        + (RAN_EQUIVALENT if proven else ""),
        proven=proven,
    )


def _is_lost(ranks: RankFacts) -> bool:
    """Whether gradients stay beside their parameters; where some were reduced the control has to have brought them."""
    if ranks.reduction.stepped_without:
        return not ranks.reductions or ranks.is_rounding(ranks.sync_control)
    return ranks.at_fault and ranks.ends_unreduced


def _reducing(ranks: RankFacts) -> str:
    """How many backward passes of the window reduce, in words."""
    reducing = f"{ranks.reductions or 'none'} of {word_passes(len(ranks.reduction.bytes_by_pass))}"
    return f"{reducing} {'reduce' if ranks.reductions > 1 else 'reduces'} over ranks"


@rule_of_ranks("GAV707")
def rank_statistics(comparison: Comparison, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a finding where buffers of the ranks are apart and holding their layers still repairs the gradient."""
    if not ranks.at_fault or not ranks.replicas.buffers:
        return
    difference_left, proven = ranks.evaluation_mode_control, ranks.is_rounding(ranks.evaluation_mode_control)
    # buffers differ in harmless loops as well: only a control that helps makes them a cause
    if not difference_left < ranks.difference:
        return
    names = [name.partition(":")[2] for name in ranks.replicas.buffers]
    # a layer has several buffers, and is named once
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    yield finding_of(
        f"{join_texts([f'`{owner}`' for owner in owners])} computes statistics over the samples of its own rank",
        measured_evidence(
            "ranks", f"buffers differ between the ranks: {join_texts([f'`{name}`' for name in names])}", buffers=names
        ),
        word_control(
            "ranks", "with these layers in evaluation mode in both runs the difference", difference_left, proven
        ),
        location=Location(owners[0]),
        remedy="use GroupNorm or LayerNorm, keep these layers in evaluation mode (`.eval()`), or use SyncBatchNorm if "
        "K = 1",
        proven=proven,
    )


@rule_of_ranks("GAV708")
def synchronised_every_micro_batch(comparison: Comparison, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a note where more than one backward pass of the first window reduces over the ranks."""
    if ranks.reductions < 2:
        return
    bytes_by_pass = ranks.reduction.bytes_by_pass
    total_bytes, last = sum(bytes_by_pass), bytes_by_pass[-1]
    switch = "set_requires_gradient_sync(False)" if ranks.engine is Engine.FSDP2 else "no_sync()"
    yield finding_of(
        f"{ranks.reductions} of {len(bytes_by_pass)} backward passes per update reduce over the ranks; one would be "
        "enough",
        measured_evidence(
            "ranks",
            f"each rank reduces {total_bytes:,} bytes per update; {last:,} if only the last backward pass reduces",
            bytes=total_bytes,
            needed=last,
            reductions=ranks.reductions,
        ),
        location=backward_place(comparison),
        remedy=f"run all backward passes of an update except the last under `{switch}`",
        severity="note",
        proven=True,
    )


@rule_of_ranks("GAV703")
def mean_over_ranks(comparison: Comparison, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a finding where unequal weights of the ranks' gradients make the full batch's."""
    if not ranks.at_fault or ranks.replicas_differ:
        return
    fit = ranks.shares.fit
    if fit is None:
        yield from _of_shards(ranks)
        return
    if (
        fit.residual > ranks.rounding
        or is_constant(fit.weights, ranks.rounding)
        or min(fit.weights, default=0.0) <= 0.0
    ):
        return
    # weights of a mean over ranks are equal: others were put in on purpose, or the reduction is wrong
    if fit.used_residual > ranks.rounding or not is_constant(fit.used, ranks.rounding):
        return
    right, used = word_shares(fit.weights), word_shares(fit.used)
    fitted = f"the weights used are {used}; {right} fit to {fit.residual:.0e}"
    yield _finding(ranks, right, fitted, right=list(fit.weights), used=list(fit.used))


def _of_shards(ranks: RankFacts) -> Iterator[Finding]:
    """Sharded ranks keep no gradient of their own: valid targets say what is tried, and the control decides."""
    if ranks.shares_tried not in ranks.shares_of_targets or not ranks.is_rounding(ranks.weights_control):
        return
    of_each = any(len(rank_shares) > 1 for rank_shares in ranks.shares_tried)
    fitting = word_shares([rank_shares[0] / ranks.ranks for rank_shares in ranks.shares_tried])
    counted = join_texts([" + ".join(map(str, counts[:_SHOWN])) for counts in ranks.shares.targets], ranks.ranks)
    yield _finding(
        ranks,
        "each micro-batch's share of the valid targets" if of_each else fitting,
        f"the ranks have {counted} valid targets",
        targets=[list(counts) for counts in ranks.shares.targets],
    )


def _finding(ranks: RankFacts, fitting: str, what: str, **values: object) -> Finding:
    return finding_of(
        f"the gradients of the {ranks.ranks} ranks get the same weight; the right weights of ranks 0 to "
        f"{ranks.ranks - 1} are {fitting}",
        measured_evidence("rank-weights", f"{beside_one_process(ranks)}; {what}", **values),
        *rank_trial(ranks, f"each rank's loss multiplied by its right weight ({fitting}) divided by the used one"),
        remedy="divide each rank's summed loss by the count over all ranks (one all-reduce), then multiply by the "
        "number of ranks, because the engine averages",
        proven=ranks.is_rounding(ranks.weights_control),
    )


@rule_of_ranks("GAV704")
def wrong_rank_scale(comparison: Comparison, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a finding where one factor for all parameters makes the ranks' gradient the full batch's."""
    if not ranks.at_fault or ranks.replicas_differ:
        return
    factor, difference_left = ranks.one_factor
    if not math.isfinite(factor) or abs(factor) < ranks.rounding or difference_left > ranks.rounding:
        return
    # one factor of 1 means that the ranks agree with the full batch after all
    if abs(factor - 1) <= ranks.rounding:
        return
    counting_rank = _rank_that_counts(ranks, factor)
    if (
        not comparison.window.has_recipe
        and not _of_ranks(factor, ranks.ranks, comparison.window.steps)
        and counting_rank is None
    ):
        return
    strategy_meaning = (
        (float(ranks.ranks), "R): gradients are summed over the ranks instead of averaged"),
        (1.0 / ranks.ranks, "1/R): the loss is divided by the number of ranks, and the engine averages as well"),
    )
    meaning = next(
        (f" (= {text}" for value, text in strategy_meaning if math.isclose(factor, value, rel_tol=COMPUTED_FLOAT32)), ""
    )
    remedy = f"multiply each rank's loss by {1 / factor:.6g}"
    if counting_rank is not None:
        counts = [sum(targets) for targets in ranks.shares.targets]
        meaning = f": it is divided by the {counts[counting_rank]} valid targets of rank {counting_rank} alone"
        meaning += f", not by the {sum(counts)} of all ranks"
        remedy = (
            "divide each rank's summed loss by the count over all ranks (one all-reduce), then multiply by the number "
            f"of ranks, because the engine averages: here, {remedy}"
        )
    yield finding_of(
        f"the gradient of the {ranks.ranks} ranks is {factor:.6g} times the full batch's{meaning}",
        measured_evidence(
            "rank-weights",
            f"{beside_one_process(ranks)}; apart from this factor the gradients agree up to {difference_left:.0e}",
            factor=factor,
        ),
        *rank_trial(ranks, f"each rank's loss multiplied by {1 / factor:.6g}"),
        remedy=remedy + (RAN_EQUIVALENT if ranks.is_rounding(ranks.weights_control) else ""),
        proven=ranks.is_rounding(ranks.weights_control),
    )


def _rank_that_counts(ranks: RankFacts, factor: float) -> int | None:
    """Returns the rank whose valid targets alone divide the loss of all; None where the factor is not made of them.

    Dividing by n_r where N was meant makes the gradient N / n_r times as large, or N / (R · n_r) where the ranks'
    gradients are averaged and no loss is multiplied by R.
    """
    counts = [sum(targets) for targets in ranks.shares.targets]
    if len(set(counts)) < 2:  # equal counts make a factor of R or 1, which says nothing of who has counted
        return None
    for rank, count in enumerate(counts):
        times = sum(counts) / count
        if any(math.isclose(factor, value, rel_tol=COMPUTED_FLOAT32) for value in (times, times / ranks.ranks)):
            return rank
    return None


def _of_ranks(factor: float, ranks: int, steps: int) -> bool:
    """Whether a factor is one of ranks: in a loop a division by K can be forgotten as well, which is another rule's."""

    def stands_for(count: int) -> bool:
        return any(math.isclose(factor, value, rel_tol=COMPUTED_FLOAT32) for value in (count, 1.0 / count))

    return stands_for(ranks) and not (steps > 1 and stands_for(steps))


@rule_of_ranks("GAV705")
def gather_without_gradient(comparison: Comparison, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a finding where the ranks gather, and a gather that hands gradients back repairs the gradient."""
    if not ranks.at_fault or ranks.replicas_differ or not ranks.gathers:
        return
    difference_left = ranks.gather_control
    # a loop that gathers may have another fault: a gather with gradients has to remove nearly all of the difference
    if not math.isfinite(difference_left) or difference_left > max(ranks.rounding, SMALL_PART * ranks.difference):
        return
    proven = difference_left <= ranks.rounding
    fit = ranks.shares.fit
    residual = fit.residual if fit is not None else math.nan
    yield finding_of(
        f"the loss gathers tensors of {ranks.ranks} ranks, but gradients do not flow back through the gather",
        measured_evidence(
            "rank-weights",
            f"{beside_one_process(ranks)}; no weights of the ranks' gradients explain it: the best leave "
            f"{residual:.1e}",
            residual=residual,
        ),
        word_control("gather", "with `gaverify.remedies.all_gather` instead, the difference", difference_left, proven),
        location=_place(comparison),
        remedy="use `gaverify.remedies.all_gather`, which passes gradients back, instead of the gather"
        + (RAN_EQUIVALENT if proven else ""),
        proven=proven,
    )


def _place(comparison: Comparison) -> Location | None:
    """Where the first window of a loop gathers a trained tensor; None for a run of a model."""
    window = comparison.calls.first
    places = [place for backward in (window.of(Backward) if window else ()) for place in backward.gathers]
    file, line = next(filter(None, places), (None, None))
    return Location(file=display_path(file), line=line) if file else None


@rule_of_ranks("GAV706")
def shard_local_norm(comparison: Comparison, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a finding where each shard has a factor of its own."""
    fit, shards = ranks.shares.fit, ranks.shares.shards
    if not ranks.at_fault or len(shards) < 2:
        return
    factors = [shard.factor for shard in shards]
    # shards that are no multiples of the full batch's have another fault than their scale
    if any(shard.residual > ranks.rounding for shard in shards):
        return
    if max(factors) - min(factors) <= FIT_FLOAT32 * max(map(abs, factors)):
        return
    # only sharded ranks keep no gradient of their own to fit weights to
    whose, part = ("shard", "shards") if fit is None else ("gradient", "gradients")
    # clipping by the shard's own norm predicts each factor: agreement proves it without another run
    largest_error = max(abs(shard.norms / shard.factor - 1) if shard.factor else math.inf for shard in shards)
    evidence = [
        measured_evidence(
            "ranks",
            f"the {part} of ranks 0 to {ranks.ranks - 1} are {word_shares(factors)} times the full batch's, each to "
            f"within {max(shard.residual for shard in shards):.0e}",
            factors=factors,
        )
    ]
    proven = largest_error <= ranks.rounding
    if proven:
        norms = [shard.norms for shard in shards]
        text = f"clipping each by its own norm gives the factors {word_shares(norms)}, "
        text += f"the same to {largest_error:.0e}: proven"
        evidence.append(control_evidence("ranks", text, norms=norms, left=largest_error))
    yield finding_of(
        f"each of the {ranks.ranks} ranks scales its {whose} by a different factor"
        + (" before they are reduced" if fit is not None else ""),
        *evidence,
        location=_clip_place(comparison),
        remedy="clip with `torch.nn.utils.clip_grad_norm_`, which handles sharded gradients, or sum the squared norms "
        "over all ranks first"
        if fit is None
        else "reduce the gradients first, then clip on every rank",
        proven=proven,
    )


def _clip_place(comparison: Comparison) -> Location | None:
    """Where the first window of a loop clips; None where no clipping was seen."""
    window = comparison.calls.first
    clips = window.of(Clipping) if window is not None else ()
    file, line = clips[0].place if clips else (None, None)
    return Location(file=display_path(file), line=line) if file else None
