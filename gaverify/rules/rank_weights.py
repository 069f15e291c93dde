"""What each rank's gradient counts: GAV703 to GAV706."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding, Location
from gaverify.records.ranks import RankFacts
from gaverify.records.weights import is_constant
from gaverify.rules.rule import controlled, finding_of, judged, measured, rule_of_ranks
from gaverify.rules.wording import beside_one_process, listed, shares, tried
from gaverify.thresholds import COMPUTED_FLOAT32, FIT_FLOAT32, SMALL_PART
from gaverify.tracebacks import shown

_SHOWN = 8  # micro-batches of a rank whose targets are listed


@rule_of_ranks("GAV703")
def mean_over_ranks(facts: Facts, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a finding where unequal weights of the ranks' gradients make the full batch's."""
    if not ranks.at_fault or ranks.apart > ranks.rounding:
        return
    fit = ranks.weights
    if fit is None:
        yield from _of_shards(ranks)
        return
    if (
        fit.residual > ranks.rounding
        or is_constant(fit.weights, ranks.rounding)
        or min(fit.weights, default=0.0) <= 0.0
    ):
        return
    if fit.used_residual > ranks.rounding or not is_constant(fit.used, ranks.rounding):
        return
    right, used = shares(fit.weights), shares(fit.used)
    fitted = f"used were {used}; {right} fit to {fit.residual:.0e}"
    yield _finding(ranks, right, fitted, right=list(fit.weights), used=list(fit.used))


def _of_shards(ranks: RankFacts) -> Iterator[Finding]:
    """Sharded ranks keep no gradient of their own: valid targets say what is tried, and the control decides."""
    if ranks.shares_tried not in ranks.shares_of_targets or not ranks.is_rounding(ranks.weights_control):
        return
    of_each = any(len(own) > 1 for own in ranks.shares_tried)
    fitting = shares([own[0] / ranks.ranks for own in ranks.shares_tried])
    counted = listed([" + ".join(map(str, counts[:_SHOWN])) for counts in ranks.targets], ranks.ranks)
    yield _finding(
        ranks,
        "each micro-batch's share of the valid targets" if of_each else fitting,
        f"the ranks have {counted} valid targets",
        targets=[list(counts) for counts in ranks.targets],
    )


def _finding(ranks: RankFacts, fitting: str, what: str, **values: object) -> Finding:
    return finding_of(
        f"the gradients of the {ranks.ranks} ranks are averaged equally; right for ranks 0 to "
        f"{ranks.ranks - 1} would be {fitting}",
        measured("rank-weights", f"{beside_one_process(ranks)}; {what}", **values),
        *tried(ranks, f"each rank's loss multiplied by its right share ({fitting}) over the used one"),
        remedy="divide each rank's summed loss by the count over all ranks (one all-reduce) and multiply it by the "
        "number of ranks, because the engine averages",
        proven=ranks.is_rounding(ranks.weights_control),
    )


@rule_of_ranks("GAV704")
def wrong_rank_scale(facts: Facts, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a finding where one factor for all parameters makes the ranks' gradient the full batch's."""
    if not ranks.at_fault or ranks.apart > ranks.rounding:
        return
    factor, left = ranks.one_factor
    if not math.isfinite(factor) or abs(factor) < ranks.rounding or left > ranks.rounding:
        return
    if abs(factor - 1) <= ranks.rounding:
        return
    if facts.loop is not None and not _of_ranks(factor, ranks.ranks, facts.steps):
        return
    known = (
        (float(ranks.ranks), "R: a sum where the mean over the ranks was meant"),
        (1.0 / ranks.ranks, "1/R: the engine's mean divides once more"),
    )
    meaning = next((f" = {text}" for value, text in known if math.isclose(factor, value, rel_tol=COMPUTED_FLOAT32)), "")
    yield finding_of(
        f"the gradient that {ranks.ranks} ranks end up with is {factor:.6g} times the full batch's{meaning}",
        measured("rank-weights", f"{beside_one_process(ranks)}; one factor leaves {left:.0e} over", factor=factor),
        *tried(ranks, f"each rank's loss multiplied by {1 / factor:.6g}"),
        remedy=f"multiply each rank's loss by {1 / factor:.6g}"
        + (": tested, equivalent" if ranks.is_rounding(ranks.weights_control) else ""),
        proven=ranks.is_rounding(ranks.weights_control),
    )


def _of_ranks(factor: float, ranks: int, steps: int) -> bool:
    """Whether a factor is one of ranks: in a loop a division by K can be forgotten as well, which is another rule's."""

    def stands_for(count: int) -> bool:
        return any(math.isclose(factor, value, rel_tol=COMPUTED_FLOAT32) for value in (count, 1.0 / count))

    return stands_for(ranks) and not (steps > 1 and stands_for(steps))


@rule_of_ranks("GAV705")
def gather_without_gradient(facts: Facts, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a finding where the ranks gather, and a gather that hands gradients back repairs the gradient."""
    if not ranks.at_fault or ranks.apart > ranks.rounding or not ranks.gathers:
        return
    left = ranks.gather_control
    if not math.isfinite(left) or left > max(ranks.rounding, SMALL_PART * ranks.difference):
        return
    proven = left <= ranks.rounding
    residual = ranks.weights.residual if ranks.weights is not None else math.nan
    yield finding_of(
        f"the loss gathers tensors of {ranks.ranks} ranks, and their gradients stay behind",
        measured(
            "rank-weights",
            f"{beside_one_process(ranks)}; the best weights of the ranks' gradients leave {residual:.1e} over",
            residual=residual,
        ),
        judged("gather", "with `gaverify.remedies.all_gather` in its place the difference", left, proven),
        location=_place(facts),
        remedy="`gaverify.remedies.all_gather`, which hands gradients back, in place of the gather"
        + (": tested, equivalent" if proven else ""),
        proven=proven,
    )


def _place(facts: Facts) -> Location | None:
    """Where the first window of a loop gathers a trained tensor; None for a run of a model."""
    window = facts.loop.first if facts.loop is not None else None
    places = [place for event in (window.of("backward") if window else ()) for place in event.values.get("gathers", ())]
    file, line = next(filter(None, places), (None, None))
    return Location(file=shown(file), line=line) if file else None


@rule_of_ranks("GAV706")
def shard_local_norm(facts: Facts, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a finding where each shard has a factor of its own."""
    if not ranks.at_fault or len(ranks.shards) < 2:
        return
    factors = [shard.factor for shard in ranks.shards]
    if any(shard.residual > ranks.rounding for shard in ranks.shards):
        return
    if max(factors) - min(factors) <= FIT_FLOAT32 * max(map(abs, factors)):
        return
    whose, part = ("shard", "shards") if ranks.weights is None else ("gradient", "gradients")
    left = max(abs(shard.norms / shard.factor - 1) if shard.factor else math.inf for shard in ranks.shards)
    evidence = [
        measured(
            "ranks",
            f"the {part} of ranks 0 to {ranks.ranks - 1} count {shares(factors)} times the full batch's, each with "
            f"{max(shard.residual for shard in ranks.shards):.0e} left over",
            factors=factors,
        )
    ]
    proven = left <= ranks.rounding
    if proven:
        norms = [shard.norms for shard in ranks.shards]
        text = f"clipping each by its norm alone makes that {shares(norms)}, the same to {left:.0e}: proven"
        evidence.append(controlled("ranks", text, norms=norms, left=left))
    yield finding_of(
        f"each of the {ranks.ranks} ranks scales its {whose} by a number of its own"
        + (" before they are reduced" if ranks.weights is not None else ""),
        *evidence,
        location=_clip_place(facts),
        remedy="clip with `torch.nn.utils.clip_grad_norm_`, which knows sharded gradients, or add up the squared norms "
        "of all ranks first"
        if ranks.weights is None
        else "reduce the gradients first, and clip what every rank then holds",
        proven=proven,
    )


def _clip_place(facts: Facts) -> Location | None:
    """Where the first window of a loop clips; None where no clipping was seen."""
    clips = facts.loop.first.of("clip") if facts.loop is not None and facts.loop.first is not None else ()
    file, line = clips[0].place if clips else (None, None)
    return Location(file=shown(file), line=line) if file else None
