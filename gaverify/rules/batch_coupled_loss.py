"""GAV103 batch-coupled-loss: the loss is no weighted sum over samples.

What it finds

A loss that compares the samples of a batch or divides by something taken over the batch, while all outputs of the
model agree sample by sample: in-batch negatives (InfoNCE, CLIP, multiple negatives ranking), triplet mining,
advantages whitened over the batch, ratio losses (Dice or F1 over the batch), correlation and covariance terms, load
balancing.

Why gradients diverge

Accumulation is right exactly when

    L(batch) = Σ_k w_k L(micro-batch k)

for all parameters. With in-batch negatives the term of sample i is

    −log( exp(s_ii / τ) / Σ_j exp(s_ij / τ) ),     j over the batch

In a micro-batch the sum over j has B/K terms instead of B. Each sample meets fewer negatives: an easier task with
another optimum, not a noisier estimate of the same one. A product or quotient of two batch means has the same
trouble: the mean of the products is not the product of the means.

Signature in the numbers

- Every module output agrees; the first diverging operation stands in the loss, often a matrix of B × B.
- The best micro-batch weights leave much of the gradient over (half of it and more in the example): no weighting
  repairs it.
- The loss itself is lower when accumulated, since there are fewer negatives.
- A two-pass cached gradient gives the full-batch gradient to rounding: this is the proof that gaverify runs.
- In a training script the proof is another run: the code of the loss hands each micro-batch the values, and the
  gradients, of its samples in the full batch. What is left is rounding.

Example

    import torch
    from torch import nn
    from torch.nn import functional as F

    model = nn.ModuleDict({"image": nn.Linear(6, 4), "text": nn.Linear(7, 4)})
    batch = torch.randn(16, 6), torch.randn(16, 7)

    def contrastive(image, text):
        logits = F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / 0.1
        return F.cross_entropy(logits, torch.arange(len(logits)))

    def loss(model, batch):
        return contrastive(model["image"](batch[0]), model["text"](batch[1]))

Use instead

Compute the loss once over all embeddings of the window, then send its gradients back through the model one
micro-batch at a time. `gaverify.remedies.CachedGradients(model, embed, loss, steps)` does both passes, with the
same dropout masks in both. Written out, the second pass is

    import torch
    from torch import nn
    from torch.nn import functional as F

    model = nn.ModuleDict({"image": nn.Linear(6, 4), "text": nn.Linear(7, 4)})
    images, texts = torch.randn(16, 6), torch.randn(16, 7)

    def contrastive(image, text):
        logits = F.normalize(image, dim=1) @ F.normalize(text, dim=1).T / 0.1
        return F.cross_entropy(logits, torch.arange(len(logits)))

    with torch.no_grad():  # first pass, micro-batch by micro-batch
        found = model["image"](images), model["text"](texts)
    found = [embedding.requires_grad_() for embedding in found]
    gradients = torch.autograd.grad(contrastive(*found), found)

    batch = images, texts, *gradients
    options = {"weighting": "none"}  # the gradients are the window's

    def loss(model, batch):
        image, text = model["image"](batch[0]), model["text"](batch[1])
        return (image * batch[2]).sum() + (text * batch[3]).sum()

Statistics that need no gradient (whitened advantages, a divisor) are computed once over the window, before it is
cut, and travel with the batch. Where the gradient of the full batch goes through them, holding them constant is
another loss, and makes it worse: gaverify prints that repair only where it tried it and the gradient came out.

When it is harmless

Where the number of negatives is meant to be the micro-batch's (several devices without gathering do the same), or
where the coupled term is a small regulariser such as load balancing: its gradient is then that of the
micro-batches, and only the logged value and the effective strength change. Compare at equal micro-batch size, not
at equal B.

References

- L. Gao, Y. Zhang, J. Han, J. Callan, Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup,
  2021, https://arxiv.org/abs/2101.06983
- A. van den Oord, Y. Li, O. Vinyals, Representation Learning with Contrastive Predictive Coding, 2018, section 2.3,
  https://arxiv.org/abs/1807.03748
- huggingface/sentence-transformers#2916, https://github.com/huggingface/sentence-transformers/issues/2916
- mlfoundations/open_clip#267 (accumulation for contrastive losses),
  https://github.com/mlfoundations/open_clip/pull/267
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.experiment import Cause, ControlKind
from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence, Finding
from gaverify.rules.controls import control, first_operation, held_remedy, paired_remedy, proven
from gaverify.rules.rule import Rule

RULE = Rule("GAV103", "batch-coupled-loss")
_WHAT = {
    "matrix": "the loss compares the samples of a batch with each other",
    "rows": "the loss gives each sample a value that depends on the other samples",
    "non-additive": "the loss is not a weighted sum over samples",
    "control-flow": "the loss is computed in another way for another batch",
}


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a finding per operation outside the model's outputs that couples samples."""
    for cause in facts.forward.causes:
        suspect = cause.suspect
        if suspect.in_model or suspect.kind not in _WHAT:
            continue
        fit = facts.weights.fit
        evidence = [first_operation(facts, cause)]
        if fit is not None and fit.residual > 1e-6:
            text = f"the best micro-batch weights leave {fit.residual:.1e} of the gradient over"
            evidence.append(Evidence("micro-batch-weights", "fit", text, {"residual": fit.residual}))
        yield RULE.finding(
            _WHAT[suspect.kind],
            *evidence,
            control(facts, cause),
            location=suspect.culprit.location,
            remedy=_remedy(cause),
            proven=proven(facts, cause),
        )


def _remedy(cause: Cause) -> str:
    """The repair that was run, else the one that holds for every loss over the outputs of a model."""
    run = cause.control
    cached = "a two-pass cached gradient (`gaverify.remedies.CachedGradients`)"
    if cause.suspect.kind == "non-additive":
        cached = f"take what it needs of the batch (a mean, a deviation) once over the window; or {cached}"
    if run is not None and run.kind is ControlKind.CACHED_GRADIENTS and run.rounding:
        return f"{cached}: tested, gives the full-batch gradient at the memory of a micro-batch"
    if run is not None and run.kind is ControlKind.OWN_CACHE and run.rounding:
        return "hand the loss the full batch: it caches gradients itself, a part of the batch at a time: tested"
    held = held_remedy(cause)
    if held:
        return held
    once = "compute the loss once over all outputs of the window"
    tried = run is not None and run.kind is ControlKind.CACHED_GRADIENTS
    return paired_remedy(cause.suspect) or (once if tried else f"{once}: {cached} does it, not tried here")
