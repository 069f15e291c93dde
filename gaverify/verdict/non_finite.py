"""Where numbers stop to be finite: in the model's own tensors, in the batch, or at an operation of the forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from gaverify.errors import GaverifyError
from gaverify.passes.calls import OperationMode, operation_name
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import PassProbe
from gaverify.passes.nesting import leaves
from gaverify.torch_internals import tree_leaves
from gaverify.tracebacks import calling_frame, display_path

# Constants that code writes on purpose (a mask of −∞), and memory that nothing was written to yet.
_MEANT = (
    "masked_fill",
    "full",
    "fill",
    "new_full",
    "scalar_tensor",
    "empty",
    "new_empty",
    "_to_copy",
    "copy_",
    "where",
)


def first_non_finite(experiment: Experiment) -> str:
    """Returns a clause that names the first parameter, buffer, input or operation that is not finite; empty if none."""
    for root in experiment.modules:
        for kind, named in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
            for name, tensor in named:
                if _spoilt(tensor, nan_only=kind == "buffer"):
                    return f"{kind} `{name}` is not finite before anything runs: was it ever initialised?"
    for path, leaf in leaves(experiment.problem.batch):
        if isinstance(leaf, torch.Tensor) and _spoilt(leaf, nan_only=True):
            return f"the batch holds NaN{f' in `{path}`' if str(path) else ''}"
    listener = _Listener()
    with suppress(GaverifyError):  # what was found until then counts
        experiment.forward(None, listener)
    return listener.describe_first


class _Listener(PassProbe):
    """Notes the first operation that makes NaN of numbers; where none does, the first that makes infinity of them."""

    def __init__(self) -> None:
        self._nan = self._infinite = ""

    @property
    def describe_first(self) -> str:
        """What came first, in words; empty where nothing did."""
        return self._nan or self._infinite

    @contextmanager
    def around(self, k: int | None) -> Iterator[None]:
        """Listens to one forward."""
        with OperationMode(self._ran):
            yield

    def _ran(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if self._nan or operation_name(func).rstrip("_").startswith(_MEANT):
            return result
        inputs, outputs = tree_leaves((args, kwargs)), tree_leaves(result)
        if any(_spoilt(leaf, nan_only=True) for leaf in outputs) and not any(_spoilt(i, nan_only=True) for i in inputs):
            self._nan = self._name_call(func, "NaN")
        elif not self._infinite and any(map(_spoilt, outputs)) and not any(map(_spoilt, inputs)):
            self._infinite = self._name_call(func, "infinity")
        return result

    def _name_call(self, func: Any, what: str) -> str:
        frame = calling_frame()
        place = f" at {display_path(frame[0])}:{frame[1]}" if frame is not None else ""
        return f"`{operation_name(func)}`{place} is the first to give {what}"


def _spoilt(leaf: Any, *, nan_only: bool = False) -> bool:
    if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()) or leaf.is_nested:
        return False
    values = leaf.detach()
    values = values.to_dense() if values.layout is not torch.strided else values
    return bool(values.isnan().any()) if nan_only else not bool(values.isfinite().all())
