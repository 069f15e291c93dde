"""What ranks reduce and hold: GAV701, GAV702, GAV707 and GAV708."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding, Location
from gaverify.records.ranks import Engine, RankFacts
from gaverify.rules.rule import controlled, finding_of, judged, measured, rule_of_ranks
from gaverify.rules.wording import backward_place, listed, passes


@rule_of_ranks("GAV701")
def ranks_hold_different_gradients(facts: Facts, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a finding where two ranks step with different gradients, or compute them at different weights."""
    if math.isnan(ranks.apart):
        return
    if ranks.started_apart > ranks.rounding:
        yield _other_weights(ranks)
    elif ranks.apart > ranks.rounding:
        yield _other_gradients(facts, ranks)


def _other_weights(ranks: RankFacts) -> Finding:
    far = ranks.started_apart
    return finding_of(
        f"the {ranks.ranks} ranks compute their gradients at different weights",
        measured("ranks", f"the weights of the ranks are {far:.2g} apart (relative) before the first step", apart=far),
        remedy="give every rank rank 0's weights before the first step: DistributedDataParallel does, and so does "
        "`torch.distributed.broadcast` of each parameter",
        proven=False,
    )


def _other_gradients(facts: Facts, ranks: RankFacts) -> Finding:
    after = ranks.summed_apart <= ranks.rounding
    what = "; after the window's last backward pass they were the same" if after else ""
    evidence = [
        measured(
            "ranks",
            f"the gradients of the ranks are {ranks.apart:.2g} apart (relative) at the same step{what}",
            apart=ranks.apart,
        )
    ]
    left, proven = ranks.mean_left, ranks.is_rounding(ranks.mean_left)
    if proven:
        text = f"the mean of the ranks' own gradients is the full batch's to {left:.0e}: proven"
        evidence.append(controlled("rank-weights", text, left=left))
    reduced = ranks.sync_control
    repaired = ranks.is_rounding(reduced) and not after
    failed = not math.isnan(reduced) and not repaired and not after
    if repaired or failed:
        text = f"with every backward pass reducing the difference from the full batch is {reduced:.0e}"
        evidence.append(controlled("ranks", text, left=reduced))
    why = "each changes them in its own way before it" if after else "they were not reduced"
    remedy = _remedy(ranks)
    if failed:
        remedy = (
            "reducing in every backward pass does not repair it: look for what the engine does not hold (a parameter "
        )
        remedy += "outside the wrapper, a gradient made or changed by hand), and reduce that by hand on all ranks"
    if after:
        remedy = "let every rank do what changes the gradients after they were reduced: clip, scale, add noise"
    of = f" of {listed([f'`{name}`' for name in ranks.names_apart])}" if ranks.names_apart else ""
    return finding_of(
        f"the {ranks.ranks} ranks step with different gradients{of}: {why}",
        *evidence,
        location=None if after else backward_place(facts),
        remedy=remedy + (": tested, equivalent" if repaired else ""),
        proven=proven or repaired,
    )


def _remedy(ranks: RankFacts) -> str:
    """What reduces the gradients, by how the ranks hold the model."""
    if ranks.tensor_parallel:
        return "feed ranks that hold parts of the same layers the same rows, so that what each holds whole is alike"
    if ranks.engine is Engine.FSDP2:
        return "average over the ranks what they hold whole beside their shards, or do not let `fully_shard` ignore it"
    return "call the wrapper's forward, and run the window's last backward pass outside `no_sync`"


@rule_of_ranks("GAV702")
def gradients_never_reduced(facts: Facts, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a finding where sharded parameters step without a gradient, or without that of the last backward pass."""
    if not _is_lost(ranks):
        return
    left = ranks.sync_control
    proven = ranks.is_rounding(left)
    missing = "any gradient: the sharded gradients are never reduced"
    seen = f"no sharded parameter has a gradient at the step, and {_reducing(ranks)}"
    if not ranks.stepped_without:
        missing = "the gradient of the window's last backward pass"
        seen = f"{_reducing(ranks)}, and the last one does not"
    evidence = [measured("ranks", seen, backwards=len(ranks.reduced), reductions=ranks.reductions)]
    if left == left:  # not NaN: the control ran
        what = "with every backward pass reducing the difference from the full batch"
        evidence.append(judged("ranks", what, left, proven))
    yield finding_of(
        f"the {ranks.ranks} ranks step without {missing}",
        *evidence,
        location=backward_place(facts),
        remedy="`set_requires_gradient_sync(True)` before the window's last backward pass"
        + (", and `set_requires_all_reduce(True)`" if ranks.stepped_without and ranks.reductions else "")
        + (": tested, equivalent" if proven else ""),
        proven=proven,
    )


def _is_lost(ranks: RankFacts) -> bool:
    """Whether gradients stay beside their parameters; where some were reduced the control has to have brought them."""
    if ranks.stepped_without:
        return not ranks.reductions or ranks.is_rounding(ranks.sync_control)
    return ranks.at_fault and ranks.ends_unreduced


def _reducing(ranks: RankFacts) -> str:
    """How many backward passes of the window reduce, in words."""
    reducing = f"{ranks.reductions or 'none'} of the window's {passes(len(ranks.reduced))}"
    return f"{reducing} {'reduce' if ranks.reductions > 1 else 'reduces'} over ranks"


@rule_of_ranks("GAV707")
def rank_statistics(facts: Facts, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a finding where buffers of the ranks are apart and holding their layers still repairs the gradient."""
    if facts.loop is None or not ranks.at_fault or not ranks.buffers_apart:
        return
    left, proven = ranks.frozen_control, ranks.is_rounding(ranks.frozen_control)
    if not left < ranks.difference:
        return
    names = [name.partition(":")[2] for name in ranks.buffers_apart]
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    yield finding_of(
        f"{listed([f'`{owner}`' for owner in owners])} computes statistics over the samples of its own rank",
        measured(
            "ranks", f"buffers differ between the ranks: {listed([f'`{name}`' for name in names])}", buffers=names
        ),
        judged("ranks", "in evaluation mode in both runs the difference", left, proven),
        location=Location(owners[0]),
        remedy="GroupNorm or LayerNorm, evaluation mode for these layers, or SyncBatchNorm where K = 1",
        proven=proven,
    )


@rule_of_ranks("GAV708")
def synchronised_every_micro_batch(facts: Facts, ranks: RankFacts) -> Iterator[Finding]:
    """Yields a note where more than one backward pass of the first window reduces over the ranks."""
    if ranks.reductions < 2:
        return
    whole, last = sum(ranks.reduced), ranks.reduced[-1]
    switch = "set_requires_gradient_sync(False)" if ranks.engine is Engine.FSDP2 else "no_sync()"
    yield finding_of(
        f"{ranks.reductions} of {len(ranks.reduced)} backward passes of a window reduce over the ranks; one would do",
        measured(
            "ranks",
            f"each rank reduces {whole:,} bytes per window; {last:,} with the last backward pass alone",
            bytes=whole,
            needed=last,
            reductions=ranks.reductions,
        ),
        location=backward_place(facts),
        remedy=f"run all backward passes of a window but the last under `{switch}`",
        severity="note",
        proven=True,
    )
