"""GAV202 mean-of-means: micro-batches of unequal weight are averaged equally.

What it finds

Micro-batches whose losses are means over unequal numbers of samples or tokens, each divided by the same K.

Why gradients diverge

A mean of means is the mean only where all have the same number of terms. Padding that the loss ignores and a short last
micro-batch break that.

Signature in the numbers

g_full = Σ c_k g_k exactly, with unequal c_k: the shares of valid targets, or n_k/N.

Example

    for i, (tokens, targets) in enumerate(loader):
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    for window in windows(loader, K):
        total = sum((targets != -100).sum() for _, targets in window)
        for tokens, targets in window:
            loss = cross_entropy(
                model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / total).backward()
        optimizer.step()
        optimizer.zero_grad()

When it is harmless

Where all micro-batches have the same number of valid targets; on other data they have not.

References

huggingface/transformers PR#34191, huggingface/trl#2175, Lightning-AI/pytorch-lightning#2199, ultralytics/yolov5#464
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.audit.records import Record, UpdateComparison, WeightFit
from gaverify.audit.rules.empty_micro_batch import explains
from gaverify.audit.rules.scale import factor_of, shares, weights_of
from gaverify.audit.rules.wording import backward_place, difference, weights_text, window_of
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV202", "mean-of-means"


def judge(record: Record) -> Iterator[Finding]:
    """Yields a finding where other micro-batch weights give the full-batch gradient exactly."""
    found = weights_of(record)
    if found is None or explains(record):
        return
    update, fit = found
    if factor_of(record, update) is not None:
        return
    total = sum(fit.multipliers)
    weights = tuple(multiplier / total for multiplier in fit.multipliers) if total else fit.multipliers
    weights = tuple(0.0 if abs(weight) < record.tolerance else weight for weight in weights)
    summary, meaning, remedy = _meaning(update, weights, record.tolerance)
    unsure = "" if fit.determined else " (other weights fit as well: these micro-batches cannot tell them apart)"
    yield Finding(
        CODE, NAME, "fault", f"{summary} in update {update.number}",
        location=backward_place(window_of(record, update.number)),
        evidence=(
            Evidence("micro-batch-weights", "measured", difference(update), {"update": update.number}),
            Evidence("micro-batch-weights", "weights",
                     f"{weights_text(weights)} give the full-batch gradient to {fit.residual:.0e}{meaning}{unsure}",
                     {"weights": list(weights), "multipliers": list(fit.multipliers), "residual": fit.residual,
                      "determined": fit.determined}),
        ),
        remedy=remedy + (_multiply(record, update, fit) if all(weights) else ""), proven=True,
    )  # fmt: skip


def _meaning(update: UpdateComparison, weights: tuple[float, ...], tolerance: float) -> tuple[str, str, str]:
    """What is wrong, what the fitted weights are, and what to do to get them."""
    equally = "micro-batches of unequal weight are averaged equally"
    if shares(weights, update.sizes, tolerance):
        return equally, "; they are the shares of samples n_k/N", "weight each micro-batch by n_k/N"
    if shares(weights, update.valid_targets, tolerance):
        return (
            equally, "; they are the shares of valid targets",
            "sum the losses and divide by the valid targets of the whole window",
        )  # fmt: skip
    if not any(weights[:-1]):
        return (
            "each backward pass repeats the micro-batches before it", "; the last one alone holds the whole window",
            "call `backward()` on each micro-batch's own loss, not on the running sum",
        )  # fmt: skip
    if len(set(update.sizes)) == 1 and len(set(update.valid_targets)) < 2 and all(weights):
        usual = [f"{min(weights) / weight:.3g}" for weight in weights[:12]]
        return (
            "micro-batches of equal size are weighted unequally",
            f"; the script counts them {', '.join(usual)} to one another", "give each micro-batch the same weight, 1/K",
        )  # fmt: skip
    return equally, "", "weight each micro-batch by its share of what the full batch's mean counts"


def _multiply(record: Record, update: UpdateComparison, fit: WeightFit) -> str:
    """The factors for the losses as the script has them now; without the ratio that clipping puts between the runs."""
    window = window_of(record, update.number)
    clipped = window is not None and any(event.values.get("active") for event in window.of("clip"))
    mean = sum(fit.multipliers) / len(fit.multipliers) if clipped else 1.0
    return f": here, multiply the losses by {weights_text([factor / mean for factor in fit.multipliers])}"
