"""GAV703 mean-over-ranks: the ranks' gradients are averaged equally although they stand for unequal amounts.

What it finds

Every rank computes a mean over its own samples or valid tokens, and the engine averages these means with 1/R each. The
ranks' right weights, by which their gradients would be the full batch's, are unequal.

Why gradients diverge

DDP and FSDP2 divide the sum of the ranks' gradients by R. With n_r valid tokens on rank r and N = Σ n_r,

    full = Σ_r (n_r / N) g_r,     used = Σ_r (1 / R) g_r

which agree only where all n_r are equal.

Signature in the numbers

- The fit of the ranks' own gradients to the full batch's leaves rounding over (3e-7), with unequal weights: 0.534 and
  0.466 for 71 and 62 tokens; used were 0.5 and 0.5.
- Every rank holds the same gradient, so nothing else is wrong with the reduction.

Example

A model:

    import torch
    import torch.distributed as dist
    from torch import nn

    model = nn.Linear(6, 3)
    classes = torch.randint(3, (16,))
    classes[:5] = -100  # padding, most of it on the first rank
    batch = torch.randn(16, 6), classes
    steps, options = 1, {"ranks": 2}

    def loss(model, batch):
        inputs, classes = batch
        logits = model(inputs)
        losses = nn.functional.cross_entropy(logits, classes, reduction="sum")
        counts = torch.tensor([(classes != -100).sum(), len(classes)])
        dist.all_reduce(counts)  # for the log only
        return losses / (classes != -100).sum()

A training loop:

    for i, (x, y) in enumerate(loader):
        last = (i + 1) % K == 0
        with contextlib.nullcontext() if last else model.no_sync():
            losses = criterion(model(x), y)  # a sum
            (losses / (y != -100).sum() / K).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()

Use instead

Divide by the valid tokens of all ranks and undo the engine's division.

A model:

    import torch
    import torch.distributed as dist
    from torch import nn

    model = nn.Linear(6, 3)
    classes = torch.randint(3, (16,))
    classes[:5] = -100
    batch = torch.randn(16, 6), classes
    steps, options = 1, {"ranks": 2}

    def loss(model, batch):
        inputs, classes = batch
        logits = model(inputs)
        losses = nn.functional.cross_entropy(logits, classes, reduction="sum")
        count = (classes != -100).sum()
        dist.all_reduce(count)
        return losses * dist.get_world_size() / count

A training loop:

    for i, (x, y) in enumerate(loader):
        last = (i + 1) % K == 0
        count = (y != -100).sum()
        dist.all_reduce(count)
        with contextlib.nullcontext() if last else model.no_sync():
            losses = criterion(model(x), y)  # a sum
            (losses * dist.get_world_size() / count / K).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

With equal amounts on every rank, or where the loss is meant to count each rank's data alike. Hugging Face's Trainer has
`average_tokens_across_devices` for this; it counts unshifted labels, so that its shares need not be those of the
cross entropy's own count.

References

- huggingface/transformers PR#34373, https://github.com/huggingface/transformers/pull/34373
- PyTorch, DistributedDataParallel, https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.records.ranks import RankFacts
from gaverify.records.weights import is_constant
from gaverify.rules.rule import Rule, measured
from gaverify.rules.wording import beside_one_process, shares, tried

RULE = Rule("GAV703", "mean-over-ranks")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where unequal weights of the ranks' gradients make the full batch's."""
    ranks = facts.ranks
    if ranks is None or not ranks.at_fault or ranks.apart > ranks.rounding:
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
    if not ranks.shares_of_targets or not ranks.is_rounding(ranks.weights_control):
        return
    fitting = [share / ranks.ranks for share in ranks.shares_of_targets]
    counted = ", ".join(map(str, ranks.targets))
    yield _finding(ranks, shares(fitting), f"the ranks have {counted} valid targets", targets=list(ranks.targets))


def _finding(ranks: RankFacts, shown: str, what: str, **values: object) -> Finding:
    return RULE.finding(
        f"the gradients of the {ranks.ranks} ranks are averaged equally; right would be {shown}",
        measured("rank-weights", f"{beside_one_process(ranks)}; {what}", **values),
        *tried(ranks, f"each rank's loss multiplied by its right share ({shown}) over the used one"),
        remedy="divide each rank's summed loss by the count over all ranks (one all-reduce) and multiply it by the "
        "number of ranks, because the engine averages",
        proven=ranks.is_rounding(ranks.weights_control),
    )
