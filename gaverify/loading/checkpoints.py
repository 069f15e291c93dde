"""Reads checkpoints for the factory that `gaverify init` writes; says why a file is none that it can load."""

from __future__ import annotations

import re
import warnings
import zipfile
from pathlib import PurePath
from typing import Any

import torch

from gaverify.errors import SpecError, is_out_of_memory

_MOST_LINES = 10


def tensors_of(path: str) -> list[str]:
    """Returns a line for each tensor of a checkpoint, at most ten.

    Raises:
        SpecError: The file is damaged, holds a scripted or exported program, or no tensors.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about TorchScript, which is refused
            # Only weights: a pickle may run any code, and the file may come from anywhere.
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise SpecError(_refusal(path, error), "model") from error
    tensors = _named_tensors(saved, "")
    if not tensors:
        raise SpecError(
            f"`{path}` holds no tensors; give what `torch.save(model.state_dict(), path)` wrote, or the model's class",
            "model",
        )
    more = [f"… and {len(tensors) - _MOST_LINES} more"] if len(tensors) > _MOST_LINES else []
    return [f"{name}: {list(tensor.shape)}" for name, tensor in tensors[:_MOST_LINES]] + more


def _refusal(path: str, error: Exception) -> str:
    """Why `torch.load` refuses a file, and what to give instead."""
    if isinstance(error, OSError):
        return f"`{path}` cannot be read: {error.strerror or error}"
    if PurePath(path).suffix == ".safetensors":
        return f"`{path}` is a safetensors file; convert it: `torch.save(load_file(path), 'model.pt')`"
    # Checkpoints, TorchScript archives and exported programs are all zip files: their members tell them apart.
    members = {PurePath(name).name for name in zipfile.ZipFile(path).namelist()} if zipfile.is_zipfile(path) else set()
    if "constants.pkl" in members:
        return (
            f"`{path}` is a TorchScript archive without Python code; give the model's class, `--model file.py:Class`, "
            "or what `torch.save(model.state_dict(), path)` wrote"
        )
    if "archive_format" in members:
        return f"`{path}` is a program of `torch.export`; give the model's class, `--model file.py:Class`"
    foreign = re.search(r"GLOBAL (\S+)", str(error))
    if foreign:
        return (
            f"`{path}` holds objects of `{foreign[1]}`, which `torch.load` refuses by default; "
            "save only the tensors: `torch.save(model.state_dict(), path)`"
        )
    return f"`{path}` is damaged or not a checkpoint: torch.load cannot read it"


def _named_tensors(node: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        return [(name, node)]
    if isinstance(node, dict):
        return [pair for key, value in node.items() for pair in _named_tensors(value, f"{name}.{key}".lstrip("."))]
    return []
