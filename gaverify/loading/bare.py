"""Makes the loss and the batch of a problem: of a bare module, or of what a factory returned in their place."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from gaverify.errors import GaverifyError, ProblemError, SpecError, nearest
from gaverify.loading.importing import describe_error
from gaverify.passes.batching import Loss, Problem
from gaverify.passes.isolation import eager_when_compiled
from gaverify.passes.modes import check_queries, mode_set
from gaverify.torch_internals import BUILTIN_FUNCTIONS_MODULE, CriterionModule

# Makes a loss and a batch of what a factory may return in their place.
#
# A criterion such as `nn.MSELoss()` becomes a loss of (model, batch), a data loader its first batch. A module with a
# `training_step` brings the loss itself.


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


# Makes a problem of a bare module: a batch of the shape and a loss of the name that the user gives.


DEFAULT_BATCH_SIZE = 8


_OTHER_ARGUMENTS = {
    "cosine_embedding_loss": "two inputs and a target",
    "ctc_loss": "lengths",
    "gaussian_nll_loss": "a variance",
    "margin_ranking_loss": "two inputs and a target",
    "triplet_margin_loss": "an anchor, a positive and a negative",
    "triplet_margin_with_distance_loss": "an anchor, a positive and a negative",
}
"""Losses that take more than an input and a target, and what."""


@dataclass(frozen=True)
class Output:
    """The properties of a model's output that targets have to fit.

    Args:
        loss: The name of the loss.
        tensor: The output of the model, batch first.
        classes: The value of `--classes`.
        tokens: Shape of the inputs where they are integers.
    """

    loss: str
    tensor: torch.Tensor
    classes: int | None = None
    tokens: torch.Size | None = None

    @property
    def classes_last(self) -> bool:
        """Whether the classes are the last dimension, as in the (B, T, V) of a language model, and not the second."""
        shape = self.tensor.shape
        if len(shape) < 3 or self.loss not in ("cross_entropy", "nll_loss"):
            return False
        if self.classes is not None and shape[-1] != shape[1]:
            return self.classes == shape[-1]
        return self.tokens == shape[:-1]

    def checked_classes(self) -> int:
        """Returns C, the size of the output's class dimension.

        Raises:
            ProblemError: There is no such dimension, or `--classes` is another number.
        """
        shape = list(self.tensor.shape)
        if len(shape) < 2:
            raise ProblemError(f"--loss {self.loss} needs an output of shape [batch, classes, …], got {shape}")
        dimension = len(shape) - 1 if self.classes_last else 1
        if self.classes is not None and self.classes != shape[dimension]:
            raise ProblemError(
                f"--classes {self.classes}: the output of the model has shape {shape}, that is {shape[dimension]} "
                f"classes; write --classes {shape[dimension]}, or change the model's last layer"
            )
        return shape[dimension]

    def targets(self) -> torch.Tensor:
        """Returns random targets.

        Raises:
            ProblemError: The output, or `--classes`, does not fit the loss.
        """
        kind = find_loss(self.loss)
        if self.classes is not None and not kind.counts_classes:
            raise ProblemError(f"--classes {self.classes}: {self.loss} has no classes; leave it out")
        return kind.targets(self)


class LossKind(NamedTuple):
    """How a loss of `torch.nn.functional` is called, the targets that it takes, and whether these count classes."""

    targets: Callable[[Output], torch.Tensor]
    counts_classes: bool = False
    keywords: Mapping[str, str] = {}


def _like_output(output: Output) -> torch.Tensor:
    return torch.randn(output.tensor.shape)


def _class_indices(output: Output) -> torch.Tensor:
    """(B,) for an output (B, C), (B, D…) for (B, C, D…) or (B, D…, C)."""
    classes, shape = output.checked_classes(), output.tensor.shape
    return torch.randint(classes, shape[:-1] if output.classes_last else (shape[0], *shape[2:]))


def _zeros_and_ones(output: Output) -> torch.Tensor:
    return torch.randint(2, output.tensor.shape).float()


def _zeros_and_ones_per_class(output: Output) -> torch.Tensor:
    output.checked_classes()
    return _zeros_and_ones(output)


def _signs(output: Output) -> torch.Tensor:
    return 2 * _zeros_and_ones(output) - 1


def _probabilities(output: Output) -> torch.Tensor:
    """Distributions over the second dimension, of which `kl_div` takes the logarithms as the model's output."""
    return _like_output(output).softmax(min(1, output.tensor.dim() - 1))


def _counts(output: Output) -> torch.Tensor:
    return torch.poisson(torch.ones(output.tensor.shape))


def _class_lists(output: Output) -> torch.Tensor:
    """Per sample one to C classes in any order, then −1: `multilabel_margin_loss` reads up to the first −1."""
    classes = output.checked_classes()
    samples = len(output.tensor)
    order = torch.rand(samples, classes).argsort(dim=1)
    return order.masked_fill(torch.arange(classes) >= torch.randint(1, classes + 1, (samples, 1)), -1)


LOSSES = {
    "cross_entropy": LossKind(_class_indices, counts_classes=True),
    "nll_loss": LossKind(_class_indices, counts_classes=True),
    "multi_margin_loss": LossKind(_class_indices, counts_classes=True),
    "multilabel_margin_loss": LossKind(_class_lists, counts_classes=True),
    "multilabel_soft_margin_loss": LossKind(_zeros_and_ones_per_class, counts_classes=True),
    "mse_loss": LossKind(_like_output),
    "l1_loss": LossKind(_like_output),
    "smooth_l1_loss": LossKind(_like_output),
    "huber_loss": LossKind(_like_output),
    "binary_cross_entropy": LossKind(_zeros_and_ones),
    "binary_cross_entropy_with_logits": LossKind(_zeros_and_ones),
    # its "mean" is none, as PyTorch warns at every call
    "kl_div": LossKind(_probabilities, keywords={"reduction": "batchmean"}),
    "poisson_nll_loss": LossKind(_counts),
    "soft_margin_loss": LossKind(_signs),
    "hinge_embedding_loss": LossKind(_signs),
}


def find_loss(name: str) -> LossKind:
    """Returns the loss of that name.

    Raises:
        SpecError: There is none, or it takes more than an input and a target.
    """
    if name in LOSSES:
        return LOSSES[name]
    if name in _OTHER_ARGUMENTS:
        raise SpecError(
            f"`{name}` takes {_OTHER_ARGUMENTS[name]} beside the model's output; "
            "write a factory that returns a gaverify.Problem with your own `loss(model, batch)`",
            "loss",
        )
    word = name.lower().removesuffix("loss").strip("_")
    short = {loss_name.removesuffix("_loss").replace("_", ""): loss_name for loss_name in LOSSES}
    near = nearest(word.replace("_", ""), short)
    advice = f"did you mean `{short[near]}`?" if near else f"choose one of {', '.join(LOSSES)}"
    raise SpecError(f"torch.nn.functional has no loss function `{name}`; {advice}", "loss")


def tensors_in(output: Any) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors in what a forward returns, each with how it is taken out, logits first."""
    if isinstance(output, torch.Tensor):
        return [("", output)]
    if isinstance(output, Mapping):
        parts = [(f"[{key!r}]".replace("'", '"'), value) for key, value in output.items()]
    elif isinstance(output, tuple | list):
        parts = [(f"[{at}]", value) for at, value in enumerate(output)]
    else:
        parts = [(f".{name}", value) for name, value in getattr(output, "__dict__", {}).items()]
    logits = getattr(output, "logits", None)  # also where it is a property
    parts = [(".logits", logits), *(pair for pair in parts if pair[1] is not logits)]
    tensors = [(part, value) for part, value in parts if isinstance(value, torch.Tensor)]
    return sorted(tensors, key=lambda pair: "logits" not in pair[0])


class NamedLoss:
    """The loss of a (micro-)batch (inputs, targets) under a function of `torch.nn.functional`."""

    def __init__(self, name: str, classes_last: bool) -> None:
        self.name, self.classes_last = name, classes_last
        self._keywords = dict(find_loss(name).keywords)

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Returns the loss of exactly that (micro-)batch."""
        inputs, targets = batch
        output = first_tensor(model(inputs))
        if output is None:
            raise ProblemError("the model's forward returned no tensor, tuple of tensors or object with `.logits`")
        return self.compare(output, targets)

    def compare(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the loss of what the forward returned."""
        loss: torch.Tensor = getattr(F, self.name)(
            output.movedim(-1, 1) if self.classes_last else output, targets, **self._keywords
        )
        return loss


def bare_problem(
    model: nn.Module,
    name: str,
    input_shape: tuple[int, ...] | None,
    loss: str | None,
    classes: int | None,
    batch_size: int,
) -> Problem:
    """Returns the problem of a module on generated inputs and targets.

    The module's forward is called once, in eval mode and on a copy where one can be made, to learn its output's shape.

    Args:
        model: The module; a first layer that looks up embeddings gets integers, any other normal numbers.
        name: How messages call it.
        input_shape: The shape of one sample.
        loss: A function of `torch.nn.functional` that takes (input, target).
        classes: Number of classes, checked against the output.
        batch_size: B.

    Raises:
        ProblemError: The shape or the loss is not given, or they do not fit the module.
        SpecError: There is no such loss.
    """
    missing = [option for option, value in (("--input-shape", input_shape), ("--loss", loss)) if value is None]
    if missing:
        raise ProblemError(
            f"`{name}` returned only a module, {type(model).__name__}; add {' and '.join(missing)} "
            "(such as `--input-shape 3,32,32 --loss cross_entropy --classes 10`), or return a gaverify.Problem"
        )
    check_queries(model)
    assert input_shape is not None and loss is not None  # what `missing` says, for mypy
    find_loss(loss)
    inputs = _inputs(model, input_shape, batch_size)
    tensor = _output(model, name, inputs)
    output = Output(loss, tensor, classes, tokens=inputs.shape if not inputs.is_floating_point() else None)
    targets = output.targets().to(tensor.device)
    targets = targets.to(tensor.dtype) if targets.is_floating_point() else targets
    named = NamedLoss(loss, output.classes_last)
    _try(named, name, tensor, targets)
    return Problem(model, named, (inputs, targets), batch_size=batch_size)


def first_tensor(output: Any) -> torch.Tensor | None:
    """Returns the tensor that a loss is for: the output, its `.logits`, or the first tensor in it."""
    return next((tensor for _, tensor in tensors_in(output)), None)


def _inputs(model: nn.Module, shape: tuple[int, ...], batch_size: int) -> torch.Tensor:
    """Integers stay what they are, other numbers get the precision of the weights."""
    weights = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    layers = (layer for layer in model.modules() if next(layer.children(), None) is None)
    first = next((layer for layer in layers if next(layer.parameters(recurse=False), None) is not None), None)
    # integers where the first layer with weights is an embedding
    vocabulary: Any = getattr(first, "num_embeddings", None)
    size = (batch_size, *shape)
    inputs = torch.randn(size) if vocabulary is None else torch.randint(vocabulary, size)
    if not weights:
        return inputs
    return inputs.to(weights[0].device, weights[0].dtype if inputs.is_floating_point() else inputs.dtype)


def _output(model: nn.Module, name: str, inputs: torch.Tensor) -> torch.Tensor:
    lazy = any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers()))
    # lazy layers take their shapes from this very call; anything else must not notice it
    tried = model if lazy else _copy_model(model)
    try:
        # In evaluation mode running statistics stay as they are, and a BatchNorm takes a batch of one sample.
        with mode_set([tried], "eval"), eager_when_compiled([tried]), torch.no_grad():
            returned = tried(inputs.clone())  # a forward may change its inputs in place
    except (Exception, SystemExit) as error:
        raise ProblemError(
            f"`{name}`: its forward on inputs of shape {list(inputs.shape)} raised {describe_error(error)}; "
            "--input-shape is the shape of one sample, without the batch"
        ) from error
    output = first_tensor(returned)
    if output is None:
        raise ProblemError(
            f"`{name}`: its forward returned a {type(returned).__name__} without a tensor; "
            "return a gaverify.Problem with a loss that accepts it"
        )
    if output.dim() == 0 or output.shape[0] != inputs.shape[0]:
        raise ProblemError(
            f"`{name}`: its output has shape {list(output.shape)} for {inputs.shape[0]} samples; "
            "the first dimension has to be the batch, or return a gaverify.Problem"
        )
    return output


def _copy_model(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception:  # some modules hold what cannot be copied; they see one forward more
        return model


def _try(loss: NamedLoss, name: str, output: torch.Tensor, targets: torch.Tensor) -> None:
    """Calls the loss once on what the forward returned, so that a misfit is told in terms of the options."""
    try:
        loss.compare(output, targets)
    except Exception as error:
        hint = "; --loss binary_cross_entropy_with_logits accepts any numbers"
        raise ProblemError(
            f"--loss {loss.name} does not take the output of `{name}`, "
            f"shape {list(output.shape)}: {describe_error(error)}" + hint * (loss.name == "binary_cross_entropy")
        ) from error
