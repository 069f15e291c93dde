"""Lets a script that trains below float32 compute in float32, whose rounding hides nothing of what its loop does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gaverify.passes.calls import FunctionMode

_HALVES = (torch.bfloat16, torch.float16)


def _in_float32(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a call of torch with float32 where it asks for half a precision, as modules do when they are converted."""
    if func in (torch.Tensor.bfloat16, torch.Tensor.half):
        func = torch.Tensor.float
    return func(*map(_whole, args), **{name: _whole(value) for name, value in kwargs.items()})


def _whole(value: Any) -> Any:
    """Float32 for half a precision; anything else as it is."""
    return torch.float32 if type(value) is torch.dtype and value in _HALVES else value


def compute_in_float32() -> None:
    """From here on this process autocasts nothing and makes no tensor of half a precision by a call of torch's.

    What is read from a file keeps its type until it is copied or converted.
    """
    autocast: Any = torch.autocast
    begin: Callable[..., None] = autocast.__init__
    default = torch.set_default_dtype

    def init_disabled(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._enabled = False

    autocast.__init__ = init_disabled
    torch.set_default_dtype = lambda dtype: default(_whole(dtype))
    FunctionMode(_in_float32).__enter__()
