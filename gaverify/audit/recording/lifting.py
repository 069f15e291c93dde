"""Lets a script that trains below float32 compute in float32, whose rounding hides no fault of its loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gaverify.passes.calls import FunctionMode

_HALVES = (torch.bfloat16, torch.float16)


def _in_float32(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a call of torch with float32 in place of a half precision."""
    if func in (torch.Tensor.bfloat16, torch.Tensor.half):  # `module.half()` calls them for every parameter
        func = torch.Tensor.float
    return func(*map(_lift_dtype, args), **{name: _lift_dtype(value) for name, value in kwargs.items()})


def _lift_dtype(value: Any) -> Any:
    """Returns float32 for a half precision, anything else as it is."""
    return torch.float32 if type(value) is torch.dtype and value in _HALVES else value


def compute_in_float32() -> None:
    """Disables autocast in this process, and lets no call of torch make a tensor of a half precision.

    A tensor from a file keeps its type until it is copied or converted.
    """
    autocast: Any = torch.autocast
    init_autocast: Callable[..., None] = autocast.__init__
    set_default_dtype = torch.set_default_dtype

    def init_disabled(self: Any, *args: Any, **kwargs: Any) -> None:
        init_autocast(self, *args, **kwargs)
        self._enabled = False  # not as an argument: the script may pass `enabled` by position

    autocast.__init__ = init_disabled
    torch.set_default_dtype = lambda dtype: set_default_dtype(_lift_dtype(dtype))
    FunctionMode(_in_float32).__enter__()  # never left
