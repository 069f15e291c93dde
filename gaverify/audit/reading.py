"""Reads what a recorded run left: events at once, tensors when they are asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from gaverify.audit.events import Event
from gaverify.audit.job import Role


@dataclass(frozen=True)
class Run:
    """One recorded run on disk."""

    role: Role
    folder: Path
    seconds: float

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        """The closing record."""
        return json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Everything that the script did, in order."""
        with (self.folder / "events.jsonl").open(encoding="utf-8") as stream:
            return tuple(Event(**json.loads(line)) for line in stream)

    @property
    def updates(self) -> int:
        """How many updates it made."""
        return int(self.meta["updates"])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter of every optimizer with its shape."""
        parameters = {key: tuple(shape) for key, shape in self.meta["parameters"].items()}
        return {name: parameters[key] for key, name in _display(list(parameters)).items()}

    def gradients(self, update: int) -> dict[str, torch.Tensor]:
        """Returns the gradients of an update by parameter name, mapped from disk rather than read."""
        found: dict[str, torch.Tensor] = {}
        for path in sorted(self.folder.glob(f"gradients-{update}-*.pt")):
            found |= torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        names = _display(list(self.meta["parameters"]))
        return {names.get(key, key): gradient for key, gradient in found.items()}

    def samples(self, update: int) -> dict[str, Any]:
        """Returns the sampled elements of an update's window."""
        return torch.load(self.folder / f"samples-{update}.pt", weights_only=True)  # type: ignore[no-any-return]

    def rows(self, update: int) -> list[dict[str, Any]]:
        """Returns the fingerprints of the rows of an update's forwards."""
        return torch.load(self.folder / f"rows-{update}.pt", weights_only=True)  # type: ignore[no-any-return]

    @cached_property
    def disk_bytes(self) -> int:
        """Bytes of everything that the run stored."""
        return sum(path.stat().st_size for path in self.folder.glob("*.pt"))


def _display(keys: list[str]) -> dict[str, str]:
    """Names for people: the model's number only where there are several, or where two names would collide."""
    models = {key.partition(":")[0] for key in keys if not key.startswith("-")}
    names = {}
    for key in keys:
        model, _, name = key.partition(":")
        names[key] = name if len(models) < 2 or model == "-" else f"{model}.{name}"
    return names
