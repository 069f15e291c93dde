"""GAV501 low-precision-accumulation (note): adding up micro-batches in the working precision loses bits.

What it finds

Gradients that are accumulated in bfloat16 or float16 and come out with fewer correct bits than the full batch's
gradient in the same precision, both held against float64.

Why gradients diverge

`.grad` has the parameter's dtype. Adding the k-th micro-batch rounds the sum to it: with unit roundoff u (2^-8 =
3.9e-3 in bfloat16, 2^-11 in float16, 2^-24 in float32) and K additions the error is bounded by about

    |computed − exact| ≤ (K − 1) u Σ_k |w_k g_k|

In bfloat16 a term 256 times smaller than the sum so far vanishes altogether. A single backward over the full batch
adds the same terms inside a matrix product, which keeps its partial sums in float32.

Signature in the numbers

- Both errors against float64 and the bits between them: 5e-3 to 1e-2 accumulated, 2e-3 to 3e-3 full batch, 1 to 2
  bits in the example (K = 32).
- The verdict is equivalent: the difference shrinks with the unit roundoff, as rounding does and a fault does not.

Example

    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    batch = torch.randn(64, 6), torch.randn(64, 1)
    steps = 32
    options = {"dtype": "bfloat16"}

    def loss(model, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)

Use instead

Parameters (and with them gradients) in float32, low precision inside autocast only; or a float32 buffer beside the
parameters into which each micro-batch's gradient is added.

    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    batch = torch.randn(64, 6), torch.randn(64, 1)
    steps = 32
    options = {"autocast": "bfloat16"}  # parameters stay in float32

    def loss(model, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)

When it is harmless

For small K the rounding is far below the gradient's sampling noise. It matters for K of 32 and more, for parameters
whose gradients nearly cancel, and where bfloat16 parameters are updated without a float32 copy.

References

- N. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 2002, section 4.2 (error of summation)
- D. Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019, https://arxiv.org/abs/1905.12322
- deepspeedai/DeepSpeed#2768, https://github.com/deepspeedai/DeepSpeed/issues/2768
- PyTorch, Automatic Mixed Precision, https://docs.pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.records.compared import BITS_WORTH_A_NOTE
from gaverify.records.facts import Facts
from gaverify.records.findings import Finding
from gaverify.rules.rule import Rule, measured

RULE = Rule("GAV501", "low-precision-accumulation")


def judge(facts: Facts) -> Iterator[Finding]:
    """Yields a note where the accumulated gradient has fewer correct bits than the full-batch one."""
    loss = facts.compared.precision
    if loss is None or loss.bits_lost < BITS_WORTH_A_NOTE:
        return
    better = ""
    if loss.in_float32 is not None and loss.in_float32 < loss.accumulated:
        better = f": tested, the error is {loss.in_float32:.1e} instead of {loss.accumulated:.1e}"
    yield RULE.finding(
        f"accumulating in {loss.dtype} loses {loss.bits_lost:.1f} bits of the gradient",
        measured(
            "precision",
            f"error against float64: accumulated {loss.accumulated:.1e}, full batch {loss.full:.1e}",
            full=loss.full,
            accumulated=loss.accumulated,
            bits_lost=loss.bits_lost,
        ),
        severity="note",
        remedy=f"accumulate the gradients in float32{better}",
        proven=True,
    )
