"""GAV705 gather-without-gradient: tensors of all ranks meet in the loss, but their gradients stay behind.

What it finds

A loss over the samples of all ranks (in-batch negatives, statistics) that collects them with `all_gather`: the values
arrive, and the backward stops there, so that each rank's parameters miss what its samples do to the others' losses.
The full batch is computed in a group of one rank. A gather that loses its own rank's gradient there as well (nothing
is put back into the gathered list) does the same to both, and is not seen.

Why gradients diverge

`torch.distributed.all_gather` copies values. With features f_r of rank r and losses L_q on every rank q,

    full:  ∂(Σ_q L_q) / ∂f_r,     with the gradient left behind:  ∂L_r / ∂f_r

Signature in the numbers

- No weights of the ranks' gradients give the full batch's: the residual is large (0.13 to 0.18, measured).
- The window has an all-gather in the forward and no reduce-scatter or all-reduce for it in the backward.
- With a differentiable gather in its place the difference is rounding (1.2e-7).

Example

A model:

    import torch
    import torch.distributed as dist
    from torch import nn

    model = nn.Linear(6, 4)
    batch = torch.randn(16, 6), torch.randn(16, 4)
    steps, options = 1, {"ranks": 2}

    def loss(model, batch):
        inputs, keys = batch
        queries = model(inputs)
        count = dist.get_world_size()
        parts = [torch.zeros_like(queries) for _ in range(count)]
        dist.all_gather(parts, queries)
        parts[dist.get_rank()] = queries
        own = torch.arange(len(queries)) + dist.get_rank() * len(queries)
        return nn.functional.cross_entropy(queries @ torch.cat(parts).T, own)

A training loop:

    for x, y in loader:
        queries, keys = model(x), model(y)
        parts = [torch.zeros_like(keys) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, keys)
        parts[dist.get_rank()] = keys
        contrast(queries, torch.cat(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()

Use instead

A model:

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.nn.functional import all_gather

    model = nn.Linear(6, 4)
    batch = torch.randn(16, 6), torch.randn(16, 4)
    steps, options = 1, {"ranks": 2}

    def loss(model, batch):
        inputs, keys = batch
        queries = model(inputs)
        everyone = torch.cat(all_gather(queries))
        own = torch.arange(len(queries)) + dist.get_rank() * len(queries)
        return nn.functional.cross_entropy(queries @ everyone.T, own)

A training loop:

    for x, y in loader:
        queries, keys = model(x), model(y)
        parts = torch.distributed.nn.functional.all_gather(keys)
        contrast(queries, torch.cat(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()

When it is harmless

Where the gathered side is a target that shall not be trained: a momentum encoder's keys, statistics for a log.

References

- mlfoundations/open_clip PR#267 and its `gather_with_grad`, https://github.com/mlfoundations/open_clip
- PyTorch, torch.distributed.nn.functional (from 2.13 on `_functional_collectives.all_gather_single_autograd`), https://docs.pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.facts import Facts
from gaverify.records.findings import Finding, Location
from gaverify.rules.rule import Rule, controlled, measured
from gaverify.rules.wording import beside_one_process

RULE = Rule("GAV705", "gather-without-gradient")
_FALLEN = 1e-2  # of the difference that the control may leave: the gather then is not all of the cause


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where the ranks gather, and a gather that hands gradients back repairs the gradient."""
    ranks = facts.ranks
    if ranks is None or not ranks.at_fault or ranks.apart > ranks.rounding or not ranks.gathers:
        return
    left = ranks.gather_control
    if not math.isfinite(left) or left > max(ranks.rounding, _FALLEN * ranks.difference):
        return
    proven = left <= ranks.rounding
    told = "proven" if proven else "another cause is left"
    residual = ranks.weights.residual if ranks.weights is not None else math.nan
    yield RULE.finding(
        f"the loss gathers tensors of {ranks.ranks} ranks, and their gradients stay behind",
        measured(
            "rank-weights",
            f"{beside_one_process(ranks)}; the best weights of the ranks' gradients leave {residual:.1e} over",
            residual=residual,
        ),
        controlled(
            "gather", f"with a differentiable gather in its place the difference is {left:.0e}: {told}", left=left
        ),
        location=_place(facts),
        remedy="a gather that hands gradients back (torch.distributed.nn.functional.all_gather) in place of "
        "torch.distributed.all_gather" + (": tested, equivalent" if proven else ""),
        proven=proven,
    )


def _place(facts: Facts) -> Location | None:
    """Where the first window of a loop gathers a trained tensor; None for a run of a model."""
    window = facts.loop.first if facts.loop is not None else None
    places = [place for event in (window.of("backward") if window else ()) for place in event.values.get("gathers", ())]
    file, line = next(filter(None, places), (None, None))
    return Location(file=file, line=line) if file else None
