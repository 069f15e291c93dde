"""Comparing 5,000 small parameters against a forward and backward over them; on a GPU also the synchronisations."""

from __future__ import annotations

import measuring
import torch
from torch import nn

from gaverify.comparison import compare
from gaverify.precision import unit_roundoff


def main() -> None:
    """Measures 5,000 parameters of 32 and 1,024 elements, on batches of 512 and 4,096 rows."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(2500))).to(device)
    for batch in (512, 4096):
        _measured(model, torch.randn(batch, 32, device=device), device)


def _measured(model: nn.Module, inputs: torch.Tensor, device: torch.device) -> None:
    def both() -> None:
        model.zero_grad()
        model(inputs).square().mean().backward()
        _finished(device)

    both()
    reference = {name: parameter.grad for name, parameter in model.named_parameters()}
    accumulated = {name: gradient.clone() for name, gradient in reference.items()}

    def compared() -> None:
        compare(accumulated, reference, unit=unit_roundoff(torch.float32))
        _finished(device)

    found, ours, theirs = measuring.ratio(compared, both, 15)
    figure = f"{found:.1%} ({ours * 1e3:.1f} ms : {theirs * 1e3:.1f} ms)"
    measuring.show(f"compare 5,000 parameters : both passes of {len(inputs)} rows", figure, "< 5 %")


def _finished(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
