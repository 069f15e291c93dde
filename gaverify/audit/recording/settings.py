"""What an optimizer was set to when it stepped: rates, decay, momentum and how many steps it counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def settings_of(optimizer: Any) -> list[dict[str, float]]:
    """Returns the numbers among the settings of every parameter group; pairs such as Adam's betas one by one."""
    return [_numbers(group) for group in optimizer.param_groups]


def rates_of(optimizer: Any) -> list[float]:
    """Returns the learning rates of the groups that have one."""
    return [group["lr"] for group in settings_of(optimizer) if "lr" in group]


def counted_steps(optimizer: Any) -> float | None:
    """Returns how many steps the optimizer itself has counted; None where it counts none."""
    for state in list(getattr(optimizer, "state", {}).values())[:1]:
        step = state.get("step") if isinstance(state, Mapping) else None
        return _number(step)
    return None


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in group.items():
        if name == "params":
            continue
        parts = {f"{name}[{at}]": part for at, part in enumerate(value)} if isinstance(value, (tuple, list)) else {}
        for label, part in (parts or {name: value}).items():
            number = _number(part)
            if number is not None:
                found[label] = number
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta else None
    return float(value) if isinstance(value, (int, float)) else None
