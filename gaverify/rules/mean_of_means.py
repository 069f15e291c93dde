"""GAV202 mean-of-means: micro-batches that count differently are averaged with the wrong weights.

What it finds

A loss that is a mean over something of which the micro-batches hold different amounts (valid tokens, matched boxes,
positive pixels, class weights, the samples of a ragged tail), averaged as if they held the same.

In a training loop: micro-batches whose losses are means over unequal numbers of samples or tokens, each divided by
the same K.

Why gradients diverge

Let micro-batch k hold n_k valid targets with summed loss S_k. The full batch's mean and the average of means are

    full         Σ_k S_k / Σ_k n_k  =  Σ_k (n_k / N) (S_k / n_k),  N = Σ_k n_k
    accumulated  (1/K) Σ_k (S_k / n_k)

They agree only where all n_k are equal. A target in a short micro-batch counts more than one in a long one, by the
factor N / (K n_k). In language models the n_k are the tokens that are not `ignore_index`, and padding makes them
unequal. With class weights the amounts are the sums of the targets' class weights.

Signature in the numbers

- The fitted micro-batch weights c in full = Σ c_k g_k are not equal, and leave only rounding over (3e-16).
- They are the shares of the valid targets: 0.2759, 0.1379, 0.3793, 0.2069 in the example, 8, 4, 11 and 6 of 29
  tokens.
- The one best factor for everything is close to 1, so that the norm alone does not give it away: the gradient has
  the wrong direction.
- In a training loop: g_full = Σ c_k g_k exactly, with unequal c_k: the shares of valid targets, or n_k/N. Where no
  loss of torch's counts targets, what a loss is divided by is read from the gradient behind it: 1/n_k in each row.

Example

A model:

    import torch
    from torch import nn

    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    tokens = torch.randint(11, (8, 6))
    labels = tokens.roll(-1, dims=1)
    for row, length in enumerate((6, 2, 1, 3, 5, 6, 2, 4)):
        labels[row, length:] = -100  # padding
    batch = tokens, labels

    def loss(model, batch):
        tokens, labels = batch
        logits = model(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten())

A training loop:

    for i, (tokens, targets) in enumerate(loader):
        logits = model(tokens).flatten(0, 1)
        loss = cross_entropy(logits, targets.flatten(), ignore_index=-100)
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

Weigh each micro-batch by its share of the window's valid targets: with `--weighting tokens`, with
`gaverify.remedies.token_weights` in a loop of your own, or by a summed loss divided by the window's count.

A model:

    import torch
    from torch import nn

    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    tokens = torch.randint(11, (8, 6))
    labels = tokens.roll(-1, dims=1)
    for row, length in enumerate((6, 2, 1, 3, 5, 6, 2, 4)):
        labels[row, length:] = -100  # padding
    batch = tokens, labels
    options = {"weighting": "tokens"}

    def loss(model, batch):
        tokens, labels = batch
        logits = model(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten())

A training loop:

    for window in windows(loader, K):
        total = sum((targets != -100).sum() for _, targets in window)
        for tokens, targets in window:
            logits = model(tokens).flatten(0, 1)
            loss = cross_entropy(
                logits, targets.flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / total).backward()
        optimizer.step()
        optimizer.zero_grad()

When it is harmless

Where every sample is meant to count the same whatever its length: then a mean per sample and a mean over samples
say so in the full batch as well, and the two runs agree. With counts that are nearly equal the difference is far
below the gradient's sampling noise; the line `harm` of the finding says how far.

In a training loop: where all micro-batches have the same number of valid targets; on other data they have not.

References

- Hugging Face, Fixing Gradient Accumulation, 2024, https://huggingface.co/blog/gradient_accumulation
- huggingface/transformers#34191, https://github.com/huggingface/transformers/pull/34191
- Lightning-AI/pytorch-lightning#2199 (ragged tail), https://github.com/Lightning-AI/pytorch-lightning/issues/2199
- PyTorch, CrossEntropyLoss, `reduction`,
  https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.audit import Record, UpdateComparison
from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence, Finding
from gaverify.records.weights import WeightFit, are_shares
from gaverify.rules.empty_micro_batch import explains_weights
from gaverify.rules.rule import Rule, controlled, measured
from gaverify.rules.scale import counted_at, factor_in_loop, factor_of, shares, weighted_term, weights_of
from gaverify.rules.wording import (
    NOT_ENOUGH,
    backward_place,
    difference,
    exact,
    not_run,
    share_texts,
    tested,
    weights_text,
)

RULE = Rule("GAV202", "mean-of-means")
_DIGITS = 10.0  # times what a fit leaves over: so far its weights may be off, and digits below it mean nothing
_EQUALLY = "micro-batches of unequal weight are averaged equally"
_SAMPLES = "; they are the shares of samples n_k/N"
_TARGETS = "; they are the shares of valid targets"
_COUNTED = "; they are the shares of what each micro-batch's loss is divided by"


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding where other micro-batch weights give the full-batch gradient exactly."""
    if explains_weights(facts):
        return
    if facts.loop is not None:
        yield from _in_loop(facts, facts.loop)
        return
    fit, run = facts.weights.fit, facts.weights.remedy
    if fit is None or not facts.weights.blamed or factor_of(facts)[0] is not None:
        return
    meaning, remedy = _meaning(facts, fit.weights)
    if run is not None and not run.rounding and not facts.cleared:
        remedy = NOT_ENOUGH
    left = f"a fit leaves {fit.residual:.0e} of the gradient over"
    if run is not None:
        left = f"the difference is {run.left:.0e}{': proven' if run.rounding else ''}"
    yield RULE.finding(
        _EQUALLY if facts.weights.weighting == "uniform" else "micro-batches of unequal weight are averaged wrongly",
        measured(
            "micro-batch-weights",
            f"{facts.compared.largest} with weights {weights_text(facts.weights.used, each=False)}"
            + counted_at(facts.weights),
            used=list(facts.weights.used),
        ),
        controlled(
            "micro-batch-weights",
            f"with weights {weights_text(fit.weights, each=False)} {left}{meaning}{_unsure(fit)}",
            weights=list(fit.weights),
            residual=fit.residual,
            determined=fit.determined,
        ),
        *not_run(facts) if run is None else (),
        location=facts.weights.place.location if facts.weights.place is not None else None,
        remedy=remedy + (f": {tested(run)}" if run is not None and run.rounding else ""),
        proven=run is not None and run.rounding,
    )


def _unsure(fit: WeightFit) -> str:
    return "" if fit.determined else " (other weights fit as well: these micro-batches cannot tell them apart)"


def _meaning(facts: Facts, fitted: tuple[float, ...]) -> tuple[str, str]:
    """What the fitted weights are, and how to ask for them."""
    sizes = tuple(map(float, facts.weights.sizes))
    if are_shares(fitted, sizes):
        return (
            f"; they are the shares of samples n_k/N: {share_texts(sizes)}",
            "weight each micro-batch by n_k/N (--weighting samples)",
        )
    if are_shares(fitted, facts.weights.valid_targets):
        return (
            f"; they are the shares of valid targets: {share_texts(facts.weights.valid_targets)}",
            "weight each micro-batch by its share of the window's valid targets (--weighting tokens)",
        )
    return "", f"multiply the micro-batch losses by {exact(fitted)}"


def _in_loop(facts: Facts, loop: Record) -> Iterator[Finding]:
    """The same for the first differing update of a training loop."""
    found, term, update = weights_of(loop), weighted_term(loop), loop.divergent
    if update is None or factor_in_loop(loop, update) is not None:
        return
    if found is not None:
        (update, fit), where = found, ""
    elif term is not None:
        fit, where = term.fit, f", in term {term.number} of {term.count} of the loss"
    else:
        return
    multipliers = _seen(fit, update)
    total = sum(multipliers)
    weights = tuple(multiplier / total for multiplier in multipliers) if total else multipliers
    weights = tuple(0.0 if abs(weight) < loop.tolerance else weight for weight in weights)
    summary, meaning, remedy = _in_update(update, weights, loop.tolerance)
    altogether = _altogether(multipliers, loop.tolerance) if meaning in (_SAMPLES, _TARGETS, _COUNTED) else ""
    yield RULE.finding(
        f"{summary} in update {update.number}{where}",
        measured("micro-batch-weights", difference(update), update=update.number),
        Evidence(
            "micro-batch-weights",
            "weights",
            f"{weights_text(weights)} give the full-batch gradient to {fit.residual:.0e}{meaning}"
            f"{altogether}{_unsure(fit)}",
            {
                "weights": list(weights),
                "multipliers": list(fit.multipliers),
                "residual": fit.residual,
                "determined": fit.determined,
            },
        ),
        location=backward_place(facts, update.number),
        remedy=remedy + (_multiply(loop, fit) if all(weights) else ""),
        proven=True,
    )


def _in_update(update: UpdateComparison, weights: tuple[float, ...], tolerance: float) -> tuple[str, str, str]:
    """What is wrong, what the fitted weights are, and what to do to get them."""
    if shares(weights, update.sizes, tolerance):
        return _EQUALLY, _SAMPLES, "weight each micro-batch by n_k/N"
    if shares(weights, update.valid_targets, tolerance):
        return _EQUALLY, _TARGETS, "sum the losses and divide by the valid targets of the whole window"
    if shares(weights, update.counted, tolerance):
        return _EQUALLY, _COUNTED, "sum the losses and divide by what the whole window counts"
    if not any(weights[:-1]):
        return (
            "each backward pass repeats the micro-batches before it",
            "; the last one alone holds the whole window",
            "call `backward()` on each micro-batch's own loss, not on the running sum",
        )
    if len(set(update.sizes)) == 1 and len(set(update.valid_targets)) == 1 and all(weights):
        usual = [f"{min(weights) / weight:.3g}" for weight in weights[:12]]
        return (
            "micro-batches of equal size are weighted unequally",
            f"; the script counts them {', '.join(usual)} to one another",
            "give each micro-batch the same weight, 1/K",
        )
    unseen = "" if update.valid_targets else "; no loss was seen whose targets could be counted"
    return _EQUALLY, unseen, "weight each micro-batch by its share of what the full batch's mean counts"


def _seen(fit: WeightFit, update: UpdateComparison) -> tuple[float, ...]:
    """What the losses should be multiplied by; 0 for one without a valid target, to which any number would fit."""
    counts = update.valid_targets
    if fit.determined or len(counts) != len(fit.multipliers) or not any(counts):
        return fit.multipliers
    return tuple(multiplier if count else 0.0 for multiplier, count in zip(fit.multipliers, counts, strict=True))


def _altogether(multipliers: tuple[float, ...], tolerance: float) -> str:
    """How many times too much the micro-batches count together, where right weights add up to 1; empty where right."""
    steps = len(multipliers)
    factor = steps / sum(multipliers)
    if abs(factor - 1) < tolerance:
        return ""
    if abs(factor / steps - 1) < tolerance:
        return f"; beside that nothing divides by K = {steps}: together they count {steps} times"
    return f"; beside that they count {factor:.6g} times together"


def _multiply(loop: Record, fit: WeightFit) -> str:
    """The factors for the losses as the script has them now: the fit is of the gradient before any clipping."""
    tolerance = min(loop.tolerance, max(_DIGITS * fit.residual, 1e-10))
    return f": here, multiply the losses by {exact(fit.multipliers, tolerance)}"
