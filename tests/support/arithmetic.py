"""Training as people arrange it: autocast, half-precision weights, scaled losses, layouts, adapters, compilation.

Every arrangement has a right loss, a summed one (a wrong scale), and a model with BatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gaverify
from gaverify import Outcome, Problem, Verdict

Loss = Callable[[nn.Module, Any], torch.Tensor]
FAULTS = {"mean": [], "sum": ["GAV201"], "batch norm": ["GAV101"]}


def network(norm: bool) -> nn.Sequential:
    """Three linear layers' worth of network for 6 features and 4 classes."""
    torch.manual_seed(0)
    middle: nn.Module = nn.BatchNorm1d(16, device="cpu") if norm else nn.Identity()
    return nn.Sequential(nn.Linear(6, 16, device="cpu"), middle, nn.Tanh(), nn.Linear(16, 4, device="cpu"))


def convolutions(norm: bool) -> nn.Sequential:
    """Convolutions in the channels-last layout, for images of 3 × 8 × 8."""
    torch.manual_seed(0)
    middle: nn.Module = nn.BatchNorm2d(8, device="cpu") if norm else nn.Identity()
    layers = [nn.Conv2d(3, 8, 3, device="cpu"), middle, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 4, device="cpu")).to(memory_format=torch.channels_last)


class Adapter(nn.Module):
    """A low-rank update beside a frozen layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features, device="cpu"))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, device="cpu") / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the base's output in its own precision, and the adapter's."""
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + x @ self.down.T @ self.up.T


def adapted(norm: bool, base: torch.dtype = torch.float32) -> nn.Module:
    """The network with both layers frozen in `base` precision and an adapter beside each."""
    model = network(norm)
    for at in (0, 3):
        layer = model[at]
        assert isinstance(layer, nn.Linear)
        model[at] = Adapter(layer.to(base))
    return model


def samples(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 16 inputs of a shape and their classes."""
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randn(16, *shape, generator=generator, device="cpu"), torch.randint(
        4, (16,), generator=generator, device="cpu"
    )


def plain(reduction: str) -> Loss:
    """The usual loss."""
    return lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction=reduction)


def in_autocast(dtype: torch.dtype) -> Callable[[str], Loss]:
    """A loss that switches autocast on itself, on the device of its batch."""

    def make(reduction: str) -> Loss:
        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            with torch.autocast(batch[0].device.type, dtype=dtype):
                return plain(reduction)(model, batch)

        return loss

    return make


def scaled(reduction: str) -> Loss:
    """A loss scaled as a `GradScaler` scales it, but by a power of two that float16 can hold."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        scaler = torch.amp.GradScaler(batch[0].device.type, init_scale=256.0)
        return scaler.scale(plain(reduction)(model, batch))

    return loss


def in_layout(reduction: str) -> Loss:
    """A loss that insists on the batch's layout, which cutting micro-batches must keep."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        assert batch[0].is_contiguous(memory_format=torch.channels_last), batch[0].stride()
        return plain(reduction)(model, batch)

    return loss


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Images in the channels-last layout."""
    inputs, classes = samples(3, 8, 8)
    return inputs.to(memory_format=torch.channels_last), classes


def halves() -> tuple[torch.Tensor, torch.Tensor]:
    """The samples in bfloat16."""
    inputs, classes = samples(6)
    return inputs.to(torch.bfloat16), classes


@dataclass(frozen=True)
class Arrangement:
    """A model with or without BatchNorm, a loss by its reduction, a batch, and options of `verify`."""

    model: Callable[[bool], nn.Module] = network
    loss: Callable[[str], Loss] = plain
    batch: Callable[[], Any] = lambda: samples(6)
    options: dict[str, Any] = field(default_factory=dict)

    def verified(self, fault: str, device: str) -> Verdict:
        """Verifies one of `FAULTS` on a device."""
        model = self.model(fault == "batch norm")
        loss = self.loss("sum" if fault == "sum" else "mean")
        return gaverify.verify(Problem(model, loss, self.batch()), steps=4, device=device, **self.options)


ARRANGEMENTS = {
    "autocast to bfloat16": Arrangement(options={"autocast": "bfloat16"}),
    "autocast to float16": Arrangement(options={"autocast": "float16"}),
    "autocast in the loss": Arrangement(loss=in_autocast(torch.bfloat16)),
    "bfloat16 weights": Arrangement(model=lambda norm: network(norm).to(torch.bfloat16), batch=halves),
    "a scaled loss": Arrangement(loss=scaled),
    "channels last": Arrangement(model=convolutions, loss=in_layout, batch=images),
    "channels last in autocast": Arrangement(model=convolutions, batch=images, options={"autocast": "bfloat16"}),
    "adapters": Arrangement(model=adapted),
    "adapters on bfloat16": Arrangement(model=lambda norm: adapted(norm, torch.bfloat16)),
}
COMPILED = {
    "compiled model": Arrangement(model=lambda norm: torch.compile(network(norm), backend="aot_eager")),  # type: ignore[arg-type,return-value]
    "compiled loss": Arrangement(loss=lambda reduction: torch.compile(plain(reduction), backend="aot_eager")),
}


def check(arrangement: Arrangement, fault: str, device: str) -> None:
    """Fails unless the fault is found and proven, and the right arrangement is quiet."""
    verdict = arrangement.verified(fault, device)
    found = [(finding.code, finding.proven) for finding in verdict.findings if finding.severity == "fault"]
    assert found == [(code, True) for code in FAULTS[fault]], verdict.findings
    assert verdict.outcome is (Outcome.DIVERGENT if found else Outcome.EQUIVALENT)
