"""Products of matrices by groups of rows, as experts compute them, in the precisions that the fused kernel refuses.

Shapes: S rows in G groups, group g ends before row `ends[g]`; an expert's matrix is (K, N).

    a (S, K), b (G, K, N)    out (S, N),     rows of group g times b[g]
    a (G, M, K), b (K, S)    out (M, S),     a[g] times the columns of group g
    a (M, S), b (S, N)       out (G, M, N),  the columns of group g times its rows
    a (G, M, K), b (G, K, N) out (G, M, N)

Source: PyTorch, `torch.nn.functional.grouped_mm`.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from gaverify.tracebacks import hands_over


@hands_over  # a shape that does not fit is the caller's fault
def grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns what `aten::_grouped_mm` computes, by a loop over the groups. Rows behind the last group are zero."""
    if offs is None:
        result = torch.bmm(a, b)
    else:
        groups = list(enumerate(pairwise([0, *offs.tolist()])))
        if a.dim() == 2 and b.dim() == 3:
            result = a.new_zeros(a.shape[0], b.shape[2])
            for g, (start, stop) in groups:
                result[start:stop] = a[start:stop] @ b[g]
        elif a.dim() == 3:
            result = a.new_zeros(a.shape[1], b.shape[1])
            for g, (start, stop) in groups:
                result[:, start:stop] = a[g] @ b[:, start:stop]
        else:
            result = a.new_zeros(len(groups), a.shape[0], b.shape[1])
            for g, (start, stop) in groups:
                result[g] = a[:, start:stop] @ b[start:stop]
    return result if bias is None else result + bias
