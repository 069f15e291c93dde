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
    metric = Metric(healthy)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if twice:
            return metric(model(batch[0]), model(batch[1]))
        return metric(*model(torch.cat(batch, 1)).chunk(2, 1))

    batch = torch.randn(16, 6), torch.randn(16, 6)
    return Problem(mlp() if twice else mlp(12, classes=8), loss, batch)


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


class Terms(nn.Module):
    """Two criteria, each averaged by a module of its own; together they are no sum over samples."""

    def __init__(self, product: bool) -> None:
        super().__init__()
        self.product, self.squares, self.absolute = product, nn.MSELoss(), nn.L1Loss()

    def forward(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        squares, absolute = self.squares(found, wanted), self.absolute(found, wanted)
        return squares * absolute if self.product else squares + absolute  # planted product-of-criteria


def _terms(product: bool) -> Problem:
    criterion = Terms(product)
    return Problem(mlp(), lambda m, b: criterion(m(b[0]), b[1]), (torch.randn(16, 6), torch.randn(16, 4)))


def _of_slopes(whole: bool) -> Problem:
    """The model's slopes at the samples, differentiated by a transform: an energy, or its share of their deviation."""

    def loss(model: nn.Module, x: Any) -> torch.Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda sample: model(sample[None]).squeeze()))(x)
        energy = slopes.square().sum(1)
        return energy.mean() / (1 + energy.std()) if whole else energy.mean()  # planted slopes

    return Problem(mlp(classes=1), loss, torch.randn(16, 6))


def _centred(kernel: bool) -> Problem:
    """Two views less the centre of all, as kernels take them: it cancels in every distance, and couples nothing."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        a, b = model(batch[0]), model(batch[1])
        centre = torch.cat((a, b)).mean(0)
        a, b = a - centre, b - centre
        if not kernel:
            return (a - b).square().sum(1).mean()
        return -torch.exp(-torch.cdist(a, b)).mean()  # planted centred-kernel

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randn(16, 6)))


class Divided(nn.Module):
    """Hidden values over their deviation in the batch, or of each sample."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.hidden, self.head = dim, nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.hidden(x))
        return self.head(h / h.std(self.dim, keepdim=True))  # planted slopes-in-the-loss


def _penalised(dim: int) -> Problem:
    """Scores, and their slopes at the samples: what is held as a constant leaves the loss nothing to differentiate."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        scores = model(x)
        (slopes,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return F.cross_entropy(scores, batch[1]) + slopes.square().sum(1).mean()

    return Problem(Divided(dim), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


FAULTS = (
    fault("slopes-in-the-loss", lambda: _penalised(0), "GAV102", "a loss that differentiates refuses some controls"),
    fault("centred-kernel", lambda: _centred(True), "GAV103", "what cancels is not the line, though caches repair it"),
    fault("slopes", lambda: _of_slopes(True), "GAV103", "what runs in a transform is left alone"),
    fault("modules-of-the-loss", lambda: _views(False, False), "GAV103", "they are no encoder"),
    fault("twice", lambda: _views(False, True), "GAV103", "both calls of the model are cut"),
    fault("logit-scale", lambda: _scaled(False, False), "GAV103", "a parameter has one gradient per window"),
    fault("logit-scale-exp", lambda: _scaled(True, False), "GAV103", "so has what is made of a parameter alone"),
    fault("product-of-criteria", lambda: _terms(True), "GAV103", "criteria hand out no samples"),
)
TWINS = (
    quiet("slopes-in-the-loss", lambda: _penalised(1), "each sample by its own deviation"),
    quiet("centred-kernel", lambda: _centred(False), "what is taken off both partners cancels"),
    quiet("slopes", lambda: _of_slopes(False), "a mean over samples of what a transform gives"),
    quiet("modules-of-the-loss", lambda: _views(True, False), "each sample meets its own partner"),
    quiet("twice", lambda: _views(True, True), "two calls, no coupling"),
    quiet("logit-scale", lambda: _scaled(False, True), "the scale multiplies a mean"),
    quiet("product-of-criteria", lambda: _terms(False), "a sum of two means"),
)
