"""What `gaverify init` finds out about a model that it is to write a factory for."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gaverify.errors import ProblemError, kind_of_value
from gaverify.loading.bare import first_tensor
from gaverify.loading.importing import import_factory
from gaverify.passes.isolation import isolated_generators, mode_set


@dataclass(frozen=True)
class Sketch:
    """What a factory's text says of a model.

    Args:
        steps: Whether it has a `training_step`.
        arguments: What its constructor needs, as written in a call.
        inputs: A Python expression for a batch of `batch_size` inputs.
        loss: A function of `torch.nn.functional` as written there.
        targets: A Python expression for targets that fit.
        tried: Whether a forward ran on the inputs; else they are a guess.
    """

    steps: bool = False
    arguments: str = ""
    inputs: str = "torch.randn(batch_size, 16)"
    loss: str = "F.cross_entropy"
    targets: str = "torch.randint(10, (batch_size,))"
    tried: bool = False


def sketch(name: str) -> Sketch | None:
    """Returns what is known of the class that `name` stands for, or None where that is a factory already.

    Raises:
        SpecError: No such module, file or attribute.
        ProblemError: It is neither a class of modules nor a function.
    """
    found = import_factory(name)
    if not inspect.isclass(found):
        if callable(found) and not isinstance(found, nn.Module):
            return None
        raise ProblemError(f"`{name}` is {kind_of_value(found)}; name a class or a function that returns it")
    if not issubclass(found, nn.Module):
        raise ProblemError(f"`{name}` is a class, but not of torch.nn.Module; name the model's class")
    steps = callable(getattr(found, "training_step", None))
    needed = [
        p.name
        for p in inspect.signature(found).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if needed:
        return Sketch(steps, ", ".join(f"{parameter}=..." for parameter in needed))
    try:
        with isolated_generators():
            return _tried(found(), steps)
    except Exception:  # a model that wants more than a guess; its owner writes the batch
        return Sketch(steps)


def tensors_of(path: str) -> list[str]:
    """Returns a line for each tensor of a checkpoint, at most ten; none where torch cannot read it safely."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:
        return []
    found = list(_tensors(saved, ""))
    more = [f"… and {len(found) - 10} more"] if len(found) > 10 else []
    return [f"{name}: {list(tensor.shape)}" for name, tensor in found[:10]] + more


def _tensors(node: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        return [(name, node)]
    if isinstance(node, dict):
        return [pair for key, value in node.items() for pair in _tensors(value, f"{name}.{key}".lstrip("."))]
    return []


def _tried(model: nn.Module, steps: bool) -> Sketch:
    """Runs a forward on inputs that the first layer takes, and reads the targets off the output."""
    shape, vocabulary = _input(model)
    batch = torch.randint(vocabulary, (4, *shape)) if vocabulary else torch.randn(4, *shape)
    with mode_set([model], "eval"), torch.no_grad():
        output = first_tensor(model(batch))
    assert output is not None and output.shape[0] == 4
    inputs = f"torch.randint({vocabulary}, {_sizes(shape)})" if vocabulary else f"torch.randn{_sizes(shape)}"
    if output.dim() == 2 and output.shape[1] > 1:
        return Sketch(steps, "", inputs, "F.cross_entropy", f"torch.randint({output.shape[1]}, (batch_size,))", True)
    return Sketch(steps, "", inputs, "F.mse_loss", f"torch.randn{_sizes(tuple(output.shape[1:]))}", True)


def _sizes(shape: tuple[int, ...]) -> str:
    return f"({', '.join(('batch_size', *map(str, shape)))}{'' if shape else ','})"


def _input(model: nn.Module) -> tuple[tuple[int, ...], int]:
    """The shape of a sample that the first layer with weights takes, and its vocabulary, 0 where it takes numbers.

    Layers tell their sizes in attributes whose names the layers of `torch.nn` share.
    """
    layers = [layer for layer in model.modules() if next(layer.children(), None) is None]
    first: Any = next(layer for layer in layers if next(layer.parameters(recurse=False), None) is not None)
    if hasattr(first, "num_embeddings"):
        return (16,), first.num_embeddings
    if hasattr(first, "in_channels"):
        return (first.in_channels, *{1: (64,), 2: (32, 32), 3: (8, 16, 16)}[first.weight.dim() - 2]), 0
    if hasattr(first, "input_size"):
        return (16, first.input_size), 0
    return (first.in_features,), 0
