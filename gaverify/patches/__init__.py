"""Repairs of the user's source: proposes patches for the findings of an audit, applies and writes them. No torch.

The audit tries each proposal on copies of the files, and prints only one that makes the runs equivalent.
"""

from gaverify.patches.proposing import propose
from gaverify.patches.sources import Context, Source, apply, read_context, render_diff
from gaverify.patches.writing import write

__all__ = ["Context", "Source", "apply", "propose", "read_context", "render_diff", "write"]
