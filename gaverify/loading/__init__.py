"""From a spec to a problem: a built-in, or the user's own factory. The only room that imports user code.

`load_problem` is resolved on first use (PEP 562): whether a name exists is said without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaverify.loading.problems import load_problem as load_problem

__all__ = ["load_problem"]


def __getattr__(name: str) -> Any:
    if name != "load_problem":
        raise AttributeError(f"module 'gaverify.loading' has no attribute {name!r}")
    from gaverify.loading.problems import load_problem

    return load_problem
