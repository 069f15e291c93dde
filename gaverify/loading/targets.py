"""Targets that fit a model's output and a loss of `torch.nn.functional`.

Shapes: B samples, C classes, D any further dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from gaverify.errors import ProblemError, SpecError, nearest

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
