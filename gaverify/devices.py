"""Device words: `cpu`, `cuda`, `cuda:1`, `mps`, `auto`."""

from __future__ import annotations

import torch

from gaverify.errors import ProblemError


def available_devices() -> tuple[str, ...]:
    """Returns the device words that work on this machine."""
    cuda = tuple(f"cuda:{index}" for index in range(torch.cuda.device_count())) if torch.cuda.is_available() else ()
    return ("cpu", *cuda, *(("mps",) if torch.backends.mps.is_available() else ()))


def resolve_device(word: str | torch.device | None) -> torch.device | None:
    """Returns the device that `word` names; None stays None (where the model is).

    Raises:
        ProblemError: It is not a device, or not on this machine; the message says which are.
    """
    if word is None:
        return None
    there = available_devices()
    if word == "auto":
        return torch.device(there[1] if len(there) > 1 else "cpu")
    try:
        device = torch.device(word)
    except (RuntimeError, TypeError) as error:
        raise ProblemError(f"unknown device `{word}`; on this machine there are: {', '.join(there)}, auto") from error
    if device.type == "cuda" and device.index is None and any(name.startswith("cuda") for name in there):
        return torch.device("cuda", torch.cuda.current_device())
    if str(device) not in there:
        raise ProblemError(f"there is no device `{word}` here; on this machine there are: {', '.join(there)}, auto")
    return device
