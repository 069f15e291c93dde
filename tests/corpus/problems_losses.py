"""Losses that call modules themselves, and models that hand out parameters: the cached gradient has to fit them.

Shapes: B = 16 samples of D = 6 features, two views of each where the loss compares them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from problems import Problem, fault, mlp, quiet
from torch import nn


class Cosine(nn.Module):
    """A distance: the matrix of all similarities, or of each sample with its own partner."""

    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.healthy = healthy

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
        return (a * b).sum(1) if self.healthy else a @ b.T  # planted modules-of-the-loss


class Reducer(nn.Module):
    """Averages the losses of the samples."""

    def forward(self, losses: torch.Tensor) -> torch.Tensor:
        return losses.mean()


class Metric(nn.Module):
    """A loss made of modules, as libraries for metric learning build them; the last two see what samples met in."""

    def __init__(self, healthy: bool) -> None:
        super().__init__()
        self.healthy = healthy
        self.distance, self.temper, self.reducer = Cosine(healthy), nn.Softplus(), Reducer()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        near = self.temper(5 * self.distance(a, b))
        if self.healthy:
            return self.reducer(-near)
        return self.reducer(F.cross_entropy(near, torch.arange(len(near)), reduction="none"))


def _views(healthy: bool, twice: bool) -> Problem:
    torch.manual_seed(0)
    metric = Metric(healthy)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if twice:
            return metric(model(batch[0]), model(batch[1]))
        return metric(*model(torch.cat(batch, 1)).chunk(2, 1))

    batch = torch.randn(16, 6), torch.randn(16, 6)
    return Problem(mlp() if twice else mlp(12, classes=8), loss, batch)


def modules_of_the_loss() -> Problem:
    return _views(False, False)


def model_called_twice() -> Problem:
    return _views(False, True)


def modules_of_the_loss_alone() -> Problem:
    return _views(True, False)


def model_called_twice_alone() -> Problem:
    return _views(True, True)


class Scaled(nn.Module):
    """Two encoders, and the scale of their similarities as an output: a parameter, or made from one."""

    def __init__(self, exp: bool) -> None:
        super().__init__()
        self.exp = exp
        self.image, self.text = mlp(), mlp()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = self.logit_scale.exp() if self.exp else self.logit_scale
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), scale


def _scaled(exp: bool, healthy: bool) -> Problem:
    torch.manual_seed(0)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        image, text, scale = model(*batch)
        if healthy:
            return -(scale * (image * text).sum(1)).mean()
        logits = scale * image @ text.T
        return F.cross_entropy(logits, torch.arange(len(logits)))

    return Problem(Scaled(exp), loss, (torch.randn(16, 6), torch.randn(16, 6)))


def parameter_handed_out() -> Problem:
    return _scaled(False, False)


def scale_handed_out() -> Problem:
    return _scaled(True, False)


def parameter_handed_out_alone() -> Problem:
    return _scaled(False, True)


class Terms(nn.Module):
    """Two criteria, each averaged by a module of its own; together they are no sum over samples."""

    def __init__(self, product: bool) -> None:
        super().__init__()
        self.product, self.squares, self.absolute = product, nn.MSELoss(), nn.L1Loss()

    def forward(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        squares, absolute = self.squares(found, wanted), self.absolute(found, wanted)
        return squares * absolute if self.product else squares + absolute  # planted product-of-criteria


def _terms(product: bool) -> Problem:
    torch.manual_seed(0)
    criterion = Terms(product)
    return Problem(mlp(), lambda m, b: criterion(m(b[0]), b[1]), (torch.randn(16, 6), torch.randn(16, 4)))


def product_of_criteria() -> Problem:
    return _terms(True)


def sum_of_criteria() -> Problem:
    return _terms(False)


def _of_slopes(whole: bool) -> Problem:
    """The model's slopes at the samples, differentiated by a transform: an energy, or its share of their deviation."""
    torch.manual_seed(0)

    def loss(model: nn.Module, x: Any) -> torch.Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda sample: model(sample[None]).squeeze()))(x)
        energy = slopes.square().sum(1)
        return energy.mean() / (1 + energy.std()) if whole else energy.mean()  # planted slopes

    return Problem(mlp(classes=1), loss, torch.randn(16, 6))


def slopes_over_deviation() -> Problem:
    return _of_slopes(True)


def slopes_alone() -> Problem:
    return _of_slopes(False)


FAULTS = (
    fault("slopes", slopes_over_deviation, "GAV103", "what runs in a transform is left alone", planted=True),
    fault("modules-of-the-loss", modules_of_the_loss, "GAV103", "they are no encoder", planted=True),
    fault("twice", model_called_twice, "GAV103", "both calls of the model are cut"),
    fault("logit-scale", parameter_handed_out, "GAV103", "a parameter has one gradient per window"),
    fault("logit-scale-exp", scale_handed_out, "GAV103", "so has what is made of a parameter alone"),
    fault(
        "product-of-criteria",
        product_of_criteria,
        "GAV103",
        "criteria hand out no samples",
        planted=True,
    ),
)
TWINS = (
    quiet("slopes", slopes_alone, "a mean over samples of what a transform gives"),
    quiet("modules-of-the-loss", modules_of_the_loss_alone, "each sample meets its own partner"),
    quiet("twice", model_called_twice_alone, "two calls, no coupling"),
    quiet("logit-scale", parameter_handed_out_alone, "the scale multiplies a mean"),
    quiet("product-of-criteria", sum_of_criteria, "a sum of two means"),
)
