"""GAV202 mean-of-means: micro-batches that count differently are averaged with the wrong weights.

What it finds

A loss that is a mean over something of which the micro-batches hold different amounts (valid tokens, matched boxes,
positive pixels, class weights, the samples of a ragged tail), averaged as if they held the same.

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

Example

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

Use instead

Weigh each micro-batch by its share of the window's valid targets: with `--weighting tokens`, with
`gaverify.remedies.token_weights` in a loop of your own, or by a summed loss divided by the window's count.

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

When it is harmless

Where every sample is meant to count the same whatever its length: then a mean per sample and a mean over samples
say so in the full batch as well, and the two runs agree. With counts that are nearly equal the difference is far
below the gradient's sampling noise; the line `harm` of the finding says how far.

References

- Hugging Face, Fixing Gradient Accumulation, 2024, https://huggingface.co/blog/gradient_accumulation
- huggingface/transformers#34191, https://github.com/huggingface/transformers/pull/34191
- Lightning-AI/pytorch-lightning#2199 (ragged tail), https://github.com/Lightning-AI/pytorch-lightning/issues/2199
- PyTorch, CrossEntropyLoss, `reduction`,
  https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.diagnosis.empty_micro_batch import explains_weights
from gaverify.diagnosis.wording import tested
from gaverify.diagnosis.wrong_loss_scale import factor_of
from gaverify.measurements import Measurements, are_shares
from gaverify.results import Evidence, Finding

CODE, NAME = "GAV202", "mean-of-means"


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where other micro-batch weights give the full-batch gradient exactly."""
    fit, run = measured.fit, measured.weight_remedy
    if fit is None or run is None or factor_of(measured)[0] is not None or explains_weights(measured):
        return
    meaning, remedy = _meaning(measured, fit.weights)
    weights = ", ".join(f"{weight:.4g}" for weight in fit.weights)
    used = ", ".join(f"{weight:.4g}" for weight in measured.weights)
    evenly = "equally" if measured.weighting == "uniform" else "wrongly"
    unsure = "" if fit.determined else " (other weights fit as well: these micro-batches cannot tell them apart)"
    yield Finding(
        CODE, NAME, "fault", f"micro-batches of unequal weight are averaged {evenly}",
        evidence=(
            Evidence("micro-batch-weights", "measured", f"{measured.largest} with weights {used}",
                     {"used": list(measured.weights)}),
            Evidence("micro-batch-weights", "control",
                     f"with weights {weights} the difference is {run.left:.0e}{': proven' if run.rounding else ''}"
                     f"{meaning}{unsure}",
                     {"weights": list(fit.weights), "residual": fit.residual, "determined": fit.determined}),
        ),
        remedy=remedy + (f": {tested(run)}" if run.rounding else ""), proven=run.rounding,
    )  # fmt: skip


def _meaning(measured: Measurements, fitted: tuple[float, ...]) -> tuple[str, str]:
    """What the fitted weights are, and how to ask for them."""
    if are_shares(fitted, tuple(map(float, measured.sizes))):
        return "; they are the shares of samples n_k/N", "weight each micro-batch by n_k/N (--weighting samples)"
    if are_shares(fitted, measured.valid_targets):
        return (
            "; they are the shares of valid targets",
            "weight each micro-batch by its share of the window's valid targets (--weighting tokens)",
        )
    weights = ", ".join(f"{weight:.6g}" for weight in fitted)
    return "", f"multiply the micro-batch losses by {weights}"
