"""Makes a problem of a bare module: a batch for its input, a named loss of `torch.nn.functional`, targets for both.

Shapes: B samples, C classes, D any further dimensions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from gaverify.errors import ProblemError, SpecError, nearest
from gaverify.loading.importing import described
from gaverify.passes.isolation import eager_when_compiled, mode_set
from gaverify.passes.problem import Problem

# What takes more than an input and a target; the value says what.
_MORE = {
    "cosine_embedding_loss": "two inputs and a target",
    "ctc_loss": "lengths",
    "gaussian_nll_loss": "a variance",
    "margin_ranking_loss": "two inputs and a target",
    "triplet_margin_loss": "an anchor, a positive and a negative",
    "triplet_margin_with_distance_loss": "an anchor, a positive and a negative",
}


@dataclass(frozen=True)
class Target:
    """What targets have to fit.

    Args:
        loss: The name of the loss.
        output: What the model returned, batch first.
        classes: What `--classes` said.
        tokens: Shape of the inputs where they are integers.
    """

    loss: str
    output: torch.Tensor
    classes: int | None
    tokens: torch.Size | None = None

    @property
    def classes_last(self) -> bool:
        """Whether the classes are the last dimension, as in the (B, T, V) of a language model, and not the second."""
        if self.output.dim() < 3 or self.loss not in ("cross_entropy", "nll_loss"):
            return False
        if self.classes is not None and self.output.shape[-1] != self.output.shape[1]:
            return self.classes == self.output.shape[-1]
        return self.tokens == self.output.shape[:-1]

    def checked_classes(self) -> int:
        """Returns C, the size of the output's class dimension.

        Raises:
            ProblemError: There is no such dimension, or `--classes` is another number.
        """
        shape = list(self.output.shape)
        if len(shape) < 2:
            raise ProblemError(f"--loss {self.loss} needs an output of shape [batch, classes, …], got {shape}")
        dimension = len(shape) - 1 if self.classes_last else 1
        if self.classes is not None and self.classes != shape[dimension]:
            raise ProblemError(
                f"--classes {self.classes}: the output of the model has shape {shape}, that is {shape[dimension]} "
                f"classes; write --classes {shape[dimension]}, or change the model's last layer"
            )
        return shape[dimension]


@dataclass(frozen=True)
class LossKind:
    """A loss, the targets that it takes, and whether these count classes."""

    function: Callable[..., torch.Tensor]
    make: Callable[[Target], torch.Tensor]
    counts_classes: bool = False

    def targets(self, target: Target) -> torch.Tensor:
        """Returns random targets.

        Raises:
            ProblemError: The output, or `--classes`, does not fit the loss.
        """
        if target.classes is not None and not self.counts_classes:
            raise ProblemError(f"--classes {target.classes}: {target.loss} has no classes; leave it out")
        return self.make(target)


def find_loss(name: str) -> LossKind:
    """Returns the loss of that name.

    Raises:
        SpecError: There is none, or it takes more than an input and a target.
    """
    if name in _KINDS:
        return _KINDS[name]
    if name in _MORE:
        raise SpecError(
            f"`{name}` takes {_MORE[name]} beside the model's output; "
            "write a factory that returns a gaverify.Problem with your own `loss(model, batch)`",
            "loss",
        )
    word = name.lower().removesuffix("loss").strip("_")
    short = {known.removesuffix("_loss").replace("_", ""): known for known in _KINDS}
    near = nearest(word.replace("_", ""), short)
    advice = f"did you mean `{short[near]}`?" if near else f"they are {', '.join(_KINDS)}"
    raise SpecError(f"torch.nn.functional has no loss `{name}` of an input and a target; {advice}", "loss")


def _like_output(target: Target) -> torch.Tensor:
    return torch.randn(target.output.shape).to(target.output.dtype)


def _class_indices(target: Target) -> torch.Tensor:
    """(B,) for an output (B, C), (B, D…) for (B, C, D…) or (B, D…, C)."""
    classes = target.checked_classes()
    shape = target.output.shape
    return torch.randint(classes, shape[:-1] if target.classes_last else (shape[0], *shape[2:]))


def _zeros_and_ones(target: Target) -> torch.Tensor:
    return torch.randint(2, target.output.shape).to(target.output.dtype)


def _zeros_and_ones_per_class(target: Target) -> torch.Tensor:
    target.checked_classes()
    return _zeros_and_ones(target)


def _signs(target: Target) -> torch.Tensor:
    return 2 * _zeros_and_ones(target) - 1


def _probabilities(target: Target) -> torch.Tensor:
    """Distributions over the second dimension, of which `kl_div` takes the logarithms as the model's output."""
    return torch.randn(target.output.shape).softmax(min(1, target.output.dim() - 1)).to(target.output.dtype)


def _counts(target: Target) -> torch.Tensor:
    return torch.poisson(torch.ones(target.output.shape)).to(target.output.dtype)


def _class_lists(target: Target) -> torch.Tensor:
    """Per sample one to C classes in any order, then −1: `multilabel_margin_loss` reads up to the first −1."""
    classes = target.checked_classes()
    size = target.output.shape[0]
    order = torch.rand(size, classes).argsort(dim=1)
    return order.masked_fill(torch.arange(classes) >= torch.randint(1, classes + 1, (size, 1)), -1)


def _kl_div(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.kl_div(output, targets, reduction="batchmean")  # its "mean" is none, as PyTorch warns at every call


_KINDS = {
    "cross_entropy": LossKind(F.cross_entropy, _class_indices, counts_classes=True),
    "nll_loss": LossKind(F.nll_loss, _class_indices, counts_classes=True),
    "multi_margin_loss": LossKind(F.multi_margin_loss, _class_indices, counts_classes=True),
    "multilabel_margin_loss": LossKind(F.multilabel_margin_loss, _class_lists, counts_classes=True),
    "multilabel_soft_margin_loss": LossKind(
        F.multilabel_soft_margin_loss, _zeros_and_ones_per_class, counts_classes=True
    ),
    "mse_loss": LossKind(F.mse_loss, _like_output),
    "l1_loss": LossKind(F.l1_loss, _like_output),
    "smooth_l1_loss": LossKind(F.smooth_l1_loss, _like_output),
    "huber_loss": LossKind(F.huber_loss, _like_output),
    "binary_cross_entropy": LossKind(F.binary_cross_entropy, _zeros_and_ones),
    "binary_cross_entropy_with_logits": LossKind(F.binary_cross_entropy_with_logits, _zeros_and_ones),
    "kl_div": LossKind(_kl_div, _probabilities),
    "poisson_nll_loss": LossKind(F.poisson_nll_loss, _counts),
    "soft_margin_loss": LossKind(F.soft_margin_loss, _signs),
    "hinge_embedding_loss": LossKind(F.hinge_embedding_loss, _signs),
}


DEFAULT_BATCH_SIZE = 8


class NamedLoss:
    """The loss of a (micro-)batch (inputs, targets) under a function of `torch.nn.functional`."""

    def __init__(self, function: Callable[..., torch.Tensor], classes_last: bool) -> None:
        self.function, self.classes_last = function, classes_last

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Returns the loss of exactly that (micro-)batch."""
        inputs, targets = batch
        output = first_tensor(model(inputs))
        if output is None:
            raise ProblemError("the model's forward returned no tensor, tuple of tensors or object with `.logits`")
        return self.function(output.movedim(-1, 1) if self.classes_last else output, targets)


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
        input_shape: Of one sample.
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
            f"`{name}` returned a bare {type(model).__name__}, which needs {' and '.join(missing)} as well "
            "(such as `--input-shape 3,32,32 --loss cross_entropy --classes 10`); or return a gaverify.Problem"
        )
    assert input_shape is not None and loss is not None  # what `missing` says, for mypy
    kind = find_loss(loss)
    inputs = _inputs(model, (batch_size, *input_shape))
    output = _output(model, name, inputs)
    target = Target(loss, output, classes, tokens=inputs.shape if not inputs.is_floating_point() else None)
    targets = kind.targets(target).to(output.device)
    function = NamedLoss(kind.function, target.classes_last)
    _try(function, name, loss, output, targets)
    return Problem(model, function, (inputs, targets), batch_size=batch_size)


def first_tensor(output: Any) -> torch.Tensor | None:
    """Returns the tensor that a loss is for: the output, its `.logits`, or the first tensor in it."""
    if isinstance(output, torch.Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return logits
    if isinstance(output, Mapping):
        entries = [output["logits"]] if "logits" in output else list(output.values())
    else:
        entries = list(output) if isinstance(output, tuple | list) else list(getattr(output, "__dict__", {}).values())
    return next((entry for entry in entries if isinstance(entry, torch.Tensor)), None)


def _inputs(model: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    """Integers below the vocabulary for a model that starts with an embedding, else normal numbers of its precision."""
    parameters = [p for p in model.parameters() if p.is_floating_point() or p.is_complex()]
    device = parameters[0].device if parameters else torch.device("cpu")
    layers = [layer for layer in model.modules() if next(layer.children(), None) is None]
    first = next((layer for layer in layers if next(layer.parameters(recurse=False), None) is not None), None)
    if isinstance(first, nn.Embedding | nn.EmbeddingBag):
        return torch.randint(first.num_embeddings, shape).to(device)
    return torch.randn(shape).to(device, parameters[0].dtype if parameters else torch.float32)


def _output(model: nn.Module, name: str, inputs: torch.Tensor) -> torch.Tensor:
    lazy = any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers()))
    # lazy layers take their shapes from this very call; anything else must not notice it
    tried = model if lazy else _copied(model)
    try:
        with mode_set([tried], "eval"), eager_when_compiled([tried]), torch.no_grad():
            returned = tried(inputs.clone())
    except (Exception, SystemExit) as error:
        raise ProblemError(
            f"`{name}`: its forward on inputs of shape {list(inputs.shape)} raised {described(error)}; "
            "--input-shape is the shape of one sample, without the batch"
        ) from error
    output = first_tensor(returned)
    if output is None:
        raise ProblemError(
            f"`{name}`: its forward returned a {type(returned).__name__} without a tensor; "
            "return a gaverify.Problem with a loss that knows what to do with it"
        )
    if output.dim() == 0 or output.shape[0] != inputs.shape[0]:
        raise ProblemError(
            f"`{name}`: its output has shape {list(output.shape)} for {inputs.shape[0]} samples; "
            "the first dimension has to be the batch, or return a gaverify.Problem"
        )
    return output


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception:  # some modules hold what cannot be copied; they see one forward more
        return model


def _try(loss: NamedLoss, name: str, word: str, output: torch.Tensor, targets: torch.Tensor) -> None:
    """Calls the loss once on what the forward returned, so that a misfit is told in terms of the options."""
    shaped = output.movedim(-1, 1) if loss.classes_last else output
    try:
        loss.function(shaped, targets)
    except Exception as error:
        hint = "; --loss binary_cross_entropy_with_logits takes any numbers" if word == "binary_cross_entropy" else ""
        raise ProblemError(
            f"--loss {word} does not take the output of `{name}`, shape {list(output.shape)}: {described(error)}{hint}"
        ) from error
