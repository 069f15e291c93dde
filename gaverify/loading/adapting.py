"""Makes a loss and a batch of what a factory may return in their place.

A criterion such as `nn.MSELoss()` becomes a loss of (model, batch), a data loader its first batch, and a module with a
`training_step` brings the loss itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gaverify.errors import GaverifyError, ProblemError
from gaverify.loading.importing import describe_error
from gaverify.passes.problem import Loss
from gaverify.torch_internals import BUILTIN_FUNCTIONS_MODULE, CriterionModule

_FUNCTIONAL = ("torch.nn.functional", BUILTIN_FUNCTIONS_MODULE)


class CriterionLoss(nn.Module):
    """`criterion(model(inputs), targets)` for a batch `(inputs, targets)`; a module, as criteria may have weights."""

    def __init__(self, criterion: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.criterion = criterion

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Returns the loss of exactly that (micro-)batch."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            name = getattr(self.criterion, "__name__", type(self.criterion).__name__)
            raise ProblemError(
                f"the loss is {name}, which compares outputs with targets, and the batch is a {type(batch).__name__} "
                "and not `(inputs, targets)`. Write a function `loss(model, batch)` that unpacks it"
            )
        inputs, targets = batch
        return self.criterion(model(inputs), targets)


def as_loss(loss: Any) -> Any:
    """Returns a loss of torch (`nn.MSELoss()`, `F.cross_entropy`) as `loss(model, batch)`, any other unchanged."""
    functional = inspect.isroutine(loss) and getattr(loss, "__module__", None) in _FUNCTIONAL
    return CriterionLoss(loss) if functional or isinstance(loss, CriterionModule) else loss


def first_batch(batch: Any) -> Any:
    """Returns the first batch of a loader or an iterator, and any other batch as it is.

    Raises:
        ProblemError: The loader is empty or raised, or the batch is a data set.
    """
    if isinstance(batch, Dataset) and not isinstance(batch, torch.Tensor):
        raise ProblemError(
            f"the batch is a data set, {type(batch).__name__}; return a batch of it, or "
            "`DataLoader(dataset, batch_size=8)`, whose first batch is used"
        )
    # Fabric, for one, wraps loaders in a class of its own.
    wrapped = hasattr(batch, "__iter__") and hasattr(batch, "dataset") and not isinstance(batch, torch.Tensor | Mapping)
    if not (isinstance(batch, DataLoader | Iterator) or wrapped):
        return batch
    kind = type(batch).__name__
    try:
        return next(iter(batch))
    except StopIteration:
        raise ProblemError(f"the {kind} yields no batch; its data set is empty, or smaller than one batch") from None
    except (GaverifyError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise ProblemError(f"the {kind} raised on its first batch: {describe_error(error)}") from error


def has_training_step(model: Any) -> bool:
    """Whether a module says itself what its loss is, as a LightningModule does."""
    return isinstance(model, nn.Module) and callable(getattr(model, "training_step", None))


def training_step_loss(model: nn.Module, name: str) -> Loss:
    """Returns `loss(model, batch)` that calls the model's `training_step`.

    Raises:
        ProblemError: The step runs its optimizers itself.
    """
    if getattr(model, "automatic_optimization", True) is False:
        raise ProblemError(
            f"`{name}`: its training_step calls backward and the optimizer itself (automatic_optimization = False); "
            "`gaverify audit` checks such a loop, or return (model, loss, batch)"
        )
    with_index = len(inspect.signature(model.training_step).parameters) > 1  # type: ignore[arg-type]

    def loss(model: nn.Module, batch: Any) -> Any:
        # 0 is the index of the batch, which most steps take and few read.
        returned = model.training_step(batch, 0) if with_index else model.training_step(batch)  # type: ignore[operator]
        if returned is None:
            raise ProblemError(f"`{name}`: its training_step returned None, which skips the batch; return the loss")
        return returned

    return loss


def training_batch(model: nn.Module, name: str) -> Any:
    """Returns the first batch of a LightningModule's own `train_dataloader`.

    Raises:
        ProblemError: It has none, or the loader raised.
    """
    advice = "return (module, batch) or (module, loader) from the factory"
    loader = getattr(model, "train_dataloader", None)
    if not callable(loader):
        raise ProblemError(f"`{name}` has a training_step and no data; {advice}")
    try:
        setup = getattr(model, "setup", None)
        if callable(setup):
            setup("fit")  # Lightning calls it before any loader: many modules make their data sets in it
        loaded = loader()
    except (GaverifyError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise ProblemError(
            f"`{name}` has a training_step, but its train_dataloader cannot be used; {advice}"
        ) from error
    return first_batch(loaded)


def forward_loss(model: nn.Module, batch: Any) -> Any:
    """Returns what a model of transformers returns for a dict batch: an object whose `.loss` it computes itself."""
    return model(**batch)
